//! Anybody may connect to the control port: nobody's transfer is lost, ended or held up by that.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mooncake_relay::Metadata;
use serde_json::{Value, json};

use crate::{
    common::{comes_about, eventually},
    listener::forged,
    on::{On, Peer, cases},
    raw::{connect, frame, rest},
};

cases! {
    Processes: q16_names_that_are_not_utf8_cost_no_other_note,
        q17_idle_connections_to_the_control_port_hold_up_nothing,
        q18_a_sender_that_drops_notes_is_told_when_it_takes_them_again,
        q18_a_sender_that_drops_every_note_is_given_up_with_the_lease,
        q21_forged_notes_on_the_control_port_end_no_put;
}

const METADATA: u8 = 1;
const NOTE: u8 = 2;

fn address(peer: &Peer) -> SocketAddr {
    peer.session_id().parse().unwrap()
}

fn note(name: &str, message: &str) -> Vec<u8> {
    frame(NOTE, json!({"name": name, "notify_msg": message}).to_string().as_bytes())
}

/// Sends a frame, and waits until it has been dealt with.
fn sends(address: SocketAddr, frame: &[u8]) {
    let mut stream = connect(address);
    stream.write_all(frame).unwrap();
    rest(&mut stream);
}

fn parsed(metadata: &Value) -> Metadata {
    metadata.to_string().parse().unwrap()
}

fn counter(peer: &Peer, name: &str) -> u64 {
    peer.health()["counters"][name].as_u64().unwrap()
}

fn q16_names_that_are_not_utf8_cost_no_other_note(on: &On) {
    let (a, b) = (on.peer(&[]), on.peer(&[]));
    let sent = [a.put(json!({"size": 100, "seed": 1})), a.put(json!({"size": 100, "seed": 2}))];
    let name = parsed(&sent[0].metadata).transfer_id().to_owned();
    let bad = [
        &b"{\"name\":\"\xff\xfe\",\"notify_msg\":\"transfer_complete\"}"[..],
        b"{\"name\":\"\xed\xa0\x80\",\"notify_msg\":\"transfer_complete\"}",
        b"{\"name\":\"a\",\"notify_msg\":\"\xc0\x80\"}",
    ];
    // All at once: what was sent to it stopped is one batch when it goes on.
    a.stop();
    let streams: Vec<_> = [&bad[..], &bad[..]]
        .concat()
        .iter()
        .enumerate()
        .map(|(n, body)| {
            let mut stream = connect(address(&a));
            let good = note(&name, "transfer_complete");
            stream.write_all(&if n == 2 { good } else { frame(NOTE, body) }).unwrap();
            stream
        })
        .collect();
    let get = b.send_get(&sent[1].metadata);
    a.resume();
    streams.into_iter().for_each(|mut stream| drop(rest(&mut stream)));
    assert_eq!(b.answer(get)["sha256"], *sent[1].sha256);
    for sent in &sent {
        assert_eq!(a.wait(sent.tag)["ok"], true);
    }
}

fn q17_idle_connections_to_the_control_port_hold_up_nothing(on: &On) {
    /// How long an engine bears one that does not go on.
    const BORNE: Duration = Duration::from_secs(5);
    let (a, b) = (on.peer(&[]), on.peer(&[]));
    comes_about(|| {
        let begun = Instant::now();
        let mut idle: Vec<_> = (0..50).map(|_| connect(address(&a))).collect();
        for (n, stream) in idle.iter_mut().enumerate() {
            // None, a part of the length, a part of the body.
            stream.write_all(&note("never whole", "")[..[0, 3, 12][n % 3]]).unwrap();
        }
        for round in 0..10 {
            let sent = a.put(json!({"size": 70_000, "seed": round}));
            assert_eq!(b.get(&sent.metadata)["sha256"], *sent.sha256);
            assert_eq!(a.wait(sent.tag)["ok"], true);
        }
        // All that before the first of them was let go.
        let open = idle.iter_mut().all(|stream| {
            stream.set_nonblocking(true).unwrap();
            let read = stream.read(&mut [0; 1]).map_err(|error| error.kind());
            read == Err(ErrorKind::WouldBlock)
        });
        assert!(open || begun.elapsed() >= BORNE, "one of them was let go");
        open
    });
}

