//! What the in-process engine promises beyond the contract of every engine.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    ptr::NonNull,
    time::{Duration, Instant},
};

use mooncake_relay::{
    Access, Engine, Error, Event, Identity, InProcessEngine, Instance, Notification, Publication,
    RemoteBuffer, Result, Retracted, Span, TransferId,
};

#[test]
fn a_name_is_taken_while_its_engine_lives() {
    let engine = InProcessEngine::new("taken").unwrap();
    let second = InProcessEngine::new("taken");
    assert!(matches!(second, Err(Error::Config { field: "name", .. })), "{second:?}");
    drop(engine);
    InProcessEngine::new("taken").unwrap();
    assert!(InProcessEngine::new("").is_err());
}

#[test]
fn each_failure_has_its_own_error() {
    let sender = Sender::new("errors: sender");
    let receiver = InProcessEngine::new("errors: receiver").unwrap();
    let publication = sender.publish(1);
    let remote = sender.remote(&publication);
    let read = |remote: &RemoteBuffer, deadline| {
        let mut dest = vec![0; remote.len];
        receiver.read_into(remote, &mut dest, deadline).unwrap()
    };

    read(&remote, soon()).unwrap();
    let late = read(&remote, Instant::now());
    assert!(matches!(late, Err(Error::TimedOut)), "{late:?}");

    let mut outside = remote.clone();
    outside.ptr += 1;
    let refused = read(&outside, soon());
    assert!(matches!(refused, Err(Error::Rejected { .. })), "{refused:?}");

    let mut other = publication.identity();
    other.instance = Instance::from_bytes([9; 16]);
    let stale = read(&remote.clone().with_identity(other), soon());
    assert!(matches!(stale, Err(Error::Stale { .. })), "{stale:?}");

    assert_eq!(sender.engine.retract(&publication), Retracted::Quiet);
    let stale = read(&remote, soon());
    assert!(matches!(stale, Err(Error::Stale { .. })), "{stale:?}");

    sender.engine.stop(soon());
    let closed = read(&remote, soon());
    assert!(matches!(closed, Err(Error::PeerFailed { .. })), "{closed:?}");

    drop(sender);
    let gone = read(&remote, soon());
    assert!(matches!(gone, Err(Error::PeerFailed { .. })), "{gone:?}");

    let _not_started = InProcessEngine::new("errors: sender").unwrap();
    let stale = read(&remote, soon());
    assert!(matches!(stale, Err(Error::Stale { .. })), "{stale:?}");
}

#[test]
fn what_is_not_registered_is_not_served() {
    let sender = Sender::new("unregistered: sender");
    let (good, stranger) = (sender.publication(1), leak());
    let too_long = Span { len: sender.memory.len + 1, ..sender.memory };
    let stamp_span = good.stamp_span();
    for (span, stamp_span) in
        [(stranger, stamp_span), (too_long, stamp_span), (good.span(), Span { len: 8, ..stranger })]
    {
        // SAFETY: it is not registered, which is the case; it is never freed and never written.
        let put = unsafe { Publication::new(0, span, good.identity(), 0, stamp_span) };
        sender.engine.publish(&put);
        let mut dest = vec![0; put.span().len];
        let read = sender.engine.read_into(&sender.remote(&put), &mut dest, soon());
        assert!(read.unwrap().is_err());
    }
}

#[test]
fn a_full_inbox_says_so() {
    let (teller, hearer) = (engine("inbox: teller"), engine("inbox: hearer"));
    hearer.start(&Instance::from_bytes([1; 16])).unwrap();
    let note = Notification::new("a_1", "transfer_complete");
    let tell = || teller.notify(hearer.session_id(), &note, soon());
    let taken = std::iter::repeat_with(tell).take_while(Result::is_ok).count();
    let full = tell();
    assert!(matches!(&full, Err(Error::PeerFailed { reason, .. }) if reason.contains("full")));
    assert_eq!(heard(&hearer), taken);
    tell().unwrap();
    assert_eq!(heard(&hearer), 1);
}

