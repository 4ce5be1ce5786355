//! Round trips, damage, and the frames that were captured from the real engine.

use proptest::{collection::vec, prelude::*};

use super::*;

const METADATA_REQUEST: &[u8] = b"\x03\0\0\0\0\0\0\0\x01{}";
const METADATA_RESPONSE: &[u8] = b"\x03\x01\0\0\0\0\0\0\x01\
    {\"buffers\":[{\"addr\":140223238357008,\"length\":1048576,\"name\":\"127.0.0.1:15225\"}],\
    \"name\":\"127.0.0.1:15225\",\"protocol\":\"tcp\",\"rdma_server_name\":\"\",\
    \"tcp_data_host\":\"127.0.0.1\",\"tcp_data_port\":16961,\"tcp_proto_version\":2,\
    \"timestamp\":\"2026-11-30 08:17:25.702259\"}\n";
const V1_READ_REQUEST: &[u8] =
    b"@\0\0\0\0\0\0\0\x10\xc0OD\x88\x7f\0\0\0\xaa\xaa\xaa\xaa\xaa\xaa\xaa";
const V2_READ_REQUEST: &[u8] = b" \0\0\0\0\0\0\0\x10\xc0OD\x88\x7f\0\0\x80\0\0\0\0\0\0\0";
const V2_READ_RESPONSE: &[u8] = b"\0\0\0\0VTCM\x01 ?^}\x9c\xbb\xda\xf9\x187Vu\x94\xb3\xd2\
    \xf1\x10/Nm\x8c\xab\xca\xe9\x08'Fe\x84\xa3\xc2";
const V2_WRITE_REQUEST: &[u8] =
    b"\x10\0\0\0\0\0\0\0\x10\xc2OD\x88\x7f\0\0\x81\0\0\0\0\0\0\0\x30123456789abcdef";
const V2_WRITE_ACK: &[u8] = b"\0\0\0\0VTCM";
const V2_REJECTION: &[u8] = b"\x01\0\0\0VTCM";
const NOTIFY_RESPONSE: &[u8] = b"$\0\0\0\0\0\0\0\x02{\"name\":\"\",\"notify_msg\":\"success\"}\n";
const PROBE_RESPONSE: &[u8] = b"\x16\0\0\0\0\0\0\0\x03{\"status\":\"success\"}\n";
const CONNECTION_REQUEST: &[u8] = b"\x03\0\0\0\0\0\0\0\0{}";
const CONNECTION_RESPONSE: &[u8] = b"o\0\0\0\0\0\0\0\0{\"local_gid\":\"\",\"local_lid\":0,\
    \"local_nic_path\":\"\",\"payload\":\"\",\"peer_nic_path\":\"\",\"qp_num\":[],\
    \"reply_msg\":\"\"}\n";
const UNTYPED_REQUEST: &[u8] = b"\x02\0\0\0\0\0\0\0{}";
const REAL_METADATA_REQUEST: &[u8] = b"\x03\x01\0\0\0\0\0\0\x01\
    {\"buffers\":[{\"addr\":140210765549584,\"length\":4194304,\"name\":\"127.0.0.1:15857\"}],\
    \"name\":\"127.0.0.1:15857\",\"protocol\":\"tcp\",\"rdma_server_name\":\"\",\
    \"tcp_data_host\":\"127.0.0.1\",\"tcp_data_port\":15983,\"tcp_proto_version\":2,\
    \"timestamp\":\"2026-11-30 08:15:06.156864\"}\n";
const REAL_READ_HEADER: &[u8] = b"0\0\0\0\0\0\0\0\x10\0\0\0\0\x10\0\0\x80\0\0\0\0\0\0\0";
const REAL_WRITE_HEADER: &[u8] = b"\x1e\0\0\0\0\0\0\0\xe8\x03\0\0\0\x10\0\0\x81\0\0\0\0\0\0\0";
const REAL_NOTIFY_REQUEST: &[u8] =
    b"&\0\0\0\0\0\0\0\x02{\"name\":\"req-7\",\"notify_msg\":\"done\"}\n";
