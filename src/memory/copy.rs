//! Copies into and out of slots.

use std::{
    sync::{Arc, OnceLock},
    thread::{self, JoinHandle},
};

use parking_lot::Mutex;
use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};

/// From this many bytes on a copy is shared between threads; below, waking them costs more than
/// they save.
pub(crate) const PARALLEL_COPY: usize = 4 << 20;

/// The piece that one thread copies at a time.
const PIECE: usize = 1 << 20;

/// More threads than this do not copy faster: memory is the limit.
const MOST_THREADS: usize = 4;

/// A relay's own small pool of copying threads, made at the first large copy.
#[derive(Debug)]
pub(crate) struct Copier {
    threads: usize,
    pool: OnceLock<Option<ThreadPool>>,
    handles: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Copier {
    /// `cores` is how many processors this process may use.
    pub(crate) fn new(cores: usize) -> Self {
        let threads = cores.min(MOST_THREADS);
        Self { threads, pool: OnceLock::new(), handles: Arc::default() }
    }

    /// Copies `from` to `to`, which is as long.
    pub(crate) fn copy(&self, from: &[u8], to: &mut [u8]) {
        let large = from.len() >= PARALLEL_COPY;
        match large.then(|| self.pool()).flatten() {
            None => to.copy_from_slice(from),
            Some(pool) => pool.install(|| {
                let pieces = to.par_chunks_mut(PIECE).zip(from.par_chunks(PIECE));
                pieces.for_each(|(to, from)| to.copy_from_slice(from));
            }),
        }
    }

    /// The pool, or `None` where one thread is as good or the system gives no more.
    fn pool(&self) -> Option<&ThreadPool> {
        let build = || {
            if self.threads < 2 {
                return None;
            }
            ThreadPoolBuilder::new()
                .num_threads(self.threads)
                .spawn_handler(|thread| {
                    let name = format!("relay-copy-{}", thread.index());
                    let handle = thread::Builder::new().name(name).spawn(|| thread.run())?;
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
        // rayon only asks its threads to end; a closed relay has none left.
        drop(self.pool.take());
        for handle in self.handles.lock().drain(..) {
            // A copy does not panic; if it did, its caller has heard.
            let _ = handle.join();
        }
    }
}
