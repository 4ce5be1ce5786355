//! What others claim, in metadata and in names, is looked at before anything is taken.

use std::time::Duration;

use mooncake_relay::{Config, Error, Metadata, Token};
use serde_json::{Value, json};

use crate::{
    common::bytes::Canary,
    on::{Lack, On, cases},
};

cases! {
    Any: q22_metadata_that_claims_more_or_elsewhere_yields_no_byte,
        q25_bad_metadata_is_an_error_and_costs_nothing;
    Processes: q25_bad_messages_never_stop_a_receiver,
        q24_ipv6_is_bracketed_and_works_both_ways;
}

const PATIENCE: Duration = Duration::from_secs(60);

fn config() -> Config {
    Config::default().with_slot_size(64 << 10).with_quarantine(Duration::from_millis(20))
}

/// `metadata` with another value there.
fn with(metadata: &Value, place: &str, value: Value) -> Value {
    let mut changed = metadata.clone();
    *changed.pointer_mut(place).unwrap_or_else(|| panic!("{place} is not in {metadata}")) = value;
    changed
}

/// `metadata` that claims so many bytes, with a shape to match.
fn sized(metadata: &Value, size: u64) -> Value {
    let shaped = with(metadata, "/transfer_info/shape", json!([size]));
    with(&shaped, "/transfer_info/size", json!(size))
}

fn q22_metadata_that_claims_more_or_elsewhere_yields_no_byte(on: &On) {
    let (a, b) = on.pair(&config().with_credits(4));
    let (other, other_token) = a.sends(&[0xEE; 4096]);
    let other = serde_json::to_value(&other).unwrap();
    let elsewhere = &other["mooncake"]["buffer_ptr"];
    // One that knows ranges only serves whatever is registered: who may write its metadata may point
    // anywhere in there.
    let tells_puts_apart = !on.lacks(Lack::Identity);
    for n in 0.. {
        let (metadata, token) = a.sends(&[0x11; 4096]);
        let good = serde_json::to_value(&metadata).unwrap();
        let pointer = good["mooncake"]["buffer_ptr"].as_u64().unwrap();
        let at = |pointer: u64| with(&good, "/mooncake/buffer_ptr", json!(pointer));
        let mut forgeries = vec![at(8), at(pointer + (1 << 40))];
        if tells_puts_apart {
            forgeries.extend([
                sized(&good, 4097),
                sized(&good, 64 << 10),
                at(pointer + 1),
                at(pointer + (64 << 10)),
                at(pointer - (64 << 10)),
                sized(&at(pointer - 1), 4098),
                with(&good, "/mooncake/buffer_ptr", elsewhere.clone()),
                sized(&with(&good, "/mooncake/buffer_ptr", elsewhere.clone()), 100),
            ]);
        }
        let Some(forgery) = forgeries.into_iter().nth(n) else {
            b.get(&metadata).unwrap().wait().unwrap();
            token.wait().unwrap();
            break;
        };
        let forged: Metadata = forgery.to_string().parse().unwrap();
        let mut canary = Canary::new(64 << 10);
        let into = b.get_into(&forged, canary.dest(), PATIENCE).map(drop);
        canary.is_untouched();
        let got = b.get(&forged).and_then(Token::wait).map(drop);
        for outcome in [into, got] {
            let refused = matches!(outcome, Err(Error::Rejected { .. } | Error::Stale { .. }));
            assert!(refused, "{outcome:?} of {forgery}");
        }
        // Refused, its receiver gave up, and said so.
        assert!(matches!(token.wait(), Err(Error::PeerFailed { .. })));
        b.comes_to_rest();
    }
    assert!(!other_token.is_done());
    let other: Metadata = other.to_string().parse().unwrap();
    assert_eq!(b.get(&other).unwrap().wait().unwrap()[..], [0xEE; 4096]);
    other_token.wait().unwrap();
}

/// Metadata that nobody should believe.
fn bad(good: &Value) -> Vec<String> {
    let fields = ["/transfer_info/size", "/mooncake/buffer_ptr", "/session_id", "/transfer_id"];
    let values = [
        json!(null),
        json!(-1),
        json!(1.5),
        json!(1e300),
        json!(u64::MAX),
        json!("twelve"),
        json!(""),
        json!([]),
        json!({"of": {}}),
        json!(true),
    ];
    let mut bad = Vec::new();
    for field in fields {
        // A name is a name, whatever it says.
        let fits = |value: &Value| {
            value.as_str().is_some_and(|text| !text.is_empty())
                && matches!(field, "/session_id" | "/transfer_id")
                || field == "/mooncake/buffer_ptr" && value.is_u64()
        };
        let wrong = values.iter().filter(|value| !fits(value));
        bad.extend(wrong.map(|value| with(good, field, value.clone()).to_string()));
    }
    bad.extend(["", "null", "[]", "7", "{", "{}", "{\"transfer_info\":{}}"].map(str::to_owned));
    bad.push("[".repeat(100_000));
    bad.push(with(good, "/relay/version", json!(99)).to_string());
    bad
}

