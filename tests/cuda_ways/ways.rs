//! Which way the bytes go.

use serde_json::json;

use crate::{
    CHUNK, Case, SLOT, at_rest, count, cuda, far, host, is_real, leaves_nothing, live, put, spawn,
    start, start_with, station::Plan, way, works,
};

pub(crate) const CASES: &[Case] = &[
    ("host_to_host_as_ever", host_to_host_as_ever),
    ("host_to_device_by_tcp", || goes(&host(), &far(cuda()), "staged")),
    ("device_to_host_by_tcp", || goes(&far(cuda()), &host(), "tcp")),
    ("device_to_device_by_tcp", || goes(&far(cuda()), &far(cuda()), "staged")),
    ("host_to_device_on_one_host", || goes(&host(), &cuda(), "local-staged")),
    ("device_to_host_on_one_host", || goes(&cuda(), &host(), "tcp")),
    ("device_to_device_on_one_host", || goes(&cuda(), &cuda(), "cuda-ipc")),
    ("device_to_another_device_on_one_host", device_to_another_device_on_one_host),
    ("a_copy_from_device_to_device_is_counted", a_copy_from_device_to_device_is_counted),
    ("a_sender_without_ipc_is_read_through_the_host", || no_ipc(true, false)),
    ("a_receiver_without_ipc_reads_through_the_host", || no_ipc(false, true)),
    ("one_process_does_not_open_what_is_its_own", one_process_does_not_open_what_is_its_own),
    (
        "without_staging_there_is_no_relay_on_a_device",
        without_staging_there_is_no_relay_on_a_device,
    ),
    ("pinned_memory_is_bounded", pinned_memory_is_bounded),
    ("what_is_mapped_is_let_go_of_before_it_is_freed", mapped_is_let_go_of_before_it_is_freed),
];

/// Every length that is a case of its own, forward and back.
fn goes(from: &Plan, to: &Plan, by: &str) {
    let (sender, receiver) = (start(from), start(to));
    let sizes =
        [1, 0, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 5, SLOT, 0, 7, SLOT - 1];
    for (round, size) in (1..).zip(sizes) {
        works(&sender, &receiver, size, round);
    }
    let refused = is_real() && by == "cuda-ipc" && count(&receiver, "ipc_refused") == 1;
    if refused {
        println!("this machine shares no device memory between processes: it came by TCP");
    }
    assert_eq!(way(&sender, &receiver), if refused { "staged" } else { by });
    // Several at a time, in slots that were used before.
    for round in 0..3 {
        let sent: Vec<_> =
            (0..4).map(|n| put(&sender, SLOT - n, 100 + 10 * round + n as u64)).collect();
        let gets: Vec<_> = sent.iter().map(|sent| receiver.send_get(&sent.metadata)).collect();
        for (sent, get) in sent.iter().zip(gets) {
            let got = receiver.answer(get);
            assert_eq!((&got["ok"], &got["sha256"]), (&json!(true), &json!(sent.sha256)), "{got}");
            assert_eq!(sender.wait(sent.tag)["ok"], true);
        }
    }
    at_rest(&sender, 4);
    at_rest(&receiver, 4);
    leaves_nothing(receiver);
    leaves_nothing(sender);
}

fn host_to_host_as_ever() {
    goes(&host(), &host(), "local");
    goes(&host(), &far(host()), "tcp");
}

fn device_to_another_device_on_one_host() {
    goes(&cuda(), &Plan { device: Some(1), ..cuda() }, "cuda-ipc");
}

fn a_copy_from_device_to_device_is_counted() {
    let (sender, receiver) = (start(&cuda()), start(&cuda()));
    works(&sender, &receiver, SLOT, 1);
    let counts = ["reads_ipc", "reads_local", "reads_tcp", "reads_staged", "ipc_refused"];
    assert_eq!(counts.map(|name| count(&receiver, name)), [1, 1, 0, 0, 0]);
    assert_eq!(count(&receiver, "bytes_read_local"), SLOT as u64);
    assert_eq!(count(&sender, "bytes_served"), 0);
    // The note went through shared memory as well.
    assert_eq!(count(&receiver, "notes_local"), 1);
}

