//! The same, of what a peer on this host says and of the words that it can write.
#![allow(unsafe_code)] // makes publications

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::{
    meeting::hear_answer,
    message::{Answer, Hello, Lends},
    note,
    page::{FIXED, OWNED, Pages},
    reader::{Heard, Reader, Readers},
    region::{RING, Region},
    shelf::{Bytes, Lent, Shelf},
    socket,
    source::{Sight, Source, Told},
};
use crate::{
    doorbell::Doorbell,
    engine::{
        Identity, Instance, Notification, Publication, RemoteBuffer, Retracted, TransferId, Viewed,
    },
    memory::{Copier, PAGE, PAIR, Span},
    words,
};

const SLOTS: u32 = 2;
const SESSION: &str = "127.0.0.1:1";

/// A note as it lies in a ring.
pub(in crate::engine::embedded) fn note_record(input: &[u8]) {
    let Some(size) = input.first_chunk().and_then(|header| note::size(*header)) else { return };
    let Some(record) = input.get(..size) else { return };
    let Some(note) = note::decode(record) else { return };
    let mut again = Vec::new();
    assert!(note::encode(&note, &mut again), "it came by a ring");
    let size = note::size(*again.first_chunk().expect("a header")).expect("its size");
    assert_eq!(note::decode(&again[..size]), Some(note));
}

/// What is said at a meeting. The first byte chooses the descriptors, the rest is the message.
pub fn meeting(input: &[u8]) {
    let Some((&kind, message)) = input.split_first() else { return };
    if let Some(hello) = Hello::decode(message) {
        assert_eq!(hello.encode(), message);
    }
    if message.len() > 512 {
        return;
    }
    let Some(pages) = Owned::new() else { return };
    let (ours, theirs) = pair();
    let unsealed = Pages::make("fuzz", 2 * PAGE, rustix::fs::SealFlags::empty());
    let Ok((_pages, unsealed)) = unsealed else { return };
    let Ok((_region, region)) = Region::make(SLOTS) else { return };
    let mut fds = [&pages.fd, &pages.shelf.lines_fd, &pages.bell, &region].map(AsFd::as_fd);
    if let Some(fd) = fds.get_mut(usize::from(kind & 7)) {
        *fd = [unsealed.as_fd(), pages.bell.as_fd()][usize::from(kind >> 3 & 1)];
    }
    // One who lends a device's memory has no descriptor of it.
    let decoded = Answer::decode(message, SESSION);
    let on_device = decoded.is_some_and(|answer| matches!(answer.lends, Lends::Device { .. }));
    let fds = &fds[usize::from(on_device)..];
    let fds = &fds[..if kind & 0x10 == 0 { fds.len() } else { usize::from(kind >> 5) % fds.len() }];
    if socket::send(&theirs, message, fds).is_err() {
        return;
    }
    let copier = Arc::new(Copier::new(1));
    let open = |_, _: &Lends, _: &Arc<OwnedFd>| Bytes::Beyond;
    let Ok(source) = hear_answer(ours, &SESSION.into(), owner(), open, &copier) else { return };
    let all_good = kind & 7 > 3 || kind & 0xf == 0xa || on_device && kind & 7 == 0;
    assert!(all_good, "it maps what has no seals, or another length");
    let answer = Answer::decode(message, SESSION).expect("it was understood");
    assert_eq!((answer.owner, answer.encode(SESSION)), (owner(), message.to_vec()));
    // Whatever the numbers are, a read stays inside the mapping, or is refused.
    for (at, len) in [(answer.base, 1), (answer.base.wrapping_add(answer.len), 64), (0, 4096)] {
        let mut dest = vec![0xee; len];
        let _ = source.read(&remote(identity(0, 1), at, len), &mut dest, Instant::now());
    }
}

/// An owner of slots and one who reads of it, each writing where it pleases into what both share:
/// whatever stands there, neither panics, reads or writes outside, or believes more than the other
/// may decide.
pub fn control_region(input: &[u8]) {
    let Some(mut play) = Play::new() else { return };
    let mut input = Input(input);
    // So that a long input does not hide what a short one does.
    for _ in 0..64 {
        let Some(act) = input.byte() else { break };
        play.act(act, &mut input);
    }
    play.end();
}

/// Both ends of a pair.
struct Play {
    pages: Owned,
    readers: Readers,
    reader: Arc<Reader>,
    /// The pair's region again, as a hand that writes anywhere.
    hand: Region,
    source: Arc<Source>,
    /// What the owner has published, by slot; the generation counts.
    published: [Option<Publication>; SLOTS as usize],
    generation: u32,
    sights: Vec<Sight>,
    /// The owner has written what no owner writes.
    dishonest: bool,
    _socket: OwnedFd,
}

