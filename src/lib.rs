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
//!
//! Slots are the credits: there are as many transfers under way as slots. Dedicated threads run the
//! blocking calls of an [`Engine`], and whoever waits on a [`Token`] does the work of its relay
//! meanwhile. Two promises stand above every feature: `Ok` means the bytes of that put, and every
//! credit comes back.
//!
//! Begin with [`Relay`], which has a whole transfer as its example; the [`guide`] has the rest: a
//! slot's life, threads and order, settings and environment variables, deployment, whom to trust with what,
//! troubleshooting.
#![deny(unsafe_code)] // the rooms that need it are marked, here or in their own files
#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc(test(attr(deny(warnings))))]
// Under loom only the lock-free parts are compiled, and not all of what they offer is used.
#![cfg_attr(loom, allow(dead_code, unused_imports, missing_docs))]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")))]
compile_error!("mooncake-relay runs on 64-bit little-endian Linux (5.10 or newer) only");

// layer 0: ground
#[cfg(not(loom))]
mod affinity;
mod doorbell;
mod error;
mod identity;
#[cfg(not(loom))]
mod ids;
#[allow(unsafe_code)] // maps a page that is wiped in a forked child
mod process;
mod sync;
#[cfg(not(loom))]
mod wait;
mod words;
// layer 1: memory
#[cfg(not(loom))]
#[allow(unsafe_code)] // owns the bytes: mmap, and the device's driver
mod memory;
// layer 2: engines
#[cfg(not(loom))]
mod engine;
// layer 3: slots and tokens
#[cfg(not(loom))]
mod backlog;
#[allow(unsafe_code)] // lends the bytes
mod pool;
#[allow(unsafe_code)] // passes a put's entry between threads
mod puts;
#[allow(unsafe_code)] // hands a value from thread to thread
mod token;
// layer 4: threads
#[cfg(not(loom))]
mod core;
#[cfg(not(loom))]
mod counters;
#[cfg(not(loom))]
mod gets;
#[cfg(not(loom))]
mod notifier;
#[cfg(not(loom))]
mod peers;
#[cfg(not(loom))]
mod receiver;
#[cfg(not(loom))]
mod sender;
#[cfg(not(loom))]
mod several;
// layer 5: face
#[cfg(not(loom))]
mod config;
#[cfg(all(feature = "cuda", not(loom)))]
mod cuda;
#[cfg(not(loom))]
mod health;
#[cfg(not(loom))]
mod metadata;
#[cfg(not(loom))]
mod relay;
#[cfg(not(loom))]
mod shutdown;
#[cfg(not(loom))]
mod tensor;
#[cfg(not(loom))]
#[allow(unsafe_code)] // lends a view's bytes to who says that it may
mod view;

#[cfg(all(feature = "conformance", not(loom)))]
pub mod conformance;
#[cfg(not(loom))]
pub mod guide;

#[cfg(all(feature = "embedded", not(loom)))]
pub use crate::engine::{EmbeddedBuilder, EmbeddedEngine, Staging};
#[cfg(all(feature = "mooncake", not(loom)))]
pub use crate::engine::{MooncakeConfig, MooncakeConnection, MooncakeEngine, Opcode};
#[cfg(all(feature = "cuda", not(loom)))]
pub use crate::memory::Cuda;
#[cfg(not(loom))]
pub use crate::{
    config::Config,
    counters::Counters,
    engine::{
        Access, Engine, EngineOptions, Event, Filled, InProcessEngine, LocalBuffer, Publication,
        ReadError, RemoteBuffer, Retracted, Stamp, Viewed, open_engine,
    },
    health::{AllCounters, Closed, Getting, Health, Holder, PeerHealth},
    memory::{Copying, CopyingWithin, Device, Host, HugePages, IpcMemory, Memory, Pinned, Span},
    metadata::Metadata,
    pool::Slot,
    relay::Relay,
    tensor::{DType, Tensor},
    view::View,
    wait::WaitStrategy,
};
pub use crate::{
    doorbell::Doorbell,
    error::{Error, Result},
    identity::{Identity, Instance, NotHex, Note, Notification, TransferId},
    token::{Completion, Token},
};

/// How many futex wakes a model has seen on this thread.
#[cfg(loom)]
#[doc(hidden)]
pub fn wakes() -> usize {
    sync::futex::WAKES.get()
}

/// What `tests/loom.rs`, `tests/stress.rs` and `benches/` drive. Not part of the API.
#[doc(hidden)]
pub mod internal {
    #[cfg(loom)]
    pub use crate::wakes;
    pub use crate::{
        doorbell::{Sleeper, Ticket, Word},
        pool::{Credits, Queued},
        puts::{Puts, Seen},
        token::{Completer, Tokens},
    };
    #[cfg(not(loom))]
    pub use crate::{memory::Copier, wait::fix_grace};

    /// See `src/words.rs`.
    pub mod words {
        pub use crate::words::*;
    }
}

/// What the targets in `fuzz/` call. Not part of the API.
#[cfg(all(fuzzing, feature = "embedded", not(loom)))]
#[doc(hidden)]
pub use crate::engine::fuzzing;

#[cfg(all(doctest, feature = "cuda", feature = "embedded", feature = "mooncake"))]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
