//! Relays that are closed whatever they are doing, and what is left of them then.

use std::{
    fs,
    net::TcpListener,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{Closed, EmbeddedEngine, Error, Relay, Result, Slot, Tensor, Token};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::{
    ENGINES, WATCHDOG, cases,
    common::{
        Random, eventually,
        hooked::{Call, Hooked},
        moved_to, threads_named,
    },
    put, small, times, works,
};

cases! {
    m2_a_close_ends_whatever_is_under_way_and_leaves_nothing,
    m2_a_close_keeps_its_time_where_no_thread_is_to_be_had,
    m2_a_close_ends_although_no_thread_is_to_be_had,
    m10_calls_beside_a_close_are_ok_or_closed_and_no_token_is_left = 600,
}

/// The threads, descriptors and shared mappings of relays that this process has.
fn held() -> (usize, usize, usize) {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mappings = maps.lines().filter(|line| line.contains("memfd:"));
    (threads_named("relay-"), descriptors.count(), mappings.count())
}

fn m2_a_close_ends_whatever_is_under_way_and_leaves_nothing() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let stuck_on = silent.local_addr().unwrap().to_string();
    for (kind, make) in ENGINES {
        let mut before = None;
        // The first time is for what a process makes once.
        for doing in ["nothing", "nothing", "transfers", "a get that is stuck", "a wait for a slot"]
        {
            let [a, b] = [(), ()].map(|()| Relay::new(make(), &small()).unwrap());
            works(&a, &b);
            let (metadata, open) = put(&a, b"open");
            let waiting: Vec<thread::JoinHandle<Result<Slot>>> = match doing {
                "transfers" => (0..2)
                    .map(|_| b.get(&metadata).unwrap())
                    .map(|token| thread::spawn(move || token.wait()))
                    .collect(),
                "a get that is stuck" => {
                    let token = b.get(&moved_to(&stuck_on, &metadata)).unwrap();
                    vec![thread::spawn(move || token.wait())]
                }
                _ => Vec::new(),
            };
            let begun = Instant::now();
            let closed = thread::scope(|s| {
                let acquire = s.spawn(|| match doing {
                    "a wait for a slot" => {
                        let _first = a.acquire(1, WATCHDOG)?;
                        a.acquire(1, WATCHDOG).map(drop)
                    }
                    _ => Ok(()),
                });
                if doing == "a wait for a slot" {
                    eventually(1, || a.health().waiting);
                }
                let closed = [&b, &a].map(|relay| relay.close(WATCHDOG));
                if doing == "a wait for a slot" {
                    assert!(matches!(acquire.join().unwrap(), Err(Error::Closed)));
                }
                closed
            });
            println!("{kind}, {doing}: closed after {:?}", begun.elapsed());
            for Closed { threads, spans_kept, .. } in closed {
                assert_eq!((threads, spans_kept), (0, 0), "{kind}, {doing}");
            }
            for thread in waiting {
                match thread.join().unwrap() {
                    Ok(_) | Err(Error::Closed | Error::Stale { .. } | Error::PeerFailed { .. }) => {
                    }
                    Err(error) => panic!("{kind}, {doing}: {error:?}"),
                }
            }
            drop(open);
            drop((a, b));
            eventually(0, || threads_named("relay-"));
            match before {
                Some(before) => eventually(before, held),
                None => before = Some(held()),
            }
        }
    }
    // The same ports, at once.
    let mut address = "127.0.0.1:0".to_owned();
    for _ in 0..20 {
        let engine = EmbeddedEngine::bind(&address).unwrap();
        address = engine.session_id().to_owned();
        let relay = Relay::new(Arc::new(engine), &small()).unwrap();
        works(&relay, &relay);
        relay.close(WATCHDOG);
    }
}

/// From here on the system gives this process no more threads. False: it still does.
fn no_more_threads() -> bool {
    // A thread that has just begun still has this one's name, and wants memory to begin with.
    let name = fs::read_to_string("/proc/thread-self/comm").unwrap();
    eventually(1, || threads_named(name.trim_end()));
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    let mut limit = getrlimit(Resource::As);
    // Some for the heap, and less than a thread's stack.
    limit.current = Some(pages * 4096 + (1 << 20));
    setrlimit(Resource::As, limit).unwrap();
    thread::Builder::new().spawn(|| ()).is_err()
}

