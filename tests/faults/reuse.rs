//! What the Python relay gets wrong, and what is right: when a slot is free for the next.

use std::{thread, time::Duration};

use mooncake_relay::{Engine, Error, Filled, Metadata, Tensor};

use crate::{
    common::{bytes::Canary, eventually, gate::Gate, hooked::Call},
    on::{AtRest, On, cases},
    reference::{PATIENCE, comes_back, gets, hooked, small},
};

cases! {
    Any:
        q3_metadata_of_a_put_that_was_ended_never_yields_the_next_puts_bytes,
        q3_metadata_of_a_put_that_timed_out_never_yields_the_next_puts_bytes,
        q3_metadata_that_is_read_again_is_stale,
        q3_a_read_that_begins_when_the_slot_has_moved_on_is_stale,
        q3_a_read_torn_by_the_next_put_is_stale,
        q4_a_put_whose_token_is_dropped_frees_its_slot_when_it_is_read,
        q4_puts_that_nobody_reads_or_waits_for_free_their_slots_with_their_lease,
        q4_a_wait_for_a_slot_is_bounded_and_leaves_nothing,
        q5_more_gets_than_slots_are_opened_before_any_is_waited_for,
        q5_gets_whose_tokens_are_dropped_keep_no_slot,
        q5_more_puts_than_slots_are_an_error_and_no_hang;
}

/// Neither way to get it yields a byte.
#[track_caller]
fn is_stale(relay: &AtRest, metadata: &Metadata) {
    let got = relay.get(metadata).unwrap().wait();
    assert!(matches!(got, Err(Error::Stale { .. })), "{got:?}");
    let mut canary = Canary::new(metadata.size());
    let got = relay.get_into(metadata, canary.dest(), PATIENCE);
    assert!(matches!(got, Err(Error::Stale { .. })), "{got:?}");
    canary.is_untouched();
}

fn q3_metadata_of_a_put_that_was_ended_never_yields_the_next_puts_bytes(on: &On) {
    let (a, b) = on.pair(&small().with_credits(1));
    for round in 0..20_u8 {
        let (old, token) = a.sends(&[round; 4096]);
        a.abort(&old).unwrap();
        assert!(matches!(token.wait(), Err(Error::Aborted)));
        // The one slot there is: the same address, the same length.
        let (new, token) = a.sends(&[!round; 4096]);
        is_stale(&b, &old);
        gets(&b, &new, &[!round; 4096]);
        comes_back(token, &[!round; 4096]);
    }
}

fn q3_metadata_of_a_put_that_timed_out_never_yields_the_next_puts_bytes(on: &On) {
    let (a, b) = on.pair(&small().with_credits(1).with_lease(Duration::from_millis(100)));
    for round in 0..5_u8 {
        let (old, token) = a.sends(&[round; 4096]);
        assert!(matches!(token.wait(), Err(Error::TimedOut)));
        let (_new, _token) = a.sends(&[!round; 4096]);
        is_stale(&b, &old);
    }
}

fn q3_metadata_that_is_read_again_is_stale(on: &On) {
    let (a, b) = on.pair(&small().with_credits(1));
    let (first, token) = a.sends(b"first");
    gets(&b, &first, b"first");
    let slot = token.wait().unwrap();
    is_stale(&b, &first); // while the caller has the slot
    let (second, token) = a.put(slot, Tensor::bytes(5)).unwrap();
    is_stale(&b, &first); // while the slot is another put's
    gets(&b, &second, b"first");
    drop(token.wait().unwrap());
    is_stale(&b, &first); // while it is free
}

/// A read of the first put, by a thread of the relay's, stands at the gate while the slot goes to the
/// next.
#[track_caller]
fn is_stale_when_its_slot_moves_on(a: &AtRest, b: &AtRest, gate: &Gate) {
    let (old, token) = a.sends(&[1; 4096]);
    let get = b.get(&old).unwrap();
    gate.entered(1);
    a.abort(&old).unwrap();
    assert!(matches!(token.wait(), Err(Error::Aborted)));
    let (new, token) = a.sends(&[2; 4096]);
    gate.open();
    let got = get.wait();
    assert!(matches!(got, Err(Error::Stale { .. })), "{got:?}");
    gets(b, &new, &[2; 4096]);
    comes_back(token, &[2; 4096]);
}

fn q3_a_read_that_begins_when_the_slot_has_moved_on_is_stale(on: &On) {
    let a = on.relay(&small().with_credits(1));
    let (engine, b) = hooked(on, &small());
    let gate = engine.hang(Call::Read, ..);
    is_stale_when_its_slot_moves_on(&a, &b, &gate);
}