fn no_ipc(of_sender: bool, of_receiver: bool) {
    let without = |no| if no { &[("STANDIN_NO_IPC", "1")][..] } else { &[] };
    let sender = start_with(&cuda(), without(of_sender));
    let receiver = start_with(&cuda(), without(of_receiver));
    for (seed, size) in (1..).zip([SLOT, 0, 5, CHUNK + 1]) {
        works(&sender, &receiver, size, seed);
    }
    assert_eq!(way(&sender, &receiver), "staged");
    assert_eq!((count(&receiver, "ipc_refused"), count(&receiver, "reads_ipc")), (1, 0));
    assert_eq!(count(&receiver, "reads_staged"), 4);
    leaves_nothing(sender);
    leaves_nothing(receiver);
}

fn one_process_does_not_open_what_is_its_own() {
    let both = start(&Plan { twin: true, ..cuda() });
    for (seed, size) in (1..).zip([SLOT, 0, 5, CHUNK + 1]) {
        let sent = put(&both, size, seed);
        let got = both.ask(json!({"cmd": "get", "at": 1, "metadata": sent.metadata}));
        assert_eq!((&got["ok"], &got["sha256"]), (&json!(true), &json!(sent.sha256)), "{got}");
        assert_eq!(both.wait(sent.tag)["ok"], true);
    }
    let health = both.ask(json!({"cmd": "health", "at": 1}))["health"].clone();
    assert_eq!(health["peers"][0]["way"], "staged", "{health}");
    assert_eq!(health["counters"]["ipc_refused"], 1);
}

fn without_staging_there_is_no_relay_on_a_device() {
    let said = spawn(&Plan { staging: None, ..cuda() }, &[]);
    let said = said.ready();
    assert_eq!(said["kind"], "Config", "{said}");
    let error = said["error"].as_str().unwrap();
    assert!(error.contains("staging") && error.contains("cuda:0"), "{error}");
}

fn pinned_memory_is_bounded() {
    let sender = start(&far(Plan { staging: Some((CHUNK, 3)), ..cuda() }));
    let readers: Vec<_> = (0..3).map(|_| start(&host())).collect();
    assert_eq!(live(&sender, "pinned"), 6);
    for round in 0..3 {
        let sent: Vec<_> = (0..3).map(|n| put(&sender, SLOT, 3 * round + n)).collect();
        let gets: Vec<_> =
            readers.iter().zip(&sent).map(|(to, sent)| to.send_get(&sent.metadata)).collect();
        for ((to, sent), get) in readers.iter().zip(&sent).zip(gets) {
            assert_eq!(to.answer(get)["sha256"], sent.sha256);
            assert_eq!(sender.wait(sent.tag)["ok"], true);
        }
    }
    assert_eq!(live(&sender, "pinned"), 6);
    leaves_nothing(sender);
}

fn mapped_is_let_go_of_before_it_is_freed() {
    let (sender, receiver) = (start(&cuda()), start(&cuda()));
    works(&sender, &receiver, SLOT, 1);
    assert_eq!(live(&receiver, "ipc"), 1);
    let closed = sender.ask(json!({"cmd": "close"}));
    // Asked at once: the close has waited for it.
    assert_eq!((&closed["spans_kept"], live(&receiver, "ipc")), (&json!(0), 0), "{closed}");
    sender.ask(json!({"cmd": "drop"}));
    // The other way round: a reader that is closed lets go too.
    let (next, reader) = (start(&cuda()), start(&cuda()));
    works(&next, &reader, SLOT, 2);
    leaves_nothing(reader);
    works(&next, &receiver, SLOT, 3);
    leaves_nothing(next);
    leaves_nothing(receiver);
}
