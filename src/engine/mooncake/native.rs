//! One C++ engine: its calls with Rust's types, and nothing else.
#![allow(unsafe_code)] // calls C++

use std::{
    ffi::{CStr, CString, c_int, c_void},
    fmt,
    path::PathBuf,
    ptr::{self, NonNull},
};

use mooncake_sys::{
    BatchId, INVALID_BATCH, Library, NotifyMsg, Options, SegmentId, TransferRequest,
    TransferStatus, load,
};

use parking_lot::Mutex;

use super::config::{Checked, MooncakeConfig, nic_matrix, rdma_devices};
use crate::{
    engine::Notification,
    error::{Error, Result},
    memory::Span,
    process,
};

/// An engine of the library, destroyed when it is dropped.
pub(super) struct Native {
    library: &'static Library,
    engine: NonNull<c_void>,
    notify: unsafe extern "C" fn(*mut c_void, u64, NotifyMsg) -> c_int,
    receive: unsafe extern "C" fn(*mut c_void, *mut c_int) -> *mut NotifyMsg,
    free_notes: unsafe extern "C" fn(*mut NotifyMsg, c_int) -> c_int,
}

// SAFETY: the engine locks what its threads and callers share; its calls may come from any thread.
unsafe impl Send for Native {}
// SAFETY: as above.
unsafe impl Sync for Native {}

/// One at a time: an engine lets go of the port that it has chosen for a moment before it listens
/// there, and another may take it meanwhile.
static OPENING: Mutex<()> = Mutex::new(());

/// Another process may take it too; the next time another port is chosen.
const ATTEMPTS: u32 = 3;

impl Native {
    pub(super) fn open(config: &MooncakeConfig, checked: &Checked) -> Result<Self> {
        let _alone = OPENING.lock();
        let mut last = Self::try_open(config, checked);
        for _ in 1..ATTEMPTS {
            match &last {
                Err(Error::Config { field: "protocol", reason }) if reason.contains(IN_USE) => {
                    last = Self::try_open(config, checked);
                }
                _ => break,
            }
        }
        last
    }

    fn try_open(config: &MooncakeConfig, checked: &Checked) -> Result<Self> {
        let library = find(config.library.clone())?;
        if let Some(scheme) = checked.scheme
            && library.has_metadata_store(scheme) == Some(false)
        {
            let reason = format!("this library was built without a store for {scheme}://");
            return Err(Error::config("metadata_server", reason));
        }
        let api = library.api();
        let (Some(notify), Some(receive), Some(free_notes)) =
            (api.genNotifyInEngine, api.getNotifsFromEngine, api.freeNotifsMsgBuf)
        else {
            return Err(broken("the library is too old: it has no notifications"));
        };
        let (metadata, name) = (checked.metadata_server.as_ptr(), checked.name.as_ptr());
        // SAFETY: NUL-terminated texts that were checked, and a metadata server of a kind that the
        // library has.
        let engine = unsafe { (api.createTransferEngine)(metadata, name, name, 0, 0) };
        let engine = NonNull::new(engine).ok_or_else(|| {
            broken(&format!(
                "it could not be created ({}): is the metadata server {:?} reachable, and {:?} a \
                 name of this host? MC_LOG_LEVEL=INFO has it say more on stderr",
                or_nothing(api.last_error()),
                checked.metadata_server,
                checked.name
            ))
        })?;
        let native = Self { library, engine, notify, receive, free_notes };
        native.install(checked)?;
        Ok(native)
    }

    fn install(&self, checked: &Checked) -> Result<()> {
        let api = self.library.api();
        let mut matrix = None;
        if checked.protocol.as_c_str() == c"rdma" {
            matrix = self.choose_devices(&checked.devices)?;
        }
        let first = matrix.as_ref().map_or(ptr::null_mut(), |text| text.as_ptr().cast_mut().cast());
        let mut arguments: [*mut c_void; 2] = [first, ptr::null_mut()];
        let (engine, protocol) = (self.engine.as_ptr(), checked.protocol.as_ptr());
        // SAFETY: the engine lives; the protocol is a text, and so is the first argument, if there
        // is one.
        let transport = unsafe { (api.installTransport)(engine, protocol, arguments.as_mut_ptr()) };
        if transport.is_null() {
            let reason = format!(
                "this library has no {:?} transport, or it found nothing here to use it with ({})",
                checked.protocol,
                or_nothing(api.last_error())
            );
            return Err(Error::config("protocol", reason));
        }
        Ok(())
    }