#[test]
fn a_note_for_the_relay_before_is_not_reported_to_the_next() {
    let (teller, hearer) = (engine("restart: teller"), engine("restart: hearer"));
    let note = Notification::new("a_1", "transfer_complete");
    let tell = || teller.notify(hearer.session_id(), &note, soon());
    assert!(matches!(tell(), Err(Error::PeerFailed { .. })), "nobody would hear it");
    hearer.start(&Instance::from_bytes([1; 16])).unwrap();
    tell().unwrap();
    hearer.stop(soon());
    assert!(matches!(tell(), Err(Error::PeerFailed { .. })), "nobody would hear it");
    hearer.start(&Instance::from_bytes([2; 16])).unwrap();
    assert_eq!(heard(&hearer), 0);
}

#[test]
fn reads_notes_and_polls_allocate_nothing() {
    let sender = Sender::new("allocations: sender");
    let receiver = engine("allocations: receiver");
    let long_name = "n".repeat(300);
    let note = Notification::new(&long_name, "transfer_complete");
    let mut dest = vec![0; 4096];
    let mut last = 0;
    for round in 0..5 {
        let publication = sender.publish(round + 1);
        let remote = sender.remote(&publication);
        let before = ALLOCATIONS.get();
        receiver.read_into(&remote, &mut dest, soon()).unwrap().unwrap();
        receiver.notify(sender.engine.session_id(), &note, soon()).unwrap();
        assert_eq!(heard(&sender.engine), 1);
        assert_eq!(sender.engine.retract(&publication), Retracted::Quiet);
        sender.engine.publish(&publication);
        assert_eq!(sender.engine.retract(&publication), Retracted::Quiet);
        last = ALLOCATIONS.get() - before;
    }
    assert_eq!(last, 0);
}

/// A relay's half: an engine, and one slot of 4096 bytes with its stamp behind it.
struct Sender {
    engine: InProcessEngine,
    instance: Instance,
    memory: Span,
}

impl Sender {
    fn new(name: &str) -> Self {
        let sender =
            Self { engine: engine(name), instance: Instance::from_bytes([5; 16]), memory: leak() };
        sender.engine.start(&sender.instance).expect("it is new");
        // SAFETY: the memory is never freed.
        unsafe { sender.engine.register(sender.memory, Access::Published) }.expect("it is new");
        sender
    }

    fn publish(&self, generation: u32) -> Publication {
        let publication = self.publication(generation);
        self.engine.publish(&publication);
        publication
    }

    fn publication(&self, generation: u32) -> Publication {
        let id = TransferId { random: 1, slot: 0, generation };
        let span = Span { len: 4096, ..self.memory };
        let identity = Identity { instance: self.instance, id };
        // SAFETY: inside the memory.
        let stamp_span = Span { ptr: unsafe { self.memory.ptr.add(4096) }, len: 8 };
        // SAFETY: the memory is registered, never freed and never written.
        unsafe { Publication::new(0, span, identity, 0, stamp_span) }
    }

    fn remote(&self, publication: &Publication) -> RemoteBuffer {
        let Span { len, .. } = publication.span();
        RemoteBuffer::new(self.engine.session_id(), publication.span().addr(), len)
            .with_identity(publication.identity())
    }
}

fn engine(name: &str) -> InProcessEngine {
    InProcessEngine::new(name).expect("each test has names of its own")
}

fn heard(engine: &InProcessEngine) -> usize {
    let mut count = 0;
    let polled = engine.poll(&mut |event| count += usize::from(matches!(event, Event::Note(_))));
    polled.expect("it can be polled");
    count
}

/// 4104 aligned bytes that live as long as the process.
fn leak() -> Span {
    let words: &'static mut [u64] = vec![0; 513].leak();
    Span { ptr: NonNull::from(words).cast(), len: 4104 }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: hands every call to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}
