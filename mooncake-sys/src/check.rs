//! Whether a library does what its functions' names say.

use std::{
    ffi::{CStr, CString, c_int, c_void},
    ptr, thread,
    time::{Duration, Instant},
};

use crate::{
    api::Api,
    types::{
        Engine, INVALID_BATCH, LOCAL_SEGMENT, NotifyMsg, OPCODE_READ, STATUS_COMPLETED,
        STATUS_PENDING, STATUS_WAITING, TransferRequest, TransferStatus,
    },
};

/// Much longer than it takes.
const PATIENCE: Duration = Duration::from_secs(10);
const HALF: usize = 64 * 1024;

/// An engine lets go of the port that it has chosen for a moment before it listens there, and another
/// process may take it meanwhile; the next engine chooses another.
const ATTEMPTS: u32 = 3;

/// Registers memory, reads from the local segment, compares, notifies itself and receives it. On
/// loopback; takes up to a second, most of it for the engine's end.
pub(crate) fn self_check(api: &Api) -> Result<(), String> {
    let mut made = make(api);
    for _ in 1..ATTEMPTS {
        if made.is_ok() {
            break;
        }
        made = make(api);
    }
    let engine = made?;
    // Leaked unless the engine is gone for sure: after a timeout it may still write.
    let memory = Box::leak(vec![0_u8; 2 * HALF].into_boxed_slice());
    let checked = with_memory(api, engine, memory).and_then(|()| notes(api, engine));
    // SAFETY: made above, and nobody else knows it.
    unsafe { (api.destroyTransferEngine)(engine) };
    checked
}

/// An engine by TCP.
fn make(api: &Api) -> Result<Engine, String> {
    let (metadata, host, tcp) = (c"P2PHANDSHAKE", c"127.0.0.1", c"tcp");
    // SAFETY: the texts are NUL-terminated and live through the call.
    let engine = unsafe {
        (api.createTransferEngine)(metadata.as_ptr(), host.as_ptr(), host.as_ptr(), 0, 0)
    };
    if engine.is_null() {
        return Err(format!("it made no engine: {}", api.last_error()));
    }
    // SAFETY: the engine lives, and the protocol is a text; no arguments are allowed.
    let transport = unsafe { (api.installTransport)(engine, tcp.as_ptr(), ptr::null_mut()) };
    if transport.is_null() {
        // SAFETY: made above, and nobody else knows it.
        unsafe { (api.destroyTransferEngine)(engine) };
        return Err("it has no TCP transport".to_owned());
    }
    Ok(engine)
}

fn with_memory(api: &Api, engine: Engine, memory: &'static mut [u8]) -> Result<(), String> {
    for (at, byte) in memory[..HALF].iter_mut().enumerate() {
        *byte = (at * 31 + 7) as u8;
    }
    let start: *mut u8 = memory.as_mut_ptr();
    // SAFETY: the memory is never freed, and the location is a text.
    let code =
        unsafe { (api.registerLocalMemory)(engine, start.cast(), 2 * HALF, c"*".as_ptr(), 1) };
    expect_zero("registering memory", code)?;
    // SAFETY: the second half lies inside.
    let second = unsafe { start.add(HALF) };
    read(api, engine, start.expose_provenance() as u64, second.cast())?;
    // SAFETY: that address was registered.
    let code = unsafe { (api.unregisterLocalMemory)(engine, start.cast()) };
    expect_zero("unregistering memory", code)?;
    // SAFETY: the read is over, so that nobody writes the two halves.
    let (first, second) = unsafe { std::slice::from_raw_parts(start, 2 * HALF) }.split_at(HALF);
    if first == second { Ok(()) } else { Err("a read delivered other bytes".to_owned()) }
}

fn read(api: &Api, engine: Engine, from: u64, into: *mut c_void) -> Result<(), String> {
    // SAFETY: the engine lives.
    let batch = unsafe { (api.allocateBatchID)(engine, 1) };
    if batch == INVALID_BATCH {
        return Err("it made no batch".to_owned());
    }
    let mut request = TransferRequest {
        opcode: OPCODE_READ,
        source: into,
        target_id: LOCAL_SEGMENT,
        target_offset: from,
        length: HALF as u64,
    };
    // SAFETY: one request for a batch of one; both addresses are registered.
    let code = unsafe { (api.submitTransfer)(engine, batch, &raw mut request, 1) };
    expect_zero("submitting a read", code)?;
    eventually("the end of a read", || {
        let mut status = TransferStatus::default();
        // SAFETY: the batch has a first task, and the status is ours.
        let code = unsafe { (api.getTransferStatus)(engine, batch, 0, &raw mut status) };
        expect_zero("the status of a read", code)?;
        match status.status {
            STATUS_COMPLETED => Ok(true),
            STATUS_WAITING | STATUS_PENDING => Ok(false),
            ended => Err(format!("a read ended with status {ended}")),
        }
    })?;
    // SAFETY: no transfer of it is under way.
    expect_zero("freeing a batch", unsafe { (api.freeBatchID)(engine, batch) })
}

/// Where the library has notifications at all.
fn notes(api: &Api, engine: Engine) -> Result<(), String> {
    let (Some(notify), Some(receive), Some(free)) =
        (api.genNotifyInEngine, api.getNotifsFromEngine, api.freeNotifsMsgBuf)
    else {
        return Ok(());
    };
    let name = CString::from(c"self-check").into_raw();
    let msg = CString::from(c"of a name and a text").into_raw();
    let sent = NotifyMsg { name, msg };
    // SAFETY: both texts live until they are dropped below; the segment is the engine's own.
    let code = unsafe { notify(engine, LOCAL_SEGMENT as u64, sent) };
    // SAFETY: made by `into_raw`.
    let name = unsafe { CString::from_raw(name) };
    // SAFETY: as above.
    let msg = unsafe { CString::from_raw(msg) };
    expect_zero("notifying itself", code)?;
    eventually("a notification", || {
        let mut count: c_int = 0;
        // SAFETY: the engine lives, and the count is ours.
        let notes = unsafe { receive(engine, &raw mut count) };
        if notes.is_null() {
            return if count < 0 { Err("no notifications".to_owned()) } else { Ok(false) };
        }
        // SAFETY: not NULL, so that there is a first.
        let first = unsafe { *notes };
        // SAFETY: a note's two texts are NUL-terminated, and live until they are freed.
        let same_name = unsafe { CStr::from_ptr(first.name) } == name.as_c_str();
        // SAFETY: as above.
        let same_msg = unsafe { CStr::from_ptr(first.msg) } == msg.as_c_str();
        // SAFETY: what `receive` gave, with its count.
        unsafe { free(notes, count) };
        if count == 1 && same_name && same_msg {
            Ok(true)
        } else {
            Err("another notification came than was sent".to_owned())
        }
    })
}

fn expect_zero(what: &str, code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{what} returned {code}")) }
}

fn eventually(what: &str, mut attempt: impl FnMut() -> Result<bool, String>) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    while !attempt()? {
        if Instant::now() >= deadline {
            return Err(format!("{what} did not come within {PATIENCE:?}"));
        }
        thread::sleep(Duration::from_micros(200)); // between two looks
    }
    Ok(())
}
