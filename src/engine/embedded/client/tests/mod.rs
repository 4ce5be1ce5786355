//! The client against peers made of plain sockets, which do what no proper server would.
#![allow(unsafe_code)] // lends buffers

mod faults;
mod lifecycle;
mod many;
mod notes;
mod patience;
mod reads;
mod writes;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use super::*;
use crate::{
    engine::{
        Instance, Lender, TransferId,
        embedded::frame::{self, Descriptor, Header, Status},
    },
    memory::{Host, Memory, Purpose},
};

/// Where the fakes' memory begins.
const BASE: u64 = 0x10_0000;
const PLAIN: u32 = 2;
const OLD: u32 = 1;

fn instance(byte: u8) -> Instance {
    Instance::from_bytes([byte; 16])
}

fn identity(byte: u8) -> Identity {
    let id = TransferId { random: 7, slot: 1, generation: 3 };
    Identity { instance: instance(byte), id }
}

fn started() -> Client {
    let client = Client::new(Patience::default());
    client.start();
    client
}

/// Far off: only a test that fails waits for it.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn shortly() -> Instant {
    Instant::now() + Duration::from_millis(100)
}

/// Runs the test on a thread of its own and gives up on it after two minutes.
fn watched(test: impl FnOnce() + Send + 'static) {
    let (tx, done) = mpsc::channel();
    let thread = thread::spawn(move || {
        test();
        let _ = tx.send(());
    });
    if let Err(mpsc::RecvTimeoutError::Timeout) = done.recv_timeout(Duration::from_secs(120)) {
        panic!("hangs");
    }
    if let Err(panic) = thread.join() {
        resume_unwind(panic);
    }
}

struct Lent {
    host: Host,
    returned: AtomicUsize,
}

impl Lender for Lent {
    fn give_back(&self, _: u32) {
        self.returned.fetch_add(1, Ordering::SeqCst);
    }

    fn is_host(&self) -> bool {
        true
    }
}

/// A buffer of `len` bytes of 0xEE.
fn buffer(len: usize) -> LocalBuffer {
    let host = Host::allocate(&(), len, Purpose::Receive, false).unwrap();
    let span = Span { ptr: host.span().ptr, len };
    let lender = Arc::new(Lent { host, returned: AtomicUsize::new(0) });
    assert!(lender.host.span().len >= len);
    // SAFETY: the memory is the lender's own, fresh, and lent once.
    let mut buffer = unsafe { LocalBuffer::new(lender, 0, span) };
    buffer.bytes_mut().unwrap().fill(0xEE);
    buffer
}

fn remote(fake: &Fake, len: usize) -> RemoteBuffer {
    RemoteBuffer::new(&fake.name(), BASE, len)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (31 * i + 1) as u8).collect()
}

#[track_caller]
fn kind<T: std::fmt::Debug>(result: Result<T, ReadError>) -> &'static str {
    let ReadError { error, buffer } = result.unwrap_err();
    assert!(buffer.is_some(), "the buffer comes back");
    eprintln!("{error}");
    error.kind()
}

/// A peer: two listeners, and closures that say what happens on a connection.
struct Fake {
    control: SocketAddr,
    state: Arc<State>,
}

struct State {
    descriptor: Mutex<Descriptor>,
    /// Requests for the descriptor.
    asked: AtomicUsize,
    /// Connections to the data port.
    connections: AtomicUsize,
    stopped: AtomicBool,
    /// Whether an assertion failed on one of the fake's threads.
    panicked: AtomicBool,
}

impl Fake {
    /// A peer with the usual control port.
    fn new(
        version: u32,
        instance: Option<Instance>,
        data: impl Fn(TcpStream, usize) + Send + Sync + 'static,
    ) -> Self {
        Self::at("127.0.0.1", version, instance, data)
    }

    fn at(
        host: &str,
        version: u32,
        instance: Option<Instance>,
        data: impl Fn(TcpStream, usize) + Send + Sync + 'static,
    ) -> Self {
        Self::with_control(host, version, instance, data, answer_control)
    }

