//! Moves tensors between processes that run no async runtime.
//!
//! A sender *puts* a tensor into a slot of registered memory and hands out [`Metadata`] as JSON
//! text; a receiver *gets* it by a one-sided read; a notification gives the sender its slot back.
//!
//! ```text
//!  putter process                                        getter process
//!  caller ─acquire─► Slot ─put─► notifier (owns Slot)    caller ─get(metadata)─► worker (owns Slot) ─► engine.read
//!    metadata (JSON) ───────── any channel of the user's ───────►                       │
//!  caller ◄─ Slot ◄─ Token ◄─ notifier ◄─ engine.poll ◄──── notification ◄──────────────┤
//!                                                         caller ◄─ Slot ◄─ Token ◄─────┘
//! ```
#![deny(unsafe_code)] // the rooms that need it are marked below
#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc(test(attr(deny(warnings))))]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")))]
compile_error!("mooncake-relay runs on 64-bit little-endian Linux (5.10 or newer) only");

// layer 0: ground
mod affinity;
mod doorbell;
mod error;
mod sync;
// layer 1: memory
#[allow(unsafe_code)] // owns the bytes: mmap
mod memory;
// layer 2: engines
mod engine;
// layer 5: face
mod config;
mod metadata;
mod tensor;

#[cfg(feature = "conformance")]
pub mod conformance;

pub use crate::{
    engine::{
        Access, Engine, Event, Filled, Identity, Instance, LocalBuffer, Note, Notification,
        Publication, ReadError, RemoteBuffer, Retracted, Stamp, TransferId,
    },
    error::{Error, Result},
    memory::{Host, Memory, Span},
    doorbell::Doorbell,
};
