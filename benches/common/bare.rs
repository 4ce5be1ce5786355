//! An engine by its C calls, as a program without a relay would use it.
#![allow(dead_code, reason = "each bench uses a part")]

use std::{
    ffi::{CStr, CString, c_void},
    ptr,
};

use mooncake_sys::{
    Api, Engine, NotifyMsg, OPCODE_READ, Options, STATUS_COMPLETED, STATUS_PENDING, STATUS_WAITING,
    SegmentId, TransferRequest, TransferStatus, load,
};

pub(crate) struct Bare {
    api: &'static Api,
    engine: Engine,
    segment: SegmentId,
    /// Registered, so that peers can read it and reads can fill it.
    pub(crate) memory: Vec<u8>,
    name: CString,
}

impl Bare {
    /// An engine with memory of its own; with a peer, if it reads or notifies.
    pub(crate) fn open(largest: usize, peer: Option<&str>) -> Self {
        let api = load(&Options::default()).expect("it was loaded before").api();
        let (metadata, host) = (c"P2PHANDSHAKE".as_ptr(), c"127.0.0.1".as_ptr());
        // SAFETY: NUL-terminated texts.
        let engine = unsafe { (api.createTransferEngine)(metadata, host, host, 0, 0) };
        assert!(!engine.is_null(), "{}", api.last_error());
        // SAFETY: the engine lives; no arguments are needed for TCP.
        let tcp = unsafe { (api.installTransport)(engine, c"tcp".as_ptr(), ptr::null_mut()) };
        assert!(!tcp.is_null(), "{}", api.last_error());
        let mut memory = vec![0; largest];
        let addr: *mut c_void = memory.as_mut_ptr().cast();
        let remote = i32::from(peer.is_none());
        // SAFETY: the memory lives until the engine is destroyed.
        let code =
            unsafe { (api.registerLocalMemory)(engine, addr, largest, c"*".as_ptr(), remote) };
        assert_eq!(code, 0, "registerLocalMemory");
        let segment = peer.map_or(0, |peer| {
            let peer = CString::new(peer).expect("a session id has no NUL");
            // SAFETY: the engine lives; a NUL-terminated text.
            let segment = unsafe { (api.openSegment)(engine, peer.as_ptr()) };
            assert!(segment >= 0, "openSegment");
            segment
        });
        // As long as a transfer's id, and of no relay.
        let name = CString::new(format!("nobody_{:032}", 0)).expect("no NUL");
        Self { api, engine, segment, memory, name }
    }

    /// By what name peers open it.
    pub(crate) fn session_id(&self) -> String {
        let mut text = [0_u8; 512];
        // SAFETY: the engine lives, and the buffer is as long as it says.
        let code = unsafe {
            (self.api.getLocalIpAndPort)(self.engine, text.as_mut_ptr().cast(), text.len())
        };
        assert_eq!(code, 0, "getLocalIpAndPort");
        let text = CStr::from_bytes_until_nul(&text).expect("a text");
        text.to_str().expect("of an address").to_owned()
    }

    pub(crate) fn read(&self, remote: u64, len: usize) {
        let mut request = TransferRequest {
            opcode: OPCODE_READ,
            source: self.memory.as_ptr().cast_mut().cast(),
            target_id: self.segment,
            target_offset: remote,
            length: len as u64,
        };
        // SAFETY: the engine lives.
        let batch = unsafe { (self.api.allocateBatchID)(self.engine, 1) };
        // SAFETY: a new batch with room for one; the memory is registered, and nobody looks at it.
        let code = unsafe { (self.api.submitTransfer)(self.engine, batch, &raw mut request, 1) };
        assert_eq!(code, 0, "submitTransfer");
        let mut status = TransferStatus::default();
        while matches!(status.status, STATUS_WAITING | STATUS_PENDING) {
            // SAFETY: the batch has that one task, and is not freed.
            let code =
                unsafe { (self.api.getTransferStatus)(self.engine, batch, 0, &raw mut status) };
            assert_eq!(code, 0, "getTransferStatus");
        }
        assert_eq!(status.status, STATUS_COMPLETED);
        // SAFETY: the batch has ended, and is freed once.
        let code = unsafe { (self.api.freeBatchID)(self.engine, batch) };
        assert_eq!(code, 0, "freeBatchID");
    }

    pub(crate) fn notify(&self) {
        let (name, msg) = (self.name.as_ptr().cast_mut(), c"transfer_complete".as_ptr().cast_mut());
        let call = self.api.genNotifyInEngine.expect("a library with notifications");
        // SAFETY: the engine lives, the segment is open, and the texts are only read.
        let code = unsafe { call(self.engine, self.segment as u64, NotifyMsg { name, msg }) };
        assert_eq!(code, 0, "genNotifyInEngine");
    }

    /// How many notifications have come since it was last asked.
    pub(crate) fn notes(&self) -> usize {
        let receive = self.api.getNotifsFromEngine.expect("a library with notifications");
        let free = self.api.freeNotifsMsgBuf.expect("a library with notifications");
        let mut count = 0;
        // SAFETY: the engine lives, and the count is ours.
        let notes = unsafe { receive(self.engine, &raw mut count) };
        if notes.is_null() {
            assert!(count >= 0, "getNotifsFromEngine");
            return 0;
        }
        // SAFETY: what the call gave, with its count, once.
        unsafe { free(notes, count) };
        count.max(0) as usize
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        // SAFETY: no transfer is under way; once.
        unsafe { (self.api.destroyTransferEngine)(self.engine) };
    }
}
