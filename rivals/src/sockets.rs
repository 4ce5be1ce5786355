//! Plain sockets: the bytes there, one byte back. With two waits: in the system, or looking without
//! a pause.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    process,
};

use crate::{
    measure::{LARGEST, Plan, check, clock, look, measure, value, warm_up},
    pair::{Pair, Requests},
    rows::Start,
};

const CONNECT: u64 = 1;
const SERVE: u64 = 2;

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

struct Socket(Box<dyn Stream>);

impl Socket {
    fn tcp(stream: TcpStream, start: Start) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(start == Start::TcpSocketSpin)?;
        Ok(Self(Box::new(stream)))
    }

    fn unix(stream: UnixStream, start: Start) -> io::Result<Self> {
        stream.set_nonblocking(start == Start::UnixSocketSpin)?;
        Ok(Self(Box::new(stream)))
    }

    fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let sent = moved(|| self.0.write(bytes))?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    fn receive(&mut self, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match moved(|| self.0.read(bytes))? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                read => bytes = &mut bytes[read..],
            }
        }
        Ok(())
    }
}

/// What a call moved, once it can. A blocking socket moves at once.
fn moved(mut once: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    look(|| match once() {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        outcome => outcome.map(Some),
    })
}

fn is_tcp(start: Start) -> bool {
    matches!(start, Start::TcpSocket | Start::TcpSocketSpin)
}

fn row(start: Start) -> &'static str {
    match start {
        Start::TcpSocket => "socket, TCP",
        Start::TcpSocketSpin => "socket, TCP, spinning",
        Start::UnixSocket => "socket, Unix",
        _ => "socket, Unix, spinning",
    }
}

pub(crate) fn send(start: Start, plan: &Plan, mut pair: Pair) -> io::Result<()> {
    let mut socket = if is_tcp(start) {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        pair.call(CONNECT, &listener.local_addr()?.to_string());
        Socket::tcp(listener.accept()?.0, start)?
    } else {
        let name = format!("rivals-{}", process::id());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        pair.call(CONNECT, &name);
        Socket::unix(listener.accept()?.0, start)?
    };
    plan.pin();
    let mut bytes = vec![1; LARGEST];
    for (size, count) in plan.sizes() {
        let bytes = &mut bytes[..size];
        let mut number = 0;
        pair.ask(SERVE, 0, &format!("{size} {}", warm_up(count) + count));
        measure(row(start), (size, count), || {
            number += 1;
            bytes.fill(value(number));
            let begun = clock();
            socket.send(bytes)?;
            socket.receive(&mut [0])?;
            Ok([clock() - begun; 2])
        })?;
    }
    pair.end()
}

pub(crate) fn receive(start: Start, requests: &mut Requests) -> io::Result<()> {
    let mut socket = None;
    let mut dest = vec![1; LARGEST];
    while let Some(request) = requests.next() {
        if request.what == CONNECT {
            socket = Some(if is_tcp(start) {
                Socket::tcp(TcpStream::connect(request.text)?, start)?
            } else {
                let address = SocketAddr::from_abstract_name(request.text)?;
                Socket::unix(UnixStream::connect_addr(&address)?, start)?
            });
            requests.pin();
            requests.reply();
            continue;
        }
        let socket = socket.as_mut().expect("it connects first");
        let (size, count) = request.text.split_once(' ').expect("`send` wrote two");
        let size: usize = size.parse().expect("`send` wrote a length");
        let count: u64 = count.parse().expect("`send` wrote a number");
        for number in 1..=count {
            socket.receive(&mut dest[..size])?;
            socket.send(&[0])?;
            check(&dest[..size], number);
        }
    }
    Ok(())
}
