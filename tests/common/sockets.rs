//! The sockets of a process, and of the network namespace that it is in, as the kernel lists them.

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpStream},
    time::Duration,
};

/// A TCP socket as `/proc/net/tcp` has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Socket {
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    pub(crate) state: State,
    /// Bytes that nobody has read; of a listener, connections that nobody has accepted.
    pub(crate) unread: usize,
    inode: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    Established,
    SynSent,
    SynReceived,
    FinWait1,
    FinWait2,
    TimeWait,
    Closed,
    CloseWait,
    LastAck,
    Listening,
    Closing,
}

/// All that are in the namespace of that process.
pub(crate) fn sockets_around(pid: u32) -> Vec<Socket> {
    ["tcp", "tcp6"]
        .iter()
        // Without IPv6 there is one file only.
        .filter_map(|table| fs::read_to_string(format!("/proc/{pid}/net/{table}")).ok())
        .flat_map(|table| table.lines().skip(1).map(parse).collect::<Vec<_>>())
        .collect()
}

/// Where that process listens, in no order.
pub(crate) fn listeners_of(pid: u32) -> Vec<SocketAddr> {
    let mine: Vec<_> = fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|descriptor| fs::read_link(descriptor.unwrap().path()).ok())
        .filter_map(|link| {
            link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<u64>().ok()
        })
        .collect();
    sockets_around(pid)
        .iter()
        .filter(|socket| socket.state == State::Listening && mine.contains(&socket.inode))
        .map(|socket| socket.local)
        .collect()
}

/// The control port and the data port of an engine's process, whatever it advertises.
pub(crate) fn ports_of(pid: u32) -> (SocketAddr, SocketAddr) {
    let listeners = listeners_of(pid);
    let (control, data): (Vec<_>, Vec<_>) =
        listeners.iter().map(reachable).partition(answers_a_probe);
    match (&control[..], &data[..]) {
        (&[control], &[data]) => (control, data),
        _ => panic!("process {pid} listens at {listeners:?}, of which {control:?} answer probes"),
    }
}

/// Mooncake's frame of type 3. To a data port it is a header that ends too early.
fn answers_a_probe(listener: &SocketAddr) -> bool {
    let mut stream = TcpStream::connect(listener).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(b"\x03\0\0\0\0\0\0\0\x03{}").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    match stream.read(&mut [0; 1]) {
        Ok(len) => len > 0,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
        Err(error) => panic!("{listener}: {error}"),
    }
}

fn reachable(listener: &SocketAddr) -> SocketAddr {
    let ip = match listener.ip().to_canonical() {
        ip if !ip.is_unspecified() => ip,
        _ => IpAddr::from([127, 0, 0, 1]),
    };
    SocketAddr::new(ip, listener.port())
}

/// `sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode …`
fn parse(line: &str) -> Socket {
    let fields: Vec<_> = line.split_whitespace().collect();
    let number = |text, radix| u64::from_str_radix(text, radix).unwrap();
    let state = match number(fields[3], 16) {
        1 => State::Established,
        2 => State::SynSent,
        3 | 12 => State::SynReceived,
        4 => State::FinWait1,
        5 => State::FinWait2,
        6 => State::TimeWait,
        7 => State::Closed,
        8 => State::CloseWait,
        9 => State::LastAck,
        10 => State::Listening,
        11 => State::Closing,
        other => panic!("a socket in state {other}: {line}"),
    };
    Socket {
        local: parse_address(fields[1]),
        remote: parse_address(fields[2]),
        state,
        unread: number(fields[4].split_once(':').unwrap().1, 16) as usize,
        inode: number(fields[9], 10),
    }
}

/// Groups of four bytes, each as the number that this machine makes of it; the port as it is.
fn parse_address(text: &str) -> SocketAddr {
    let (ip, port) = text.split_once(':').unwrap();
    let word = |at: usize| u32::from_str_radix(&ip[at * 8..][..8], 16).unwrap().to_ne_bytes();
    let ip = if ip.len() == 8 {
        IpAddr::from(word(0))
    } else {
        let mut octets = [0; 16];
        (0..4).for_each(|at| octets[at * 4..][..4].copy_from_slice(&word(at)));
        Ipv6Addr::from(octets).into()
    };
    SocketAddr::new(ip, u16::from_str_radix(port, 16).unwrap())
}
