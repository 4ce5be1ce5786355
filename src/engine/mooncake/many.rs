//! Many reads at once: one batch for each peer.

use std::{sync::Arc, time::Instant};

use super::{
    delivered,
    flight::{Landed, Opcode, Task},
    shared::{Shared, Until},
};
use crate::{
    engine::{Filled, LocalBuffer, ReadError, RemoteBuffer},
    error::Error,
};

/// Does them all; the outcomes come in the order asked.
pub(super) fn read(
    shared: &Arc<Shared>,
    reads: Vec<(RemoteBuffer, LocalBuffer)>,
    deadline: Instant,
) -> Vec<Result<Filled, ReadError>> {
    let spans: Vec<_> = reads.iter().map(|(_, local)| local.span()).collect();
    let until = match shared.until(deadline, spans) {
        Ok(until) => until,
        Err(error) => {
            let refuse =
                |(_, local)| Err(ReadError { error: Until::again(&error), buffer: Some(local) });
            return reads.into_iter().map(refuse).collect();
        }
    };
    let mut outcomes: Vec<_> = reads.iter().map(|_| None).collect();
    let mut left: Vec<_> = reads.into_iter().enumerate().collect();
    while let Some((_, (first, _))) = left.first() {
        let peer = Arc::clone(&first.peer);
        let (same, others) = left.into_iter().partition(|(_, (remote, _))| remote.peer == peer);
        left = others;
        read_from_one(shared, same, &until, &mut outcomes);
    }
    let lost = || Err(ReadError { error: Error::TimedOut, buffer: None });
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(lost)).collect()
}

type Outcome = Result<Filled, ReadError>;

fn read_from_one(
    shared: &Arc<Shared>,
    reads: Vec<(usize, (RemoteBuffer, LocalBuffer))>,
    until: &Until<'_>,
    outcomes: &mut [Option<Outcome>],
) {
    let Some((_, (first, _))) = reads.first() else { return };
    let instance = first.identity.map(|identity| identity.instance);
    let mut opened = shared.peers.find(&first.peer, shared.p2p).and_then(|peer| {
        let segment = peer.segment(shared, instance, until)?;
        Ok((peer, segment))
    });
    let (mut places, mut tasks) = (Vec::new(), Vec::new());
    for (place, (remote, local)) in reads {
        let lease = match &mut opened {
            Ok(_) if remote.len == 0 => {
                outcomes[place] = Some(Ok(Filled { buffer: local, verified: false }));
                continue;
            }
            Ok((peer, segment)) => peer
                .segment_with(shared, instance, (remote.ptr, remote.len), until)
                .and_then(|now| {
                    *segment = now; // it may have been asked anew
                    shared.spans.lease(local.span())
                }),
            Err(error) => Err(Until::again(error)),
        };
        match lease {
            Ok(lease) => {
                places.push(place);
                tasks.push(Task::new(remote.ptr, local.span(), Some(local), lease));
            }
            Err(error) => outcomes[place] = Some(Err(ReadError { error, buffer: Some(local) })),
        }
    }
    let Ok((peer, segment)) = opened else { return };
    if tasks.is_empty() {
        return;
    }
    let landed: Vec<Landed> = shared.transfer(&peer, segment.id, Opcode::Read, tasks, until);
    for (place, landed) in places.into_iter().zip(landed) {
        let filled = |buffer| Filled { buffer, verified: false };
        outcomes[place] = Some(delivered(landed).map(filled));
    }
}