    /// The matrix of the named devices; without names the engine looks for all.
    fn choose_devices(&self, wanted: &[String]) -> Result<Option<CString>> {
        let there = rdma_devices();
        if there.is_empty() {
            let reason = "this host has no RDMA device (/sys/class/infiniband is empty): use tcp";
            return Err(Error::config("protocol", reason));
        }
        if let Some(unknown) = wanted.iter().find(|name| !there.contains(name)) {
            let reason = format!("there is no RDMA device {unknown:?}: there are {there:?}");
            return Err(Error::config("device_name", reason));
        }
        if !wanted.is_empty() {
            return CString::new(nic_matrix(wanted)).map(Some).map_err(|_| broken("a NUL"));
        }
        if let Some(discover) = self.library.api().discoverTopology {
            // SAFETY: the engine lives.
            let code = unsafe { discover(self.engine.as_ptr()) };
            if code != 0 {
                return Err(broken(&format!("it could not look for devices: {}", meaning(code))));
            }
        }
        Ok(None)
    }

    /// `host:port` of where peers ask for the segment, without brackets.
    pub(super) fn address(&self) -> Result<String> {
        let mut text = [0_u8; 512];
        let call = self.library.api().getLocalIpAndPort;
        // SAFETY: the engine lives, and the buffer is as long as it says.
        let code = unsafe { call(self.engine.as_ptr(), text.as_mut_ptr().cast(), text.len()) };
        let found = CStr::from_bytes_until_nul(&text).ok().and_then(|text| text.to_str().ok());
        match found {
            Some(address) if code == 0 && !address.is_empty() => Ok(address.to_owned()),
            _ => Err(broken("it does not tell its address")),
        }
    }

    /// Registers memory at `location`; peers are told of it if they may reach it.
    ///
    /// # Safety
    ///
    /// The span stays mapped until it is unregistered, or the engine is destroyed; what the processor
    /// cannot touch is at the location of its device.
    pub(super) unsafe fn register(&self, span: Span, location: &CStr, remote: bool) -> Result<()> {
        let (addr, location) = (span.ptr.as_ptr().cast(), location.as_ptr());
        let (call, remote) = (self.library.api().registerLocalMemory, c_int::from(remote));
        // SAFETY: by this function's contract; the location is a text.
        let code = unsafe { call(self.engine.as_ptr(), addr, span.len, location, remote) };
        if code == 0 { Ok(()) } else { Err(broken(&self.why("registering memory", code))) }
    }

    pub(super) fn unregister(&self, span: Span) -> Result<()> {
        let call = self.library.api().unregisterLocalMemory;
        // SAFETY: the engine looks the address up, and knows it or says so.
        let code = unsafe { call(self.engine.as_ptr(), span.ptr.as_ptr().cast()) };
        if code == 0 { Ok(()) } else { Err(broken(&self.why("unregistering memory", code))) }
    }

    /// Asks the peer for its segment, also if it is known, where the library can do that. May take as
    /// long as the system's timeouts.
    pub(super) fn open_segment(&self, name: &CStr) -> Result<SegmentId, String> {
        let api = self.library.api();
        let call = api.openSegmentNoCache.unwrap_or(api.openSegment);
        // SAFETY: the engine lives; the name was checked.
        let segment = unsafe { call(self.engine.as_ptr(), name.as_ptr()) };
        if segment < 0 { Err(self.why("asking it for its segment", segment)) } else { Ok(segment) }
    }

    /// Tells a peer; `Ok` once it has answered. May take as long as the system's timeouts.
    pub(super) fn notify(
        &self,
        segment: SegmentId,
        name: &CStr,
        text: &CStr,
    ) -> Result<(), String> {
        let (name, msg) = (name.as_ptr().cast_mut(), text.as_ptr().cast_mut());
        // SAFETY: the engine lives, the segment is open, and the texts are only read.
        let code =
            unsafe { (self.notify)(self.engine.as_ptr(), segment as u64, NotifyMsg { name, msg }) };
        if code == 0 { Ok(()) } else { Err(self.why("notifying it", code)) }
    }

    /// What peers have told; how many of it was no text is counted in `refused`.
    pub(super) fn notes(&self, refused: &mut u64) -> Result<Vec<Notification>> {
        let mut count: c_int = 0;
        // SAFETY: the engine lives, and the count is ours.
        let notes = unsafe { (self.receive)(self.engine.as_ptr(), &raw mut count) };
        if notes.is_null() {
            // The adapter says by a negative count that there are some, and no memory for them.
            let failed = || Err(broken("its notifications could not be fetched"));
            return if count < 0 { failed() } else { Ok(Vec::new()) };
        }
        let mut heard = Vec::with_capacity(count.max(0) as usize);
        for at in 0..count.max(0) as usize {
            // SAFETY: there are `count` of them.
            let note = unsafe { notes.add(at) };
            // SAFETY: as above; it was written by the call.
            let note = unsafe { *note };
            // SAFETY: either NULL or a NUL-terminated text, which lives until it is freed below.
            let name = unsafe { text(note.name) };
            // SAFETY: as above.
            match (name, unsafe { text(note.msg) }) {
                (Some(name), Some(message)) => heard.push(Notification::new(name, message)),
                _ => *refused += 1,
            }
        }
        // SAFETY: what the call gave, with its count, once.
        unsafe { (self.free_notes)(notes, count) };
        Ok(heard)
    }