fn m2_a_close_keeps_its_time_where_no_thread_is_to_be_had() {
    let engine = Hooked::over(crate::in_process());
    let relay = Relay::new(engine.engine(), &small()).unwrap();
    let (_, open) = put(&relay, b"open");
    let hung = engine.hang(Call::Unregister, ..);
    let closing = Arc::new(AtomicBool::new(true));
    let (watched, begun) = (Arc::clone(&closing), Instant::now());
    let watchdog = thread::Builder::new().name("watchdog".to_owned());
    let watch = move || {
        while watched.load(Ordering::SeqCst) {
            if begun.elapsed() > WATCHDOG {
                eprintln!("it waits for the engine");
                std::process::abort();
            }
            thread::sleep(Duration::from_millis(5)); // between two looks
        }
    };
    let watchdog = watchdog.spawn(watch).unwrap();
    assert!(no_more_threads());
    let closed = relay.close(Duration::from_millis(300));
    closing.store(false, Ordering::SeqCst);
    assert_eq!((closed.puts, closed.spans_kept), (1, 4), "the engine holds on to all of it");
    assert!(matches!(open.wait(), Err(Error::Closed)));
    hung.open();
    eventually(0, || engine.registered());
    drop(relay);
    eventually(0, || threads_named("relay-"));
    watchdog.join().unwrap();
}

fn m2_a_close_ends_although_no_thread_is_to_be_had() {
    let relays: Vec<_> =
        ENGINES.iter().map(|(_, make)| Relay::new(make(), &small()).unwrap()).collect();
    let tokens: Vec<_> = relays.iter().map(|relay| put(relay, b"open").1).collect();
    assert!(no_more_threads());
    for relay in &relays {
        let closed = relay.close(WATCHDOG);
        assert_eq!((closed.puts, closed.threads, closed.spans_kept), (1, 0, 0));
    }
    for token in tokens {
        assert!(matches!(token.wait(), Err(Error::Closed)));
    }
    drop(relays);
    eventually(0, || threads_named("relay-"));
}

fn m10_calls_beside_a_close_are_ok_or_closed_and_no_token_is_left() {
    let rounds = times("MOONCAKE_RELAY_TEST_CLOSES", 60);
    let mut random = Random::new(0x10c);
    for round in 0..rounds {
        let (_, make) = ENGINES[round % ENGINES.len()];
        let config = small().with_credits(4).with_transfer_threads(2);
        let [a, b] = [(), ()].map(|()| Relay::new(make(), &config).unwrap());
        let (published, _kept) = put(&b, b"read again and again");
        let start = Barrier::new(9);
        let moment = random.below(3000);
        thread::scope(|s| {
            let callers: Vec<_> = (0..8)
                .map(|n| {
                    let (a, published, start) = (&a, &published, &start);
                    s.spawn(move || {
                        start.wait();
                        let mut tokens: Vec<Token<Slot>> = Vec::new();
                        for call in n.. {
                            let made: Result<()> = match call % 3 {
                                0 => a.try_acquire(1).and_then(|slot| {
                                    tokens.push(a.put(slot, Tensor::bytes(1))?.1);
                                    Ok(())
                                }),
                                1 => a.get(published).map(|token| tokens.push(token)),
                                _ => a.get_into(published, &mut [0; 64], WATCHDOG).map(drop),
                            };
                            match made {
                                Ok(()) | Err(Error::Exhausted | Error::Stale { .. }) => {}
                                Err(Error::Closed) => break,
                                Err(error) => panic!("{error:?}"),
                            }
                            if tokens.len() > 16 {
                                tokens.retain(|token| !token.is_done());
                            }
                        }
                        tokens
                    })
                })
                .collect();
            start.wait();
            // Any moment will do.
            let until = Instant::now() + Duration::from_micros(moment);
            while Instant::now() < until {
                thread::yield_now();
            }
            let closed = a.close(WATCHDOG);
            assert_eq!((closed.threads, closed.spans_kept), (0, 0), "round {round}");
            for caller in callers {
                for token in caller.join().unwrap() {
                    assert!(token.is_done(), "round {round}: a token has survived the close");
                    match token.wait() {
                        Ok(_) | Err(Error::Closed | Error::Stale { .. } | Error::TimedOut) => {}
                        Err(error) => panic!("round {round}: {error:?}"),
                    }
                }
            }
        });
    }
}