const REAL_PROBE_REQUEST: &[u8] = b"\x04\0\0\0\0\0\0\0\x03{}\n";

const CONTROL: [(&[u8], ControlKind); 10] = [
    (METADATA_REQUEST, ControlKind::Metadata),
    (METADATA_RESPONSE, ControlKind::Metadata),
    (NOTIFY_RESPONSE, ControlKind::Notify),
    (PROBE_RESPONSE, ControlKind::Probe),
    (CONNECTION_REQUEST, ControlKind::Connection),
    (CONNECTION_RESPONSE, ControlKind::Connection),
    (UNTYPED_REQUEST, ControlKind::Untyped),
    (REAL_METADATA_REQUEST, ControlKind::Metadata),
    (REAL_NOTIFY_REQUEST, ControlKind::Notify),
    (REAL_PROBE_REQUEST, ControlKind::Probe),
];

fn control(frame: &[u8]) -> Control<'_> {
    decode_control(frame).unwrap().unwrap()
}

fn header(bytes: &[u8]) -> Header {
    Header::decode(bytes[..Header::LEN].try_into().unwrap())
}

#[test]
fn captured_control_frames_are_decoded_and_encoded_again_bit_for_bit() {
    for (frame, kind) in CONTROL {
        let whole = control(frame);
        assert_eq!((whole.kind, whole.len), (kind, frame.len()));
        check_json(whole.json).unwrap();
        assert_eq!(encode_control(kind, whole.json), frame);
    }
}

#[test]
fn a_captured_control_frame_cut_at_any_byte_asks_for_more() {
    for (frame, _) in CONTROL {
        for len in 0..frame.len() {
            assert_eq!(decode_control(&frame[..len]), Ok(None));
        }
    }
}

#[test]
fn captured_headers_and_statuses_are_decoded() {
    let of = |size, addr, opcode| Header { size, addr, opcode };
    assert_eq!(header(V1_READ_REQUEST), of(64, 0x7f88_444f_c010, READ_V1));
    let requests = [
        (V2_READ_REQUEST, of(32, 0x7f88_444f_c010, READ_V2)),
        (V2_WRITE_REQUEST, of(16, 0x7f88_444f_c210, WRITE_V2)),
        (REAL_READ_HEADER, of(48, 0x1000_0000_0010, READ_V2)),
        (REAL_WRITE_HEADER, of(30, 0x1000_0000_03e8, WRITE_V2)),
    ];
    for (bytes, expected) in requests {
        assert_eq!(header(bytes), expected);
        assert_eq!(expected.encode(), bytes[..Header::LEN]);
    }
    assert_eq!(Status::Done.encode(), V2_WRITE_ACK);
    assert_eq!(Status::Done.encode(), V2_READ_RESPONSE[..Status::LEN]);
    assert_eq!(Status::Refused.encode(), V2_REJECTION);
    assert_eq!(Status::decode(b"\0\0\0\0VTCN"), Err(FrameError::Magic));
    assert_eq!(Status::decode(b"\x04\0\0\0VTCM"), Err(FrameError::Status(4)));
}

#[test]
fn a_captured_descriptor_and_a_captured_note_are_parsed() {
    let descriptor = Descriptor::parse(control(METADATA_RESPONSE).json).unwrap();
    let expected = Descriptor {
        name: "127.0.0.1:15225".to_owned(),
        data_host: Some("127.0.0.1".to_owned()),
        data_port: 16961,
        version: 2,
        instance: None,
        buffers: vec![(140_223_238_357_008, 1 << 20)],
    };
    assert_eq!(descriptor, expected);
    let note = parse_notification(control(REAL_NOTIFY_REQUEST).json).unwrap();
    assert_eq!((note.name(), note.message()), ("req-7", "done"));
    let reply = parse_notification(control(NOTIFY_RESPONSE).json).unwrap();
    assert_eq!((reply.name(), reply.message()), ("", "success"));
}

