//! Device memory, over ways that reach the host's alone: through pinned chunks, so that the next one
//! is copied while this one travels.
//!
//! ```text
//!   serving   slot ──copy──► chunk ──send──► socket      `relay-stager` copies, the server's thread sends
//!   reading   socket, or a peer's pages ──► chunk ──copy──► slot      the thread that reads does both
//! ```
//!
//! The server's thread never asks the device for anything, so that no device keeps peers waiting. A
//! chunk is held only while bytes move through it: not for a peer that is silent, or takes nothing.
//! Whatever a copy touches is owned by the copy until it is over.

mod chunks;
mod landing;
mod stager;

pub(super) use self::{
    chunks::{Chunk, Chunks},
    landing::Landing,
    stager::{Arrivals, Copied, Stager},
};
use crate::error::{Error, Result};

/// What the host memory between a device and a socket may be.
///
/// Allocated when a relay in device memory is made, and freed when it is closed.
///
/// ```
/// use mooncake_relay::{EmbeddedEngine, Staging};
/// let staging = Staging { chunk: 2 << 20, ..Staging::default() };
/// let engine = EmbeddedEngine::builder("127.0.0.1:0").staging(staging).bind()?;
/// # drop(engine);
/// # Ok::<(), mooncake_relay::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staging {
    /// How many bytes are copied at a time; 1 MiB by default. Smaller ones begin to travel sooner,
    /// larger ones cost fewer calls of the driver.
    pub chunk: usize,
    /// How many such chunks there are for what peers read, and as many again for what this relay
    /// reads; 8 by default. A transfer uses two at a time, so that one is copied while the other
    /// travels; with fewer than all transfers could use they take turns.
    pub chunks: usize,
}

impl Default for Staging {
    fn default() -> Self {
        Self { chunk: 1 << 20, chunks: 8 }
    }
}

/// How large a chunk may be: what is larger is no chunk any more.
const SIZES: std::ops::RangeInclusive<usize> = 4096..=1 << 30;
const COUNTS: std::ops::RangeInclusive<usize> = 2..=4096;

impl Staging {
    pub(super) fn check(&self) -> Result<()> {
        let (sizes, counts) = (SIZES, COUNTS);
        if !sizes.contains(&self.chunk) {
            let reason = format!("chunk must be {} to {} bytes", sizes.start(), sizes.end());
            return Err(Error::config("staging", reason));
        }
        if !counts.contains(&self.chunks) {
            let reason = format!("chunks must be {} to {}", counts.start(), counts.end());
            return Err(Error::config("staging", reason));
        }
        Ok(())
    }
}
