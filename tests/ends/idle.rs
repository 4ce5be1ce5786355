//! What relays cost that have nothing to do, or nothing but failures.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{Relay, WaitStrategy};
use rustix::time::{ClockId, clock_gettime};

use crate::{
    ENGINES, cases,
    common::{
        eventually,
        hooked::{Call, Hooked, refused},
        threads_named,
    },
    put, small, works,
};

cases! {
    j3_an_idle_relay_takes_less_than_a_hundredth_of_a_core,
    j3_threads_that_wait_for_a_peer_that_does_nothing_take_next_to_nothing,
    j3_who_waits_long_on_an_engine_without_a_bell_takes_next_to_nothing,
    j6_an_engine_that_only_fails_is_not_asked_without_pause_and_works_right_after,
    j8_many_relays_have_the_threads_that_are_documented_and_need_no_call_of_their_users,
}

/// The processor time that this process has taken, all its threads together.
fn taken() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// What the process takes in `time` while this thread sleeps, as a part of one core.
fn share_of(time: Duration) -> f64 {
    let (before, begun) = (taken(), Instant::now());
    thread::sleep(time); // what is measured
    (taken() - before).as_secs_f64() / begun.elapsed().as_secs_f64()
}

fn j3_an_idle_relay_takes_less_than_a_hundredth_of_a_core() {
    for wait in [WaitStrategy::Auto, WaitStrategy::Park] {
        let relays: Vec<_> = ENGINES
            .iter()
            .flat_map(|(_, make)| {
                [(), ()].map(|()| Relay::new(make(), &small().with_wait(wait)).unwrap())
            })
            .collect();
        for pair in relays.chunks(2) {
            works(&pair[0], &pair[1]);
        }
        // One has open puts, as most have that wait for the next request.
        let _open = put(&relays[2], b"open");
        let each = share_of(Duration::from_secs(10)) / relays.len() as f64;
        println!("{wait}: {:.3} % of a core for each idle relay", each * 100.0);
        assert!(each < 0.01, "{wait}: {each}");
    }
}

fn j3_threads_that_wait_for_a_peer_that_does_nothing_take_next_to_nothing() {
    for (kind, make) in ENGINES {
        let relay = Relay::new(make(), &small().with_credits(4)).unwrap();
        let tokens: Vec<_> = (0..4).map(|_| put(&relay, b"nobody gets it").1).collect();
        let each = thread::scope(|s| {
            for token in tokens {
                s.spawn(move || drop(token.wait()));
            }
            // They spin for a while first.
            thread::sleep(Duration::from_millis(100));
            let each = share_of(Duration::from_secs(3)) / 4.0;
            relay.close(Duration::from_secs(20));
            each
        });
        println!("{kind}: {:.3} % of a core for each thread that waits", each * 100.0);
        assert!(each < 0.05, "{kind}: {each}");
    }
}

fn j3_who_waits_long_on_an_engine_without_a_bell_takes_next_to_nothing() {
    let engine = Hooked::over(crate::in_process());
    engine.replace_bell(None);
    let relay = Relay::new(engine.engine(), &small()).unwrap();
    let (metadata, token) = put(&relay, b"nobody gets it");
    thread::scope(|s| {
        let waiting = s.spawn(|| token.wait());
        // It spins for a while first, and then its naps grow.
        thread::sleep(Duration::from_millis(200));
        let share = share_of(Duration::from_secs(3));
        println!("{:.3} % of a core", share * 100.0);
        relay.abort(&metadata).unwrap();
        assert!(waiting.join().unwrap().is_err());
        assert!(share < 0.04, "{share}");
    });
}

fn j6_an_engine_that_only_fails_is_not_asked_without_pause_and_works_right_after() {
    let engine = Hooked::over(crate::in_process());
    let other = Relay::new(crate::in_process(), &small().with_credits(8)).unwrap();
    let relay = Relay::new(engine.engine(), &small().with_credits(8)).unwrap();
    works(&relay, &other);
    let fails = Arc::new(AtomicBool::new(true));
    for call in [Call::Read, Call::Notify, Call::Poll] {
        let fails = Arc::clone(&fails);
        engine.before(
            call,
            move || if fails.load(Ordering::SeqCst) { Err(refused()) } else { Ok(()) },
        );
    }
    // Gets that fail, each with a notification that is owed and fails, and a put that is open.
    let gets: Vec<_> = (0..8).map(|_| relay.get(&put(&other, b"x").0).unwrap()).collect();
    let (metadata, open) = put(&relay, b"heard of after the fault");
    let share = share_of(Duration::from_secs(2));
    println!("{:.1} % of a core while everything fails", share * 100.0);
    assert!(share < 0.4, "{share}");
    for get in gets {
        assert!(get.wait().is_err());
    }
    let health = relay.health();
    assert_eq!(health.status, "degraded");
    assert!(health.counters.relay.poll_errors > 3, "they are counted");
    fails.store(false, Ordering::SeqCst);
    let again = Instant::now();
    assert_eq!(other.get(&metadata).unwrap().wait().unwrap()[..], *b"heard of after the fault");
    drop(open.wait().unwrap());
    println!("works {:?} after the fault", again.elapsed());
    eventually("healthy", || relay.health().status);
    works(&other, &relay);
}

fn j8_many_relays_have_the_threads_that_are_documented_and_need_no_call_of_their_users() {
    for (kind, make) in ENGINES {
        let config = small().with_transfer_threads(2).with_credits(4);
        let relays: Vec<_> = (0..10).map(|_| Relay::new(make(), &config).unwrap()).collect();
        // Two workers and a notifier, and the server of an embedded engine.
        let each = if kind == "in process" { 3 } else { 4 };
        eventually(10 * each, || threads_named("relay-"));
        let begun = Instant::now();
        thread::scope(|s| {
            for n in 0..10 {
                let (from, to) = (&relays[n], &relays[(n + 1) % 10]);
                s.spawn(move || (0..100).for_each(|_| works(from, to)));
            }
        });
        println!("{kind}: 1000 transfers among 10 relays in {:?}", begun.elapsed());
        assert_eq!(threads_named("relay-"), 10 * each, "{kind}: work makes none");
        // Its put is acknowledged, and the slot free, with no call of its own.
        let (metadata, token) = put(&relays[0], b"nobody waits for it");
        let got = relays[1].get(&metadata).unwrap();
        eventually((true, true), || (got.is_done(), token.is_done()));
        drop((got, token));
        drop(relays);
        eventually(0, || threads_named("relay-"));
    }
}
