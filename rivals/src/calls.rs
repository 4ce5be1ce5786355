//! The real Mooncake engine by its C calls: the receiver reads from the sender's memory, and notifies it.

use std::io;

use mooncake_relay::{MooncakeConfig, MooncakeEngine};

use crate::{
    bare::Bare,
    measure::{LARGEST, Plan, check, clock, look, measure, value},
    pair::{Pair, Requests},
};

const OPEN: u64 = 1;
const READ: u64 = 2;

pub(crate) fn send(plan: &Plan, mut pair: Pair) -> io::Result<()> {
    let mut bare = open(None)?;
    let remote = bare.memory.as_ptr() as u64;
    pair.call(OPEN, &bare.session_id());
    plan.pin();
    let mut number = 0;
    for (size, count) in plan.sizes() {
        measure("Mooncake, bare calls", (size, count), || {
            number += 1;
            bare.memory[..size].fill(value(number));
            let begun = clock();
            pair.ask(READ, number, &format!("{remote} {size}"));
            look(|| Ok((bare.notes() > 0).then_some(())))?;
            let now = clock();
            Ok([now - pair.begun(), now - begun])
        })?;
    }
    pair.end()
}

pub(crate) fn receive(requests: &mut Requests) -> io::Result<()> {
    let mut bare = None;
    while let Some(request) = requests.next() {
        match request.what {
            OPEN => {
                bare = Some(open(Some(request.text))?);
                requests.pin();
                requests.reply();
            }
            _ => {
                let bare = bare.as_ref().expect("it is opened first");
                let (number, (remote, size)) =
                    (request.number, request.text.split_once(' ').expect("`send` wrote two"));
                let remote = remote.parse().expect("`send` wrote an address");
                let size = size.parse().expect("`send` wrote a length");
                requests.begin();
                bare.read(remote, size);
                bare.notify();
                check(&bare.memory[..size], number);
            }
        }
    }
    Ok(())
}

fn open(peer: Option<&str>) -> io::Result<Bare> {
    // Finds the library, or says what is missing.
    drop(MooncakeEngine::open(&MooncakeConfig::default()).map_err(io::Error::other)?);
    let mut bare = Bare::open(LARGEST, peer);
    bare.memory.fill(1); // no page is new
    Ok(bare)
}
