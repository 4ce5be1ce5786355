//! A way for lines between two processes of one host: memory that both have mapped.
//!
//! Two rings of words, one each way, in a sealed memfd that the server makes and the client opens by
//! its number. Neither believes the other more than it must: an index is cut to its ring, and nothing
//! in the memory is anything but an atomic.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    process,
    ptr::{self, NonNull},
    sync::atomic::{
        AtomicU32, AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
};

use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
    thread::futex,
    time::Timespec,
};
use serde::{Deserialize, Serialize};

/// One end.
pub(crate) struct Pipe {
    map: Map,
    out: Way,
    back: Way,
    _file: File,
}

/// Where the client finds it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Address {
    process: u32,
    file: u32,
    /// Of the ring that goes to the server.
    words: u32,
    /// It says so itself, too: the numbers may name another file by now, or on another host.
    key: u64,
}

/// One of the two rings, as one end sees it.
#[derive(Clone, Copy)]
struct Way {
    number: usize,
    /// Where its words begin, and how many there are: a power of two.
    at: usize,
    words: u32,
}

/// What stands before the rings.
#[repr(C)]
struct Head {
    key: AtomicU64,
    closed: AtomicU32,
    written: [Count; 2],
    taken: [Count; 2],
}

/// Words, since the beginning. Whoever waits for it to change may sleep.
#[repr(C, align(128))]
struct Count {
    now: AtomicU32,
    sleeps: AtomicU32,
}

const HEAD: usize = 4096;
/// Of the ring that goes to the client, which has little to hear.
const BACK: u32 = 512;
const FEWEST: u32 = 8 << 10;
const MOST: u32 = 1 << 20;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

impl Pipe {
    /// The server's end, with room for so many words from the client.
    pub(crate) fn create(words: usize, key: u64) -> io::Result<(Self, Address)> {
        let words = u32::try_from(words).unwrap_or(MOST).clamp(FEWEST, MOST).next_power_of_two();
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("perftest", flags)?);
        file.set_len(len(words) as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        let [to_server, to_client] = ways(words);
        let map = Map::of(&file, words)?;
        map.head().key.store(key, SeqCst);
        let address = Address { process: process::id(), file: file.as_raw_fd() as u32, words, key };
        Ok((Self { map, out: to_client, back: to_server, _file: file }, address))
    }

