//! Requests to a peer's control port: a connection, a frame there, a frame back.

use std::{
    slice,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use tracing::debug;

use super::{
    Client,
    operation::Operation,
    peer::{Endpoint, Peer},
    socket::{Fault, Socket},
};
use crate::{
    engine::{
        Notification,
        embedded::{
            address::{Address, parse_host, resolve_unless},
            frame::{
                self, ControlKind, Descriptor, FrameError, MAX_CONTROL_BODY, decode_control,
                encode_control,
            },
        },
    },
    error::{Error, Result},
};

/// How long a peer that has answered may take to close.
const LINGER: Duration = Duration::from_millis(200);

impl Client {
    /// Asks the peer's control port.
    pub(super) fn ask(&self, operation: &Operation<'_>, peer: &Peer) -> Result<Endpoint> {
        let address = Address::parse(&peer.name)
            .map_err(|malformed| Error::metadata("session_id", malformed.to_string()))?;
        let find =
            |host, port| resolve_unless(&operation.cancelled(), host, port, operation.deadline);
        let addresses = find(address.host, address.port)?;
        let asked = Instant::now();
        self.counters.descriptors.fetch_add(1, Ordering::Relaxed);
        let socket = self.dial(operation, peer, &addresses)?;
        let descriptor = descriptor(&peer.name, &socket, operation.deadline);
        operation.release()?;
        let Descriptor { name, data_host, data_port, version, instance, .. } = descriptor?;
        let control = socket.address();
        let data_host = data_host.as_deref().map_or(Ok(address.host), parse_host);
        let data_host = data_host.map_err(|malformed| {
            Error::peer_failed(&peer.name, format!("its data host is wrong: {malformed}"))
        })?;
        let data = if data_host == address.host {
            // The address that has just answered, whichever else the name stands for.
            let mut data = control;
            data.set_port(data_port);
            vec![data]
        } else {
            find(data_host, data_port)?
        };
        debug!(peer = &*peer.name, ?data, ?instance, "opened");
        Ok(Endpoint { asked, epoch: 0, name, control, data, version, instance })
    }

    /// Tells a real engine, at the name that it gives itself.
    pub(super) fn notify_control(
        &self,
        operation: &Operation<'_>,
        peer: &Peer,
        endpoint: &Endpoint,
        note: &Notification,
    ) -> Result<()> {
        let named = match Address::parse(&endpoint.name) {
            Ok(Address { host, port }) if port != 0 && endpoint.name != *peer.name => {
                match resolve_unless(&operation.cancelled(), host, port, operation.deadline) {
                    Err(Error::PeerFailed { .. }) => None,
                    found => Some(found?),
                }
            }
            _ => None,
        };
        let addresses = named.as_deref().unwrap_or_else(|| slice::from_ref(&endpoint.control));
        let socket = self.dial(operation, peer, addresses)?;
        let told = notify(&peer.name, &socket, note, operation.deadline);
        // A call that was ended sees it as whatever its socket says.
        told.or_else(|error| operation.release().and(Err(error)))
    }
}

/// Asks the peer what it is.
fn descriptor(peer: &str, socket: &Socket, deadline: Instant) -> Result<Descriptor> {
    let json = exchange(peer, socket, ControlKind::Metadata, b"{}", deadline)?;
    Descriptor::parse(&json).map_err(|error| garbage(peer, error))
}

/// Hands the peer a notification, and returns once it has it.
fn notify(peer: &str, socket: &Socket, note: &Notification, deadline: Instant) -> Result<()> {
    let mut body = Vec::new();
    frame::encode_notification(note, &mut body);
    // The type byte counts.
    if body.len() >= MAX_CONTROL_BODY {
        return Err(Error::TooLarge { len: body.len(), slot_size: MAX_CONTROL_BODY - 1 });
    }
    let json = exchange(peer, socket, ControlKind::Notify, &body, deadline)?;
    let answer = frame::parse_notification(&json).map_err(|error| garbage(peer, error))?;
    // If it closed with something unread, the peer would see a reset, and might count it as one.
    let until = deadline.min(Instant::now() + LINGER);
    while socket.fill(&mut [0; 256], until).is_ok() && Instant::now() < until {}
    if answer.message().is_empty() {
        return Err(Error::rejected(peer, "it does not take the notification"));
    }
    Ok(())
}

/// The JSON text of the answer.
///
/// The engine at the other end may serve one connection at a time and wait for its end, so the
/// frame goes in one piece, and the caller closes once the answer is there.
fn exchange(
    peer: &str,
    socket: &Socket,
    kind: ControlKind,
    json: &[u8],
    deadline: Instant,
) -> Result<Vec<u8>> {
    const TYPED: usize = 9; // the length and the type byte
    let failed = |fault: Fault| fault.error(peer, "asking its control port");
    // An early answer, or end, is found by reading.
    let _ = socket.send(&encode_control(kind, json), &[], deadline).map_err(failed)?;
    let mut frame = vec![0; TYPED];
    socket.fill(&mut frame, deadline).map_err(|short| failed(short.fault))?;
    let whole = decode_control(&frame).map_err(|error| garbage(peer, error))?.is_some();
    if !whole && let Some((len, _)) = frame.split_first_chunk::<8>() {
        // It has just been found to be at most `MAX_CONTROL_BODY`.
        let len = u64::from_le_bytes(*len) as usize;
        frame.resize(8 + len, 0);
        socket.fill(&mut frame[TYPED..], deadline).map_err(|short| failed(short.fault))?;
    }
    match decode_control(&frame) {
        Ok(Some(answer)) if answer.kind == kind => Ok(frame.split_off(TYPED)),
        Ok(_) => Err(Error::peer_failed(peer, "its control port answered another request")),
        Err(error) => Err(garbage(peer, error)),
    }
}

#[cold]
fn garbage(peer: &str, error: FrameError) -> Error {
    Error::peer_failed(peer, format!("its control port answered with {error}"))
}
