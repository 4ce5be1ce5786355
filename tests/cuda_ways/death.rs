//! Either process is killed in the middle of a transfer: the other has every credit back, and nothing
//! of the dead one is left.

use std::{thread, time::Duration};

use serde_json::json;

use crate::{
    Case, SLOT, at_rest,
    common::{Random, eventually},
    count, cuda, far, host, leaves_nothing, live, put, start,
    station::Plan,
    works,
};

pub(crate) const CASES: &[Case] = &[
    ("a_receiver_is_killed_from_device_to_device", || receiver_dies(&cuda(), &cuda())),
    ("a_receiver_is_killed_by_tcp", || receiver_dies(&far(cuda()), &far(cuda()))),
    ("a_receiver_is_killed_from_shared_memory", || receiver_dies(&host(), &cuda())),
    ("a_sender_is_killed_from_device_to_device", || sender_dies(&cuda(), &cuda())),
    ("a_sender_is_killed_by_tcp", || sender_dies(&far(cuda()), &far(cuda()))),
    ("a_sender_is_killed_from_shared_memory", || sender_dies(&host(), &cuda())),
];

const ROUNDS: u64 = 8;

fn moment(random: &mut Random) -> Duration {
    Duration::from_micros(random.below(6_000))
}

fn receiver_dies(from: &Plan, to: &Plan) {
    let sender = start(from);
    let mut random = Random::new(0xdead);
    for round in 0..ROUNDS {
        let receiver = start(to);
        works(&sender, &receiver, SLOT, 10 * round);
        let sent: Vec<_> = (1..5).map(|n| put(&sender, SLOT, 10 * round + n)).collect();
        for sent in &sent {
            receiver.send_get(&sent.metadata);
        }
        // Only widens the window: it may die at any point of it.
        thread::sleep(moment(&mut random));
        receiver.kill();
        for sent in &sent {
            // What it was not reading, nobody can know to be over.
            sender.ask(json!({"cmd": "abort", "metadata": sent.metadata}));
            let ended = sender.wait(sent.tag);
            let kind = ended["kind"].as_str();
            assert!(matches!(kind, None | Some("PeerFailed" | "Aborted")), "{ended}");
        }
        at_rest(&sender, 4);
        eventually(0, || count(&sender, "local_peers"));
    }
    let receiver = start(to);
    works(&sender, &receiver, SLOT, 1);
    leaves_nothing(sender);
    leaves_nothing(receiver);
}

fn sender_dies(from: &Plan, to: &Plan) {
    let receiver = start(to);
    let mut random = Random::new(0xdead2);
    for round in 0..ROUNDS {
        let sender = start(from);
        works(&sender, &receiver, SLOT, 10 * round);
        let sent: Vec<_> = (1..5).map(|n| put(&sender, SLOT, 10 * round + n)).collect();
        let gets: Vec<_> = sent.iter().map(|sent| receiver.send_get(&sent.metadata)).collect();
        // Only widens the window, as above.
        thread::sleep(moment(&mut random));
        sender.kill();
        for (sent, get) in sent.iter().zip(gets) {
            let got = receiver.answer(get);
            match got["kind"].as_str() {
                None => assert_eq!(got["sha256"], sent.sha256),
                Some("PeerFailed" | "Stale") => {}
                Some(_) => panic!("{got}"),
            }
        }
        at_rest(&receiver, 4);
        eventually(0, || count(&receiver, "local_peers"));
        eventually(0, || live(&receiver, "ipc"));
    }
    let sender = start(from);
    works(&sender, &receiver, SLOT, 1);
    leaves_nothing(sender);
    leaves_nothing(receiver);
}
