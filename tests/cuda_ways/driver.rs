//! Each call of the driver on these ways fails once, before or after it has done what it does: a
//! transfer ends well or with an error, no byte is wrong, and every credit comes back.

use serde_json::json;

use crate::{
    Case, SLOT, at_rest, common::peer::Peer, count, cuda, far, host, leaves_nothing, live, put,
    spawn, start, station::Plan, tell, way, works,
};

pub(crate) const CASES: &[Case] = &[
    ("a_sender_s_driver_fails_by_tcp", || fails(&far(cuda()), &far(host()), Of::Sender)),
    ("a_receiver_s_driver_fails_by_tcp", || fails(&far(host()), &far(cuda()), Of::Receiver)),
    ("a_receiver_s_driver_fails_from_shared_memory", || fails(&host(), &cuda(), Of::Receiver)),
    ("a_receiver_s_driver_fails_from_device_to_device", || fails(&cuda(), &cuda(), Of::Receiver)),
    ("what_cannot_be_mapped_comes_through_the_host", what_cannot_be_mapped),
    ("what_has_no_handle_comes_through_the_host", what_has_no_handle),
    ("without_pinned_memory_there_is_no_relay", without_pinned_memory_there_is_no_relay),
];

#[derive(Clone, Copy, PartialEq)]
enum Of {
    Sender,
    Receiver,
}

/// What is called in the middle of a transfer.
const CALLS: &[&str] = &[
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuEventCreate",
];
const UNKNOWN: u32 = 999;

fn fail(peer: &Peer, name: &str, nth: u32, after: bool) {
    let after = u8::from(after);
    tell(peer, json!({"do": "fail", "name": name, "nth": nth, "code": UNKNOWN, "after": after}));
}

fn calls(peer: &Peer, name: &str) -> u64 {
    tell(peer, json!({"do": "calls", "name": name}))["calls"].as_u64().unwrap()
}

fn fails(from: &Plan, to: &Plan, of: Of) {
    let (sender, receiver) = (start(from), start(to));
    works(&sender, &receiver, SLOT, 1);
    let by = way(&sender, &receiver);
    let failing = if of == Of::Sender { &sender } else { &receiver };
    let (mut seed, mut all_failed) = (1, 0);
    for name in CALLS {
        let (called, mut failed) = (calls(failing, name), 0);
        for (nth, after) in [(1, false), (2, false), (9, false), (1, true), (2, true), (5, true)] {
            seed += 1;
            let sent = put(&sender, SLOT, seed);
            fail(failing, name, nth, after);
            let got = receiver.get(&sent.metadata);
            // Where it was not called as often, it does not fail any more.
            tell(failing, json!({"do": "fail", "name": name, "nth": 0, "code": 0}));
            let case = format!("{name} {nth} {after}: {got}");
            match got["kind"].as_str() {
                None => assert_eq!(got["sha256"], sent.sha256, "{case}"),
                Some("Device" | "PeerFailed" | "Engine") => failed += 1,
                Some(_) => panic!("{case}"),
            }
            let ended = sender.wait(sent.tag);
            assert!(matches!(ended["kind"].as_str(), None | Some("PeerFailed")), "{case}: {ended}");
            at_rest(&sender, 4);
            at_rest(&receiver, 4);
            seed += 1;
            works(&sender, &receiver, SLOT, seed);
            assert_eq!(way(&sender, &receiver), by, "{case}");
        }
        println!("{name}: {} calls, {failed} gets failed by it", calls(failing, name) - called);
        all_failed += failed;
    }
    assert!(all_failed > 0, "no call that failed was seen");
    leaves_nothing(receiver);
    leaves_nothing(sender);
}

fn what_cannot_be_mapped() {
    for name in ["cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2"] {
        let (sender, receiver) = (start(&cuda()), start(&cuda()));
        let sent = put(&sender, SLOT, 1);
        fail(&receiver, name, 1, false);
        let got = receiver.get(&sent.metadata);
        assert_eq!(got["sha256"], sent.sha256, "{name}: {got}");
        assert_eq!(sender.wait(sent.tag)["ok"], true);
        assert_eq!(way(&sender, &receiver), "staged", "{name}");
        assert_eq!((count(&receiver, "ipc_refused"), live(&receiver, "ipc")), (1, 0), "{name}");
        // It is not tried again, and works all the same.
        works(&sender, &receiver, SLOT, 2);
        leaves_nothing(sender);
        leaves_nothing(receiver);
    }
}

fn what_has_no_handle() {
    let sender = spawn(&cuda(), &[("STANDIN_FAIL", "cuIpcGetMemHandle:1:801")]);
    let receiver = start(&cuda());
    works(&sender, &receiver, SLOT, 1);
    assert_eq!((way(&sender, &receiver).as_str(), count(&receiver, "ipc_refused")), ("staged", 1));
    leaves_nothing(sender);
    leaves_nothing(receiver);
}

fn without_pinned_memory_there_is_no_relay() {
    for nth in [1, 3, 8] {
        let failing = format!("cuMemHostAlloc:{nth}:2");
        let said = spawn(&cuda(), &[("STANDIN_FAIL", failing.as_str())]);
        assert_eq!(said.ready()["kind"], "Device", "{}", said.ready());
        let error = said.ready()["error"].as_str().unwrap();
        assert!(error.contains("cuMemHostAlloc"), "{error}");
    }
}
