//! Several reads, and several notes, at once: by TCP together, on the same host one by one.

use std::time::Instant;

use super::EmbeddedEngine;
use crate::{
    engine::{Engine, Filled, LocalBuffer, Notification, ReadError, RemoteBuffer},
    error::Result,
    process,
};

type Outcome = Result<Filled, ReadError>;

pub(super) fn read(
    engine: &EmbeddedEngine,
    reads: Vec<(RemoteBuffer, LocalBuffer)>,
    deadline: Instant,
) -> Vec<Outcome> {
    let mut outcomes: Vec<_> = reads.iter().map(|_| None).collect();
    let (mut places, mut by_tcp) = (Vec::new(), Vec::new());
    for (place, (remote, local)) in reads.into_iter().enumerate() {
        match near(engine, &remote, local, deadline) {
            Ok(outcome) => outcomes[place] = Some(outcome),
            Err(local) => {
                places.push(place);
                by_tcp.push((remote, local));
            }
        }
    }
    for (place, read) in places.into_iter().zip(engine.client.read_many(by_tcp, deadline)) {
        outcomes[place] = Some(read);
    }
    outcomes.into_iter().flatten().collect()
}

/// The outcome, or the buffer of a read that goes by TCP.
fn near(
    engine: &EmbeddedEngine,
    remote: &RemoteBuffer,
    mut local: LocalBuffer,
    deadline: Instant,
) -> Result<Outcome, LocalBuffer> {
    let dest = local.bytes_mut().filter(|_| process::is_here());
    let Some(dest) = dest else { return Ok(engine.read(remote, local, deadline)) };
    match engine.shared.local.read(remote, dest, deadline) {
        Some(Ok(())) => Ok(Ok(Filled { buffer: local, verified: true })),
        Some(Err(error)) => Ok(Err(ReadError { error, buffer: Some(local) })),
        None => Err(local),
    }
}

pub(super) fn notify(
    engine: &EmbeddedEngine,
    peer: &str,
    notes: &[Notification],
    deadline: Instant,
) -> Vec<Result<()>> {
    if !process::is_here() || engine.shared.local.way(peer).is_some() {
        return notes.iter().map(|note| engine.notify(peer, note, deadline)).collect();
    }
    engine.client.notify_many(peer, notes, deadline)
}
