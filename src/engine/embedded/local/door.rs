//! Where readers on this host come in: the listening half of a meeting, run by the server's thread.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use arrayvec::ArrayVec;
use mio::{Interest, Registry, Token, unix::SourceFd};
use tracing::{debug, warn};

use super::{
    Local,
    message::{Answer, Hello, Lends},
    reader::Reader,
    region::Region,
    shelf::Backing,
    socket,
};
use crate::engine::Instance;

/// Tokens from here on are the door's; those with [`SOURCE`] are the sockets of sources.
pub(in crate::engine::embedded) const DOOR: usize = 1 << 60;
pub(super) const SOURCE: usize = 1 << 61;

const BACKLOG: i32 = 1024;
/// How long who has connected may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many come in before the server's connections have their turn.
const AT_ONCE: usize = 64;

/// The listening socket, and everybody who has come in by it.
#[derive(Debug)]
pub(in crate::engine::embedded) struct Door {
    listener: OwnedFd,
    registry: Registry,
    guests: HashMap<usize, Guest>,
    next: usize,
    most: usize,
    /// More may wait outside: it looks again at the next tick.
    resting: bool,
}

#[derive(Debug)]
enum Guest {
    /// Has not said who it is.
    Waiting(OwnedFd, Instant),
    Reader(Arc<Reader>),
}

impl Door {
    /// Opens the door of `instance`, for `most` readers.
    pub(in crate::engine::embedded) fn open(
        instance: Instance,
        registry: Registry,
        most: usize,
    ) -> io::Result<Self> {
        let listener = socket::listen_at(&super::name(instance), BACKLOG)?;
        watch(&registry, &listener, DOOR)?;
        let (guests, next) = (HashMap::new(), 1);
        Ok(Self { listener, registry, guests, next, most, resting: false })
    }

    /// Whether it has something to do at the next tick.
    pub(in crate::engine::embedded) fn waits(&self) -> bool {
        self.resting || self.guests.values().any(|guest| matches!(guest, Guest::Waiting(..)))
    }

    /// Takes in what epoll has told of `token`.
    pub(in crate::engine::embedded) fn heard(&mut self, token: Token, local: &Local) {
        let key = token.0 - DOOR;
        if key == 0 {
            return self.accept(local);
        }
        match self.guests.get(&key) {
            Some(Guest::Waiting(..)) => self.meet(key, local),
            Some(Guest::Reader(reader)) if !socket::is_open(reader.socket()) => {
                debug!(reader = %reader.instance, "a reader on this host is gone");
                local.reader_left(reader);
                self.guests.remove(&key);
            }
            _ => {}
        }
    }

    /// Sends those away who have not said in time who they are.
    pub(in crate::engine::embedded) fn tick(&mut self, now: Instant, local: &Local) {
        self.guests.retain(|_, guest| !matches!(guest, Guest::Waiting(_, until) if *until <= now));
        if self.resting {
            self.accept(local);
        }
    }

    fn accept(&mut self, local: &Local) {
        self.resting = false;
        for _ in 0..AT_ONCE {
            let guest = match socket::accept(&self.listener) {
                Ok(guest) => guest,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => {
                        warn!(%error, "cannot meet readers on this host for now");
                        break;
                    }
                },
            };
            // Those who have gone count until the relay has heard of it.
            let met = self.guests.len().max(local.readers.count());
            if !socket::is_same_user(&guest) || met >= self.most {
                debug!("somebody on this host was sent away: another user, or one too many");
                continue;
            }
            let key = self.next;
            self.next += 1;
            if let Err(error) = watch(&self.registry, &guest, DOOR + key) {
                debug!(%error, "a reader on this host could not be watched");
                continue;
            }
            self.guests.insert(key, Guest::Waiting(guest, Instant::now() + PATIENCE));
            // It may have spoken before it was watched.
            self.meet(key, local);
        }
        self.resting = true;
    }

    /// Hears who it is, and answers. Whoever is not wanted finds the socket closed.
    fn meet(&mut self, key: usize, local: &Local) {
        let Some(Guest::Waiting(guest, _)) = self.guests.get(&key) else { return };
        let mut bytes = [0; Hello::LEN + 1];
        let message = match socket::receive(guest.as_fd(), &mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            message => message,
        };
        let Some(Guest::Waiting(guest, _)) = self.guests.remove(&key) else { return };
        let hello = message.ok().and_then(|message| Hello::decode(&bytes[..message.len]));
        let Some(hello) = hello else { return debug!("somebody on this host said no hello") };
        match admit(&hello, guest, local) {
            Ok(reader) => drop(self.guests.insert(key, Guest::Reader(reader))),
            Err(error) => debug!(reader = %hello.reader, %error, "a reader was sent to TCP"),
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        socket::shut(&self.listener);
    }
}

/// Makes the pair's region, and tells the reader what there is.
fn admit(hello: &Hello, guest: OwnedFd, local: &Local) -> io::Result<Arc<Reader>> {
    let refused = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why);
    let owner = local.instance().ok_or_else(|| refused("the relay is closed"))?;
    if hello.wanted != owner {
        return Err(refused("it wants another instance"));
    }
    let shelf = local.shelf().ok_or_else(|| refused("nothing is lent"))?;
    let bell = local.bell_fd().ok_or_else(|| refused("there is no shared doorbell"))?;
    let (region, fd) = Region::make(shelf.slots)?;
    let (lends, slots, borrows) = match &shelf.backing {
        Backing::File(fd, file) => (Lends::File(*file), Some(fd.as_fd()), false),
        &Backing::Device(uuid, handle) => (Lends::Device { uuid, handle }, None, handle.is_some()),
    };
    let reader = Arc::new(Reader::new(hello.reader, region, guest, borrows));
    let (base, len) = (shelf.span.addr(), shelf.span.len as u64);
    let answer = Answer { owner, base, len, slots: shelf.slots, lends };
    let others = [shelf.lines_fd.as_fd(), bell.as_fd(), fd.as_fd()];
    let fds: ArrayVec<BorrowedFd<'_>, { socket::MOST_FDS }> =
        slots.into_iter().chain(others).collect();
    if borrows {
        local.borrowed(&shelf, &reader)?;
    }
    // Before it can pin anything.
    local.readers.add(Arc::clone(&reader));
    if let Err(error) = socket::send(reader.socket(), &answer.encode(local.session()), &fds) {
        local.readers.forget(&reader);
        local.returned(&reader);
        return Err(error);
    }
    Ok(reader)
}

/// Has epoll tell of `fd` under `token`.
pub(super) fn watch(registry: &Registry, fd: &OwnedFd, token: usize) -> io::Result<()> {
    registry.register(&mut SourceFd(&fd.as_raw_fd()), Token(token), Interest::READABLE)
}