#[test]
fn a_bad_length_or_type_is_told_from_the_first_nine_bytes() {
    assert_eq!(decode_control(&[0; 8]), Err(FrameError::Empty));
    for len in [MAX_CONTROL_BODY as u64 + 1, u64::MAX] {
        assert_eq!(decode_control(&len.to_le_bytes()), Err(FrameError::TooLong(len)));
    }
    assert_eq!(decode_control(&(MAX_CONTROL_BODY as u64).to_le_bytes()), Ok(None));
    assert_eq!(decode_control(b"\x09\0\0\0\0\0\0\0\x80"), Err(FrameError::Kind(0x80)));
}

#[test]
fn a_wrong_descriptor_names_the_key_at_fault() {
    let wrong = [
        (r#"{"name":"a:1"}"#, "protocol"),
        (r#"{"protocol":["tcp"]}"#, "protocol"),
        (r#"{"protocol":"rdma"}"#, "protocol"),
        (r#"{"protocol":"tcp","name":""}"#, "name"),
        (r#"{"protocol":"tcp","name":7}"#, "name"),
        (r#"{"protocol":"tcp","name":"a:1"}"#, "tcp_data_port"),
        (r#"{"protocol":"tcp","name":"a:1","tcp_data_port":"9"}"#, "tcp_data_port"),
        (r#"{"protocol":"tcp","name":"a:1","tcp_data_port":65536}"#, "tcp_data_port"),
        (r#"{"protocol":"tcp","name":"a:1","tcp_data_port":9,"tcp_data_host":1}"#, "tcp_data_host"),
        (
            r#"{"protocol":"tcp","name":"a:1","tcp_data_port":9,"tcp_proto_version":-2}"#,
            "tcp_proto_version",
        ),
        (r#"{"protocol":"tcp","name":"a:1","tcp_data_port":9,"buffers":{}}"#, "buffers"),
        (r#"{"protocol":"tcp","name":"a:1","tcp_data_port":9,"buffers":[[]]}"#, "addr"),
        (r#"{"protocol":"tcp","name":"a:1","tcp_data_port":9,"buffers":[{"addr":1}]}"#, "length"),
        (r#"{"protocol":"tcp","name":"a:1","tcp_data_port":9,"relay":1}"#, "relay"),
        (r#"{"protocol":"tcp","name":"a:1","tcp_data_port":9,"relay":{}}"#, "version"),
        (r#"{"protocol":"tcp","name":"a:1","tcp_data_port":9,"relay":{"version":1}}"#, "instance"),
    ];
    for (text, fault) in wrong {
        match Descriptor::parse(text.as_bytes()) {
            Err(FrameError::Key { key, .. }) => assert_eq!(key, fault, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    assert_eq!(Descriptor::parse(b"null"), Err(FrameError::NotReady));
    let plain = br#"{"protocol":"tcp","name":"a:1","tcp_data_port":9,
        "tcp_data_host":"","relay":{"version":2}}"#;
    let plain = Descriptor::parse(plain).unwrap();
    assert_eq!((plain.data_host, plain.version, plain.instance), (None, 1, None));
}

#[test]
fn a_note_is_an_object_of_texts_and_nothing_else() {
    let read = |text: &str| parse_notification(text.as_bytes());
    for text in ["{}", r#" {"x":{"y":[1]}}"#] {
        assert_eq!(read(text), Ok(Notification::new("", "")));
    }
    assert_eq!(read(r#"{"name":"\u00e9\n"}"#), Ok(Notification::new("é\n", "")));
    let deep = "[".repeat(100_000);
    let wrong = ["", "null", "[]", r#"["a","b"]"#, "5", r#""a""#, r#"{"name":5}"#, "{}{}"];
    let wrong = wrong.into_iter().chain([r#"{"name":null}"#, r#"{"notify_msg":{}}"#, &deep]);
    for text in wrong {
        assert!(matches!(read(text), Err(FrameError::Json(_))), "{text}");
    }
    assert!(parse_notification(b"{\"name\":\"\xff\"}").is_err());
}

#[test]
fn a_timestamp_is_a_civil_date() {
    let at =
        |secs: u64| timestamp(UNIX_EPOCH + std::time::Duration::from_micros(secs * 1_000_000 + 7));
    assert_eq!(at(0), "1970-01-01 00:00:00.000007");
    assert_eq!(at(951_782_399), "2000-02-28 23:59:59.000007");
    assert_eq!(at(951_782_400), "2000-02-29 00:00:00.000007");
    assert_eq!(at(4_102_444_799), "2099-12-31 23:59:59.000007");
}

proptest! {
    #[test]
    fn control_frames_round_trip_wherever_they_are_split(
        json in vec(4..=0x7fu8, 1..300), at: prop::sample::Index,
    ) {
        for kind in [ControlKind::Connection, ControlKind::Notify, ControlKind::Untyped] {
            let mut frame = encode_control(kind, &json);
            prop_assert_eq!(decode_control(&frame[..at.index(frame.len())]), Ok(None));
            let len = frame.len();
            frame.push(1); // the next frame's business
            prop_assert_eq!(decode_control(&frame), Ok(Some(Control { kind, json: &json, len })));
        }
    }

    #[test]
    fn headers_and_identities_round_trip(size: u64, addr: u64, opcode: u8, bytes: [u8; 32]) {
        let header = Header { size, addr, opcode };
        prop_assert_eq!(Header::decode(&header.encode()), header);
        prop_assert_eq!(encode_identity(&decode_identity(&bytes)), bytes);
    }

    #[test]
    fn descriptors_round_trip(
        name in "\\PC{1,20}", data_host in prop::option::of("\\PC{1,20}"),
        data_port in 1..=u16::MAX, version: u32, instance: Option<[u8; 16]>,
        buffers in vec((1..=u64::MAX, 1..=u64::MAX), 0..5),
    ) {
        let instance = instance.map(Instance::from_bytes);
        let descriptor = Descriptor { name, data_host, data_port, version, instance, buffers };
        prop_assert_eq!(Descriptor::parse(&descriptor.encode()), Ok(descriptor));
    }

    #[test]
    fn notes_round_trip(name: String, message: String) {
        let note = Notification::new(&name, &message);
        let mut body = Vec::new();
        encode_notification(&note, &mut body);
        prop_assert_eq!(parse_notification(&body), Ok(note));
    }

    #[test]
    fn random_bytes_never_panic(
        bytes in vec(any::<u8>(), 0..200), text in "[\\[\\]{}\":,a-z0-9\\\\ ]{0,60}",
    ) {
        for input in [&bytes, text.as_bytes()] {
            let _ = decode_control(input);
            let _ = Descriptor::parse(input);
            let _ = parse_notification(input);
            let _ = check_json(input);
            if let Ok(status) = input.try_into() {
                let _ = Status::decode(status);
            }
        }
    }
}

#[test]
fn the_reason_of_a_note_travels_beside_its_texts_and_nobody_has_to_know_it() {
    let plain = Notification::new("a_b", "transfer_failed");
    let mut body = Vec::new();
    encode_notification(&plain, &mut body);
    assert_eq!(body, br#"{"name":"a_b","notify_msg":"transfer_failed"}"#);
    let told = plain.clone().because("TimedOut");
    body.clear();
    encode_notification(&told, &mut body);
    assert_eq!(body, br#"{"name":"a_b","notify_msg":"transfer_failed","reason":"TimedOut"}"#);
    assert_eq!(parse_notification(&body), Ok(told));
    for reason in ["\"nonsense\"", "5", "null", "[{}]", "{\"a\":1}", "\"\""] {
        let body = format!(r#"{{"reason":{reason},"name":"a_b","notify_msg":"transfer_failed"}}"#);
        assert_eq!(parse_notification(body.as_bytes()), Ok(plain.clone()), "{body}");
    }
}
