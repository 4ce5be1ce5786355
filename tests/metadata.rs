//! Metadata is input from outside: what a sender may send is taken, all else is refused by name.
#![expect(clippy::unwrap_used, reason = "helpers of tests, which may")]

use std::time::Duration;

use mooncake_relay::{DType, Error, Instance, Metadata, Tensor};
use proptest::prelude::*;
use serde_json::{Value, json};

/// As Python's `json.dumps` writes what the Python relay sends.
const PYTHON: &str = r#"{"engine_id": "peer", "session_id": "127.0.0.1:15708", "protocol": "tcp", "transfer_id": "peer_f38df03d", "mooncake": {"buffer_ptr": 140333700214848, "device_id": 0}, "transfer_info": {"size": 12, "shape": [2, 3], "dtype": "torch.bfloat16", "credit_id": 1048576}}"#;

/// As this library writes it.
const RELAY: &str = r#"{"engine_id":"stage0","session_id":"127.0.0.1:15708","protocol":"tcp","transfer_id":"stage0_f38df03d0badcafe0000000100000007","mooncake":{"buffer_ptr":140333700214848,"device_id":0},"transfer_info":{"size":12,"shape":[2,3],"dtype":"torch.bfloat16","credit_id":1048576},"relay":{"version":1,"instance":"000102030405060708090a0b0c0d0e0f","slot":1,"generation":7,"stamp":"00000000deadbeef","stamp_ptr":"0x7fa200000008","lease_ms":30000}}"#;

/// Where each key stands, and whether metadata can do without it.
const KEYS: [(&str, bool); 20] = [
    ("/engine_id", true),
    ("/session_id", false),
    ("/protocol", true),
    ("/transfer_id", false),
    ("/mooncake", false),
    ("/mooncake/buffer_ptr", false),
    ("/mooncake/device_id", true),
    ("/transfer_info", false),
    ("/transfer_info/size", false),
    ("/transfer_info/shape", true),
    ("/transfer_info/dtype", true),
    ("/transfer_info/credit_id", true),
    ("/relay", true),
    ("/relay/version", false),
    ("/relay/instance", false),
    ("/relay/slot", false),
    ("/relay/generation", false),
    ("/relay/stamp", false),
    ("/relay/stamp_ptr", false),
    ("/relay/lease_ms", false),
];

#[test]
fn what_the_python_relay_sends_is_taken() {
    let metadata: Metadata = PYTHON.parse().unwrap();
    assert_eq!(metadata.engine_id(), Some("peer"));
    assert_eq!(metadata.session_id(), "127.0.0.1:15708");
    assert_eq!(metadata.protocol(), Some("tcp"));
    assert_eq!(metadata.transfer_id(), "peer_f38df03d");
    assert_eq!(metadata.size(), 12);
    assert_eq!(metadata.tensor(), &Tensor::new(DType::Bfloat16, [2, 3]));
    assert_eq!((metadata.device_id(), metadata.credit_id()), (Some(0), Some(1 << 20)));
    assert_eq!((metadata.lease(), metadata.instance()), (None, None));
}

#[test]
fn what_this_library_sends_is_taken_and_written_again_as_it_was() {
    let metadata: Metadata = RELAY.parse().unwrap();
    assert_eq!(metadata.lease(), Some(Duration::from_secs(30)));
    let bytes = std::array::from_fn(|i| i as u8);
    assert_eq!(metadata.instance(), Some(Instance::from_bytes(bytes)));
    assert_eq!(metadata.to_string(), RELAY);
    assert_eq!(PYTHON.parse::<Metadata>().unwrap().to_string(), PYTHON.replace(' ', ""));
}

#[test]
fn the_transfer_and_its_stamp_are_not_shown() {
    let shown = format!("{:?}", RELAY.parse::<Metadata>().unwrap());
    for secret in ["f38df03d", "deadbeef", &0xdead_beef_u32.to_string()] {
        assert!(!shown.contains(secret), "{shown}");
    }
}

