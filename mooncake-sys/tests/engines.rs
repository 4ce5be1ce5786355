//! Two real engines in one process: a read and a notification between them, by the raw calls.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    ffi::{CStr, CString, c_int},
    path::Path,
    ptr,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use mooncake_sys::{
    Api, Engine, INVALID_BATCH, Library, NotifyMsg, OPCODE_READ, Options, STATUS_COMPLETED,
    STATUS_PENDING, STATUS_WAITING, SegmentId, TransferRequest, TransferStatus, load,
};

use crate::common::wheel;

const SIZE: usize = 1 << 20;

#[test]
fn a_read_and_a_note_between_two_engines() {
    let Some(library) = library() else { return };
    let api = library.api();
    let (sender, receiver) = (Side::new(api, 7), Side::new(api, 0));
    let segment = receiver.open(&sender.name());
    assert!(segment > 0, "{segment}");

    receiver.read(segment, sender.memory.as_ptr().expose_provenance() as u64);
    assert_eq!(receiver.memory, sender.memory);

    receiver.notify(segment, c"stage0_\xc3\xa9", c"transfer_complete");
    let expected = [("stage0_é".to_owned(), "transfer_complete".to_owned())];
    assert_eq!(eventually(|| sender.notes()), expected);
    assert_eq!(sender.notes(), []);
}

#[test]
fn the_library_tells_which_metadata_servers_it_knows() {
    let Some(library) = library() else { return };
    assert_eq!(library.has_metadata_store("http"), Some(true));
    assert_eq!(library.has_metadata_store("etcd"), Some(true));
    assert_eq!(library.has_metadata_store("redis"), Some(false), "the wheel is built without");
    assert_eq!(library.has_metadata_store("gopher"), Some(false));
}

#[test]
fn an_unknown_peer_is_a_code_and_not_a_crash() {
    let Some(library) = library() else { return };
    let side = Side::new(library.api(), 1);
    for name in [c"", c"nobody", c"127.0.0.1:1", c":", c"a:b:c", c"[::1"] {
        let segment = side.open(name);
        assert!(segment < 0, "{name:?} is segment {segment}");
    }
}

fn library() -> Option<&'static Library> {
    // Kept from run to run, and beside what else is built.
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("adapters");
    let options = Options { wheel: Some(wheel()?), cache: Some(cache), ..Options::default() };
    Some(load(&options).unwrap())
}

/// One by TCP; `None`: somebody took its port first.
fn open(api: &Api) -> Option<Engine> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (metadata, host) = (c"P2PHANDSHAKE".as_ptr(), c"127.0.0.1".as_ptr());
    // SAFETY: the texts are NUL-terminated.
    let engine = unsafe { (api.createTransferEngine)(metadata, host, host, 0, 0) };
    if engine.is_null() {
        return None;
    }
    // SAFETY: the engine lives, and the text is NUL-terminated.
    let tcp = unsafe { (api.installTransport)(engine, c"tcp".as_ptr(), ptr::null_mut()) };
    if tcp.is_null() {
        // SAFETY: it lives, and nobody uses it after this.
        unsafe { (api.destroyTransferEngine)(engine) };
        return None;
    }
    Some(engine)
}

/// An engine with registered memory.
struct Side<'a> {
    api: &'a Api,
    engine: Engine,
    memory: Vec<u8>,
}

impl<'a> Side<'a> {
    fn new(api: &'a Api, fill: u8) -> Self {
        // The engine looks for a free port before it binds it: whoever does likewise may be first.
        let engine = (0..20).find_map(|_| open(api)).expect("a port is free");
        let mut memory: Vec<u8> = (0..SIZE).map(|at| (at as u8).wrapping_mul(fill)).collect();
        let start = memory.as_mut_ptr().cast();
        // SAFETY: the memory lives until `drop` has destroyed the engine.
        let code = unsafe { (api.registerLocalMemory)(engine, start, SIZE, c"*".as_ptr(), 1) };
        assert_eq!(code, 0);
        Self { api, engine, memory }
    }

