//! What a relay counts.

use crossbeam::utils::CachePadded;
use serde::Serialize;

use crate::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The live counters.
        #[derive(Debug, Default)]
        pub(crate) struct Counting {
            $(pub(crate) $name: Counter,)*
        }

        /// How often each thing has happened since the relay was made. They only grow, and are read
        /// one after another.
        ///
        /// ```
        /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-counters")?;
        /// # let relay = Relay::new(std::sync::Arc::new(engine), &Config::default().with_slot_size(1))?;
        /// let (metadata, put) = relay.put_bytes(b"hello", Tensor::bytes(5))?;
        /// relay.get_into(&metadata, &mut [0; 5], std::time::Duration::from_secs(5))?;
        /// put.wait()?;
        /// let Counters { puts, puts_acknowledged, bytes_got, .. } = relay.health().counters.relay;
        /// assert_eq!((puts, puts_acknowledged, bytes_got), (1, 1, 5));
        /// # Ok::<(), Error>(())
        /// ```
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counting {
            pub(crate) fn now(&self) -> Counters {
                Counters { $($name: self.$name.0.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Puts that were published.
    puts,
    /// Puts that were acknowledged.
    puts_acknowledged,
    /// Puts that failed: the sum of `puts_peer_failed`, `puts_closed` and `puts_broken`.
    puts_failed,
    /// Puts whose lease ended.
    puts_expired,
    /// Puts that were aborted.
    puts_aborted,
    /// Puts whose receiver said that it gave up, or died while it was reading.
    puts_peer_failed,
    /// Puts that the relay's close cut short.
    puts_closed,
    /// Puts that the relay's own failure cut short.
    puts_broken,
    /// Slots that went into quarantine because a peer was, or may have been, still reading them.
    quarantines,
    /// Quarantines that lasted their time and were cut.
    quarantines_cut,
    /// Gets that were taken in; what is refused at the door is not counted.
    gets,
    /// Gets that ended well.
    gets_done,
    /// Gets that ended in an error, each for one of the next seven causes.
    gets_failed,
    /// Gets whose deadline passed.
    gets_timed_out,
    /// Gets that were aborted.
    gets_aborted,
    /// Gets whose sender no longer held what the metadata names.
    gets_stale,
    /// Gets whose sender refused the range.
    gets_rejected,
    /// Gets whose sender was dead, unreachable, or broke off.
    gets_peer_failed,
    /// Gets that the relay's close cut short.
    gets_closed,
    /// Gets that failed on this side: the engine, the system, or metadata that the engine cannot use.
    gets_broken,
    /// Bytes that gets delivered.
    bytes_got,
    /// Notifications that ended a put.
    notes_taken,
    /// Notifications about a put that was over: late ones and doubles.
    notes_late,
    /// Notifications about no put of ours, or that say nothing we know.
    notes_unknown,
    /// Acknowledgements that a sender did not take at the first try; they are tried again.
    notes_untaken,
    /// Notifications that were given up: the lease passed, or too many were owed.
    notes_lost,
    /// Looks at the engine that failed.
    poll_errors,
    /// Buffers that the engine kept after a failed read, until it is quiet.
    buffers_kept,
}

/// One counter, on lines of its own: who puts, who gets and who polls are different threads.
#[derive(Debug, Default)]
pub(crate) struct Counter(CachePadded<AtomicU64>);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn count(&self) {
        self.add(1);
    }
}