    fn with_control(
        host: &str,
        version: u32,
        instance: Option<Instance>,
        data: impl Fn(TcpStream, usize) + Send + Sync + 'static,
        control: impl Fn(TcpStream, &State) + Send + Sync + 'static,
    ) -> Self {
        let control_listener = TcpListener::bind((host, 0)).unwrap();
        let address = control_listener.local_addr().unwrap();
        let descriptor = Descriptor {
            name: address.to_string(),
            data_host: None,
            data_port: 1,
            version,
            instance,
            buffers: vec![(BASE, 1 << 20)],
        };
        let state = Arc::new(State {
            descriptor: Mutex::new(descriptor),
            asked: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        let fake = Self { control: address, state };
        fake.move_data(data);
        fake.accept(control_listener, move |stream, state| control(stream, state));
        fake
    }

    /// Opens another data port, and says so from now on.
    fn move_data(&self, data: impl Fn(TcpStream, usize) + Send + Sync + 'static) {
        let listener = TcpListener::bind((self.control.ip(), 0)).unwrap();
        self.state.descriptor.lock().unwrap().data_port = listener.local_addr().unwrap().port();
        self.accept(listener, move |stream, state| {
            data(stream, state.connections.fetch_add(1, Ordering::SeqCst));
        });
    }

    fn accept(
        &self,
        listener: TcpListener,
        serve: impl Fn(TcpStream, &State) + Send + Sync + 'static,
    ) {
        let (state, serve) = (Arc::clone(&self.state), Arc::new(serve));
        thread::spawn(move || {
            for stream in listener.incoming() {
                if state.stopped.load(Ordering::SeqCst) {
                    return;
                }
                let stream = stream.unwrap();
                let (state, serve) = (Arc::clone(&state), Arc::clone(&serve));
                thread::spawn(move || {
                    let served = AssertUnwindSafe(|| serve(stream, &state));
                    if catch_unwind(served).is_err() {
                        state.panicked.store(true, Ordering::SeqCst);
                    }
                });
            }
        });
    }

    fn name(&self) -> String {
        self.control.to_string()
    }

    fn asked(&self) -> usize {
        self.state.asked.load(Ordering::SeqCst)
    }

    fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }

    fn become_instance(&self, byte: u8) {
        self.state.descriptor.lock().unwrap().instance = Some(instance(byte));
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.state.stopped.store(true, Ordering::SeqCst);
        let data_port = self.state.descriptor.lock().unwrap().data_port;
        for port in [self.control.port(), data_port] {
            let _ = TcpStream::connect((self.control.ip(), port));
        }
        if !thread::panicking() {
            assert!(!self.state.panicked.load(Ordering::SeqCst), "the fake saw something wrong");
        }
    }
}

/// Reads one control frame: its type, and its JSON text.
fn control_request(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut len = [0; 8];
    stream.read_exact(&mut len).ok()?;
    let mut body = vec![0; u64::from_le_bytes(len) as usize];
    stream.read_exact(&mut body).ok()?;
    Some((body[0], body.split_off(1)))
}

fn control_reply(stream: &mut TcpStream, kind: u8, json: &[u8]) {
    let mut frame = (json.len() as u64 + 1).to_le_bytes().to_vec();
    frame.push(kind);
    frame.extend_from_slice(json);
    let _ = stream.write_all(&frame);
}

/// What the real engine does.
fn answer_control(mut stream: TcpStream, state: &State) {
    match control_request(&mut stream) {
        Some((1, json)) => {
            assert_eq!(json, b"{}");
            state.asked.fetch_add(1, Ordering::SeqCst);
            let json = state.descriptor.lock().unwrap().encode();
            control_reply(&mut stream, 1, &json);
        }
        Some((2, _)) => {
            control_reply(&mut stream, 2, br#"{"name":"","notify_msg":"success"}"#);
        }
        _ => {}
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let _ = stream.read(&mut [0]);
}

/// The next request's header, or `None` at the end of the connection.
fn header(stream: &mut TcpStream) -> Option<Header> {
    let mut bytes = [0; Header::LEN];
    stream.read_exact(&mut bytes).ok()?;
    Some(Header::decode(&bytes))
}

fn take(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

fn taken_identity(stream: &mut TcpStream) -> Identity {
    frame::decode_identity(&take(stream, frame::IDENTITY_LEN).try_into().unwrap())
}

fn say(stream: &mut TcpStream, status: Status) {
    let _ = stream.write_all(&status.encode());
}

/// Answers every read, of whichever kind, with the pattern.
fn serve_pattern(mut stream: TcpStream, _: usize) {
    while let Some(header) = header(&mut stream) {
        assert_eq!(header.addr, BASE);
        if header.opcode == frame::READ_IDENTIFIED {
            taken_identity(&mut stream);
        }
        if header.opcode != frame::READ_V1 {
            say(&mut stream, Status::Done);
        }
        let _ = stream.write_all(&pattern(header.size as usize));
    }
}

/// Answers every request with that status, and goes on.
fn serve_status(status: Status) -> impl Fn(TcpStream, usize) + Send + Sync {
    move |mut stream, _| {
        while let Some(header) = header(&mut stream) {
            if header.opcode == frame::READ_IDENTIFIED {
                taken_identity(&mut stream);
            }
            say(&mut stream, status);
        }
    }
}

/// Takes everything and says nothing, for ever.
fn serve_silence(mut stream: TcpStream, _: usize) {
    while stream.read(&mut [0; 4096]).is_ok_and(|got| got > 0) {}
}

/// Makes the close of `stream` a reset.
fn reset(stream: TcpStream) {
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
}
