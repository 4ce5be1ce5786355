//! The thread that moves the bytes.

use std::{
    io::{ErrorKind, Read},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, read},
    net::{
        AddressFamily, SocketFlags, SocketType, connect, socket_with,
        sockopt::{set_socket_linger, set_socket_recv_buffer_size, set_socket_send_buffer_size},
    },
};

use super::{
    CONTROL, DOWN, Ending, Rules, Shared, UP,
    pipe::{Framer, Over, Pipe, ROOM, TURN, Waits, is_early},
};

/// What the kernel is asked to keep on each side of us; it doubles it.
const KERNEL_ROOM: usize = 64 << 10;
/// Between two portions of a throttled way.
const PACE: Duration = Duration::from_millis(5);

pub(super) struct Pump {
    shared: Arc<Shared>,
    ports: [PumpedPort; 2],
}

struct PumpedPort {
    addr: SocketAddr,
    listener: Option<TcpListener>,
    connections: Vec<Connection>,
    _holder: OwnedFd,
}

struct Connection {
    client: TcpStream,
    /// `None` after a half-close: what the client says is lost.
    server: Option<TcpStream>,
    pipes: [Pipe; 2],
    /// When something was forwarded last.
    last: Instant,
}

impl Pump {
    pub(super) fn new(shared: Arc<Shared>, holders: [OwnedFd; 2], addrs: [SocketAddr; 2]) -> Self {
        let mut addrs = addrs.into_iter();
        let ports = holders.map(|_holder| PumpedPort {
            addr: addrs.next().unwrap(),
            listener: None,
            connections: Vec::new(),
            _holder,
        });
        Self { shared, ports }
    }

    pub(super) fn run(mut self) {
        loop {
            let timeout = {
                let mut state = self.shared.state.lock();
                if state.stop {
                    return;
                }
                let now = Instant::now();
                for (number, port) in self.ports.iter_mut().enumerate() {
                    port.work(&mut state.ports[number], number == CONTROL, now);
                }
                state.done = state.asked;
                self.shared.changed.notify_all();
                self.ports.iter().zip(&state.ports).filter_map(|(p, r)| p.wait(r, now)).min()
            };
            self.sleep(timeout);
        }
    }

    fn sleep(&self, timeout: Option<Duration>) {
        let mut fds = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        for port in &self.ports {
            fds.extend(port.listener.iter().map(|socket| PollFd::new(socket, PollFlags::IN)));
            for connection in &port.connections {
                let [up, down] = connection.pipes.each_ref().map(|pipe| pipe.waits);
                let sides = [
                    (Some(&connection.client), up.to_read, down.to_write),
                    (connection.server.as_ref(), down.to_read, up.to_write),
                ];
                for (socket, to_read, to_write) in sides {
                    let mut events = PollFlags::empty();
                    events.set(PollFlags::IN, to_read);
                    events.set(PollFlags::OUT, to_write);
                    // One that is polled for nothing would still wake us for its errors.
                    if let Some(socket) = socket.filter(|_| !events.is_empty()) {
                        fds.push(PollFd::new(socket, events));
                    }
                }
            }
        }
        let timeout = timeout.map(|limit| Timespec::try_from(limit).unwrap());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => panic!("poll: {error}"),
        }
        let _ = read(&self.shared.wake, &mut [0; 8]); // an error if nobody woke us
    }
}

impl PumpedPort {
    fn work(&mut self, rules: &mut Rules, control: bool, now: Instant) {
        if rules.refusing {
            self.listener = None;
        } else if self.listener.is_none() {
            self.listener = Some(listen(self.addr));
        }
        if let Some(ending) = rules.end_all.take() {
            rules.seen.ended += self.connections.len() as u64;
            self.connections.retain_mut(|connection| connection.end(ending));
        }
        for way in &mut rules.ways {
            if let Some(rate) = &mut way.rate {
                rate.fill(now);
            }
        }
        self.accept(rules, control, now);
        self.connections.retain_mut(|connection| connection.work(rules, now));
        rules.seen.open = self.connections.len() as u64;
    }