    fn name(&self) -> CString {
        let mut name = [0; 256];
        // SAFETY: as long as it says.
        let code = unsafe { (self.api.getLocalIpAndPort)(self.engine, name.as_mut_ptr(), 256) };
        assert_eq!(code, 0);
        // SAFETY: the call has written a NUL-terminated text.
        unsafe { CStr::from_ptr(name.as_ptr()) }.to_owned()
    }

    fn open(&self, name: &CStr) -> SegmentId {
        // SAFETY: the text is NUL-terminated.
        unsafe { (self.api.openSegment)(self.engine, name.as_ptr()) }
    }

    fn read(&self, segment: SegmentId, from: u64) {
        // SAFETY: the engine lives.
        let batch = unsafe { (self.api.allocateBatchID)(self.engine, 1) };
        assert_ne!(batch, INVALID_BATCH);
        let mut request = TransferRequest {
            opcode: OPCODE_READ,
            source: self.memory.as_ptr().cast_mut().cast(),
            target_id: segment,
            target_offset: from,
            length: SIZE as u64,
        };
        // SAFETY: both ends are registered; nobody looks at the bytes before the read has ended.
        let code = unsafe { (self.api.submitTransfer)(self.engine, batch, &raw mut request, 1) };
        assert_eq!(code, 0);
        let ended = eventually(|| {
            let mut status = TransferStatus::default();
            // SAFETY: the batch has that task, and the status is ours.
            let code =
                unsafe { (self.api.getTransferStatus)(self.engine, batch, 0, &raw mut status) };
            assert_eq!(code, 0);
            [status]
                .into_iter()
                .filter(|s| ![STATUS_WAITING, STATUS_PENDING].contains(&s.status))
                .collect()
        });
        assert_eq!(ended[0].status, STATUS_COMPLETED);
        // SAFETY: the transfer has ended.
        assert_eq!(unsafe { (self.api.freeBatchID)(self.engine, batch) }, 0);
    }

    fn notify(&self, segment: SegmentId, name: &CStr, msg: &CStr) {
        let (name, msg) = (name.as_ptr().cast_mut(), msg.as_ptr().cast_mut());
        let notify = self.api.genNotifyInEngine.unwrap();
        // SAFETY: the segment is open, and the texts are NUL-terminated and only read.
        let code = unsafe { notify(self.engine, segment as u64, NotifyMsg { name, msg }) };
        assert_eq!(code, 0);
    }

    fn notes(&self) -> Vec<(String, String)> {
        let mut count: c_int = 0;
        // SAFETY: the engine lives, and the count is ours.
        let notes = unsafe { self.api.getNotifsFromEngine.unwrap()(self.engine, &raw mut count) };
        // SAFETY: the text is one of a note, NUL-terminated.
        let text = |text| unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned();
        let mut heard = Vec::new();
        for at in 0..count as usize {
            // SAFETY: there are `count` of them.
            let note = unsafe { notes.add(at) };
            // SAFETY: as above.
            let note = unsafe { *note };
            heard.push((text(note.name), text(note.msg)));
        }
        // SAFETY: what the call gave, with its count.
        unsafe { self.api.freeNotifsMsgBuf.unwrap()(notes, count) };
        heard
    }
}

impl Drop for Side<'_> {
    fn drop(&mut self) {
        // SAFETY: no transfer is under way, and nobody uses the engine after this.
        unsafe { (self.api.destroyTransferEngine)(self.engine) };
    }
}

/// Asks until there is something.
fn eventually<T>(mut ask: impl FnMut() -> Vec<T>) -> Vec<T> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let found = ask();
        if !found.is_empty() {
            return found;
        }
        assert!(Instant::now() < deadline, "nothing came");
        thread::sleep(Duration::from_millis(1)); // between two looks
    }
}
