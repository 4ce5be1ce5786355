//! The one error type of the crate.

use std::io;

/// Everything that can go wrong in a relay: a variant per remedy, the facts in its fields.
///
/// No variant shows a transfer id, since whoever knows one can end that transfer. What to do about
/// each is in [`guide::troubleshooting`](crate::guide::troubleshooting).
///
/// ```
/// use mooncake_relay::{Config, Error, InProcessEngine, Relay};
/// let engine = std::sync::Arc::new(InProcessEngine::new("doc-error")?);
/// match Relay::new(engine, &Config::default().with_credits(0)) {
///     Err(Error::Config { field, reason }) => {
///         assert_eq!((field, reason.as_str()), ("credits", "0 is not an integer from 1 to 65536"));
///     }
///     other => panic!("{other:?}"),
/// }
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Every slot is in use, or the queue of gets is full. Wait for a transfer to end.
    #[error(
        "every slot is in use, or the queue of gets is full: wait for a transfer to end, or \
         configure more credits or a longer queue"
    )]
    Exhausted,

    /// The time given passed first; for a put, its lease ended before anybody acknowledged it.
    #[error("timed out: a put's lease, a get's limit, or a wait for a free slot has ended")]
    TimedOut,

    /// The payload does not fit. Configure larger slots, or pass a larger destination.
    #[error(
        "{len} bytes do not fit in {slot_size}: configure larger slots, or `get_into` a buffer that is \
         long enough"
    )]
    TooLarge {
        /// Bytes asked for.
        len: usize,
        /// Bytes there are: in a slot, or in the destination of a `get_into`.
        slot_size: usize,
    },

    /// The sender no longer holds what the metadata names. Ask it for fresh metadata.
    #[error("stale transfer of {peer}: {reason}")]
    Stale {
        /// The sender's session id.
        peer: String,
        /// How that was seen.
        reason: &'static str,
    },

    /// The peer is dead, unreachable, or broke off; for a put, its receiver said that it failed. Other
    /// peers are not affected.
    #[error("peer {peer} failed: {reason}")]
    PeerFailed {
        /// The peer's session id; of a put `"(its receiver)"`, since a notification names no sender; of a
        /// get whose sender's end the engine reports, `"(the sender)"`.
        peer: String,
        /// What happened.
        reason: String,
    },

    /// The peer refused the range: it is not, or not wholly, inside what the peer publishes.
    #[error("{peer} refused: {reason}")]
    Rejected {
        /// The peer's session id.
        peer: String,
        /// What it refused.
        reason: String,
    },

    /// The transfer was ended by `abort` or `cleanup`.
    #[error("aborted")]
    Aborted,

    /// A peer's metadata is malformed, or does not fit this relay.
    #[error("metadata field {field:?}: {reason}")]
    Metadata {
        /// The JSON key at fault, without its parents; `metadata` for the text as a whole.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },

    /// The configuration, or an argument, cannot work here.
    #[error("configuration field {field:?}: {reason}")]
    Config {
        /// The field or argument at fault.
        field: &'static str,
        /// What is wrong, and what would work.
        reason: String,
    },

    /// The engine itself failed or broke its contract, or (`engine` is `"relay"`) a thread of the
    /// relay panicked.
    #[error("{engine} engine: {reason}")]
    Engine {
        /// Which engine.
        engine: &'static str,
        /// What it said.
        reason: String,
    },

    /// A device refused or failed. Other devices, and relays in host memory, are not affected; most
    /// failures of a device last until the process ends. That there is no driver, or no such device,
    /// or that it has too little memory, is an [`Error::Config`].
    ///
    /// ```
    /// # use mooncake_relay::Error;
    /// let call = "cuMemcpyDtoDAsync_v2";
    /// let reason = "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned();
    /// let error = Error::Device { device: "cuda:0".to_owned(), call, reason };
    /// assert_eq!(error.to_string(), "cuda:0: cuMemcpyDtoDAsync_v2 failed: CUDA_ERROR_ILLEGAL_ADDRESS");
    /// ```
    #[error("{device}: {call} failed: {reason}")]
    Device {
        /// Which device: `"cuda:0"`.
        device: String,
        /// The driver's function.
        call: &'static str,
        /// The driver's own name for what happened, and what else is known of it.
        reason: String,
    },

    /// The relay is closed, or the outcome was taken before. Stop using this handle.
    #[error("the relay is closed, or the outcome was taken before")]
    Closed,

    /// The operating system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Error {
    /// The variant's name, as the `peer` example's `kind` shows it.
    ///
    /// ```
    /// assert_eq!(mooncake_relay::Error::TimedOut.kind(), "TimedOut");
    /// ```
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Exhausted => "Exhausted",
            Self::TimedOut => "TimedOut",
            Self::TooLarge { .. } => "TooLarge",
            Self::Stale { .. } => "Stale",
            Self::PeerFailed { .. } => "PeerFailed",
            Self::Rejected { .. } => "Rejected",
            Self::Aborted => "Aborted",
            Self::Metadata { .. } => "Metadata",
            Self::Config { .. } => "Config",
            Self::Engine { .. } => "Engine",
            Self::Device { .. } => "Device",
            Self::Closed => "Closed",
            Self::Io(_) => "Io",
        }
    }

    /// The variant of that name, of those that a get can end with.
    pub(crate) fn known_kind(kind: &str) -> Option<&'static str> {
        const KINDS: [&str; 10] = [
            "TimedOut",
            "Aborted",
            "PeerFailed",
            "Rejected",
            "Metadata",
            "Engine",
            "Device",
            "Io",
            "Exhausted",
            "TooLarge",
        ];
        KINDS.into_iter().find(|known| *known == kind)
    }

    pub(crate) fn config(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Config { field, reason: reason.into() }
    }

    pub(crate) fn metadata(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Metadata { field, reason: reason.into() }
    }

    pub(crate) fn peer_failed(peer: &str, reason: impl ToString) -> Self {
        Self::PeerFailed { peer: peer.to_owned(), reason: reason.to_string() }
    }

    pub(crate) fn stale(peer: &str, reason: &'static str) -> Self {
        Self::Stale { peer: peer.to_owned(), reason }
    }

    pub(crate) fn rejected(peer: &str, reason: impl Into<String>) -> Self {
        Self::Rejected { peer: peer.to_owned(), reason: reason.into() }
    }
}

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
