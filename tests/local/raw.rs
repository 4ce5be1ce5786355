//! A meeting by hand: either end of it, and the pages that come of it.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use mooncake_relay::{Instance, Metadata, TransferId};
use rustix::{
    fs::{
        FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstat, ftruncate,
        memfd_create,
    },
    mm::{MapFlags, ProtFlags, mmap, munmap},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind,
        connect, listen, recvmsg, sendmsg, socket_with,
    },
};

pub(crate) const TAIL: usize = 128;
pub(crate) const HEAD: usize = 0;
pub(crate) const MAGIC: &[u8; 8] = b"mnckrly2";

/// Where the pin of a slot is.
pub(crate) fn pin_of(slot: u32) -> usize {
    3 * 128 + slot as usize * 128
}

/// Where the ring of a region for `slots` slots is; it has 64 KiB.
pub(crate) fn ring_of(slots: usize) -> usize {
    (3 * 128 + slots * 128).next_multiple_of(4096)
}

pub(crate) fn socket_of(instance: Instance) -> String {
    format!("mooncake-relay-{instance}")
}

/// The random half of a put's id, which its pin holds.
pub(crate) fn secret_of(metadata: &Metadata) -> u64 {
    TransferId::of_name(metadata.transfer_id()).unwrap().random
}

pub(crate) fn slot_of(metadata: &Metadata) -> u32 {
    TransferId::of_name(metadata.transfer_id()).unwrap().slot
}

/// A reader's end, after the meeting.
pub(crate) struct Reader {
    pub(crate) socket: OwnedFd,
    pub(crate) answer: Vec<u8>,
    pub(crate) slots: OwnedFd,
    pub(crate) lines: OwnedFd,
    pub(crate) bell: Mapped,
    pub(crate) region: Mapped,
}

impl Reader {
    pub(crate) fn meet(wanted: Instance) -> Self {
        let socket = dial(wanted);
        say(&socket, &hello(1, [9; 16], wanted), &[]);
        let (answer, fds) = hear(&socket);
        let [slots, lines, bell, region] = fds.try_into().expect("it was let in");
        let (bell, region) = (Mapped::of(&bell), Mapped::of(&region));
        Self { socket, answer, slots, lines, bell, region }
    }
}

pub(crate) fn hello(version: u32, reader: [u8; 16], wanted: Instance) -> Vec<u8> {
    [&MAGIC[..], &version.to_le_bytes(), &reader, &wanted.to_bytes()].concat()
}

pub(crate) fn dial(instance: Instance) -> OwnedFd {
    let socket = open();
    connect(&socket, &address(&socket_of(instance))).unwrap();
    socket
}

/// Listens in the place of that relay.
pub(crate) fn pose_as(instance: Instance) -> OwnedFd {
    let socket = open();
    bind(&socket, &address(&socket_of(instance))).unwrap();
    listen(&socket, 16).unwrap();
    socket
}

pub(crate) fn next_guest(listener: &OwnedFd) -> OwnedFd {
    accept(listener).unwrap()
}

pub(crate) fn say(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    }
    // Whoever has hung up meanwhile does not hear it.
    let _ = sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL);
}

/// What is said next; nothing at the end.
pub(crate) fn hear(socket: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut bytes = [0; 512];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let heard = recvmsg(socket, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC);
    let len = heard.map_or(0, |heard| heard.bytes);
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    (bytes[..len].to_vec(), fds)
}

fn open() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn address(name: &str) -> SocketAddrUnix {
    SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()
}

/// A memfd of that length and with those seals.
pub(crate) fn memory(len: u64, seals: SealFlags) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, len).unwrap();
    if len > 0 {
        fallocate(&fd, FallocateFlags::empty(), 0, len).unwrap();
    }
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// All of a memfd, to read and write.
pub(crate) struct Mapped {
    ptr: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: it is touched by atomics only.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    pub(crate) fn of(fd: &OwnedFd) -> Self {
        let len = fstat(fd).unwrap().st_size as usize;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping aliases nothing.
        let ptr = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, fd.as_fd(), 0) };
        Self { ptr: ptr.unwrap().cast(), len }
    }

    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= self.len && offset.is_multiple_of(8));
        // SAFETY: inside the mapping, and touched by atomics only.
        let ptr = unsafe { self.ptr.add(offset) };
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(ptr.cast()) }
    }

    pub(crate) fn futex(&self) -> &AtomicU32 {
        // SAFETY: as in `word`.
        unsafe { AtomicU32::from_ptr(self.ptr.cast()) }
    }

    /// Writes `bytes`, in whole words, at `offset`.
    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) {
        for (n, word) in bytes.chunks(8).enumerate() {
            let mut whole = [0; 8];
            whole[..word.len()].copy_from_slice(word);
            self.word(offset + n * 8).store(u64::from_le_bytes(whole), Ordering::SeqCst);
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing outlives it.
        unsafe { munmap(self.ptr.cast(), self.len) }.unwrap();
    }
}
