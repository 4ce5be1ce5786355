//! C: many callers of a peer that came back, and whoever survives the death of another.

use std::{sync::Barrier, thread, time::Duration};

use mooncake_relay::Config;
use serde_json::json;

use crate::{
    common::{Random, eventually},
    on::{Lack, On, cases, metadata_of},
};

cases! {
    Processes:
        c8_eight_threads_meet_a_restarted_peer_at_once = 300,
        c9_a_process_outlives_the_peers_that_die_under_its_transfers = 300;
}

fn c8_eight_threads_meet_a_restarted_peer_at_once(on: &On) {
    const THREADS: usize = 8;
    let flags = ["--credits", "8"];
    let receiver =
        on.relay(&Config::default().with_slot_size(4096).with_credits(8).with_transfer_threads(2));
    let mut sender = on.peer(&flags);
    let address = sender.session_id().to_owned();
    let mut descriptors = None;
    for round in 0..on.full_or(100, 10) {
        if round > 0 {
            sender.kill();
            sender = if on.lacks(Lack::Ports) {
                on.peer(&flags)
            } else {
                on.peer(&[&flags[..], &["--listen", &address]].concat())
            };
        }
        let sent: Vec<_> =
            (0..THREADS).map(|n| sender.put(json!({"size": 999, "fill": n}))).collect();
        let begin = Barrier::new(THREADS);
        thread::scope(|s| {
            for (n, sent) in sent.iter().enumerate() {
                let (receiver, begin) = (&receiver, &begin);
                s.spawn(move || {
                    let metadata = metadata_of(sent);
                    begin.wait();
                    assert_eq!(
                        receiver.get(&metadata).unwrap().wait().unwrap()[..],
                        [n as u8; 999]
                    );
                });
            }
        });
        for sent in &sent {
            assert_eq!(sender.wait(sent.tag)["ok"], true);
        }
        let known = receiver.health().peers;
        let entries = known.iter().filter(|peer| peer.session_id == sender.session_id()).count();
        assert_eq!(entries, 1, "round {round}: {known:?}");
        // Whatever eight callers opened to the first, the next costs no more.
        let own = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let most = *descriptors.get_or_insert_with(|| own() + 2 * THREADS);
        eventually(true, || own() <= most);
    }
}

fn c9_a_process_outlives_the_peers_that_die_under_its_transfers(on: &On) {
    const SIZE: u64 = 256 << 10;
    let survivor = on.peer(&["--credits", "4"]);
    let other = on.peer(&[]);
    let mut random = Random::new(0xc9);
    for round in 0..on.full_or(100, 10) {
        let victim = on.peer(&[]);
        let moment = Duration::from_micros(random.below(3000));
        if round % 2 == 0 {
            let sent = [1, 2].map(|fill| victim.put(json!({"size": SIZE, "fill": fill})));
            let gets = sent.each_ref().map(|sent| survivor.send_get(&sent.metadata));
            thread::sleep(moment); // the moment of its death is what varies
            victim.kill();
            for (get, sent) in gets.into_iter().zip(sent) {
                let got = survivor.answer(get);
                let whole = got["sha256"] == *sent.sha256;
                assert!(whole || got["kind"] == "PeerFailed" || got["kind"] == "TimedOut", "{got}");
            }
        } else {
            let sent = [1, 2].map(|fill| survivor.put(json!({"size": SIZE, "fill": fill})));
            for sent in &sent {
                victim.send_get(&sent.metadata);
            }
            thread::sleep(moment);
            victim.kill();
            for sent in sent {
                // It may be over already.
                survivor.ask(json!({"cmd": "abort", "of": sent.tag}));
                let ended = survivor.wait(sent.tag);
                let known = ["PeerFailed", "Aborted"].iter().any(|kind| ended["kind"] == **kind);
                assert!(ended["ok"] == true || known, "{ended}");
            }
        }
        survivor.works_with(&other);
        other.works_with(&survivor);
    }
}