#[test]
fn serde_reads_and_writes_the_same() {
    for text in [PYTHON, RELAY] {
        let metadata: Metadata = text.parse().unwrap();
        let value = serde_json::to_value(&metadata).unwrap();
        assert_eq!(value, serde_json::from_str::<Value>(text).unwrap());
        assert_eq!(serde_json::from_value::<Metadata>(value).unwrap(), metadata);
        assert_eq!(serde_json::from_reader::<_, Metadata>(text.as_bytes()).unwrap(), metadata);
    }
    let error = serde_json::from_value::<Metadata>(changed("/transfer_info/size", json!("12")));
    assert!(error.unwrap_err().to_string().contains("\"size\""));
}

#[test]
fn each_missing_key_is_an_error_that_names_it_unless_it_can_be_missed() {
    for (path, optional) in KEYS {
        let (parent, key) = path.rsplit_once('/').unwrap();
        let mut value: Value = RELAY.parse().unwrap();
        value.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(key).unwrap();
        match (read(&value.to_string()), optional) {
            (Ok(_), true) => {}
            (Err(Error::Metadata { field, .. }), false) => assert_eq!(field, key),
            (other, _) => panic!("{path}: {other:?}"),
        }
    }
}

#[test]
fn each_value_of_another_type_is_an_error_that_names_its_key() {
    let values = [
        "null",
        "true",
        "1.5",
        "-1.0",
        "1e3",
        "1e400",
        "-7",
        "18446744073709551616",
        "\"\"",
        "\"x y\"",
        "[]",
        "[1]",
        "[-1]",
        "[1.5]",
        "[[]]",
        "{}",
        "{\"a\": 1}",
        "\"\\u0000\"",
    ];
    for (path, _) in KEYS {
        let key = path.rsplit('/').next().unwrap();
        for raw in values {
            let fine = match key {
                "device_id" => raw == "-7",
                "engine_id" => raw == "\"x y\"",
                "dtype" => raw == "\"x y\"", // not known, so any shape goes
                _ => false,
            };
            let text = changed(path, json!("@")).to_string().replace("\"@\"", raw);
            match read(&text) {
                Ok(_) => assert!(fine, "{path}: {raw}"),
                Err(Error::Metadata { field, reason }) => {
                    let inside = raw.starts_with('{')
                        && ["mooncake", "transfer_info", "relay"].contains(&key);
                    assert!(!fine && (inside || field == key), "{path}: {raw}: {field}: {reason}");
                }
                Err(other) => panic!("{path}: {raw}: {other:?}"),
            }
        }
    }
}

#[test]
fn each_value_out_of_range_is_an_error_that_names_its_key() {
    let long = |len| json!("x".repeat(len));
    let refused = [
        ("/session_id", long(301)),
        ("/session_id", json!("127.0.0.1:1 2")),
        ("/session_id", json!("höst:1")),
        ("/engine_id", long(256)),
        ("/engine_id", json!("a\nb")),
        ("/protocol", long(65)),
        ("/transfer_id", long(256)),
        ("/transfer_id", json!("stage0_\u{7f}")),
        ("/mooncake/buffer_ptr", json!(0)),
        ("/mooncake/buffer_ptr", json!(u64::MAX - 11)),
        ("/transfer_info/size", json!(u64::MAX)),
        ("/transfer_info/size", json!(1_u64 << 63)),
        ("/transfer_info/shape", json!([2, 3, 2])),
        ("/transfer_info/shape", json!([])),
        ("/transfer_info/shape", json!([0])),
        ("/transfer_info/shape", json!([u64::MAX, u64::MAX])),
        ("/transfer_info/shape", json!(vec![1; 65])),
        ("/transfer_info/dtype", long(256)),
        ("/transfer_info/dtype", json!("torch.\u{1b}")),
        ("/relay/version", json!(0)),
        ("/relay/version", json!(2)),
        ("/relay/instance", json!("000102030405060708090A0B0C0D0E0F")),
        ("/relay/instance", json!("00")),
        ("/relay/slot", json!(1_u64 << 32)),
        ("/relay/generation", json!(1_u64 << 32)),
        ("/relay/stamp", json!("deadbeef")),
        ("/relay/stamp", json!("+0000000deadbeef")),
        ("/relay/stamp_ptr", json!("7fa200000008")),
        ("/relay/stamp_ptr", json!("0x")),
        ("/relay/stamp_ptr", json!("0x0")),
        ("/relay/stamp_ptr", json!("0xfffffffffffffff8")),
        ("/relay/stamp_ptr", json!("0x10000000000000000")),
    ];
    for (path, value) in refused {
        let text = changed(path, value).to_string();
        assert_eq!(field(&text), path.rsplit('/').next().unwrap(), "{path}: {text}");
    }
    let size_and_shape = changed("/transfer_info/size", json!(13)).to_string();
    assert_eq!(field(&size_and_shape), "shape");
}

