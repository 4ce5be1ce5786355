//! The server's side of both ports: whatever a peer sends, only the published bytes change, only
//! where writes are allowed, and the next peer is served.
#![allow(unsafe_code)] // registers memory

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    ptr::NonNull,
    sync::OnceLock,
    time::Duration,
};

use mooncake_relay::{
    Access, EmbeddedEngine, Engine, Identity, Instance, Publication, Retracted, Span, TransferId,
};

const ALL: usize = 1 << 12;
/// What is published lies in the middle of it.
const FROM: usize = 1 << 10;
const LEN: usize = 1 << 8;
const CANARY: u8 = 0xc5;

/// The first byte says how the rest is sent: 0 and 1 to the data port as it is, or as requests whose
/// addresses are near those that are published; 2 to the control port; 4 and 8: in pieces.
pub(crate) fn server(input: &[u8]) {
    let Some((&how, rest)) = input.split_first() else { return };
    let served = served();
    let (port, bytes) = match how & 3 {
        2 => (served.engine.control_addr(), rest.to_vec()),
        1 => (served.engine.data_addr(), requests(rest, served)),
        _ => (served.engine.data_addr(), rest.to_vec()),
    };
    let pieces = 1 + usize::from(how >> 2 & 3);
    let answer = ask(port, &bytes, pieces);
    // A status and the published bytes for each header at most, or a descriptor.
    let most = bytes.len() / 24 * (LEN + 16) + (1 << 10);
    assert!(answer.len() <= most, "{} bytes for {}", answer.len(), bytes.len());
    served.engine.poll(&mut |_| ()).expect("the server runs");
    // SAFETY: the memory lives for ever; what lies outside of the published range nobody writes.
    let all = unsafe { std::slice::from_raw_parts(served.memory.ptr.as_ptr(), FROM) };
    assert!(all.iter().all(|byte| *byte == CANARY), "a write before the published range");
    // SAFETY: as above.
    let after = unsafe { served.memory.ptr.add(FROM + LEN) };
    // SAFETY: as above.
    let all = unsafe { std::slice::from_raw_parts(after.as_ptr(), ALL - FROM - LEN) };
    assert!(all.iter().all(|byte| *byte == CANARY), "a write after the published range");
    if how & 0x80 != 0 {
        served.is_alive();
    }
}

struct Served {
    engine: EmbeddedEngine,
    memory: Span,
    publication: Publication,
}

impl Served {
    /// After whatever came, a slot can be had back, and put again.
    fn is_alive(&self) {
        let mut tries = 0;
        while self.engine.retract(&self.publication) != Retracted::Quiet {
            tries += 1;
            assert!(tries < 1_000_000, "somebody reads who has gone");
            std::thread::yield_now();
        }
        self.engine.publish(&self.publication);
        let probe = [&3_u64.to_le_bytes()[..], b"\x03{}"].concat();
        let answer = ask(self.engine.control_addr(), &probe, 1);
        assert!(answer.ends_with(b"{\"status\":\"success\"}\n"), "{answer:?}");
    }
}

fn served() -> &'static Served {
    static SERVED: OnceLock<Served> = OnceLock::new();
    SERVED.get_or_init(|| {
        let builder = EmbeddedEngine::builder("127.0.0.1:0").allow_writes(true).local(false);
        let engine = builder.stall_timeout(Duration::from_secs(2)).bind().unwrap();
        let instance = Instance::from_bytes(*b"an instance here");
        engine.start(&instance).unwrap();
        let bytes = vec![CANARY; ALL].leak();
        let memory = Span { len: ALL, ptr: NonNull::from(bytes).cast() };
        // SAFETY: never freed.
        unsafe { engine.register(memory, Access::Published) }.unwrap();
        // SAFETY: inside.
        let span = Span { ptr: unsafe { memory.ptr.add(FROM) }, len: LEN };
        let stamp = Span { len: 8, ptr: NonNull::from(Box::leak(Box::new(0_u64))).cast() };
        let id = TransferId { random: 7, slot: 3, generation: 1 };
        // SAFETY: registered, never freed, and written by the server alone.
        let publication = unsafe { Publication::new(3, span, Identity { instance, id }, 9, stamp) };
        engine.publish(&publication);
        Served { engine, memory, publication }
    })
}

/// `opcode, kind, size, offset, bytes that follow, their count` again and again.
fn requests(mut input: &[u8], served: &Served) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Some((request, rest)) = input.split_first_chunk::<7>() {
        let [opcode, kind, size, more, offset, follow, follows] = *request;
        let size = u64::from(size) | u64::from(more) << if kind & 1 == 0 { 8 } else { 56 };
        let base = served.publication.span().addr();
        let addr = match kind >> 1 & 3 {
            0 => base,
            1 => base + u64::from(offset),
            2 => base.wrapping_sub(u64::from(offset)),
            _ => served.publication.stamp_span().addr(),
        };
        bytes.extend(size.to_le_bytes());
        bytes.extend(addr.to_le_bytes());
        bytes.extend([opcode; 8]);
        if kind & 8 != 0 {
            let Identity { instance, id } = served.publication.identity();
            bytes.extend(instance.to_bytes());
            bytes.extend(id.to_bytes());
            if kind & 16 != 0 {
                *bytes.last_mut().unwrap() ^= offset;
            }
        }
        let (own, rest) = rest.split_at(rest.len().min(follow.into()));
        bytes.extend(own);
        bytes.extend(std::iter::repeat_n(follows, usize::from(kind >> 5) * 64));
        input = rest;
    }
    bytes
}

/// What comes back until the end. A reset is an end.
fn ask(addr: SocketAddr, bytes: &[u8], pieces: usize) -> Vec<u8> {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    for piece in bytes.chunks(bytes.len().div_ceil(pieces).max(1)) {
        if stream.write_all(piece).is_err() {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    if let Err(error) = stream.read_to_end(&mut answer) {
        let reset = matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe);
        assert!(reset, "the server neither answers nor closes: {error}");
    }
    answer
}