    pub(super) fn allocate_batch(&self, size: usize) -> Result<BatchId> {
        // SAFETY: the engine lives.
        let batch = unsafe { (self.library.api().allocateBatchID)(self.engine.as_ptr(), size) };
        if batch == INVALID_BATCH { Err(broken("it made no batch")) } else { Ok(batch) }
    }

    /// Begins transfers; 0 if all have begun.
    ///
    /// # Safety
    ///
    /// The batch is of this engine, has room for them and is not freed. The local bytes are
    /// registered and nobody else's until every transfer has ended.
    pub(super) unsafe fn submit(&self, batch: BatchId, requests: &mut [TransferRequest]) -> c_int {
        let call = self.library.api().submitTransfer;
        // SAFETY: by this function's contract.
        unsafe { call(self.engine.as_ptr(), batch, requests.as_mut_ptr(), requests.len()) }
    }

    /// # Safety
    ///
    /// The batch is of this engine and not freed.
    pub(super) unsafe fn status(&self, batch: BatchId, task: usize) -> Result<c_int, c_int> {
        let mut status = TransferStatus::default();
        let call = self.library.api().getTransferStatus;
        // SAFETY: by this function's contract; the engine checks the task's number.
        let code = unsafe { call(self.engine.as_ptr(), batch, task, &raw mut status) };
        if code == 0 { Ok(status.status) } else { Err(code) }
    }

    /// Whether it is freed; the engine refuses while a transfer of it is under way.
    ///
    /// # Safety
    ///
    /// The batch is of this engine and not freed; after `true` it is.
    pub(super) unsafe fn free_batch(&self, batch: BatchId) -> bool {
        // SAFETY: by this function's contract.
        unsafe { (self.library.api().freeBatchID)(self.engine.as_ptr(), batch) == 0 }
    }

    /// What a code of a failed call means, with what the library says of it.
    pub(super) fn why(&self, what: &str, code: c_int) -> String {
        match self.library.api().last_error() {
            said if code == mooncake_sys::ERR_EXCEPTION => format!("{what} failed: {said}"),
            _ => format!("{what} failed: {}", meaning(code)),
        }
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        if !process::is_here() {
            // It would wait for its threads, which a forked child has not.
            return;
        }
        // SAFETY: whoever has a batch of it keeps it alive, so that no transfer is under way; it is
        // dropped once.
        unsafe { (self.library.api().destroyTransferEngine)(self.engine.as_ptr()) };
    }
}

impl fmt::Debug for Native {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Native").field("library", &self.library.path()).finish_non_exhaustive()
    }
}

/// What the engine says of a port that is taken.
const IN_USE: &str = "in use";

pub(super) fn broken(reason: &str) -> Error {
    Error::Engine { engine: "mooncake", reason: reason.to_owned() }
}

fn find(named: Option<PathBuf>) -> Result<&'static Library> {
    let mut options = Options::default();
    match named {
        Some(folder) if folder.is_dir() => options.wheel = Some(folder),
        file => options.library = file,
    }
    load(&options).map_err(|error| broken(&error.to_string()))
}

/// # Safety
///
/// NULL, or a NUL-terminated text that outlives what is returned.
unsafe fn text<'a>(text: *const std::ffi::c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: by this function's contract.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

fn or_nothing(said: String) -> String {
    if said.is_empty() { "it does not say why".to_owned() } else { said }
}

/// The engine's codes, positive or negative.
fn meaning(code: c_int) -> String {
    let text = match code.unsigned_abs() {
        1 => "an argument is not valid",
        2 => "too many requests",
        3 => "the address is not registered",
        4 => "the batch is busy",
        6 => "there is no such device",
        7 => "the address overlaps another",
        8 => "the transport is not supported",
        101 => "its name was not found",
        102 => "it does not answer",
        103 => "its answer makes no sense",
        104 => "it refused",
        200 => "its metadata is not there",
        201 | 202 => "the device failed",
        300 | 302 => "there is no memory for it",
        999 => "the library was built without it",
        _ => "for a reason that is not known",
    };
    format!("{text} (code {code})")
}
