//! Ports and connections: few, one's own, and none left behind.

use std::{collections::HashSet, fs, thread};

use crossbeam::channel::unbounded;
use mooncake_relay::Config;
use serde_json::json;

use crate::{
    common::{
        eventually,
        place::Net,
        sockets::{State, ports_of},
    },
    on::{Lack, On, cases, metadata_of},
};

cases! {
    Any: e3_bursts_of_gets_leave_no_more_descriptors_than_the_first = 120;
    Processes:
        e1_five_thousand_transfers_fit_in_a_hundred_ports = 900,
        e5_fifty_peers_that_start_at_once_are_reached_each_by_its_own_ports = 600;
    Nothing:
        e5_a_port_that_somebody_has_beside_ours_does_no_harm,
        e6_a_port_is_ours_at_once_and_free_at_once = 300;
}

fn e3_bursts_of_gets_leave_no_more_descriptors_than_the_first(on: &On) {
    const AT_ONCE: u64 = 64;
    const THREADS: usize = 4;
    let config = Config::default()
        .with_slot_size(4096)
        .with_credits(AT_ONCE as u32)
        .with_transfer_threads(THREADS);
    let (a, b) = on.pair(&config);
    let own = || fs::read_dir("/proc/self/fd").unwrap().count();
    let before = own();
    for cycle in 0..on.full_or(20, 5) {
        let puts: Vec<_> = (0..AT_ONCE).map(|n| a.sends(&n.to_le_bytes())).collect();
        let (tx, rx) = unbounded();
        for (n, (metadata, _)) in (0..).zip(&puts) {
            b.get(metadata).unwrap().attach(&tx, n);
        }
        for said in rx.iter().take(AT_ONCE as usize) {
            assert_eq!(said.result.unwrap()[..], said.tag.to_le_bytes());
        }
        puts.into_iter().for_each(|(_, token)| drop(token.wait().unwrap()));
        // A connection has two ends here: one for each thread's reads, and one for its notes.
        let now = own();
        assert!(now <= before + 4 * THREADS, "cycle {cycle}: {now}, at first {before}");
    }
}

fn e1_five_thousand_transfers_fit_in_a_hundred_ports(on: &On) {
    let transfers = on.rounds(2500) as u64; // each way
    let Some(net) = Net::new() else { return };
    if net.choose_ports(40_000, 40_099).is_none() {
        return;
    }
    let (a, b) = (on.peer_in(&net, &[]), on.peer_in(&net, &[]));
    a.works_with(&b);
    b.works_with(&a);
    let warm = [&a, &b].map(|peer| peer.descriptors());
    thread::scope(|scope| {
        for (from, to) in [(&a, &b), (&b, &a)] {
            scope.spawn(move || {
                for seed in 0..transfers {
                    let sent = from.put(json!({"size": seed % 7000, "seed": seed}));
                    let got = to.get(&sent.metadata);
                    assert_eq!(got["sha256"], *sent.sha256, "{got}");
                    let ended = from.wait(sent.tag);
                    assert_eq!(ended["ok"], true, "{ended}");
                }
            });
        }
    });
    if !on.lacks(Lack::NoteConnections) {
        let waiting = net.count(State::TimeWait);
        assert!(waiting < 10, "{waiting} connections were closed, and block their ports");
    }
    for (peer, warm) in [&a, &b].into_iter().zip(warm) {
        // One lane more each way, since both ways were busy at once.
        eventually(true, || peer.descriptors() <= warm + 4);
    }
}

fn e5_fifty_peers_that_start_at_once_are_reached_each_by_its_own_ports(on: &On) {
    let peers_at_once = on.rounds(50);
    let mut peers: Vec<_> = thread::scope(|scope| {
        let starting: Vec<_> = (0..peers_at_once)
            .map(|_| scope.spawn(|| on.peer(&["--slot-size", "4096", "--wait", "park"])))
            .collect();
        starting.into_iter().map(|peer| peer.join().unwrap()).collect()
    });
    let ports: HashSet<_> =
        peers.iter().map(|peer| ports_of(peer.pid())).flat_map(|(a, b)| [a, b]).collect();
    assert_eq!(ports.len(), 2 * peers_at_once);
    let names: HashSet<_> = peers.iter().map(|peer| peer.session_id().to_owned()).collect();
    assert_eq!(names.len(), peers_at_once);

    // All puts are open at once, so that one who is asked for another's has none of that name.
    let receiver = on.relay(&Config::default().with_slot_size(4096));
    let sent: Vec<_> = peers
        .iter()
        .enumerate()
        .map(|(n, peer)| peer.put(json!({"size": 99, "fill": n})))
        .collect();
    for (n, sent) in sent.iter().enumerate() {
        let got = receiver.get(&metadata_of(sent)).unwrap().wait().unwrap();
        assert_eq!(got[..], [n as u8; 99]);
    }
    for (peer, sent) in peers.drain(..).zip(sent) {
        assert_eq!(peer.wait(sent.tag)["ok"], true);
    }
}

#[cfg(feature = "embedded")]
fn e5_a_port_that_somebody_has_beside_ours_does_no_harm(_: &On) {
    use std::{net::TcpListener, sync::Arc};

    use mooncake_relay::{EmbeddedEngine, Error};

    use crate::on::AtRest;

    let config = Config::default().with_slot_size(4096);
    let relay = |listen: &str| {
        EmbeddedEngine::bind(listen).map(|engine| AtRest::new(Arc::new(engine), &config))
    };
    // The port after the one we name is taken; before it is found, those that we name may be.
    let beside = loop {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port() - 1;
        match relay(&format!("127.0.0.1:{port}")) {
            Ok(relay) => break (relay, taken),
            Err(Error::Io(error)) => assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse),
            Err(other) => panic!("{other:?}"),
        }
    };
    let other = relay("127.0.0.1:0").unwrap();
    beside.0.works_with(&other);
    other.works_with(&beside.0);
}

#[cfg(not(feature = "embedded"))]
fn e5_a_port_that_somebody_has_beside_ours_does_no_harm(_: &On) {}

/// Bound and listening when the constructor returns, or not there.
#[cfg(feature = "embedded")]
fn e6_a_port_is_ours_at_once_and_free_at_once(on: &On) {
    use std::{
        io::ErrorKind,
        net::{TcpListener, TcpStream},
        sync::Arc,
    };

    use mooncake_relay::{EmbeddedEngine, Error};

    use crate::on::AtRest;

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    match EmbeddedEngine::bind(&taken.local_addr().unwrap().to_string()) {
        Err(Error::Io(error)) => assert_eq!(error.kind(), ErrorKind::AddrInUse),
        other => panic!("{other:?}"),
    }
    let address = EmbeddedEngine::bind("127.0.0.1:0").unwrap().control_addr().to_string();
    let config = Config::default().with_slot_size(4096);
    let other = AtRest::new(Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap()), &config);
    for cycle in 0..on.full_or(500, 60) {
        let engine = EmbeddedEngine::bind(&address).expect("the one before has gone");
        for port in [engine.control_addr(), engine.data_addr()] {
            drop(TcpStream::connect(port).expect("it listens"));
        }
        // A relay that comes and goes at one address: its peers find each of them.
        let relay = AtRest::new(Arc::new(engine), &config);
        if cycle % 4 == 0 {
            relay.works_with(&other);
        }
    }
}

#[cfg(not(feature = "embedded"))]
fn e6_a_port_is_ours_at_once_and_free_at_once(_: &On) {}