fn q21_forged_notes_on_the_control_port_end_no_put(on: &On) {
    let (a, b) = (on.peer(&["--credits", "1"]), on.peer(&[]));
    a.works_with(&b);
    let sent = a.put(json!({"size": 1000, "seed": 3}));
    let metadata = parsed(&sent.metadata);
    // Refused is what its engine cannot have: a NUL.
    let strange = || {
        ["notes_unknown", "notes_late", "notes_refused"].map(|name| counter(&a, name)).iter().sum()
    };
    let before: u64 = strange();
    let forged = forged(&metadata);
    for (name, message) in &forged {
        sends(address(&a), &note(name, message));
    }
    eventually(before + forged.len() as u64, strange);
    assert_eq!((a.free().0, &a.health()["published"]), (0, &json!(1)));
    assert_eq!(b.get(&sent.metadata)["sha256"], *sent.sha256);
    assert_eq!(a.wait(sent.tag)["ok"], true);
    // Known now, and of another life of the slot.
    let next = a.put(json!({"size": 1000, "seed": 4}));
    sends(address(&a), &note(metadata.transfer_id(), "transfer_complete"));
    eventually(before + forged.len() as u64 + 1, strange);
    assert_eq!(a.health()["published"], json!(1));
    assert_eq!(b.get(&next.metadata)["sha256"], *next.sha256);
    assert_eq!(a.wait(next.tag)["ok"], true);
}

/// Answers for a sender that it stands before, under a name of its own: it gives out the sender's
/// descriptor and drops notes, until it is healed.
struct Deaf {
    address: SocketAddr,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    over: AtomicBool,
    healed: AtomicBool,
    dropped: AtomicUsize,
}

impl Deaf {
    fn before(sender: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        let serve = move || {
            for stream in listener.incoming() {
                if shared.over.load(Ordering::SeqCst) {
                    return;
                }
                // Whoever goes in the middle of it, goes.
                let _ = shared.serve(stream.unwrap(), address, sender);
            }
        };
        Self { address, state, thread: Some(thread::spawn(serve)) }
    }

    /// As the sender's, but to be found here.
    fn renamed(&self, metadata: &Value) -> Value {
        let mut renamed = metadata.clone();
        renamed["session_id"] = self.address.to_string().into();
        renamed
    }

    fn dropped(&self) -> usize {
        self.state.dropped.load(Ordering::SeqCst)
    }
}

impl Drop for Deaf {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::SeqCst);
        let _wake = TcpStream::connect(self.address);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || thread::panicking());
    }
}

impl State {
    fn serve(
        &self,
        mut client: TcpStream,
        address: SocketAddr,
        sender: SocketAddr,
    ) -> std::io::Result<()> {
        client.set_read_timeout(Some(Duration::from_secs(5)))?;
        let mut len = [0; 8];
        client.read_exact(&mut len)?;
        let mut body = vec![0; u64::from_le_bytes(len) as usize];
        client.read_exact(&mut body)?;
        if body[0] == NOTE && !self.healed.load(Ordering::SeqCst) {
            self.dropped.fetch_add(1, Ordering::SeqCst);
            return Ok(());
        }
        let mut real = connect(sender);
        real.write_all(&[&len[..], &body].concat())?;
        let reply = rest(&mut real);
        if body[0] != METADATA {
            return client.write_all(&reply);
        }
        let mut descriptor: Value = serde_json::from_slice(&reply[9..])?;
        descriptor["name"] = address.to_string().into();
        // As a real engine's, which takes notes on the control port.
        descriptor.as_object_mut().unwrap().remove("relay");
        client.write_all(&frame(METADATA, descriptor.to_string().as_bytes()))
    }
}

fn q18_a_sender_that_drops_notes_is_told_when_it_takes_them_again(on: &On) {
    let (a, b) = (on.peer(&[]), on.peer(&[]));
    let deaf = Deaf::before(address(&a));
    let sent = a.put(json!({"size": 70_000, "seed": 5}));
    let got = b.get(&deaf.renamed(&sent.metadata));
    assert_eq!(got["sha256"], *sent.sha256, "{got}");
    // The receiver has its bytes, and knows that the sender does not know.
    eventually(true, || deaf.dropped() >= 3);
    assert_eq!((counter(&b, "notes_untaken"), counter(&b, "notes_lost")), (1, 0));
    assert_eq!(a.health()["published"], json!(1));
    deaf.state.healed.store(true, Ordering::SeqCst);
    assert_eq!(a.wait(sent.tag)["ok"], true);
    assert_eq!(counter(&b, "notes_lost"), 0);
}

fn q18_a_sender_that_drops_every_note_is_given_up_with_the_lease(on: &On) {
    let (a, b) = (on.peer(&["--lease-ms", "4000"]), on.peer(&[]));
    let deaf = Deaf::before(address(&a));
    let sent = a.put(json!({"size": 70_000, "seed": 6}));
    let got = b.get(&deaf.renamed(&sent.metadata));
    assert_eq!(got["sha256"], *sent.sha256, "{got}");
    assert_eq!(a.wait(sent.tag)["kind"], "TimedOut");
    eventually((1, 1), || (counter(&b, "notes_untaken"), counter(&b, "notes_lost")));
    assert!(deaf.dropped() >= 2, "it was tried again");
    a.works_with(&b);
}