    /// The client's end; an error where that is another host, or another user's.
    pub(crate) fn open(address: &Address) -> io::Result<Self> {
        let &Address { process, file, words, key } = address;
        let other = || io::Error::new(io::ErrorKind::InvalidData, "another file has that number");
        if !words.is_power_of_two() || !(FEWEST..=MOST).contains(&words) {
            return Err(other());
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(format!("/proc/{process}/fd/{file}"))?;
        let whole = file.metadata()?.size() == len(words) as u64;
        if !whole || !fcntl_get_seals(&file)?.contains(SEALS) {
            return Err(other());
        }
        let [to_server, to_client] = ways(words);
        let map = Map::of(&file, words)?;
        if map.head().key.load(SeqCst) != key {
            return Err(other());
        }
        Ok(Self { map, out: to_server, back: to_client, _file: file })
    }

    /// Sends as much as there is room for: whole words, whose number comes back.
    pub(crate) fn write(&self, text: &[[u8; 8]]) -> usize {
        let head = self.map.head();
        let Way { number, words, .. } = self.out;
        let written = head.written[number].now.load(Relaxed);
        let under_way = written.wrapping_sub(head.taken[number].now.load(SeqCst)).min(words);
        let fits = text.len().min((words - under_way) as usize);
        for (index, word) in text[..fits].iter().enumerate() {
            let word = u64::from_le_bytes(*word);
            self.map.word(self.out, written.wrapping_add(index as u32)).store(word, Relaxed);
        }
        if fits > 0 {
            head.written[number].set(written.wrapping_add(fits as u32));
        }
        fits
    }

    /// Takes what has come, as much as `into` holds of it; how many bytes.
    pub(crate) fn read(&self, into: &mut [u8]) -> usize {
        let head = self.map.head();
        let Way { number, words, .. } = self.back;
        let taken = head.taken[number].now.load(Relaxed);
        let come = head.written[number].now.load(SeqCst).wrapping_sub(taken).min(words);
        let (into, _) = into.as_chunks_mut::<8>();
        let come = into.len().min(come as usize);
        for (index, bytes) in into[..come].iter_mut().enumerate() {
            let word = self.map.word(self.back, taken.wrapping_add(index as u32)).load(Relaxed);
            *bytes = word.to_le_bytes();
        }
        if come > 0 {
            head.taken[number].set(taken.wrapping_add(come as u32));
        }
        come * 8
    }

    /// Whether one end has closed it.
    pub(crate) fn is_closed(&self) -> bool {
        self.map.head().closed.load(SeqCst) != 0
    }

    /// Sleeps until something has come, or the other end has closed it; a moment at most.
    pub(crate) fn sleep_until_come(&self, moment: &Timespec) {
        let head = self.map.head();
        let number = self.back.number;
        let seen = head.taken[number].now.load(Relaxed); // what has come is taken
        head.written[number].sleep(seen, moment, || self.is_closed());
    }

    /// Sleeps until there is room, likewise.
    pub(crate) fn sleep_until_room(&self, moment: &Timespec) {
        let head = self.map.head();
        let Way { number, words, .. } = self.out;
        let full = head.written[number].now.load(Relaxed).wrapping_sub(words);
        head.taken[number].sleep(full, moment, || self.is_closed());
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        let head = self.map.head();
        head.closed.store(1, SeqCst);
        head.written.iter().chain(&head.taken).for_each(Count::wake);
    }
}

impl Count {
    fn set(&self, now: u32) {
        self.now.store(now, SeqCst);
        if self.sleeps.load(SeqCst) != 0 {
            self.wake();
        }
    }

    fn wake(&self) {
        // It fails only for a word that is none.
        let _ = futex::wake(&self.now, futex::Flags::empty(), 1);
    }

    fn sleep(&self, seen: u32, moment: &Timespec, over: impl FnOnce() -> bool) {
        self.sleeps.store(1, SeqCst);
        if !over() {
            // Woken, changed meanwhile, or late: the caller looks again.
            let _ = futex::wait(&self.now, futex::Flags::empty(), seen, Some(moment));
        }
        self.sleeps.store(0, SeqCst);
    }
}

fn ways(words: u32) -> [Way; 2] {
    let to_server = Way { number: 0, at: 0, words };
    [to_server, Way { number: 1, at: words as usize, words: BACK }]
}

fn len(words: u32) -> usize {
    HEAD + 8 * (words + BACK) as usize
}

/// The memory, as one end has it.
struct Map {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: nothing in it but atomics, for any thread; who owns it unmaps it, once.
unsafe impl Send for Map {}

impl Map {
    fn of(file: &File, words: u32) -> io::Result<Self> {
        let len = len(words);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: where the system chooses, so that it replaces no memory of ours.
        let at = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }?;
        let at = NonNull::new(at.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Self { at, len })
    }

    fn head(&self) -> &Head {
        // SAFETY: the first page of the mapping, which lives as long as `self` and which nobody can
        // cut; nothing in it but atomics, for which all bits are good.
        unsafe { self.at.cast().as_ref() }
    }

    fn word(&self, way: Way, number: u32) -> &AtomicU64 {
        let index = way.at + (number & (way.words - 1)) as usize;
        // SAFETY: both rings are within the mapping, which was made that long.
        let word = unsafe { self.at.add(HEAD + 8 * index) };
        // SAFETY: as for `head`; eight bytes at a multiple of eight.
        unsafe { word.cast().as_ref() }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`, and no reference into it outlives `self`.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.len) };
    }
}

const _: () = assert!(size_of::<Head>() <= HEAD);