    fn accept(&mut self, rules: &mut Rules, control: bool, now: Instant) {
        let Some(listener) = &self.listener else { return };
        loop {
            let client = match listener.accept() {
                Ok((client, _)) => client,
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                Err(error) if is_early(&error) => return,
                Err(error) => panic!("accept: {error}"),
            };
            set_up(&client);
            rules.seen.accepted += 1;
            let pipes = [Pipe::new(Some(Framer::new(control))), Pipe::new(None)];
            let mut connection = Connection { client, server: None, pipes, last: now };
            let ending = rules.at_accept.pop_front();
            match (ending, rules.target) {
                (None, Some(target)) => connection.server = Some(start_connecting(target)),
                (ending, _) => {
                    rules.seen.ended += 1;
                    if !connection.end(ending.unwrap_or(Ending::Reset)) {
                        continue;
                    }
                }
            }
            self.connections.push(connection);
        }
    }

    /// After which time there is something to do, whatever the sockets say.
    fn wait(&self, rules: &Rules, now: Instant) -> Option<Duration> {
        let paced = |connection: &Connection| connection.pipes.iter().any(|p| p.waits.for_time);
        let pace = self.connections.iter().any(paced).then_some(PACE);
        let served = self.connections.iter().filter(|connection| connection.server.is_some());
        let left = |limit: Duration, last: Instant| {
            (limit + Duration::from_millis(1)).saturating_sub(now - last)
        };
        let idle = rules.idle.and_then(|(limit, _)| served.map(|c| left(limit, c.last)).min());
        pace.into_iter().chain(idle).min()
    }
}

impl Connection {
    /// Whether it is still there.
    fn work(&mut self, rules: &mut Rules, now: Instant) -> bool {
        match self.forward(rules, now) {
            Ok(()) => true,
            Err(Over::Done) => false,
            Err(Over::Broken) => self.end(Ending::Reset),
            Err(Over::Ended(ending)) => {
                rules.seen.ended += 1;
                self.end(ending)
            }
        }
    }

    fn forward(&mut self, rules: &mut Rules, now: Instant) -> Result<(), Over> {
        let Self { client, server: Some(server), pipes, last } = self else {
            self.pipes[UP].waits.to_read = true;
            return if drain(&mut self.client) { Ok(()) } else { Err(Over::Done) };
        };
        let before = rules.seen;
        pipes[UP].forward(client, server, UP, rules)?;
        pipes[DOWN].forward(server, client, DOWN, rules)?;
        if pipes.iter().all(|pipe| pipe.told) {
            return Err(Over::Done);
        }
        if rules.seen != before {
            *last = now;
        }
        match rules.idle {
            Some((limit, ending)) if now - *last >= limit => Err(Over::Ended(ending)),
            _ => Ok(()),
        }
    }

    /// Whether the client's socket is still there.
    fn end(&mut self, ending: Ending) -> bool {
        self.server = None;
        match ending {
            Ending::Close => {
                // What is unread would make a reset of it.
                drain(&mut self.client);
                false
            }
            Ending::HalfClose => {
                self.pipes.iter_mut().for_each(|pipe| pipe.waits = Waits::default());
                self.pipes[UP].waits.to_read = true;
                self.client.shutdown(Shutdown::Write).is_ok()
            }
            Ending::Reset => {
                let _ = set_socket_linger(&self.client, Some(Duration::ZERO));
                false
            }
        }
    }
}

fn listen(addr: SocketAddr) -> TcpListener {
    let listener = TcpListener::bind(addr).unwrap();
    listener.set_nonblocking(true).unwrap();
    // What is accepted inherits it, in time for the window that the client is told.
    set_socket_recv_buffer_size(&listener, KERNEL_ROOM).unwrap();
    listener
}

fn start_connecting(target: SocketAddr) -> TcpStream {
    let family = if target.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, None).unwrap();
    set_socket_recv_buffer_size(&socket, KERNEL_ROOM).unwrap();
    let _ = connect(&socket, &target); // the first read or write says how it went
    let stream = TcpStream::from(socket);
    set_up(&stream);
    stream
}

fn set_up(stream: &TcpStream) {
    stream.set_nonblocking(true).unwrap();
    let _ = stream.set_nodelay(true); // an error where it was reset already
    set_socket_send_buffer_size(stream, KERNEL_ROOM).unwrap();
}

/// Reads what is there; whether more may come.
fn drain(stream: &mut TcpStream) -> bool {
    let mut bytes = [0; ROOM];
    for _ in 0..TURN {
        match stream.read(&mut bytes) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return is_early(&error),
        }
    }
    true
}
