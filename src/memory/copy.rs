//! Copies into and out of slots.

use std::{
    mem, ptr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

use parking_lot::{Condvar, Mutex};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::stream::Stream;
use crate::{affinity, process};

// What `benches/copy.rs` showed: see `benches/RESULTS.md`.

/// From this many bytes on a second thread helps; below, waking it costs about what it saves.
const SHARE: usize = 4 << 20;

/// From this many bytes on, and from half as many where two threads copy, stores go past the caches;
/// below, whoever reads next finds the bytes there.
const STREAM: usize = 32 << 20;

/// What one thread takes at a time of a copy that is shared: so long at most does the other wait.
const PIECE: usize = 256 << 10;

/// Who helps the thread that copies. More were not measured.
const HELPERS: usize = 1;

/// How large copies are made: by how many threads, and by which stores.
#[derive(Debug)]
pub struct Copier {
    share: usize,
    stream: usize,
    streaming: Option<Stream>,
    helpers: usize,
    pool: OnceLock<Option<ThreadPool>>,
    handles: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Copier {
    /// `cores` is how many processors this process may use.
    pub fn new(cores: usize) -> Self {
        Self::with_thresholds(cores, SHARE, STREAM)
    }

    /// With other bounds than the ones that were measured.
    pub fn with_thresholds(cores: usize, share: usize, stream: usize) -> Self {
        Self {
            share,
            stream,
            streaming: Stream::best(),
            helpers: HELPERS.min(cores.saturating_sub(1)),
            pool: OnceLock::new(),
            handles: Arc::default(),
        }
    }

    /// Copies `from` to the front of `to`, which is as long at least.
    pub fn copy_slice(&self, from: &[u8], to: &mut [u8]) {
        let to = &mut to[..from.len()];
        // SAFETY: as long as each other, and a slice that is borrowed to write overlaps no other.
        unsafe { self.copy(from.as_ptr(), to.as_mut_ptr(), from.len()) };
    }

    /// Copies `len` bytes by their addresses alone, so that another process may be writing what is
    /// read: then some of them are old and some are new. Where it streams, it ends with a fence.
    ///
    /// # Safety
    ///
    /// As for [`ptr::copy_nonoverlapping`]; nobody in this process writes `from` or touches `to`.
    pub unsafe fn copy(&self, from: *const u8, to: *mut u8, len: usize) {
        let pool = (len >= self.share).then(|| self.pool()).flatten();
        // Two threads come to the limit of memory sooner.
        let bound = if pool.is_some() { self.stream / 2 } else { self.stream };
        let copy = Copy { from, to, len, streaming: self.streaming.filter(|_| len >= bound) };
        match pool {
            // SAFETY: the caller's own words.
            None => unsafe { copy.all() },
            // SAFETY: likewise, and `shared` returns when no thread touches the bytes any more.
            Some(pool) => unsafe { copy.shared(pool) },
        }
    }

    /// The pool, or `None` where one thread is as good or the system gives no more.
    fn pool(&self) -> Option<&ThreadPool> {
        let build = || {
            if self.helpers == 0 {
                return None;
            }
            ThreadPoolBuilder::new()
                .num_threads(self.helpers)
                .spawn_handler(|thread| {
                    let name = format!("relay-copy-{}", thread.index());
                    let handle = thread::Builder::new().name(name).spawn(|| {
                        affinity::roam();
                        thread.run();
                    })?;
                    self.handles.lock().push(handle);
                    Ok(())
                })
                .build()
                .inspect_err(|error| tracing::warn!(%error, "large copies use one thread"))
                .ok()
        };
        self.pool.get_or_init(build).as_ref()
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        if !process::is_here() {
            // A forked child has the pool and none of its threads.
            mem::forget((self.pool.take(), mem::take(&mut self.handles)));
            return;
        }
        // rayon only asks its threads to end; a closed relay has none left.
        drop(self.pool.take());
        for handle in self.handles.lock().drain(..) {
            // A copy does not panic; if it did, its caller has heard.
            let _ = handle.join();
        }
    }
}

/// One copy, by addresses.
struct Copy {
    from: *const u8,
    to: *mut u8,
    len: usize,
    streaming: Option<Stream>,
}

// SAFETY: a copy is numbers; following the pointers is `unsafe`, and says who may.
unsafe impl Send for Copy {}
// SAFETY: as above.
unsafe impl Sync for Copy {}

impl Copy {
    /// # Safety
    ///
    /// The bytes are the caller's, as for [`Copier::copy`].
    unsafe fn all(&self) {
        // SAFETY: the caller's own words.
        unsafe { self.part(0, self.len) }
    }

    /// # Safety
    ///
    /// As for [`Self::all`], and the part lies inside.
    unsafe fn part(&self, at: usize, len: usize) {
        let (from, to) = (self.from.wrapping_add(at), self.to.wrapping_add(at));
        match self.streaming {
            // SAFETY: a part of what the caller vouches for.
            None => unsafe { ptr::copy_nonoverlapping(from, to, len) },
            // SAFETY: as above.
            Some(stream) => unsafe { stream.copy(from, to, len) },
        }
    }

    /// Copies together with a thread of `pool`, if that comes in time: a helper that has not begun when
    /// nothing is left is not waited for.
    ///
    /// # Safety
    ///
    /// As for [`Self::all`].
    unsafe fn shared(self, pool: &ThreadPool) {
        let shared = Arc::new(Shared::new(self));
        let helpers = Arc::clone(&shared);
        pool.spawn(move || helpers.help());
        // SAFETY: the caller's own words.
        unsafe { shared.pieces() };
        shared.end();
    }
}

/// A copy that two threads make, piece by piece.
struct Shared {
    copy: Copy,
    /// Where the next piece begins. It hands out indices only; `helping` orders the bytes.
    taken: AtomicUsize,
    /// Whether the helper may have taken a piece that it has not finished.
    helping: Mutex<bool>,
    ended: Condvar,
}

impl Shared {
    fn new(copy: Copy) -> Self {
        let (taken, helping) = (AtomicUsize::new(0), Mutex::new(false));
        Self { copy, taken, helping, ended: Condvar::new() }
    }

    /// Copies pieces until none is left.
    ///
    /// # Safety
    ///
    /// As for [`Copy::all`], until [`Self::end`] returns.
    unsafe fn pieces(&self) {
        loop {
            let at = self.taken.fetch_add(PIECE, Ordering::Relaxed);
            let Some(left) = self.copy.len.checked_sub(at).filter(|&left| left > 0) else { return };
            // SAFETY: inside, and the counter gave this piece to nobody else.
            unsafe { self.copy.part(at, left.min(PIECE)) };
        }
    }

    /// The helper's side.
    fn help(&self) {
        *self.helping.lock() = true;
        // SAFETY: before the caller's `end` this thread has said that it helps, so `end` waits; after it
        // every piece was taken, and the lock lets this thread see that.
        unsafe { self.pieces() };
        *self.helping.lock() = false;
        self.ended.notify_one();
    }

    /// The caller's side, when nothing is left: from here on the bytes are the caller's alone.
    fn end(&self) {
        let mut helping = self.helping.lock();
        while *helping {
            self.ended.wait(&mut helping);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc::channel, thread, time::Duration};

    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    use super::*;

    /// What lies around a copy and must stay as it is.
    const MARGIN: usize = 128;
    const CANARY: u8 = 0xc5;

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|n| (n % 251) as u8 ^ (n >> 12) as u8).collect()
    }

    /// Copies `len` bytes to `offset` bytes behind a line's beginning.
    fn check(copier: &Copier, source: &[u8], offset: usize, len: usize) {
        let mut room = vec![CANARY; MARGIN + 64 + offset + len + MARGIN];
        let start = MARGIN + room[MARGIN..].as_ptr().align_offset(64) + offset;
        copier.copy_slice(&source[..len], &mut room[start..start + len]);
        let case = (offset, len, copier.helpers, copier.share, copier.stream);
        assert!(room[start..start + len] == source[..len], "{case:?}");
        let around = room[..start].iter().chain(&room[start + len..]);
        assert!(around.copied().all(|byte| byte == CANARY), "{case:?}");
    }

    #[test]
    fn around_every_bound_every_byte_is_copied_and_nothing_else() {
        let source = pattern(2 * PIECE + 100);
        let bounds = [0, 1, 64, 700, 1500, PIECE, 2 * PIECE];
        let offsets = if cfg!(miri) { vec![0, 1, 63] } else { (0..64).collect() };
        for cores in [1, 2] {
            for (share, stream) in [(700, 1500), (1500, 700), (0, 0), (700, usize::MAX)] {
                let copier = Copier::with_thresholds(cores, share, stream);
                for bound in bounds.into_iter().filter(|&bound| bound < PIECE || !cfg!(miri)) {
                    for len in [
                        bound.saturating_sub(64),
                        bound.saturating_sub(1),
                        bound,
                        bound + 1,
                        bound + 65,
                    ] {
                        for &offset in &offsets {
                            check(&copier, &source, offset, len);
                        }
                    }
                }
            }
        }
    }

    #[cfg(not(miri))] // too much for it
    #[test]
    fn the_bounds_that_a_relay_has_lose_no_byte() {
        let source = pattern(STREAM + 1);
        for cores in [1, 2] {
            let copier = Copier::new(cores);
            for bound in [SHARE, STREAM / 2, STREAM] {
                for len in [bound - 1, bound, bound + 1] {
                    check(&copier, &source, 5, len);
                }
            }
        }
    }

    #[test]
    fn a_helper_that_does_not_come_is_not_waited_for_and_touches_nothing_later() {
        let copier = Copier::with_thresholds(2, 0, usize::MAX);
        let pool = copier.pool().unwrap();
        let (release, held) = channel::<()>();
        pool.spawn(move || held.recv().unwrap());
        let source = pattern(3 * PIECE);
        let mut dest = vec![0; source.len()];
        let (tx, copied) = channel();
        thread::scope(|s| {
            s.spawn(|| {
                copier.copy_slice(&source, &mut dest);
                tx.send(()).unwrap();
            });
            let in_time = copied.recv_timeout(Duration::from_secs(60));
            release.send(()).unwrap();
            assert!(in_time.is_ok());
        });
        assert!(dest == source);
        dest.fill(CANARY);
        pool.install(|| {}); // behind the helper's turn
        assert!(dest.iter().all(|&byte| byte == CANARY));
    }

    #[test]
    fn a_helper_that_has_begun_is_waited_for() {
        let source = pattern(64 * PIECE);
        let mut dest = vec![0; source.len()];
        let (from, to, len) = (source.as_ptr(), dest.as_mut_ptr(), source.len());
        let shared = Shared::new(Copy { from, to, len, streaming: None });
        thread::scope(|s| {
            s.spawn(|| shared.help());
            while shared.taken.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            shared.end();
            // The last piece first: it is what would be missing.
            let all = dest.rchunks(PIECE).zip(source.rchunks(PIECE));
            assert!(all.into_iter().all(|(got, sent)| got == sent));
        });
    }

    #[test]
    fn a_pinned_caller_s_helper_runs_where_it_likes() {
        let before = sched_getaffinity(None).unwrap();
        let mask = thread::spawn(|| {
            let mut one = CpuSet::new();
            one.set(affinity::allowed()[0]);
            sched_setaffinity(None, &one).unwrap();
            let copier = Copier::new(2);
            copier.pool().unwrap().install(|| sched_getaffinity(None).unwrap())
        });
        assert!(mask.join().unwrap() == before);
    }
}
