//! Processes that are killed while bytes move.

use std::{
    env,
    time::{Duration, Instant},
};

use mooncake_relay::{Error, Metadata, Token};
use serde_json::json;

use crate::{
    WATCHDOG, at_rest,
    common::{Random, eventually, peer::Peer, within},
    config, count, put, relay, works,
};

const SLOT: usize = 8 << 20;

/// How many are killed in each case; the environment can ask for more.
fn rounds() -> u64 {
    let asked = env::var("MOONCAKE_RELAY_TEST_KILLS").ok();
    asked.and_then(|text| text.parse().ok()).unwrap_or(12)
}

fn start() -> Peer {
    Peer::start(&["--slot-size", &SLOT.to_string(), "--credits", "4"])
}

/// At some point of the transfers that were just begun.
fn moment(random: &mut Random) -> Duration {
    Duration::from_micros(random.next() % 20_000)
}

#[test]
fn receivers_that_are_killed_under_load_cost_their_sender_nothing() {
    within(WATCHDOG * 10, || {
        let sender = relay(&config().with_slot_size(SLOT).with_credits(4));
        let mut random = Random::new(0xdead);
        let mut worst = Duration::ZERO;
        for round in 0..rounds() {
            let receiver = start();
            let bytes = vec![round as u8; SLOT];
            let puts: Vec<_> = (0..4).map(|_| put(&sender, &bytes)).collect();
            for (metadata, _) in &puts {
                receiver.send_get(&serde_json::from_str(&metadata.to_string()).unwrap());
            }
            // Only widens the window: it may be killed before, during or after any of them.
            std::thread::sleep(moment(&mut random));
            receiver.kill();
            let killed = Instant::now();
            // What it was reading ends by itself; what it had not begun, and nobody else can know,
            // its sender ends.
            eventually(0, || count(&sender, "local_peers"));
            for (metadata, _) in &puts {
                let _ = sender.abort(metadata);
            }
            for (_, token) in puts {
                match token.wait() {
                    Ok(_) | Err(Error::Aborted | Error::PeerFailed { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            eventually((4, 0), || (sender.health().free, sender.health().quarantined.len()));
            worst = worst.max(killed.elapsed());
        }
        println!("every credit was back {worst:?} after a kill at the latest");
        works(&sender, &relay(&config().with_slot_size(SLOT)));
        at_rest(&sender);
    });
}

#[test]
fn senders_that_are_killed_under_load_cost_their_receiver_nothing() {
    within(WATCHDOG * 10, || {
        let receiver = relay(&config().with_slot_size(SLOT).with_credits(4));
        let mut random = Random::new(0xdead1);
        let mut worst = Duration::ZERO;
        for round in 0..rounds() {
            let sender = start();
            let sent: Vec<_> =
                (0..4).map(|_| sender.put(json!({"size": SLOT, "fill": round}))).collect();
            let gets: Vec<_> = sent
                .iter()
                .map(|sent| sent.metadata.to_string().parse::<Metadata>().unwrap())
                .map(|metadata| receiver.get(&metadata).unwrap())
                .collect();
            // Only widens the window, as above.
            std::thread::sleep(moment(&mut random));
            sender.kill();
            let killed = Instant::now();
            let ended: Vec<_> = gets.into_iter().map(Token::wait).collect();
            worst = worst.max(killed.elapsed());
            for get in ended {
                match get {
                    Ok(slot) => assert!(slot[..] == vec![round as u8; SLOT]),
                    // Stale: it had gone, and nobody is left to say so.
                    Err(Error::PeerFailed { .. } | Error::Stale { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            at_rest(&receiver);
            eventually(0, || count(&receiver, "local_peers"));
        }
        println!("every get had ended {worst:?} after a kill at the latest");
        works(&relay(&config()), &receiver);
    });
}

#[test]
fn a_view_is_gone_when_its_sender_is_killed() {
    within(WATCHDOG, || {
        let (sender, receiver) = (start(), relay(&config()));
        let sent = sender.put(json!({"size": SLOT, "fill": 7}));
        let view = receiver.view(&sent.metadata.to_string().parse().unwrap()).unwrap();
        let mut copy = vec![0; SLOT];
        view.copy_to(&mut copy).unwrap();
        assert!(copy.iter().all(|byte| *byte == 7));
        sender.kill();
        eventually(true, || view.is_gone());
        assert!(matches!(view.copy_to(&mut copy), Err(Error::Stale { .. })));
        drop(view);
        at_rest(&receiver);
    });
}
