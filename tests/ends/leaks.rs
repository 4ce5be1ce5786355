//! Many gets, of which two in three fail: nothing grows.

use std::{fs, net::TcpListener, thread, time::Duration};

use mooncake_relay::{Error, Relay};

use crate::{
    ENGINES, WATCHDOG, cases,
    common::{eventually, moved_to, threads_named},
    put, small, times,
};

cases! { m6_gets_that_end_well_fail_and_time_out_leave_nothing = 1800 }

/// Resident memory in KiB, descriptors, threads.
fn held() -> (u64, usize, usize) {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident = line.trim().trim_end_matches(" kB").parse().unwrap();
    (resident, fs::read_dir("/proc/self/fd").unwrap().count(), threads_named(""))
}

fn m6_gets_that_end_well_fail_and_time_out_leave_nothing() {
    let gets = times("MOONCAKE_RELAY_TEST_GETS", 9_000);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().unwrap().to_string();
    for (kind, make) in ENGINES {
        let [a, b] = [(), ()].map(|()| Relay::new(make(), &small().with_credits(4)).unwrap());
        let (ended, token) = put(&a, b"ended");
        a.abort(&ended).unwrap();
        drop(token);
        let mut before = None;
        for get in 0..gets {
            // Warm after a tenth: what is made once has been made.
            if get == gets / 10 {
                // At rest: a connection that was given up may be on its way out.
                eventually(true, || {
                    before = Some(held());
                    thread::sleep(Duration::from_millis(50)); // between two looks, not instead of one
                    let (now, before) = (held(), before.unwrap());
                    (now.1, now.2) == (before.1, before.2)
                });
            }
            match get % 3 {
                0 => {
                    let (metadata, token) = put(&a, b"read");
                    assert_eq!(b.get(&metadata).unwrap().wait().unwrap()[..], *b"read");
                    drop(token.wait().unwrap());
                }
                1 => {
                    let got = b.get(&ended).unwrap().wait();
                    assert!(matches!(got, Err(Error::Stale { .. })), "{kind}: {got:?}");
                }
                _ => {
                    let metadata = moved_to(&silent, &ended);
                    // Some have no time at all, some end in the middle of it.
                    let time = Duration::from_micros(get as u64 % 5 * 100);
                    let got = b.get_timeout(&metadata, time).unwrap().wait();
                    let late = matches!(got, Err(Error::TimedOut | Error::PeerFailed { .. }));
                    assert!(late, "{kind}: {got:?}");
                }
            }
        }
        let (before, after) = (before.unwrap(), held());
        println!("{kind}: {before:?}, then {after:?} after {gets} gets");
        assert!(after.0 < before.0 + 4096, "{kind}: {before:?} {after:?} KiB");
        // A connection that was given up is on its way out.
        eventually((before.1, before.2), || (held().1, held().2));
        assert_eq!((a.health().free, b.health().receive_free), (4, 4), "{kind}");
        assert_eq!(b.close(WATCHDOG).threads, 0);
    }
}
