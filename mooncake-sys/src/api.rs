//! The functions of `transfer_engine_c.h`, as pointers that are looked up when a library is loaded.
#![allow(non_snake_case, reason = "the header's names, and its own")]

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fmt,
};

use crate::types::{
    BatchId, BufferEntry, Engine, NotifyMsg, SegmentId, TransferRequest, TransferStatus, Transport,
};

macro_rules! api {
    (
        required { $($(#[$rdoc:meta])* $rname:ident: $rtype:ty,)* }
        optional { $($(#[$odoc:meta])* $oname:ident: $otype:ty,)* }
    ) => {
        /// One library's functions. The required ones are there; of the optional ones a library
        /// may lack any.
        ///
        /// Each is called under the header's conditions: the engine lives, texts are
        /// NUL-terminated, and memory stays registered and mapped while transfers use it. Those of
        /// a built library let C++ exceptions out, which ends the process; the adapter's do not.
        #[derive(Clone, Copy)]
        #[non_exhaustive]
        pub struct Api {
            $($(#[$rdoc])* pub $rname: $rtype,)*
            $($(#[$odoc])* pub $oname: Option<$otype>,)*
        }

        /// The symbols without which nothing is loaded.
        pub const REQUIRED: &[&str] = &[$(stringify!($rname)),*];

        impl Api {
            /// Looks every symbol up; the error names the required ones that are missing.
            ///
            /// # Safety
            ///
            /// The symbols, where they are there, are the functions of the C interface, and the
            /// library is never unloaded.
            pub(crate) unsafe fn look_up(library: &libloading::Library) -> Result<Self, String> {
                let missing: Vec<_> = REQUIRED
                    .iter()
                    .copied()
                    // SAFETY: the symbol is only looked for.
                    .filter(|name| unsafe { library.get::<*const ()>(*name) }.is_err())
                    .collect();
                if !missing.is_empty() {
                    return Err(missing.join(", "));
                }
                Ok(Self {
                    $(
                        // SAFETY: by this function's contract it has that type.
                        $rname: *unsafe { library.get::<$rtype>(stringify!($rname)) }
                            .map_err(|_| stringify!($rname).to_owned())?,
                    )*
                    $(
                        // SAFETY: as above.
                        $oname: unsafe { library.get::<$otype>(stringify!($oname)) }
                            .ok()
                            .map(|symbol| *symbol),
                    )*
                })
            }
        }

        impl fmt::Debug for Api {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut out = f.debug_struct("Api");
                $(out.field(stringify!($oname), &self.$oname.is_some());)*
                out.finish_non_exhaustive()
            }
        }
    };
}

api! {
    required {
        /// `(metadata, local_name, host, rpc_port, auto_discover)`: an engine, or NULL.
        createTransferEngine: unsafe extern "C" fn(
            *const c_char, *const c_char, *const c_char, u64, c_int) -> Engine,
        /// Ends the engine's threads and frees it; takes up to a second.
        destroyTransferEngine: unsafe extern "C" fn(Engine),
        /// `(engine, out, len)`: `host:port`, of an IPv6 address without brackets.
        getLocalIpAndPort: unsafe extern "C" fn(Engine, *mut c_char, usize) -> c_int,
        /// `(engine, protocol, args)`: NULL if it cannot. `args` may be NULL; for `rdma` its first
        /// entry may be a matrix of network cards, as JSON text.
        installTransport: unsafe extern "C" fn(
            Engine, *const c_char, *mut *mut c_void) -> Transport,
        /// `(engine, protocol)`.
        uninstallTransport: unsafe extern "C" fn(Engine, *const c_char) -> c_int,
        /// `(engine, name)`: asks the peer for its descriptor; negative on failure.
        openSegment: unsafe extern "C" fn(Engine, *const c_char) -> SegmentId,
        /// `(engine, segment)`.
        closeSegment: unsafe extern "C" fn(Engine, SegmentId) -> c_int,
        /// `(engine, addr, len, location, remote_accessible)`: location is `*`, `cpu:N`, `cuda:N`.
        registerLocalMemory: unsafe extern "C" fn(
            Engine, *mut c_void, usize, *const c_char, c_int) -> c_int,
        /// `(engine, addr)`.
        unregisterLocalMemory: unsafe extern "C" fn(Engine, *mut c_void) -> c_int,
        /// `(engine, entries, count, location)`.
        registerLocalMemoryBatch: unsafe extern "C" fn(
            Engine, *mut BufferEntry, usize, *const c_char) -> c_int,
        /// `(engine, addrs, count)`.
        unregisterLocalMemoryBatch: unsafe extern "C" fn(
            Engine, *mut *mut c_void, usize) -> c_int,
        /// `(engine, size)`: a batch for that many transfers.
        allocateBatchID: unsafe extern "C" fn(Engine, usize) -> BatchId,
        /// `(engine, batch)`: refused while a transfer of it is under way.
        freeBatchID: unsafe extern "C" fn(Engine, BatchId) -> c_int,
        /// `(engine, batch, requests, count)`.
        submitTransfer: unsafe extern "C" fn(
            Engine, BatchId, *mut TransferRequest, usize) -> c_int,
        /// `(engine, batch, task, status)`: how the `task`th transfer of the batch stands.
        getTransferStatus: unsafe extern "C" fn(
            Engine, BatchId, usize, *mut TransferStatus) -> c_int,
    }
    optional {
        /// Finds the network cards; an engine that was created without `auto_discover` needs it
        /// before it can have an RDMA transport.
        discoverTopology: unsafe extern "C" fn(Engine) -> c_int,
        /// As `openSegment`, and asks anew.
        openSegmentNoCache: unsafe extern "C" fn(Engine, *const c_char) -> SegmentId,
        /// `(engine, name)`.
        removeLocalSegment: unsafe extern "C" fn(Engine, *const c_char) -> c_int,
        /// Asks every known peer for its descriptor anew.
        syncSegmentCache: unsafe extern "C" fn(Engine) -> c_int,
        /// As `submitTransfer`; the note follows some later look at the status, and nothing says
        /// whether the peer got it.
        submitTransferWithNotify: unsafe extern "C" fn(
            Engine, BatchId, *mut TransferRequest, usize, NotifyMsg) -> c_int,
        /// `(engine, count)`: what has come, or NULL. Freed by `freeNotifsMsgBuf`.
        getNotifsFromEngine: unsafe extern "C" fn(Engine, *mut c_int) -> *mut NotifyMsg,
        /// `(notes, count)`.
        freeNotifsMsgBuf: unsafe extern "C" fn(*mut NotifyMsg, c_int) -> c_int,
        /// `(engine, segment, note)`: 0 once the peer has it.
        genNotifyInEngine: unsafe extern "C" fn(Engine, u64, NotifyMsg) -> c_int,
        /// Has the engine tell its peers when the process ends.
        enableGracefulShutdown: unsafe extern "C" fn(Engine),
        /// `(engine, out, len, as_json)`.
        showLinks: unsafe extern "C" fn(Engine, *mut c_char, usize, c_int) -> c_int,
        /// `(engine, name)`: opens the connections of an EFA segment ahead of use.
        warmupEfaSegment: unsafe extern "C" fn(Engine, *const c_char) -> c_int,
        /// Its parameters differ between builds: whoever knows theirs casts it.
        getNicLoadStats: unsafe extern "C" fn() -> c_int,
        /// The adapter's own: why this thread's last call failed.
        mooncakeRelayLastError: unsafe extern "C" fn() -> *const c_char,
    }
}

impl Api {
    /// Why this thread's last call failed, where the library can say; else empty.
    pub fn last_error(&self) -> String {
        let Some(last_error) = self.mooncakeRelayLastError else { return String::new() };
        // SAFETY: it takes nothing, and any thread may call it.
        let text = unsafe { last_error() };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: a NUL-terminated text that stays until this thread's next call.
        let text = unsafe { CStr::from_ptr(text) };
        text.to_string_lossy().into_owned()
    }
}
