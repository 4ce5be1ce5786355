//! The examples as black boxes: what they answer to whom.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};

use crate::common::{
    eventually,
    peer::{Peer, example, exit_of},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(600);

fn pair() -> (Peer, Peer) {
    let start = |id| Peer::start(&["--engine-id", id, "--slot-size", "65536", "--credits", "3"]);
    (start("alice"), start("bob"))
}

#[test]
fn every_way_to_describe_bytes_arrives_as_described() {
    within(WATCHDOG, || {
        let (a, b) = pair();
        // Computed by hand from the formula; the hashes by another program.
        let cases = [
            (json!({"hex": "00ff10"}), 3, "00ff10"),
            (json!({"text": "zwölf"}), 6, "7a77c3b66c66"),
            (json!({"size": 3, "fill": 7}), 3, "070707"),
            (json!({"size": 4, "seed": 0}), 4, "009e3cda"),
            (json!({"size": 2, "seed": -1}), 2, "ff9e"),
            (json!({"size": 2, "seed": u64::MAX}), 2, "ff9e"),
            (json!({"size": 0, "fill": 1}), 0, ""),
            (json!({"hex": ""}), 0, ""),
        ];
        for (spec, size, head) in cases {
            let sent = a.put(spec.clone());
            let got = b.get(&sent.metadata);
            assert_eq!((&got["size"], &got["head"]), (&json!(size), &json!(head)), "{spec}: {got}");
            assert_eq!(got["sha256"], *sent.sha256);
            assert_eq!((&got["dtype"], &got["shape"]), (&json!("torch.uint8"), &json!([size])));
            assert_eq!(a.wait(sent.tag)["ok"], true);
        }
        let three = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(a.put(json!({"text": "abc"})).sha256, three);
    });
}

#[test]
fn a_type_and_a_shape_travel_along() {
    within(WATCHDOG, || {
        let (a, b) = pair();
        let bytes = json!({"size": 12, "seed": 1});
        let mut put =
            json!({"cmd": "put", "bytes": bytes, "dtype": "torch.bfloat16", "shape": [2, 3]});
        let got = b.get(&a.sent(a.send(put.clone())).metadata);
        assert_eq!((&got["dtype"], &got["shape"]), (&json!("torch.bfloat16"), &json!([2, 3])));
        put["shape"] = json!([2, 4]);
        assert_eq!(a.ask(put)["kind"], "Metadata");
        eventually((3, Some(3)), || a.free());
    });
}

#[test]
fn a_destination_takes_what_fits_and_reads_nothing_else() {
    within(WATCHDOG, || {
        let (a, b) = pair();
        let get = |metadata: &Value, dest_size: usize| {
            b.ask(
                json!({"cmd": "get", "metadata": metadata, "dest_size": dest_size, "timeout": 20}),
            )
        };
        for (size, dest_size) in [(1000, 1000), (1000, 4000), (65_536, 65_536), (0, 0), (0, 9)] {
            let sent = a.put(json!({"size": size, "seed": 5}));
            let got = get(&sent.metadata, dest_size);
            assert_eq!(got["sha256"], *sent.sha256, "{got}");
            assert_eq!(got["size"], size);
            assert_eq!(a.wait(sent.tag)["ok"], true);
        }
        let sent = a.put(json!({"size": 1000, "seed": 5}));
        assert_eq!(get(&sent.metadata, 999)["kind"], "TooLarge");
        assert_eq!(get(&sent.metadata, usize::MAX)["kind"], "Config");
        eventually(Some(3), || b.free().1);
    });
}

#[test]
fn what_does_not_fit_is_refused_before_a_slot_is_taken() {
    within(WATCHDOG, || {
        let (a, b) = pair();
        let put = json!({"cmd": "put", "bytes": {"size": 65_537, "fill": 0}});
        assert_eq!(a.ask(put)["kind"], "TooLarge");
        let large = Peer::start(&["--slot-size", "131072"]);
        let sent = large.put(json!({"size": 65_537, "fill": 0}));
        assert_eq!(b.get(&sent.metadata)["kind"], "TooLarge");
        assert_eq!((a.free(), b.free()), ((3, Some(3)), (3, Some(3))));
    });
}

#[test]
fn a_put_waits_for_a_slot_as_long_as_it_was_told() {
    within(WATCHDOG, || {
        let (a, b) = pair();
        let open = [0, 1, 2].map(|fill| a.put(json!({"size": 4, "fill": fill})));
        let put = json!({"cmd": "put", "bytes": {"size": 4, "fill": 9}, "timeout": 0.1});
        assert_eq!(a.ask(put)["kind"], "TimedOut");
        let waiting = a.send(json!({"cmd": "put", "bytes": {"size": 4, "fill": 3}}));
        assert_eq!(a.free().0, 0);
        assert!(!a.has_answered(waiting));
        assert_eq!(b.get(&open[0].metadata)["ok"], true);
        // Nobody sent `wait`; the slot is free all the same.
        let sent = a.sent(waiting);
        assert_eq!(b.get(&sent.metadata)["head"], "03030303");
    });
}

#[test]
fn abort_ends_a_put_and_a_get_of_it_is_stale() {
    within(WATCHDOG, || {
        let (a, b) = pair();
        let sent = a.put(json!({"text": "never mind"}));
        let wait = a.send(json!({"cmd": "wait", "of": sent.tag}));
        assert_eq!(a.ask(json!({"cmd": "abort", "of": sent.tag}))["ok"], true);
        let ended = a.answer(wait);
        assert_eq!((&ended["kind"], &ended["of"]), (&json!("Aborted"), &json!(sent.tag)));
        assert_eq!(b.get(&sent.metadata)["kind"], "Stale");
        eventually((3, Some(3)), || a.free());
        assert_eq!(a.ask(json!({"cmd": "abort", "of": "nothing"}))["kind"], "Config");
        assert_eq!(a.wait(987_654)["kind"], "Config");
    });
}

#[test]
fn bad_metadata_is_answered_and_costs_nothing() {
    within(WATCHDOG, || {
        let (a, b) = pair();
        let good = a.put(json!({"size": 12, "seed": 3})).metadata;
        let mut cases = Vec::new();
        for needed in [
            "/session_id",
            "/transfer_id",
            "/transfer_info",
            "/transfer_info/size",
            "/mooncake",
            "/mooncake/buffer_ptr",
        ] {
            cases.push(without(&good, needed));
        }
        for (path, wrong) in [
            ("/session_id", json!(["", 5, null, {}, "no port", "host:99999", "host:0x1", "::1:1"])),
            ("/transfer_id", json!(["", 5, null, [], "a\u{0}b"])),
            ("/transfer_info", json!([5, null, []])),
            ("/transfer_info/size", json!([-1, 1.5, "12", null, [], u64::MAX])),
            ("/transfer_info/shape", json!([5, "2", [-1], [1.5], [u64::MAX, u64::MAX], [13]])),
            ("/transfer_info/dtype", json!([5, []])),
            ("/mooncake", json!([5, null, []])),
            ("/mooncake/buffer_ptr", json!([-1, 0.5, "0x1", null, u64::MAX])),
            ("/relay", json!([5, "x", []])),
            ("/relay/version", json!([2, 0, "1", -1, null])),
            ("/relay/instance", json!(["", 5, "zz", "0".repeat(31), "F".repeat(32)])),
            ("/relay/slot", json!([-1, "1", 1u64 << 32])),
            ("/relay/generation", json!([-1, "1", 1u64 << 32])),
        ] {
            for value in wrong.as_array().unwrap() {
                let mut bad = good.clone();
                *bad.pointer_mut(path).unwrap_or_else(|| panic!("no {path} in {good}")) =
                    value.clone();
                cases.push(bad);
            }
        }
        cases.extend([Value::Null, json!([]), json!("text"), json!(7), json!({})]);
        for bad in cases {
            let got = b.get(&bad);
            assert_eq!(
                (&got["ok"], &got["kind"]),
                (&json!(false), &json!("Metadata")),
                "{bad}: {got}"
            );
        }
        // What no JSON value of ours can hold goes in as text.
        let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
        for (tag, text) in (9_000_000..).zip(["1e400", &deep, "-1e400", "123456789012345678901234"])
        {
            b.send_line(&format!(r#"{{"cmd":"get","tag":{tag},"metadata":{text}}}"#));
            assert_eq!(b.answer(tag)["kind"], "Metadata");
        }
        assert_eq!(b.ask(json!({"cmd": "get"}))["kind"], "Metadata");
        assert_eq!(b.free(), (3, Some(3)));
        assert_eq!(b.get(&good)["size"], 12, "the good one still works");
    });
}

fn without(metadata: &Value, path: &str) -> Value {
    let mut metadata = metadata.clone();
    let (parent, key) = path.rsplit_once('/').unwrap();
    let parent = metadata.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    assert!(parent.remove(key).is_some(), "{path} was there");
    metadata
}

#[test]
fn bad_commands_are_answered_under_their_tag() {
    within(WATCHDOG, || {
        let (a, _) = pair();
        for bad in [
            json!({"cmd": "fly"}),
            json!({"cmd": 5}),
            json!({"cmd": null}),
            json!({}),
            json!({"cmd": "put"}),
            json!({"cmd": "put", "bytes": {}}),
            json!({"cmd": "put", "bytes": {"hex": "0"}}),
            json!({"cmd": "put", "bytes": {"hex": "0g"}}),
            json!({"cmd": "put", "bytes": {"size": -1, "fill": 0}}),
            json!({"cmd": "put", "bytes": {"size": 1, "fill": 256}}),
            json!({"cmd": "put", "bytes": {"size": 1, "seed": 0.5}}),
            json!({"cmd": "put", "bytes": {"size": 1, "fill": 0}, "timeout": -1}),
            json!({"cmd": "put", "bytes": {"size": 1, "fill": 0}, "timeout": "1"}),
            json!({"cmd": "put", "bytes": {"size": 1, "fill": 0}, "shape": 1}),
            json!({"cmd": "wait"}),
            json!({"cmd": "abort"}),
        ] {
            let answer = a.ask(bad.clone());
            assert_eq!(
                (&answer["ok"], &answer["kind"]),
                (&json!(false), &json!("Config")),
                "{bad}"
            );
        }
        for line in ["nonsense", "[1]", "5", "{\"cmd\":", "\"quit\""] {
            a.send_line(line);
            let answer = a.other();
            assert_eq!((&answer["ok"], &answer["tag"]), (&json!(false), &Value::Null), "{line}");
        }
        a.send_line("");
        assert_eq!(a.free(), (3, Some(3)));
        a.quit();
    });
}

#[test]
fn a_tag_may_be_any_value() {
    within(WATCHDOG, || {
        let (a, _) = pair();
        a.send_line(r#"{"cmd":"put","tag":{"n":[1,"x"]},"bytes":{"text":"t"}}"#);
        let put = a.other();
        assert_eq!((&put["ok"], &put["tag"]), (&json!(true), &json!({"n": [1, "x"]})));
        let abort = a.ask(json!({"cmd": "abort", "of": {"n": [1, "x"]}}));
        assert_eq!(abort["ok"], true, "{abort}");
    });
}

#[test]
fn a_thousand_gets_at_once_are_all_answered_and_leave_no_thread() {
    within(WATCHDOG, || {
        let (a, b) = pair();
        let threads = b.threads_of_its_own();
        let sent = a.put(json!({"text": "x"}));
        assert_eq!(b.get(&sent.metadata)["ok"], true);
        // The sender has taken the note in; until then it still holds those bytes, and serves them.
        assert_eq!(a.ask(json!({"cmd": "wait", "of": sent.tag}))["ok"], true);
        let descriptors = b.descriptors();
        let gets: Vec<u64> = (0..1000).map(|_| b.send_get(&sent.metadata)).collect();
        for get in gets {
            assert_eq!(b.answer(get)["kind"], "Stale");
        }
        eventually(threads, || b.threads());
        eventually(true, || b.descriptors() <= descriptors + 4);
        assert_eq!(b.free(), (3, Some(3)));
    });
}

#[test]
fn quit_ends_what_waits() {
    within(WATCHDOG, || {
        let (a, _) = pair();
        let sent = a.put(json!({"text": "x"}));
        let wait = a.send(json!({"cmd": "wait", "of": sent.tag}));
        a.send_line(r#"{"cmd":"quit"}"#);
        assert_eq!(a.answer(wait)["kind"], "Closed");
        assert_eq!(a.other(), json!({"event": "bye"}));
    });
}

#[test]
fn nobody_reading_its_output_is_no_reason_to_panic() {
    within(WATCHDOG, || {
        let mut child = Command::new(example("peer"))
            .args(["--slot-size", "4096"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut String::new()).unwrap();
        drop(output);
        for _ in 0..10 {
            input.write_all(b"{\"cmd\":\"health\"}\n{\"cmd\":\"put\",\"bytes\":{}}\n").unwrap();
        }
        drop(input);
        let status = exit_of(&mut child);
        let mut log = String::new();
        child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        assert!(status.success() && !log.contains("panic"), "{status}\n{log}");
    });
}

#[test]
fn what_cannot_start_says_why_and_exits_otherwise() {
    within(WATCHDOG, || {
        for (flags, says) in [
            (&["--engine", "carrier pigeon"][..], "embedded"),
            (&["--credits", "0"], "credits"),
            (&["--slot-size", "0"], "slot_size"),
            (&["--listen", "no such place"], "listen"),
            (&["--wait", "never"], "park"),
        ] {
            let output =
                Command::new(example("peer")).args(flags).stdin(Stdio::null()).output().unwrap();
            let log = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success(), "{flags:?}");
            assert!(log.contains(says) && !log.contains("panic"), "{flags:?}: {log}");
            assert!(output.stdout.is_empty(), "{flags:?}");
        }
    });
}

#[test]
fn the_quickstart_runs_to_its_end() {
    within(WATCHDOG, || {
        let output = Command::new(example("quickstart")).output().unwrap();
        let table = String::from_utf8_lossy(&output.stdout);
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{log}");
        assert!(table.lines().any(|line| line.contains("67108864")), "{table}");
        assert!(log.is_empty(), "{log}");
    });
}
