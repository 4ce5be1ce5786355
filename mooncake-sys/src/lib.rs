//! The C interface of [Mooncake]'s Transfer Engine, loaded when it is asked for.
//!
//! The crate builds with nothing of Mooncake on the machine. [`load`] finds a library at run time:
//! a `libtransfer_engine.so` that was built from source, or the pip wheel, which exports C++ only
//! and gets a small adapter that is compiled on demand. Either way there is one table of functions,
//! [`Api`], which is a storey of raw calls: `mooncake-relay` has the safe one.
//!
//! ```no_run
//! use std::ptr;
//! use mooncake_sys::{Options, load};
//!
//! let library = load(&Options::default())?;
//! let api = library.api();
//! let (metadata, host) = (c"P2PHANDSHAKE", c"127.0.0.1");
//! // SAFETY: the texts are NUL-terminated, and the engine is destroyed once.
//! unsafe {
//!     let engine = (api.createTransferEngine)(metadata.as_ptr(), host.as_ptr(), host.as_ptr(), 0, 0);
//!     assert!(!engine.is_null(), "{}", api.last_error());
//!     assert!(!(api.installTransport)(engine, c"tcp".as_ptr(), ptr::null_mut()).is_null());
//!     (api.destroyTransferEngine)(engine);
//! }
//! # Ok::<(), mooncake_sys::LoadError>(())
//! ```
//!
//! # What a caller must know
//!
//! - An engine ends the process when it is given a metadata server of a kind that it was built
//!   without: ask [`Library::has_metadata_store`] first. Texts end at their first NUL.
//! - A transfer cannot be cancelled, and its batch cannot be freed while it is under way: keep the
//!   batch and the memory until it has ended.
//! - A read that is submitted together with a notification reports success although the
//!   notification was lost. Notify by `genNotifyInEngine` after a read that was looked at.
//! - Built libraries of about version 0.3.7 hand out notifications whose memory is freed already.
//!   The self-check of [`load`] refuses those it catches at it; use 0.3.13 or newer.
//! - Whoever reaches an engine's ports can read and write all that is registered with it.
//!
//! # The wheel
//!
//! [`WHEELS`] lists the versions that the adapter knows. It is built with `g++` (or `CXX`) into
//! a cache folder, under a name made of the wheel, the compiler and the adapter's source, and gets
//! that name only after a process of its own has tried it: what a wrong layout would do is done
//! there. The folder is refused if anybody but its user may write it.
//!
//! [Mooncake]: https://github.com/kvcache-ai/Mooncake

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")))]
compile_error!("mooncake-sys runs on 64-bit little-endian Linux only");

mod adapter;
mod api;
mod check;
mod child;
mod error;
mod load;
mod types;
mod wheel;

pub use crate::{
    api::{Api, REQUIRED},
    error::{LoadError, Looked},
    load::{Library, Options, load},
    types::{
        BatchId, BufferEntry, ERR_EXCEPTION, Engine, INVALID_BATCH, LOCAL_SEGMENT, NotifyMsg,
        OPCODE_READ, OPCODE_WRITE, STATUS_CANCELED, STATUS_COMPLETED, STATUS_FAILED,
        STATUS_INVALID, STATUS_PENDING, STATUS_TIMEOUT, STATUS_WAITING, SegmentId, TransferRequest,
        TransferStatus, Transport,
    },
    wheel::WHEELS,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