impl Play {
    fn new() -> Option<Self> {
        let pages = Owned::new()?;
        let (region, fd) = Region::make(SLOTS).ok()?;
        let hand = Region::of_peer(fd.as_fd(), SLOTS).ok()?;
        let theirs = Region::of_peer(fd.as_fd(), SLOTS).ok()?;
        let (left, right) = pair();
        let reader = Arc::new(Reader::new(reader(), region, left, false));
        let readers = Readers::default();
        readers.add(Arc::clone(&reader));
        let shelf = &pages.shelf;
        let (base, len) = (shelf.span.addr(), shelf.span.len as u64);
        let answer = Answer { owner: owner(), base, len, slots: SLOTS, lends: Lends::File(len) };
        let lent = Lent::of_file(&answer, len, pages.fd.as_fd(), &shelf.lines_fd).ok()?;
        let bell = Pages::of_peer(pages.bell.as_fd(), PAGE, FIXED, both()).ok()?;
        let bell = Doorbell::shared(Arc::new(bell));
        let copier = Arc::new(Copier::new(1));
        let session = SESSION.into();
        let (held, socket) = pair();
        drop(right);
        let source = Source::new(session, owner(), lent, theirs, bell, Arc::new(socket), copier);
        Some(Self {
            pages,
            readers,
            reader,
            hand,
            source: Arc::new(source),
            published: [None; SLOTS as usize],
            generation: 0,
            sights: Vec::new(),
            dishonest: false,
            _socket: held,
        })
    }

    fn act(&mut self, act: u8, input: &mut Input<'_>) {
        let slot = input.byte().unwrap_or_default() % SLOTS as u8;
        match act % 14 {
            0 => self.write(input.word()),
            1 => self.hand.put(input.word(), input.bytes(usize::from(slot) * 96 + 32)),
            2 => words::advance(self.hand.tail(), (input.word() % (2 * RING as u64)) & !7),
            3 => self.scrawl(slot.into(), input),
            4 => self.publish(slot.into()),
            5 | 6 => self.retract(slot.into(), act % 14 == 6),
            7 => self.look(),
            8 => self.read(slot.into(), input),
            9 => self.notify(input),
            10 => self.view(slot.into(), input),
            11 => self.source.end(self.pages.shelf.span),
            12 => self.readers.leave(&self.reader),
            _ => self.source.leave(),
        }
    }

    /// A peer writes a word of the region, whichever.
    fn write(&mut self, at: u64) {
        let value = at >> 32;
        let word = match at % 8 {
            0 => self.hand.head(),
            1 => self.hand.tail(),
            // A pin: a secret that is in use, the marks of nobody's, or anything.
            n => match self.hand.pin(n as u32 % SLOTS) {
                Some(pin) => pin,
                None => return,
            },
        };
        let value = match at >> 8 & 3 {
            0 => u64::MAX,
            1 => secret(value as u32),
            _ => value,
        };
        word.store(value, Ordering::Relaxed);
    }

    /// An owner writes what no owner writes of a slot: its mark, its address, its length.
    fn scrawl(&mut self, slot: usize, input: &mut Input<'_>) {
        self.dishonest = true;
        let which = usize::from(input.byte().unwrap_or_default() % 3);
        let near = self.pages.shelf.span.addr();
        let value = input.word();
        let value = if which == 1 && value & 1 == 0 { near.wrapping_add(value) } else { value };
        self.pages.shelf.lines.word(slot * PAIR + which * 8).store(value, Ordering::Relaxed);
    }

    fn publish(&mut self, slot: usize) {
        if self.published[slot].is_some() {
            return;
        }
        self.generation += 1;
        let span = self.pages.slot(slot);
        let identity = identity(slot as u32, self.generation);
        self.pages.bytes.put(slot * PAGE, &[self.generation as u8; PAGE]);
        // SAFETY: the slots are mapped while `self` lives, and no stamp is ever read here.
        let put = unsafe { Publication::new(slot as u32, span, identity, 1, span) };
        self.pages.shelf.publish(&put);
        self.published[slot] = Some(put);
    }

    /// Ends the put of that slot; asks until the slot is quiet, or cuts at once.
    fn retract(&mut self, slot: usize, cut: bool) {
        let Some(put) = self.published[slot] else { return };
        self.pages.shelf.retire(&put);
        if cut {
            self.readers.revoke(&put);
        }
        let state = if self.readers.read(&put) { Retracted::Reading } else { Retracted::Quiet };
        assert!(!cut || state == Retracted::Quiet, "a revoked pin counts for nothing");
        if state == Retracted::Quiet {
            self.published[slot] = None;
        }
    }

    fn look(&self) {
        let Some(look) = self.readers.look() else { panic!("nobody else looks") };
        look.drain(&mut |heard| {
            if let Heard::Gone(instance, held) = heard {
                assert!(instance.is_none_or(|instance| instance == reader()));
                assert!(held.iter().all(|(slot, _)| *slot < SLOTS));
            }
        });
    }

