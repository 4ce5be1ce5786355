//! The socket of a meeting: abstract, so that only one network namespace has it, and of one packet
//! a message.
#![allow(unsafe_code)] // asks the system who the peer is

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use arrayvec::ArrayVec;
use rustix::{
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix,
        SocketFlags, SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg, shutdown,
        socket_with,
    },
    process::geteuid,
};

/// The most descriptors in one message.
pub(super) const MOST_FDS: usize = 4;
/// What a peer's user looks like that this user namespace does not know.
const NOBODY: u32 = 65_534;

/// Listens under `name`.
pub(super) fn listen_at(name: &str, backlog: i32) -> io::Result<OwnedFd> {
    let fd = open()?;
    bind(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    listen(&fd, backlog)?;
    Ok(fd)
}

/// Connects to whoever listens under `name`. Never blocks.
pub(super) fn connect_to(name: &str) -> io::Result<OwnedFd> {
    let fd = open()?;
    connect(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(fd)
}

/// The next who has connected.
pub(super) fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?)
}

fn open() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Whether the process at the other end is of our own user, as far as can be known.
pub(super) fn is_same_user(fd: &OwnedFd) -> bool {
    let mut peer = MaybeUninit::<libc::ucred>::uninit();
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: the system writes at most `len` bytes, which `peer` has.
    let done = unsafe {
        libc::getsockopt(fd.as_raw_fd(), level, name, peer.as_mut_ptr().cast(), &raw mut len)
    };
    if done != 0 || len as usize != size_of::<libc::ucred>() {
        return false;
    }
    // SAFETY: the system has written all of it, and any bits are such a struct.
    let peer = unsafe { peer.assume_init() };
    // Two users that have no name here look alike.
    peer.uid == geteuid().as_raw() && peer.uid != NOBODY
}

/// Sends one message whole, or not at all.
pub(super) fn send(fd: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(fd, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// A message that has arrived.
#[derive(Debug)]
pub(super) struct Message {
    /// How many bytes it has; 0 is the end.
    pub(super) len: usize,
    pub(super) fds: ArrayVec<OwnedFd, MOST_FDS>,
    /// Something of it did not fit.
    pub(super) cut: bool,
}

/// Receives one message into `bytes`.
pub(super) fn receive(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<Message> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(fd, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)?;
    let mut fds = ArrayVec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            // Those beyond the room there is are closed.
            fds.extend(rights.take(MOST_FDS));
        }
    }
    let cut = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok(Message { len: received.bytes, fds, cut })
}

/// Whether the other end is still there, and has said nothing that nobody asked for.
pub(super) fn is_open(fd: &OwnedFd) -> bool {
    match receive(fd.as_fd(), &mut [0; 1]) {
        Err(error) => {
            matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
        }
        Ok(_) => false,
    }
}

/// Tells the other end that we say no more, and go on listening to it.
pub(super) fn say_no_more(fd: &OwnedFd) {
    let _ = shutdown(fd, Shutdown::Write);
}

/// Listens no more; the other end does not hear of it.
pub(super) fn listen_no_more(fd: &OwnedFd) {
    let _ = shutdown(fd, Shutdown::Read);
}

/// Ends the connection, or the listening, also where a forked child still has the descriptor.
pub(super) fn shut(fd: &OwnedFd) {
    let _ = shutdown(fd, Shutdown::Both);
}