fn q3_a_read_torn_by_the_next_put_is_stale(on: &On) {
    let a = on.relay(&small().with_credits(1));
    let (engine, b) = hooked(on, &small());
    let (gate, way) = Gate::pair();
    // As where nothing keeps a slot from being filled while it is read: one half is of the first
    // put, the other of the next, and only the stamp can tell.
    engine.on_read(move |next, remote, local, deadline| {
        let mut filled = next.read(remote, local, deadline)?;
        way.pass();
        if remote.len == 4096 {
            filled.buffer.bytes_mut().unwrap()[2048..].fill(2);
        }
        Ok(Filled { verified: false, ..filled })
    });
    is_stale_when_its_slot_moves_on(&a, &b, &gate);
}

fn q4_a_put_whose_token_is_dropped_frees_its_slot_when_it_is_read(on: &On) {
    let (a, b) = on.pair(&small());
    for n in 0..100_u32 {
        let (metadata, token) = a.sends(&n.to_le_bytes());
        drop(token);
        gets(&b, &metadata, &n.to_le_bytes());
    }
    a.comes_to_rest();
    assert_eq!(a.health().counters.relay.puts_acknowledged, 100);
}

fn q4_puts_that_nobody_reads_or_waits_for_free_their_slots_with_their_lease(on: &On) {
    let (a, b) = on.pair(&small().with_lease(Duration::from_millis(20)));
    for n in 0..10 {
        drop(a.sends(&[n]));
    }
    a.comes_to_rest();
    assert_eq!(a.health().counters.relay.puts_expired, 10);
    drop(a);
    let a = on.relay(&small());
    a.works_with(&b);
}

fn q4_a_wait_for_a_slot_is_bounded_and_leaves_nothing(on: &On) {
    let brief = Duration::from_millis(20);
    let (a, b) = on.pair(&small().with_credits(1).with_read_timeout(brief));
    let held = a.try_acquire(1).unwrap();
    for _ in 0..10 {
        assert!(matches!(a.acquire(1, brief), Err(Error::TimedOut)));
        let put = a.put_bytes(b"x", Tensor::bytes(1));
        assert!(matches!(put, Err(Error::TimedOut)), "{put:?}");
    }
    let health = a.health();
    assert_eq!((health.waiting, health.published, health.counters.relay.puts), (0, 0, 0));
    drop(held);
    let (metadata, token) = a.sends(b"x");
    let got = b.get_timeout(&metadata, PATIENCE).unwrap().wait().unwrap();
    assert_eq!(got[..], *b"x");
    comes_back(token, b"x");
}

fn q5_more_gets_than_slots_are_opened_before_any_is_waited_for(on: &On) {
    let (a, b) = (on.relay(&small().with_credits(5)), on.relay(&small().with_credits(1)));
    let puts: Vec<_> = (0..5_u8).map(|n| a.sends(&[n])).collect();
    let all: Vec<_> = puts.iter().map(|(metadata, _)| b.get(metadata).unwrap()).collect();
    for (n, get) in all.into_iter().enumerate() {
        assert_eq!(get.wait().unwrap()[..], [n as u8]);
    }
    for (n, (_, token)) in puts.into_iter().enumerate() {
        comes_back(token, &[n as u8]);
    }
}

fn q5_gets_whose_tokens_are_dropped_keep_no_slot(on: &On) {
    let (a, b) = (on.relay(&small().with_credits(4)), on.relay(&small().with_credits(1)));
    for _ in 0..10 {
        let puts: Vec<_> = (0..4_u8).map(|n| a.sends(&[n])).collect();
        for (metadata, _) in &puts {
            drop(b.get(metadata).unwrap());
        }
        for (n, (_, token)) in puts.into_iter().enumerate() {
            comes_back(token, &[n as u8]); // it was read all the same
        }
    }
    b.comes_to_rest();
    a.works_with(&b);
}

fn q5_more_puts_than_slots_are_an_error_and_no_hang(on: &On) {
    let (a, b) = on.pair(&small().with_read_timeout(Duration::from_millis(50)));
    let (first, first_token) = a.sends(b"first");
    let (second, second_token) = a.sends(b"second");
    let third = a.put_bytes(b"third", Tensor::bytes(5));
    assert!(matches!(third, Err(Error::TimedOut)), "{third:?}");
    let full = a.try_acquire(5).unwrap_err();
    assert!(matches!(full, Error::Exhausted));
    assert!(full.to_string().contains("more credits"), "it says what to do: {full}");
    // One that waits goes on when a slot comes back.
    thread::scope(|s| {
        let third = s.spawn(|| a.acquire(5, PATIENCE).map(drop));
        eventually(1, || a.health().waiting);
        for (metadata, token, bytes) in
            [(first, first_token, &b"first"[..]), (second, second_token, &b"second"[..])]
        {
            let got = b.get_timeout(&metadata, PATIENCE).unwrap().wait().unwrap();
            assert_eq!(got[..], *bytes);
            comes_back(token, bytes);
        }
        third.join().unwrap().unwrap();
    });
}
