//! How a call gets hold of a connection.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use tracing::debug;

use super::{
    Client,
    connection::{Connection, Failure},
    operation::Operation,
    peer::{Endpoint, Peer},
    socket::{Fault, Socket},
};
use crate::{
    engine::Identity,
    error::{Error, Result},
};

impl Client {
    /// Does `ask` on a connection to the peer: a kept one, or a new one if there is none or the
    /// peer had closed it.
    pub(super) fn request<T>(
        &self,
        operation: &Operation<'_>,
        peer: &Peer,
        identity: Option<&Identity>,
        mut ask: impl FnMut(&Endpoint, &mut Connection) -> Result<T, Failure>,
    ) -> Result<T> {
        let mut only_new = false;
        loop {
            let endpoint = self.endpoint(operation, peer, identity)?;
            let kept = if only_new || !endpoint.has_status() { None } else { peer.idle() };
            let mut connection = match kept {
                Some(connection) => {
                    operation.hold(&connection.socket)?;
                    connection
                }
                None => match self.dial(operation, peer, &endpoint.data) {
                    Ok(socket) => Connection::new(socket, peer, &endpoint),
                    Err(Error::PeerFailed { reason, .. }) if endpoint.asked < operation.began => {
                        debug!(peer = &*peer.name, reason, "asking again where its data port is");
                        let newer = self.ask_again(operation, peer)?;
                        if newer.is_same(&endpoint) {
                            peer.forget(&newer);
                            return Err(Error::PeerFailed { peer: peer.name.to_string(), reason });
                        }
                        continue;
                    }
                    Err(error) => {
                        peer.forget(&endpoint);
                        return Err(error);
                    }
                },
            };
            let outcome = ask(&endpoint, &mut connection);
            let released = operation.release();
            let error = match outcome {
                Ok(value) => {
                    if released.is_ok() && endpoint.has_status() {
                        peer.keep(connection);
                    }
                    return Ok(value);
                }
                Err(_) if released.is_err() => return Err(Error::Closed),
                Err(Failure::Declined(error)) => {
                    peer.keep(connection);
                    return Err(error);
                }
                Err(Failure::Unanswered(fault)) if connection.is_kept => {
                    debug!(
                        peer = &*peer.name,
                        ?fault,
                        "a kept connection was closed; reconnecting"
                    );
                    self.counters.reconnects.fetch_add(1, Ordering::Relaxed);
                    // The others were closed with it, most likely.
                    peer.close_idle();
                    only_new = true;
                    continue;
                }
                Err(Failure::Unanswered(fault)) => fault.error(&peer.name, "waiting for an answer"),
                Err(Failure::Broken(error)) => error,
            };
            // Perhaps somebody else lives there by now.
            if matches!(error, Error::PeerFailed { .. } | Error::TimedOut) {
                peer.forget(&endpoint);
            }
            return Err(error);
        }
    }

    /// What the peer is. One that should be another relay is asked again.
    pub(super) fn endpoint(
        &self,
        operation: &Operation<'_>,
        peer: &Peer,
        identity: Option<&Identity>,
    ) -> Result<Arc<Endpoint>> {
        let is_other = |endpoint: &Endpoint| match (identity, endpoint.instance) {
            (Some(identity), Some(instance)) => identity.instance != instance,
            _ => false,
        };
        let mut endpoint = peer.endpoint(operation, None, || self.ask(operation, peer))?;
        if is_other(&endpoint) && endpoint.asked < operation.began {
            endpoint = self.ask_again(operation, peer)?;
        }
        if is_other(&endpoint) {
            return Err(Error::stale(&peer.name, "another relay has taken its place"));
        }
        Ok(endpoint)
    }

    fn ask_again(&self, operation: &Operation<'_>, peer: &Peer) -> Result<Arc<Endpoint>> {
        peer.endpoint(operation, Some(operation.began), || self.ask(operation, peer))
    }

    /// A connection to one of `addresses`, held by the operation.
    pub(super) fn dial(
        &self,
        operation: &Operation<'_>,
        peer: &Peer,
        addresses: &[SocketAddr],
    ) -> Result<Arc<Socket>> {
        let name = &*peer.name;
        let mut failed = Error::peer_failed(name, "it has no address");
        for (tried, &address) in addresses.iter().enumerate() {
            // One address that swallows everything leaves time for the next.
            let now = Instant::now();
            let left = operation.deadline.saturating_duration_since(now);
            let until = now + left / (addresses.len() - tried) as u32;
            let connected = match self.open(address) {
                Ok(socket) => {
                    let socket = Arc::new(socket);
                    operation.hold(&socket)?;
                    socket.connect(until).map(|()| socket)
                }
                Err(fault) => Err(fault),
            };
            match connected {
                Ok(socket) => {
                    debug!(peer = name, %address, "connected");
                    peer.answered();
                    return Ok(socket);
                }
                Err(fault) => {
                    let fault = self.connect_failed(peer, now.elapsed(), fault);
                    failed = fault.error(name, &format!("connecting to {address}"));
                }
            }
        }
        // A call that was ended sees it as a failed connect.
        operation.release().and(Err(failed))
    }

    /// What a connect that failed after `waited` says of the peer: several that were given little time
    /// say in the end what one says that was given our patience.
    fn connect_failed(&self, peer: &Peer, waited: Duration, fault: Fault) -> Fault {
        let limit = self.patience.connect;
        match fault {
            Fault::Os(_) => peer.answered(),
            Fault::Deadline | Fault::NotConnected(_) if peer.unanswered(waited, limit) => {
                return Fault::NotConnected(limit);
            }
            _ => {}
        }
        fault
    }

    fn open(&self, address: SocketAddr) -> Result<Socket, Fault> {
        let pace = *self.pace.read();
        match Socket::open(address, self.patience, pace) {
            Err(Fault::Ours(_)) => {
                // What nobody uses may be what is lacking.
                self.peers.close_idle();
                Socket::open(address, self.patience, pace)
            }
            socket => socket,
        }
    }
}
