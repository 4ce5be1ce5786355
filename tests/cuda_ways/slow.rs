//! Devices that take their time: nothing is handed back, published anew or freed before a copy of it
//! is over, and nobody else waits for it.

use std::{thread, time::Duration};

use serde_json::json;

use crate::{
    Case, SLOT, at_rest, common::eventually, cuda, far, host, leaves_nothing, live, put, start,
    station::Plan, tell, works,
};

pub(crate) const CASES: &[Case] = &[
    ("a_get_that_is_late_keeps_its_slot_until_the_copy_is_over", || late(&far(host()), "staged")),
    ("a_late_copy_from_shared_memory_keeps_its_slot", || late(&host(), "local-staged")),
    ("a_late_copy_from_device_to_device_keeps_both_slots", || late(&cuda(), "cuda-ipc")),
    ("a_slot_is_not_quiet_while_it_is_copied", a_slot_is_not_quiet_while_it_is_copied),
    ("a_device_that_stands_still_stops_no_other_request", stands_still),
    ("a_relay_that_is_closed_meanwhile_lets_go_of_nothing_too_soon", closed_meanwhile),
];

fn hold(peer: &crate::common::peer::Peer, on: bool) {
    tell(peer, json!({"do": "hold", "on": u8::from(on)}));
}

fn receive(peer: &crate::common::peer::Peer) -> [u64; 2] {
    let health = peer.health();
    ["receive_free", "receive_kept"].map(|key| health[key].as_u64().unwrap())
}

/// The receiver's device stands still in the middle of a get.
fn late(from: &Plan, by: &str) {
    let (sender, receiver) = (start(from), start(&cuda()));
    works(&sender, &receiver, SLOT, 1);
    assert_eq!(crate::way(&sender, &receiver), by);
    hold(&receiver, true);
    let sent = put(&sender, SLOT, 2);
    let got = receiver.ask(json!({"cmd": "get", "metadata": sent.metadata, "timeout_ms": 500}));
    assert_eq!(got["kind"], "TimedOut", "{got}");
    eventually([3, 1], || receive(&receiver));
    if by == "cuda-ipc" {
        // What is copied from it is not the sender's yet.
        assert_eq!(sender.wait(sent.tag)["kind"], "PeerFailed");
        assert_eq!(sender.health()["quarantined"].as_array().unwrap().len(), 1);
    }
    hold(&receiver, false);
    at_rest(&receiver, 4);
    at_rest(&sender, 4);
    works(&sender, &receiver, SLOT, 3);
    leaves_nothing(receiver);
    leaves_nothing(sender);
}

fn a_slot_is_not_quiet_while_it_is_copied() {
    let plan = Plan { credits: 1, quarantine_ms: 200, ..cuda() };
    let (sender, receiver) = (start(&far(plan)), start(&host()));
    works(&sender, &receiver, SLOT, 1);
    let sent = put(&sender, SLOT, 2);
    hold(&sender, true);
    let get = receiver.send_get(&sent.metadata);
    eventually(1, || crate::count(&sender, "connections_open").min(1));
    // The copy has begun when the server has been asked.
    let begun = || {
        tell(&sender, json!({"do": "calls", "name": "cuMemcpyDtoHAsync_v2"}))["calls"]
            .as_u64()
            .unwrap()
    };
    let before = SLOT.div_ceil(crate::CHUNK) as u64;
    eventually(true, || begun() > before);
    sender.ask(json!({"cmd": "abort", "metadata": sent.metadata}));
    assert_eq!(sender.wait(sent.tag)["kind"], "Aborted");
    // The quarantine is over, and the reader has been cut.
    let got = receiver.answer(get);
    assert!(matches!(got["kind"].as_str(), Some("PeerFailed" | "Stale")), "{got}");
    // Only widens the window in which a slot that is let go of too soon is handed out.
    thread::sleep(Duration::from_millis(300));
    assert_eq!(sender.health()["free"], 0, "a copy from it is under way");
    hold(&sender, false);
    at_rest(&sender, 1);
    works(&sender, &receiver, SLOT, 3);
    leaves_nothing(sender);
}

fn stands_still() {
    let (sender, receiver) = (start(&far(cuda())), start(&far(host())));
    works(&sender, &receiver, SLOT, 1);
    let (first, gone) = (put(&sender, SLOT, 2), put(&sender, SLOT, 3));
    sender.ask(json!({"cmd": "abort", "metadata": gone.metadata}));
    hold(&sender, true);
    let get = receiver.send_get(&first.metadata);
    // Answered by the same thread of the server, while that one waits for the device.
    let stale = receiver.get(&gone.metadata);
    assert_eq!(stale["kind"], "Stale", "{stale}");
    assert!(!receiver.has_answered(get));
    hold(&sender, false);
    assert_eq!(receiver.answer(get)["sha256"], first.sha256);
    assert_eq!(sender.wait(first.tag)["ok"], true);
    leaves_nothing(sender);
}

fn closed_meanwhile() {
    let (sender, receiver) = (start(&cuda()), start(&cuda()));
    works(&sender, &receiver, SLOT, 1);
    hold(&receiver, true);
    let sent = put(&sender, SLOT, 2);
    let get = receiver.send_get(&sent.metadata);
    let begun = || {
        tell(&receiver, json!({"do": "calls", "name": "cuMemcpyDtoDAsync_v2"}))["calls"]
            .as_u64()
            .unwrap()
    };
    eventually(2, begun);
    let close = sender.send(json!({"cmd": "close"}));
    let late = sender.answer(close);
    // It has waited as long as it does: the reader still has what is copied from.
    assert_eq!((&late["spans_kept"], live(&receiver, "ipc")), (&json!(1), 1), "{late}");
    hold(&receiver, false);
    let got = receiver.answer(get);
    assert!(matches!(got["kind"].as_str(), Some("PeerFailed" | "Stale")), "{got}");
    at_rest(&receiver, 4);
    eventually(0, || live(&receiver, "ipc"));
    leaves_nothing(receiver);
    // What may have been copied from was never freed.
    sender.ask(json!({"cmd": "drop"}));
    assert_eq!((live(&sender, "device"), live(&sender, "violation")), (2, 0));
}