#[test]
fn a_transfer_that_is_not_that_of_its_slot_is_refused() {
    let tail = "f38df03d0badcafe0000000100000007";
    for (path, value) in [
        ("/relay/slot", json!(2)),
        ("/relay/generation", json!(8)),
        ("/transfer_id", json!("stage0_f38df03d")),
        ("/transfer_id", json!(tail)),
        ("/transfer_id", json!(format!("stage0_{}", tail.to_uppercase()))),
    ] {
        assert_eq!(field(&changed(path, value).to_string()), "transfer_id", "{path}");
    }
}

#[test]
fn a_later_version_is_refused_for_that_and_not_for_what_it_holds() {
    let relay = r#""relay":{"version":2,"instance":[1],"slot":"x"}"#;
    let (head, _) = RELAY.split_once("\"relay\"").unwrap();
    match read(&format!("{head}{relay}}}")) {
        Err(Error::Metadata { field: "version", reason }) => assert!(reason.contains('2')),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_allowed_at_the_edges_is_taken() {
    let shape = |shape: Value, size: u64| {
        let mut value = changed("/transfer_info/shape", shape);
        value["transfer_info"]["size"] = json!(size);
        value
    };
    let mut empty = shape(json!([1_u64 << 63, 0, 4]), 0);
    empty["mooncake"]["buffer_ptr"] = json!(0);
    for value in [
        empty,
        shape(json!([]), 2),
        shape(json!(vec![1; 64]), 2),
        shape(json!([1_u64 << 61]), 1 << 62),
        changed("/transfer_info/dtype", json!("torch.qint8")),
        changed("/mooncake/device_id", json!(-1)),
        changed("/mooncake/buffer_ptr", json!(u64::MAX - 12)),
        changed("/session_id", json!("[fe80::1%lo]:1")),
        changed("/relay/stamp_ptr", json!("0xfffffffffffffff7")),
        changed("/relay/lease_ms", json!(u64::MAX)),
        changed("/relay/local", json!({"version": 9, "socket": ["x"]})),
        changed("/relay/local", json!({"socket": "a", "deep": [[{"socket": 1}], -1, 0.5, null]})),
        changed("/relay/local", json!({})),
        changed("/relay/local", json!(null)),
        changed("/relay/local", json!([{"socket": "a"}, true])),
        changed("/relay/local", json!("a")),
        changed("/relay/local", json!(-1)),
        changed("/relay/local", json!(u64::MAX)),
        changed("/relay/local", json!(0.5)),
        changed("/relay/local", json!(false)),
        changed("/unknown", json!({"size": -1, "deep": [[[{}]]]})),
    ] {
        let metadata = read(&value.to_string()).unwrap_or_else(|error| panic!("{value}: {error}"));
        assert_eq!(read(&metadata.to_string()).unwrap(), metadata);
    }
}

#[test]
fn a_hint_where_the_sender_is_met_is_taken_and_is_json_like_the_rest() {
    let local =
        |local: &str| RELAY.replace("\"relay\":{", &format!("\"relay\":{{\"local\":{local},"));
    let twice = read(&local(r#"{"socket":"a","version":2,"socket":"b"}"#)).unwrap();
    assert!(twice.to_string().contains(r#""local":{"socket":"b"}"#), "{twice}");
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    for odd in [deep.as_str(), r#"{"socket":1e999}"#, "[1e999]", r#"{"socket":"a\u0000"}"#, "{1:2}"]
    {
        let error = read(&local(odd)).unwrap_err();
        assert!(matches!(error, Error::Metadata { .. }), "{odd}: {error:?}");
    }
}

#[test]
fn without_both_a_type_and_a_shape_it_is_bytes() {
    let text = PYTHON.replace(r#""shape": [2, 3], "#, "");
    assert_eq!(read(&text).unwrap().tensor(), &Tensor::bytes(12));
}

#[test]
fn what_is_not_an_object_of_json_is_refused_as_a_whole() {
    let open = RELAY.trim_end_matches('}');
    let deep = |open: &str, close: &str| open.repeat(10_000) + &close.repeat(10_000);
    let padded = |len: usize| RELAY.to_owned() + &" ".repeat(len - RELAY.len());
    for text in [
        String::new(),
        "null".into(),
        "[]".into(),
        format!("[{RELAY}]"),
        format!("{RELAY}{RELAY}"),
        open.into(),
        RELAY.replace(':', "="),
        "\0".repeat(100),
        RELAY.replace("stage0", "stage\0"),
        deep("[", "]"),
        deep("{\"a\":", "}"),
        RELAY.replace("\"relay\"", &format!("\"x\":{},\"relay\"", deep("[", "]"))),
        padded((64 << 10) + 1),
        format!("{{\"session_id\":\"{}\"}}", "x".repeat(10 << 20)),
    ] {
        assert_eq!(field(&text), "metadata", "{}", &text[..text.len().min(600)]);
    }
    read(&padded(64 << 10)).unwrap();
    for end in 0..RELAY.len() {
        assert_eq!(field(&RELAY[..end]), "metadata", "{end}");
    }
}

#[test]
fn a_key_that_appears_twice_is_refused() {
    for (path, _) in KEYS {
        let key = path.rsplit('/').next().unwrap();
        let value = RELAY.parse::<Value>().unwrap().pointer(path).unwrap().to_string();
        let start = RELAY.find(&format!("\"{key}\":")).unwrap();
        let mut text = RELAY.to_owned();
        text.insert_str(start, &format!("\"{key}\":{value},"));
        assert_eq!(field(&text), key, "{text}");
    }
}

#[test]
fn an_error_does_not_bring_a_hostile_text_back() {
    let text = changed("/transfer_info/size", json!("x".repeat(60_000))).to_string();
    let Err(error) = read(&text) else { panic!("taken") };
    assert!(error.to_string().len() < 1000, "{error}");
}

#[test]
fn a_hundred_thousand_damaged_texts_are_refused_or_mean_something() {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % below as u64) as usize
    };
    let alphabet = b"\"{}[]:,-+.eE0123456789abcfx\\u \0\n_tn\xff";
    let mut taken = 0;
    for _ in 0..100_000 {
        let mut bytes = RELAY.as_bytes().to_vec();
        for _ in 0..=random(3) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] = alphabet[random(alphabet.len())],
                1 => bytes.insert(at, alphabet[random(alphabet.len())]),
                2 => drop(bytes.remove(at)),
                _ => bytes.truncate(at),
            }
            bytes.push(b' '); // never empty
        }
        let text = String::from_utf8_lossy(&bytes);
        match read(&text) {
            Ok(metadata) => {
                assert_eq!(read(&metadata.to_string()).unwrap(), metadata, "{text}");
                taken += 1;
            }
            Err(Error::Metadata { .. }) => {}
            Err(other) => panic!("{text}: {other:?}"),
        }
    }
    assert!(taken > 0);
}

#[test]
fn a_type_reads_as_it_prints_and_knows_its_size() {
    for (size, names) in [
        (
            1,
            "uint8 int8 bool float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu",
        ),
        (2, "uint16 int16 float16 bfloat16"),
        (4, "uint32 int32 float32 complex32"),
        (8, "uint64 int64 float64 complex64"),
        (16, "complex128"),
    ] {
        for name in names.split(' ').map(|name| format!("torch.{name}")) {
            let dtype: DType = name.parse().unwrap();
            assert_eq!((dtype.size(), dtype.to_string()), (Some(size), name.clone()));
            assert_eq!(serde_json::from_value::<DType>(json!(name)).unwrap(), dtype);
            assert_eq!(serde_json::to_value(dtype).unwrap(), json!(name));
        }
    }
    for name in ["torch.qint8", "float32", "torch.Float32", ""] {
        assert_eq!(name.parse(), Ok(DType::Other(name.into())));
    }
    assert_eq!(Tensor::new(DType::Other("torch.qint8".into()), [2]).byte_len(), None);
    assert_eq!(Tensor::new(DType::Int8, [u64::MAX, 2]).byte_len(), None);
    assert_eq!(Tensor::new(DType::Complex128, []).byte_len(), Some(16));
}

proptest! {
    #[test]
    fn any_good_metadata_reads_as_it_was_written(
        (engine_id, transfer_id) in ("\\PC{1,60}", "\\PC{1,60}"),
        session_id in "[!-~]{1,300}",
        (ptr, device_id, credit_id) in (1_u64..1 << 63, any::<i64>(), any::<u64>()),
        shape in prop::collection::vec(0_u64..1000, 0..5),
        (slot, generation, random) in any::<(u32, u32, u64)>(),
        (stamp, stamp_ptr, lease_ms) in (any::<u64>(), 1..u64::MAX - 8, any::<u64>()),
        instance in any::<u128>(),
        ours in any::<bool>(),
    ) {
        let size = shape.iter().product::<u64>() * 2;
        let mut value = json!({
            "engine_id": engine_id, "session_id": session_id, "transfer_id": transfer_id,
            "mooncake": {"buffer_ptr": ptr, "device_id": device_id},
            "transfer_info": {"size": size, "shape": shape, "dtype": "torch.float16", "credit_id": credit_id},
        });
        if ours {
            value["transfer_id"] = json!(format!("{engine_id}_{random:016x}{slot:08x}{generation:08x}"));
            value["relay"] = json!({
                "version": 1, "instance": format!("{instance:032x}"), "slot": slot, "generation": generation,
                "stamp": format!("{stamp:016x}"), "stamp_ptr": format!("{stamp_ptr:#x}"), "lease_ms": lease_ms,
            });
        }
        let metadata = serde_json::from_value::<Metadata>(value.clone());
        // 60 characters of four bytes, and 33, may be more than 255.
        prop_assume!(value["transfer_id"].as_str().unwrap().len() <= 255);
        let metadata = metadata.unwrap();
        prop_assert_eq!(&read(&metadata.to_string()).unwrap(), &metadata);
        prop_assert_eq!(serde_json::to_value(&metadata).unwrap(), value);
    }

    #[test]
    fn any_json_in_any_place_is_taken_or_refused(index in 0..KEYS.len(), value in any_json()) {
        let (path, _) = KEYS[index];
        let value = changed(path, value);
        match (read(&value.to_string()), serde_json::from_value::<Metadata>(value)) {
            (Ok(a), Ok(b)) => prop_assert_eq!(a, b),
            (Err(Error::Metadata { .. }), Err(_)) => {}
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn any_text_is_refused(text in "\\PC{0,200}") {
        prop_assert_eq!(field(&text), "metadata");
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,40}".prop_map(Value::from),
        "(0x)?[0-9a-f]{0,33}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
            prop::collection::hash_map("[a-z_]{1,12}", inner, 0..8)
                .prop_map(|map| map.into_iter().collect::<Value>()),
        ]
    })
}

fn read(text: &str) -> Result<Metadata, Error> {
    text.parse()
}

/// [`RELAY`] with `value` at `path`.
fn changed(path: &str, value: Value) -> Value {
    let (parent, key) = path.rsplit_once('/').unwrap();
    let mut whole: Value = RELAY.parse().unwrap();
    whole.pointer_mut(parent).unwrap()[key] = value;
    whole
}

/// The key that the error names.
fn field(text: &str) -> &'static str {
    match read(text) {
        Err(Error::Metadata { field, .. }) => field,
        other => panic!("{other:?}"),
    }
}
