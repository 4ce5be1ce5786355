//! A few words of memory that two processes share: as fast a way for metadata as there is.

use std::{
    fs::{File, OpenOptions},
    hint, io,
    os::fd::AsRawFd,
    process,
    ptr::{self, NonNull},
    sync::atomic::{
        AtomicU32, AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{MemfdFlags, memfd_create},
    mm::{MapFlags, ProtFlags, mmap},
    thread::futex,
};

/// How many pairs of threads talk at once.
pub(crate) const LANES: usize = 4;
/// How long whoever waits spins.
const GRACE: Duration = Duration::from_micros(50);
const WORDS: usize = 256;

/// Between one thread here and one there: a request, then perhaps an answer.
#[repr(C, align(128))]
pub(crate) struct Lane {
    request: Count,
    answer: Count,
    pub(crate) what: AtomicU64,
    /// When the receiver had read the request and began with its work, by the clock of both.
    pub(crate) begun: AtomicU64,
    len: AtomicU64,
    text: [AtomicU64; WORDS],
}

/// Only grows. Whoever waits for it spins for a while, then sleeps.
#[repr(C, align(128))]
struct Count {
    now: AtomicU32,
    sleeps: AtomicU32,
}

impl Lane {
    /// Sends a request.
    pub(crate) fn ask(&self, what: u64, text: &str) {
        assert!(text.len() <= WORDS * 8, "a text of {} bytes", text.len());
        self.what.store(what, Relaxed);
        self.len.store(text.len() as u64, Relaxed);
        for (word, bytes) in self.text.iter().zip(text.as_bytes().chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(whole), Relaxed);
        }
        self.request.step();
    }

    /// Whether request number `number` has come.
    pub(crate) fn has(&self, number: u32) -> bool {
        self.request.now.load(SeqCst) == number
    }

    /// Waits for request number `number`, counted from 1; its text goes to `text`.
    pub(crate) fn hear(&self, number: u32, text: &mut Vec<u8>) -> u64 {
        self.request.reach(number);
        text.clear();
        let len = self.len.load(Relaxed) as usize;
        for word in &self.text[..len.div_ceil(8)] {
            text.extend(word.load(Relaxed).to_le_bytes());
        }
        text.truncate(len);
        self.what.load(Relaxed)
    }

    pub(crate) fn reply(&self) {
        self.answer.step();
    }

    /// Waits for answer number `number`, counted from 1.
    pub(crate) fn await_reply(&self, number: u32) {
        self.answer.reach(number);
    }
}

impl Count {
    fn step(&self) {
        self.now.fetch_add(1, SeqCst);
        if self.sleeps.load(SeqCst) != 0 {
            futex::wake(&self.now, futex::Flags::empty(), 1).expect("a word of ours");
        }
    }

    fn reach(&self, number: u32) {
        let mut since = None;
        for looks in 1_u32.. {
            if self.now.load(SeqCst) == number {
                return;
            }
            hint::spin_loop();
            if looks.is_multiple_of(64) {
                thread::yield_now(); // both ends may share a core
                if since.get_or_insert_with(Instant::now).elapsed() >= GRACE {
                    break;
                }
            }
        }
        self.sleeps.store(1, SeqCst);
        loop {
            let now = self.now.load(SeqCst);
            if now == number {
                break;
            }
            // Woken, or changed meanwhile: look again.
            let _ = futex::wait(&self.now, futex::Flags::empty(), now, None);
        }
        self.sleeps.store(0, SeqCst);
    }
}

/// Makes the lanes; the name is for [`open`].
pub(crate) fn create() -> io::Result<(&'static [Lane; LANES], File, String)> {
    let file = File::from(memfd_create("bench", MemfdFlags::CLOEXEC)?);
    file.set_len(size_of::<[Lane; LANES]>() as u64)?;
    let name = format!("/proc/{}/fd/{}", process::id(), file.as_raw_fd());
    Ok((map(&file)?, file, name))
}

/// What another process of this program has made.
pub(crate) fn open(name: &str) -> io::Result<&'static [Lane; LANES]> {
    map(&OpenOptions::new().read(true).write(true).open(name)?)
}

#[expect(unsafe_code, reason = "memory of two processes")]
fn map(file: &File) -> io::Result<&'static [Lane; LANES]> {
    let len = size_of::<[Lane; LANES]>();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: where the system chooses, so that it replaces no memory of ours.
    let at = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }?;
    let at = NonNull::new(at.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
    // SAFETY: of that size, of a page's alignment, never unmapped or cut; nothing in it but atomics,
    // for which all bits are good.
    Ok(unsafe { at.as_ref() })
}
