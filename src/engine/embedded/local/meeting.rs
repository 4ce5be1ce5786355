//! The reading half of a meeting: dials the owner of the slots, checks what it says and what it
//! hands over, and maps that.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    mm::ProtFlags,
};
use tracing::{debug, info};

use super::{
    Local,
    door::{SOURCE, watch},
    message::{Answer, Hello, Lends},
    page::{FIXED, Pages},
    region::Region,
    shelf::{Borrowed, Bytes, Lent},
    socket,
    source::Source,
    sources::Missed,
};
use crate::{
    doorbell::Doorbell,
    engine::Instance,
    error::Result,
    memory::{Copier, PAGE},
};

/// How often a meeting looks whether it is still wanted.
const GLANCE: Duration = Duration::from_millis(50);

impl Local {
    /// Meets the relay that listens under `at`.
    pub(super) fn meet(
        &self,
        at: &str,
        session: &Arc<str>,
        wanted: Instance,
        deadline: Instant,
    ) -> Result<Arc<Source>, Missed> {
        let reader = self.instance().ok_or(Missed::NoTime)?;
        let silent = Instant::now() + self.patience;
        let refused = |error: io::Error| {
            debug!(peer = &**session, %error, "refused on this host");
            Missed::Refused
        };
        let socket = socket::connect_to(at).map_err(refused)?;
        if !socket::is_same_user(&socket) {
            return Err(refused(io::ErrorKind::PermissionDenied.into()));
        }
        socket::send(&socket, &Hello { reader, wanted }.encode(), &[]).map_err(refused)?;
        loop {
            let now = Instant::now();
            if now >= deadline || self.instance() != Some(reader) {
                return Err(Missed::NoTime);
            }
            if now >= silent {
                return Err(refused(io::ErrorKind::TimedOut.into()));
            }
            let left = GLANCE.min(deadline - now);
            let left = Timespec { tv_sec: 0, tv_nsec: left.as_nanos() as i64 };
            match poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&left)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => break,
                Err(errno) => return Err(refused(errno.into())),
            }
        }
        let open = |len, lends: &Lends, socket: &Arc<OwnedFd>| {
            self.open_device(session, len, lends, socket)
        };
        let source = hear_answer(socket, session, wanted, open, &self.copier).map_err(refused)?;
        self.keep(source).map_err(refused)
    }

    /// Maps a peer's slots that are on a device, if ours are, and the system allows it.
    fn open_device(&self, session: &str, len: u64, lends: &Lends, socket: &Arc<OwnedFd>) -> Bytes {
        let Lends::Device { uuid, handle } = lends else { return Bytes::Beyond };
        let Some(stager) = self.stager() else {
            debug!(peer = session, "its slots are on a device, and ours are not: they come by TCP");
            return Bytes::Beyond;
        };
        let opened = match handle {
            None => Err("it has no handle of them to give".to_owned()),
            Some(handle) => {
                let opened = stager.device().open_ipc(handle, len as usize);
                opened.map_err(|error| error.to_string())
            }
        };
        match opened {
            Ok(memory) if memory.span().len as u64 >= len => {
                Bytes::Device(Borrowed::new(memory, socket, &stager))
            }
            Ok(_) => self.refused_ipc(session, uuid, "they are shorter than it says"),
            Err(why) => self.refused_ipc(session, uuid, &why),
        }
    }

    fn refused_ipc(&self, session: &str, uuid: &[u8; 16], why: &str) -> Bytes {
        self.counters.ipc_refused.fetch_add(1, Ordering::Relaxed);
        let uuid = u128::from_be_bytes(*uuid);
        info!(
            peer = session,
            device = format_args!("{uuid:032x}"),
            why,
            "the slots of a peer on this host's device cannot be mapped: they come through host memory"
        );
        Bytes::Beyond
    }

    /// Watches a source, whose socket is the sign of its life.
    fn keep(&self, source: Source) -> io::Result<Arc<Source>> {
        let source = Arc::new(source);
        let token = SOURCE + self.next.fetch_add(1, Ordering::Relaxed);
        self.sources.track(token, &source);
        // Held: `stop` leaves whatever is tracked before it.
        let running = self.running.read();
        let registry = running.as_ref().map(|running| &running.registry);
        let registry = registry.ok_or(io::ErrorKind::NotConnected)?;
        watch(registry, source.socket(), token)?;
        source.attach();
        Ok(source)
    }
}

/// The peer's slots, as its answer says, if that can be trusted.
pub(super) fn hear_answer(
    socket: OwnedFd,
    session: &Arc<str>,
    wanted: Instance,
    open: impl FnOnce(u64, &Lends, &Arc<OwnedFd>) -> Bytes,
    copier: &Arc<Copier>,
) -> io::Result<Source> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut bytes = [0; 512];
    let message = socket::receive(socket.as_fd(), &mut bytes)?;
    if message.len == 0 {
        return Err(wrong("it sent us away"));
    }
    let answer = Answer::decode(&bytes[..message.len], session);
    let answer = answer.ok_or_else(|| wrong("its answer is another version's or session's"))?;
    if message.cut {
        return Err(wrong("there is no room for its descriptors"));
    }
    let mut fds = message.fds.into_iter();
    let mut next = || fds.next().ok_or_else(|| wrong("its answer lacks a descriptor"));
    if answer.owner != wanted {
        return Err(wrong("it is another instance"));
    }
    let slots = match answer.lends {
        Lends::File(_) => Some(next()?),
        Lends::Device { .. } => None,
    };
    let (lines, bell, region) = (next()?, next()?, next()?);
    if fds.next().is_some() {
        return Err(wrong("its answer has a descriptor too many"));
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let bell = Pages::of_peer(bell.as_fd(), PAGE, FIXED, access)?;
    let bell = Doorbell::shared(Arc::new(bell));
    let socket = Arc::new(socket);
    let region = Region::of_peer(region.as_fd(), answer.slots)?;
    let lent = match (answer.lends, slots) {
        (Lends::File(file), Some(slots)) => Lent::of_file(&answer, file, slots.as_fd(), &lines)?,
        (lends, _) => Lent::of_device(&answer, || open(answer.len, &lends, &socket), &lines)?,
    };
    Ok(Source::new(Arc::clone(session), wanted, lent, region, bell, socket, Arc::clone(copier)))
}