    fn read(&self, slot: usize, input: &mut Input<'_>) {
        let (wanted, at, len) = self.range(slot, input);
        let mut dest = vec![0xee; len];
        match self.source.read(&remote(wanted, at, len), &mut dest, Instant::now()) {
            Some(Ok(())) => self.is_of(slot, wanted, &dest),
            // Nothing happens between the pin and the copy here.
            Some(Err(_)) | None => assert!(dest.iter().all(|byte| *byte == 0xee), "it was written"),
        }
    }

    fn view(&mut self, slot: usize, input: &mut Input<'_>) {
        if let Some(mut sight) = self.sights.pop() {
            let mut dest = [0; 16];
            sight.copy_to(&mut dest);
            let _ = (sight.holds(), sight.end(), sight.holds());
            return;
        }
        let (wanted, at, len) = self.range(slot, input);
        if let Some(Ok(sight)) = Sight::of(&self.source, &remote(wanted, at, len)) {
            let mut dest = vec![0; len];
            sight.copy_to(&mut dest);
            if sight.holds() {
                self.is_of(slot, wanted, &dest);
            }
            self.sights.push(sight);
        }
    }

    fn notify(&self, input: &mut Input<'_>) {
        let text = "x".repeat(input.word() as usize % (RING / 3));
        let told =
            self.source.notify(&Notification::new(&text, "transfer_complete"), Instant::now());
        assert!(!matches!(told, Told::Taken) || text.len() < RING / 4);
    }

    /// A range of a put that there is, was, or never was.
    fn range(&self, slot: usize, input: &mut Input<'_>) -> (Identity, u64, usize) {
        let word = input.word();
        let behind = word as u32 % 3;
        let wanted = match self.published[slot] {
            Some(put) if behind == 0 => put.identity(),
            _ => identity(slot as u32, self.generation.wrapping_sub(behind)),
        };
        let offset = (word >> 8) as u16;
        let at = self.pages.slot(slot).addr().wrapping_add(u64::from(offset));
        let at = if word >> 24 & 0xf == 0 { word } else { at };
        (wanted, at, (word >> 32) as usize % (PAGE + 2))
    }

    /// `Ok` means the bytes of that put, if its owner has not made it otherwise.
    fn is_of(&self, slot: usize, wanted: Identity, bytes: &[u8]) {
        if self.dishonest {
            return;
        }
        let put = self.published[slot].expect("it has pinned a put that is published");
        assert_eq!(put.identity(), wanted);
        assert!(bytes.iter().all(|byte| *byte == wanted.id.generation as u8));
    }

    /// Both go: nothing of what they had stays.
    fn end(mut self) {
        self.sights.clear();
        self.look();
        self.readers.leave(&self.reader);
        self.look();
        self.readers.clear();
        assert_eq!(self.readers.count(), 0);
    }
}

/// What an owner has.
struct Owned {
    bytes: Pages,
    fd: OwnedFd,
    shelf: Shelf,
    bell: OwnedFd,
}

impl Owned {
    fn new() -> Option<Self> {
        let (bytes, fd) = Pages::make("fuzz-slots", SLOTS as usize * PAGE, OWNED).ok()?;
        let span = bytes.part(0, SLOTS as usize * PAGE);
        let shelf = Shelf::of_file(span, SLOTS, fd.as_fd()).ok()?;
        let (_, bell) = Pages::make("fuzz-bell", PAGE, FIXED).ok()?;
        Some(Self { bytes, fd, shelf, bell })
    }

    fn slot(&self, slot: usize) -> Span {
        self.bytes.part(slot * PAGE, PAGE)
    }
}

/// What is left of the input.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn word(&mut self) -> u64 {
        let mut word = [0; 8];
        let bytes = self.bytes(8);
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    }

    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }
}

fn owner() -> Instance {
    Instance::from_bytes(*b"the slots' owner")
}

fn reader() -> Instance {
    Instance::from_bytes(*b"who reads of it.")
}

fn identity(slot: u32, generation: u32) -> Identity {
    let id = TransferId { random: secret(generation), slot, generation };
    Identity { instance: owner(), id }
}

/// The random half of that put's id.
fn secret(generation: u32) -> u64 {
    0x5ec0_0000 + u64::from(generation)
}

fn remote(identity: Identity, at: u64, len: usize) -> RemoteBuffer {
    RemoteBuffer::new(SESSION, at, len).with_identity(identity)
}

fn both() -> rustix::mm::ProtFlags {
    rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE
}

fn pair() -> (OwnedFd, OwnedFd) {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    socketpair(AddressFamily::UNIX, kind, flags, None).expect("two descriptors")
}
