//! An embedded engine that runs, and raw bytes to speak to it.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "this is part of the tests")]

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    panic,
    ptr::NonNull,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{
    Access, EmbeddedBuilder, EmbeddedEngine, Engine, Event, Identity, Instance, Publication,
    Retracted, Span, TransferId,
};

pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
pub(crate) const DONE: &[u8] = b"\0\0\0\0VTCM";
pub(crate) const REFUSED: &[u8] = b"\x01\0\0\0VTCM";
pub(crate) const GONE: &[u8] = b"\x02\0\0\0VTCM";
pub(crate) const OTHER_INSTANCE: &[u8] = b"\x03\0\0\0VTCM";

pub(crate) const READ_V1: u8 = 0x00;
pub(crate) const WRITE_V1: u8 = 0x01;
pub(crate) const READ_V2: u8 = 0x80;
pub(crate) const WRITE_V2: u8 = 0x81;
pub(crate) const READ_IDENTIFIED: u8 = 0xA0;
pub(crate) const NOTIFY: u8 = 0xA2;

/// Fails if `body` hangs.
pub(crate) fn watched(body: impl FnOnce() + Send + 'static) {
    let (tx, rx) = mpsc::channel();
    let thread = thread::spawn(move || {
        body();
        let _ = tx.send(());
    });
    if rx.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!("hangs");
    }
    thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
}

/// An engine that runs, with one slot of `len` bytes and its stamp registered.
pub(crate) struct Served {
    pub(crate) engine: EmbeddedEngine,
    pub(crate) publication: Publication,
}

impl Served {
    pub(crate) fn new(len: usize) -> Self {
        Self::with(EmbeddedEngine::builder("127.0.0.1:0"), len)
    }

    pub(crate) fn with(builder: EmbeddedBuilder, len: usize) -> Self {
        let engine = builder.bind().unwrap();
        let instance = Instance::from_bytes(*b"an instance here");
        engine.start(&instance).unwrap();
        let (span, stamp_span) = (memory(len), memory(8));
        for span in [span, stamp_span] {
            // SAFETY: `memory` is never freed.
            unsafe { engine.register(span, Access::Published) }.unwrap();
        }
        let id = TransferId { random: 7, slot: 3, generation: 1 };
        let identity = Identity { instance, id };
        // SAFETY: both are registered above, and nobody writes them.
        let publication = unsafe { Publication::new(3, span, identity, 9, stamp_span) };
        Self { engine, publication }
    }

    pub(crate) fn published(len: usize) -> Self {
        let served = Self::new(len);
        served.engine.publish(&served.publication);
        served
    }

    pub(crate) fn addr(&self) -> u64 {
        self.publication.span().addr()
    }

    pub(crate) fn data(&self) -> TcpStream {
        connect(self.engine.data_addr())
    }

    pub(crate) fn control(&self) -> TcpStream {
        connect(self.engine.control_addr())
    }

    /// The server lets go of a slot just after the reader has its last byte.
    pub(crate) fn retract(&self) {
        eventually("quiet", || self.engine.retract(&self.publication) == Retracted::Quiet);
    }

    pub(crate) fn is_alive(&self) {
        assert_eq!(ask(&mut self.control(), 3, b"{}"), b"{\"status\":\"success\"}\n");
        let mut data = self.data();
        data.write_all(&header(READ_V2, 4, self.addr())).unwrap();
        assert_eq!(take(&mut data, 12), [DONE, &expected(0..4)].concat());
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        let mut found = None;
        self.engine.counters(&mut |counter, value| {
            if counter == name {
                found = Some(value);
            }
        });
        found.unwrap()
    }

    pub(crate) fn notes(&self) -> Vec<(String, String)> {
        let mut notes = Vec::new();
        let mut each = |event| {
            if let Event::Note(note) = event {
                notes.push((note.name().to_owned(), note.message().to_owned()));
            }
        };
        self.engine.poll(&mut each).unwrap();
        notes
    }
}

/// Memory for ever, filled with the pattern.
pub(crate) fn memory(len: usize) -> Span {
    let words = len.div_ceil(8).max(1);
    let word = |word| u64::from_le_bytes(std::array::from_fn(|byte| pattern(word * 8 + byte)));
    let mut all: Vec<u64> = (0..words.min(PERIOD / 8)).map(word).collect();
    while all.len() < words {
        all.extend_from_within(..all.len().min(words - all.len()));
    }
    Span { ptr: NonNull::from(all.leak()).cast(), len }
}

/// After so many bytes the pattern repeats.
pub(crate) const PERIOD: usize = 1 << 16;

pub(crate) fn pattern(index: usize) -> u8 {
    (index * 31 + index / 256 + 1) as u8
}

pub(crate) fn expected(range: std::ops::Range<usize>) -> Vec<u8> {
    range.map(pattern).collect()
}

pub(crate) fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

pub(crate) fn header(opcode: u8, size: u64, addr: u64) -> Vec<u8> {
    let padding = [0xAA; 7];
    [&size.to_le_bytes()[..], &addr.to_le_bytes(), &[opcode], &padding].concat()
}

pub(crate) fn identified(identity: &Identity, size: u64, addr: u64) -> Vec<u8> {
    let Identity { instance, id } = identity;
    let header = header(READ_IDENTIFIED, size, addr);
    [&header[..], &instance.to_bytes(), &id.to_bytes()].concat()
}

pub(crate) fn note(name: &str, message: &str) -> Vec<u8> {
    let body = format!("{{\"name\":{name:?},\"notify_msg\":{message:?}}}");
    [&header(NOTIFY, body.len() as u64, 0), body.as_bytes()].concat()
}

pub(crate) fn frame(kind: u8, json: &[u8]) -> Vec<u8> {
    [&(json.len() as u64 + 1).to_le_bytes()[..], &[kind], json].concat()
}

pub(crate) fn take(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Everything up to the end; a reset is an end.
pub(crate) fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
    bytes
}

/// The JSON of the reply to one control frame.
pub(crate) fn ask(stream: &mut TcpStream, kind: u8, json: &[u8]) -> Vec<u8> {
    stream.write_all(&frame(kind, json)).unwrap();
    let reply = rest(stream);
    let (head, body) = reply.split_at(9);
    assert_eq!(head, [&(body.len() as u64 + 1).to_le_bytes()[..], &[kind]].concat());
    body.to_vec()
}

pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        thread::yield_now();
    }
}