fn q25_bad_metadata_is_an_error_and_costs_nothing(on: &On) {
    let (a, b) = on.pair(&config());
    let (good, token) = a.sends(b"twelve bytes");
    // Many more than there are credits.
    for text in bad(&serde_json::to_value(&good).unwrap()) {
        let outcome = text.parse::<Metadata>().and_then(|metadata| {
            b.get_into(&metadata, &mut [0; 12], PATIENCE)?;
            b.get(&metadata)?.wait().map(drop)
        });
        let typed = matches!(outcome, Err(Error::Metadata { .. } | Error::TooLarge { .. }));
        assert!(typed, "{outcome:?} of {text}");
        assert_eq!(b.health().receive_free, 2, "{text}");
    }
    assert_eq!(b.health().counters.relay.gets, 0, "all were refused at the door");
    assert_eq!(&b.get(&good).unwrap().wait().unwrap()[..], b"twelve bytes");
    token.wait().unwrap();
}

fn q25_bad_messages_never_stop_a_receiver(on: &On) {
    let (a, b) = (on.peer(&[]), on.peer(&[]));
    let good = a.put(json!({"text": "twelve bytes"}));
    for text in bad(&good.metadata) {
        let Ok(bad) = serde_json::from_str::<Value>(&text) else { continue };
        let got = b.get(&bad);
        assert_eq!(got["ok"], false, "{got}");
        assert!(["Metadata", "TooLarge"].map(Value::from).contains(&got["kind"]), "{got}");
    }
    b.comes_to_rest();
    assert_eq!(b.get(&good.metadata)["sha256"], *good.sha256);
    assert_eq!(a.wait(good.tag)["ok"], true);
}

fn q24_ipv6_is_bracketed_and_works_both_ways(on: &On) {
    if !crate::common::has_ipv6() {
        return;
    }
    let six = ["--listen", "[::1]:0"];
    let (six, other, four) = (on.peer(&six), on.peer(&six), on.peer(&[]));
    assert!(six.session_id().starts_with("[::1]:"), "{}", six.session_id());
    for (from, to) in [(&six, &other), (&other, &six), (&six, &four), (&four, &six)] {
        from.works_with(to);
    }
}

/// Where the embedded engine listens, and what it tells its peers.
#[cfg(feature = "embedded")]
pub(crate) mod names {
    use std::net::ToSocketAddrs;

    use mooncake_relay::EmbeddedEngine;
    use rustix::system::uname;

    use super::*;

    cases! {
        Nothing: q24_an_address_that_is_none_is_refused_at_the_start,
            q24_what_it_listens_on_is_what_it_says,
            q24_listening_everywhere_without_a_name_that_peers_can_resolve_asks_for_one;
    }

    #[track_caller]
    fn refuses(field: &str, bound: mooncake_relay::Result<EmbeddedEngine>) {
        let named = matches!(&bound, Err(Error::Config { field: found, .. }) if *found == field);
        assert!(named, "{bound:?}");
    }

    fn q24_an_address_that_is_none_is_refused_at_the_start(_: &On) {
        for listen in [
            "",
            "127.0.0.1",
            "::1",
            "::1:7000",
            "[::1",
            "[::1]",
            "127.0.0.1:70000",
            "127.0.0.1:-1",
            "a b:0",
            "nowhere.invalid:0",
            "192.0.2.1:0",
        ] {
            refuses("listen", EmbeddedEngine::bind(listen));
        }
        for advertise in [
            "",
            "[::1",
            "[]:7000",
            "a b",
            "host:0",
            "host:1:0",
            "host:70000",
            "host:1:2:3",
            "0.0.0.0",
            "[::]:7000",
        ] {
            let builder = EmbeddedEngine::builder("127.0.0.1:0").advertise(advertise);
            refuses("advertise", builder.bind());
        }
    }

    fn q24_what_it_listens_on_is_what_it_says(_: &On) {
        let engine = EmbeddedEngine::bind("127.0.0.1:0").unwrap();
        assert_eq!(engine.session_id(), engine.control_addr().to_string());
        let six = EmbeddedEngine::builder("127.0.0.1:0").advertise("[2001:db8::7]:7000").bind();
        assert_eq!(six.unwrap().session_id(), "[2001:db8::7]:7000");
        let port =
            EmbeddedEngine::builder("127.0.0.1:0").advertise("[2001:db8::7]").bind().unwrap();
        let expected = format!("[2001:db8::7]:{}", port.control_addr().port());
        assert_eq!(port.session_id(), expected);
        let bare = EmbeddedEngine::builder("127.0.0.1:0").advertise("2001:db8::7").bind().unwrap();
        assert!(bare.session_id().starts_with("[2001:db8::7]:"), "{}", bare.session_id());
    }

    fn q24_listening_everywhere_without_a_name_that_peers_can_resolve_asks_for_one(_: &On) {
        let name = uname().nodename().to_str().unwrap().to_owned();
        let found = (&*name, 0).to_socket_addrs().map(Vec::from_iter).unwrap_or_default();
        let reachable =
            found.iter().any(|addr| !addr.ip().is_loopback() && !addr.ip().is_unspecified());
        for listen in ["0.0.0.0:0", "[::]:0"] {
            match EmbeddedEngine::bind(listen) {
                Ok(engine) => {
                    assert!(reachable, "{} of {found:?}", engine.session_id());
                    let port = engine.control_addr().port();
                    assert_eq!(engine.session_id(), format!("{name}:{port}"));
                }
                Err(Error::Config { field: "advertise", reason }) => {
                    assert!(!reachable && reason.contains(&name), "{reason}: {found:?}");
                }
                // No IPv6 here.
                Err(error) => assert!(listen.starts_with('['), "{error:?}"),
            }
        }
    }
}
