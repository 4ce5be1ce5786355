//! The types of `transfer_engine_c.h`.

use std::ffi::{c_char, c_int, c_void};

/// An engine: what `createTransferEngine` returned.
pub type Engine = *mut c_void;
/// A transport: what `installTransport` returned, owned by its engine.
pub type Transport = *mut c_void;
/// A peer's memory, as one engine knows it. 0 is the engine's own; negative is a failure.
pub type SegmentId = i32;
/// Transfers that are submitted and freed together.
pub type BatchId = u64;

/// The engine's own segment.
pub const LOCAL_SEGMENT: SegmentId = 0;
/// No batch.
pub const INVALID_BATCH: BatchId = u64::MAX;
/// In [`TransferRequest::opcode`]: from the segment into `source`.
pub const OPCODE_READ: c_int = 0;
/// In [`TransferRequest::opcode`]: from `source` into the segment.
pub const OPCODE_WRITE: c_int = 1;

/// In [`TransferStatus::status`]: not begun.
pub const STATUS_WAITING: c_int = 0;
/// In [`TransferStatus::status`]: under way.
pub const STATUS_PENDING: c_int = 1;
/// In [`TransferStatus::status`]: refused.
pub const STATUS_INVALID: c_int = 2;
/// In [`TransferStatus::status`]: given up.
pub const STATUS_CANCELED: c_int = 3;
/// In [`TransferStatus::status`]: every byte has arrived.
pub const STATUS_COMPLETED: c_int = 4;
/// In [`TransferStatus::status`]: the engine's own limit has passed. It may still be under way:
/// `freeBatchID` refuses it then.
pub const STATUS_TIMEOUT: c_int = 5;
/// In [`TransferStatus::status`]: it ended, and not all bytes have arrived.
pub const STATUS_FAILED: c_int = 6;

/// What a call of the adapter returns in place of a C++ exception. Built libraries let exceptions
/// out, which ends the process.
pub const ERR_EXCEPTION: c_int = -9001;

/// One transfer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TransferRequest {
    /// [`OPCODE_READ`] or [`OPCODE_WRITE`].
    pub opcode: c_int,
    /// Our bytes: registered with the engine.
    pub source: *mut c_void,
    /// Whose memory.
    pub target_id: SegmentId,
    /// The address in the peer's memory.
    pub target_offset: u64,
    /// How many bytes.
    pub length: u64,
}

/// How a transfer stands.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferStatus {
    /// One of the `STATUS_` constants.
    pub status: c_int,
    /// How many bytes have arrived.
    pub transferred_bytes: u64,
}

/// A notification: two texts that end at their first NUL. One that was received by the adapter and has a
/// NUL inside is NULL instead.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NotifyMsg {
    /// Which transfer.
    pub name: *mut c_char,
    /// What of it.
    pub msg: *mut c_char,
}

/// A stretch of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BufferEntry {
    /// The first byte.
    pub addr: *mut c_void,
    /// How many.
    pub length: usize,
}

// The header's layout on 64-bit Linux. An older header has a file id of four bytes behind
// `target_id`, where ours has padding: the same layout, and a value that nothing reads.
const _: () = {
    use std::mem::{align_of, offset_of, size_of};
    assert!(size_of::<TransferRequest>() == 40 && align_of::<TransferRequest>() == 8);
    assert!(offset_of!(TransferRequest, opcode) == 0);
    assert!(offset_of!(TransferRequest, source) == 8);
    assert!(offset_of!(TransferRequest, target_id) == 16);
    assert!(offset_of!(TransferRequest, target_offset) == 24);
    assert!(offset_of!(TransferRequest, length) == 32);
    assert!(size_of::<TransferStatus>() == 16 && align_of::<TransferStatus>() == 8);
    assert!(offset_of!(TransferStatus, status) == 0);
    assert!(offset_of!(TransferStatus, transferred_bytes) == 8);
    assert!(size_of::<NotifyMsg>() == 16 && align_of::<NotifyMsg>() == 8);
    assert!(offset_of!(NotifyMsg, name) == 0 && offset_of!(NotifyMsg, msg) == 8);
    assert!(size_of::<BufferEntry>() == 16 && align_of::<BufferEntry>() == 8);
    assert!(offset_of!(BufferEntry, addr) == 0 && offset_of!(BufferEntry, length) == 8);
};
