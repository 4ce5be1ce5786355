//! The two ends of a read.
#![allow(unsafe_code)] // lends the bytes of an owned slot

use std::{fmt, slice, sync::Arc};

use super::Identity;
use crate::{
    error::Error,
    memory::{Device, Span},
};

/// A peer's bytes: what an [`Engine`](crate::Engine) is asked to read.
///
/// ```
/// use mooncake_relay::{Identity, Instance, RemoteBuffer, TransferId};
/// let id = TransferId { random: 1, slot: 0, generation: 1 };
/// let identity = Identity { instance: Instance::from_bytes([7; 16]), id };
/// let remote = RemoteBuffer::new("10.0.0.7:15000", 0x7f00_0000_0000, 4096).with_identity(identity);
/// assert_eq!((&*remote.peer, remote.len, remote.stamp), ("10.0.0.7:15000", 4096, None));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteBuffer {
    /// The peer's [`session_id`](crate::Engine::session_id).
    pub peer: Arc<str>,
    /// The address in the peer's memory.
    pub ptr: u64,
    /// The number of bytes.
    pub len: usize,
    /// Which put they are, if the sender is a relay of ours.
    pub identity: Option<Identity>,
    /// What proves them where the transport cannot check the identity.
    pub stamp: Option<Stamp>,
    /// Where the peer is found by who is on its host: its [`local`](crate::Engine::local).
    pub local: Option<Arc<str>>,
}

impl RemoteBuffer {
    /// `len` bytes at `ptr` in the memory of `peer`, of no known identity.
    pub fn new(peer: &str, ptr: u64, len: usize) -> Self {
        Self { peer: peer.into(), ptr, len, identity: None, stamp: None, local: None }
    }

    /// The same bytes, as those of one put.
    pub fn with_identity(mut self, identity: Identity) -> Self {
        self.identity = Some(identity);
        self
    }
}

/// Eight bytes in the sender's memory that hold `value` exactly while a put is published.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Where they are.
    pub ptr: u64,
    /// What they hold.
    pub value: u64,
}

impl fmt::Debug for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stamp").field("ptr", &self.ptr).finish_non_exhaustive()
    }
}

/// Where a borrowed slot goes when nobody needs it any more.
pub(crate) trait Lender: Send + Sync + 'static {
    /// Takes slot `index` back.
    fn give_back(&self, index: u32);

    /// Whether the bytes can be touched by the processor.
    fn is_host(&self) -> bool;

    /// How they are copied, if they cannot.
    fn device(&self) -> Option<Arc<dyn Device>> {
        None
    }
}

/// Our bytes, owned: whoever holds it owns the slot, and dropping it returns the credit.
///
/// `Send`, and bound to no lifetime: an engine that cannot end a read keeps it until it is quiet.
/// Only a relay (or the conformance suite) makes one, and checks that what comes back is what it
/// lent.
///
/// ```
/// use mooncake_relay::{Error, Filled, LocalBuffer, ReadError};
///
/// /// The end of a read: `bytes` are what came from the peer.
/// fn deliver(mut local: LocalBuffer, bytes: &[u8]) -> Result<Filled, ReadError> {
///     match local.bytes_mut() {
///         Some(dest) if dest.len() == bytes.len() => dest.copy_from_slice(bytes),
///         _ => return Err(ReadError { error: Error::TimedOut, buffer: Some(local) }),
///     }
///     Ok(Filled { buffer: local, verified: false }) // the relay reads the stamp
/// }
/// # let _: fn(LocalBuffer, &[u8]) -> Result<Filled, ReadError> = deliver;
/// ```
pub struct LocalBuffer {
    /// `None` once the slot went back another way.
    lender: Option<Arc<dyn Lender>>,
    index: u32,
    span: Span,
}

impl LocalBuffer {
    /// # Safety
    ///
    /// The span is slot `index` of `lender`, is initialised, stays mapped while `lender` lives, and
    /// belongs to the new buffer alone until `give_back`.
    pub(crate) unsafe fn new(lender: Arc<dyn Lender>, index: u32, span: Span) -> Self {
        Self { lender: Some(lender), index, span }
    }

    /// Where the bytes are.
    pub fn span(&self) -> Span {
        self.span
    }

    /// The bytes, or `None` if they are in device memory. As long as the remote ones.
    pub fn bytes(&self) -> Option<&[u8]> {
        let lender = self.lender.as_ref().filter(|lender| lender.is_host())?;
        let _ = lender;
        // SAFETY: by the contract of `new` the bytes are initialised, mapped, and ours alone.
        Some(unsafe { slice::from_raw_parts(self.span.ptr.as_ptr(), self.span.len) })
    }

    /// The bytes, to be filled, or `None` if they are in device memory.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        self.bytes()?;
        // SAFETY: as in `bytes`, and `&mut self` makes the borrow unique.
        Some(unsafe { slice::from_raw_parts_mut(self.span.ptr.as_ptr(), self.span.len) })
    }

    /// How the bytes are copied, or `None` if they are in host memory.
    pub fn device(&self) -> Option<Arc<dyn Device>> {
        self.lender.as_ref()?.device()
    }

    /// Whether this is slot `index` of `lender`.
    pub(crate) fn is_of(&self, lender: &Arc<dyn Lender>, index: u32) -> bool {
        self.index == index
            && self
                .lender
                .as_ref()
                .is_some_and(|own| Arc::as_ptr(own).addr() == Arc::as_ptr(lender).addr())
    }

    /// Ends the loan without giving the slot back: the caller owns it now.
    pub(crate) fn forget(mut self) {
        self.lender = None;
    }
}

impl Drop for LocalBuffer {
    fn drop(&mut self) {
        if let Some(lender) = self.lender.take() {
            lender.give_back(self.index);
        }
    }
}

impl fmt::Debug for LocalBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalBuffer")
            .field("index", &self.index)
            .field("len", &self.span.len)
            .finish_non_exhaustive()
    }
}

/// A buffer that a read has filled.
#[derive(Debug)]
pub struct Filled {
    /// The buffer that was lent.
    pub buffer: LocalBuffer,
    /// Whether the engine made sure that these are the bytes of `remote.identity`. If not, the
    /// relay reads the stamp.
    pub verified: bool,
}

/// Why a read failed, and the buffer.
#[derive(Debug)]
pub struct ReadError {
    /// What went wrong.
    pub error: Error,
    /// The buffer that was lent; `None` means that the engine may still write into it. Then the
    /// engine keeps it, and drops it once it is quiet.
    pub buffer: Option<LocalBuffer>,
}
