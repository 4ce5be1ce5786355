//! The wire frames of Mooncake's control and data ports: encode and decode, nothing else.
//!
//! ```text
//!   control   u64 length (of what follows) | u8 type | JSON
//!   data      u64 size | u64 addr | u8 opcode | 7 unused bytes      (all little-endian)
//!             0xA0: then 16 bytes instance | 16 bytes id
//!   status    u32 code | u32 magic
//! ```

use std::{
    borrow::Cow,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize, de::IgnoredAny};
use serde_json::{Map, Value, json};

use crate::engine::{Identity, Instance, Notification, TransferId};

/// The longest control body that is taken, its type byte included.
pub(super) const MAX_CONTROL_BODY: usize = 1 << 20;

/// The longest body of a [`NOTIFY`] request.
pub(super) const MAX_NOTE_BODY: usize = 64 << 10;

/// Opcode: send `size` bytes at `addr`.
pub(super) const READ_V1: u8 = 0x00;
/// Opcode: store the `size` bytes that follow at `addr`; not acknowledged.
pub(super) const WRITE_V1: u8 = 0x01;
/// Opcode: as [`READ_V1`], a status first.
pub(super) const READ_V2: u8 = 0x80;
/// Opcode: as [`WRITE_V1`], a status after the last byte was stored.
pub(super) const WRITE_V2: u8 = 0x81;
/// Opcode, between relays: as [`READ_V2`], of exactly the put in the 32 bytes after the header.
pub(super) const READ_IDENTIFIED: u8 = 0xA0;
/// Opcode, between relays: the `size` bytes that follow are a notification; answered by a status.
pub(super) const NOTIFY: u8 = 0xA2;

/// The peer broke the protocol, or speaks another.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("a control frame without a body")]
    Empty,
    #[error("a control frame of {0} bytes: at most {MAX_CONTROL_BODY} are taken")]
    TooLong(u64),
    #[error("control frame type {0:#04x} is not known")]
    Kind(u8),
    #[error("a status frame without its magic number")]
    Magic,
    #[error("status {0} is not known")]
    Status(u32),
    #[error("not ready: the peer has no descriptor yet")]
    NotReady,
    #[error("not JSON: {0}")]
    Json(String),
    #[error("key {key:?}: {reason}")]
    Key { key: &'static str, reason: &'static str },
}

/// What a control frame asks for, or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControlKind {
    Connection,
    Metadata,
    Notify,
    Probe,
    /// The old protocol: no type byte, treated as [`Self::Connection`].
    Untyped,
}

/// One whole control frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Control<'a> {
    pub(super) kind: ControlKind,
    pub(super) json: &'a [u8],
    /// How many bytes of the input it took.
    pub(super) len: usize,
}

/// The frame of `kind` around `json`.
pub(super) fn encode_control(kind: ControlKind, json: &[u8]) -> Vec<u8> {
    let kind = match kind {
        ControlKind::Connection => Some(0),
        ControlKind::Metadata => Some(1),
        ControlKind::Notify => Some(2),
        ControlKind::Probe => Some(3),
        ControlKind::Untyped => None,
    };
    let len = json.len() + usize::from(kind.is_some());
    let mut frame = Vec::with_capacity(8 + len);
    frame.extend_from_slice(&(len as u64).to_le_bytes());
    frame.extend(kind);
    frame.extend_from_slice(json);
    frame
}

/// The frame at the start of `input`; `None` while it is not whole.
///
/// A bad length or type is told as soon as its bytes are there.
pub(super) fn decode_control(input: &[u8]) -> Result<Option<Control<'_>>, FrameError> {
    let Some((len, rest)) = input.split_first_chunk::<8>() else { return Ok(None) };
    let len = match u64::from_le_bytes(*len) {
        0 => return Err(FrameError::Empty),
        len if len > MAX_CONTROL_BODY as u64 => return Err(FrameError::TooLong(len)),
        len => len as usize,
    };
    let Some(&first) = rest.first() else { return Ok(None) };
    let kind = match first {
        0 => ControlKind::Connection,
        1 => ControlKind::Metadata,
        2 => ControlKind::Notify,
        3 => ControlKind::Probe,
        4..=0x7f => ControlKind::Untyped,
        _ => return Err(FrameError::Kind(first)),
    };
    let Some(body) = rest.get(..len) else { return Ok(None) };
    let json = &body[usize::from(kind != ControlKind::Untyped)..];
    Ok(Some(Control { kind, json, len: 8 + len }))
}

/// Whether `json` is one JSON value, whatever it says.
pub(super) fn check_json(json: &[u8]) -> Result<(), FrameError> {
    serde_json::from_slice::<IgnoredAny>(json).map(drop).map_err(not_json)
}

/// What every data request starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) size: u64,
    pub(super) addr: u64,
    pub(super) opcode: u8,
}

impl Header {
    pub(super) const LEN: usize = 24;

    pub(super) fn encode(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.size.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_le_bytes());
        bytes[16] = self.opcode;
        bytes
    }

    /// The last seven bytes are not looked at: the real engine sends what its memory held.
    pub(super) fn decode(bytes: &[u8; Self::LEN]) -> Self {
        let [s0, s1, s2, s3, s4, s5, s6, s7, a0, a1, a2, a3, a4, a5, a6, a7, opcode, ..] = *bytes;
        Self {
            size: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
            addr: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            opcode,
        }
    }
}

/// The length of what follows the header of [`READ_IDENTIFIED`].
pub(super) const IDENTITY_LEN: usize = 32;

/// What follows the header of [`READ_IDENTIFIED`].
pub(super) fn encode_identity(identity: &Identity) -> [u8; IDENTITY_LEN] {
    let mut bytes = [0; IDENTITY_LEN];
    bytes[..16].copy_from_slice(&identity.instance.to_bytes());
    bytes[16..].copy_from_slice(&identity.id.to_bytes());
    bytes
}

/// What [`encode_identity`] wrote.
pub(super) fn decode_identity(bytes: &[u8; IDENTITY_LEN]) -> Identity {
    let (mut instance, mut id) = ([0; 16], [0; 16]);
    instance.copy_from_slice(&bytes[..16]);
    id.copy_from_slice(&bytes[16..]);
    Identity { instance: Instance::from_bytes(instance), id: TransferId::from_bytes(id) }
}

/// How a data request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Done = 0,
    /// Not published, or not wanted; the connection closes.
    Refused = 1,
    /// That put is over; the connection stays.
    Gone = 2,
    /// Another relay lives here; the connection stays.
    OtherInstance = 3,
}

impl Status {
    pub(super) const LEN: usize = 8;
    const MAGIC: u32 = 0x4D43_5456;

    pub(super) fn encode(self) -> [u8; Self::LEN] {
        (u64::from(Self::MAGIC) << 32 | self as u64).to_le_bytes()
    }

    pub(super) fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, FrameError> {
        let word = u64::from_le_bytes(*bytes);
        if (word >> 32) as u32 != Self::MAGIC {
            return Err(FrameError::Magic);
        }
        match word as u32 {
            0 => Ok(Self::Done),
            1 => Ok(Self::Refused),
            2 => Ok(Self::Gone),
            3 => Ok(Self::OtherInstance),
            code => Err(FrameError::Status(code)),
        }
    }
}

/// What an engine says of itself when it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// `host:control port`: where notifications go.
    pub(super) name: String,
    /// `None`: the host by which the peer was opened.
    pub(super) data_host: Option<String>,
    pub(super) data_port: u16,
    /// From 2 on the data port answers by statuses.
    pub(super) version: u32,
    /// The relay behind it, if it is one of ours.
    pub(super) instance: Option<Instance>,
    /// Address and length of what it serves.
    pub(super) buffers: Vec<(u64, u64)>,
}

impl Descriptor {
    /// As JSON text, stamped with the time of now.
    pub(super) fn encode(&self) -> Vec<u8> {
        let buffer = |&(addr, length): &(u64, u64)| -> Value {
            json!({"addr": addr, "length": length, "name": self.name})
        };
        let mut map = Map::new();
        map.insert("buffers".into(), self.buffers.iter().map(buffer).collect());
        map.insert("name".into(), self.name.as_str().into());
        map.insert("protocol".into(), "tcp".into());
        map.insert("rdma_server_name".into(), "".into());
        if let Some(instance) = self.instance {
            let relay = json!({"version": RELAY_VERSION, "instance": instance.to_string()});
            map.insert("relay".into(), relay);
        }
        if let Some(host) = &self.data_host {
            map.insert("tcp_data_host".into(), host.as_str().into());
        }
        map.insert("tcp_data_port".into(), self.data_port.into());
        map.insert("tcp_proto_version".into(), self.version.into());
        map.insert("timestamp".into(), timestamp(SystemTime::now()).into());
        Value::Object(map).to_string().into_bytes()
    }

    /// Every key that we use has its type, or the error names it; other keys are ignored.
    pub(super) fn parse(json: &[u8]) -> Result<Self, FrameError> {
        let map = match serde_json::from_slice(json).map_err(not_json)? {
            Value::Object(map) => map,
            Value::Null => return Err(FrameError::NotReady),
            _ => return Err(FrameError::Json("a descriptor is an object".to_owned())),
        };
        match map.get("protocol") {
            Some(Value::String(protocol)) if protocol == "tcp" => {}
            Some(Value::String(_)) => return Err(key("protocol", "only \"tcp\" is spoken here")),
            _ => return Err(key("protocol", "must be a string")),
        }
        let name = text(&map, "name")?.ok_or_else(|| key("name", "must not be empty"))?;
        let data_port = match map.get("tcp_data_port").and_then(Value::as_u64) {
            Some(port @ 1..=0xffff) => port as u16,
            _ => return Err(key("tcp_data_port", "must be a port number")),
        };
        let version = match map.get("tcp_proto_version") {
            None => 1,
            Some(version) => version
                .as_u64()
                .and_then(|version| version.try_into().ok())
                .ok_or_else(|| key("tcp_proto_version", "must be a small number"))?,
        };
        let data_host = text(&map, "tcp_data_host")?;
        Ok(Self {
            name,
            data_host,
            data_port,
            version,
            instance: instance(&map)?,
            buffers: buffers(&map)?,
        })
    }
}

/// Appends the body of a notification to `out`.
pub(super) fn encode_notification(note: &Notification, out: &mut Vec<u8>) {
    let body = Told { name: note.name(), notify_msg: note.message(), reason: note.reason() };
    serde_json::to_writer(out, &body).expect("texts have a form in JSON, and a Vec takes all");
}

/// The notification in `json`: an object of texts; a missing one is empty.
pub(super) fn parse_notification(json: &[u8]) -> Result<Notification, FrameError> {
    // serde would take an array of two texts as well.
    if json.trim_ascii_start().first() != Some(&b'{') {
        return Err(FrameError::Json("a notification is an object".to_owned()));
    }
    let with_reason = serde_json::from_slice::<Heard<'_, String>>(json);
    match with_reason {
        Ok(body) => Ok(Notification::new(&body.name, &body.notify_msg).because(&body.reason)),
        // Somebody else's key of that name says nothing to us.
        Err(_) => serde_json::from_slice::<Heard<'_, IgnoredAny>>(json)
            .map(|body| Notification::new(&body.name, &body.notify_msg))
            .map_err(not_json),
    }
}

#[derive(Serialize)]
struct Told<'a> {
    name: &'a str,
    notify_msg: &'a str,
    /// Ours: real engines ignore it.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

#[derive(Deserialize)]
struct Heard<'a, R> {
    #[serde(borrow, default)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    notify_msg: Cow<'a, str>,
    #[serde(default)]
    reason: R,
}

const RELAY_VERSION: u64 = 1;

fn key(key: &'static str, reason: &'static str) -> FrameError {
    FrameError::Key { key, reason }
}

fn not_json(error: serde_json::Error) -> FrameError {
    FrameError::Json(error.to_string())
}

/// The text under `name`; `None` if it is empty or not there.
fn text(map: &Map<String, Value>, name: &'static str) -> Result<Option<String>, FrameError> {
    match map.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok((!text.is_empty()).then(|| text.clone())),
        Some(_) => Err(key(name, "must be a string")),
    }
}

/// A relay of a version that we do not know is used as a plain Mooncake peer.
fn instance(map: &Map<String, Value>) -> Result<Option<Instance>, FrameError> {
    let relay = match map.get("relay") {
        None => return Ok(None),
        Some(Value::Object(relay)) => relay,
        Some(_) => return Err(key("relay", "must be an object")),
    };
    match relay.get("version").and_then(Value::as_u64) {
        Some(RELAY_VERSION) => {}
        Some(_) => return Ok(None),
        None => return Err(key("version", "must be a number")),
    }
    let instance = relay.get("instance").and_then(Value::as_str).and_then(|hex| hex.parse().ok());
    let wrong = || key("instance", "must be 32 lower-case hexadecimal digits");
    instance.map(Some).ok_or_else(wrong)
}

fn buffers(map: &Map<String, Value>) -> Result<Vec<(u64, u64)>, FrameError> {
    let list = match map.get("buffers") {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(key("buffers", "must be an array")),
    };
    let number = |buffer: &Value, name| match buffer.get(name).and_then(Value::as_u64) {
        Some(value) if value > 0 => Ok(value),
        _ => Err(key(name, "must be a number above zero")),
    };
    let pair = |buffer| Ok((number(buffer, "addr")?, number(buffer, "length")?));
    list.iter().map(pair).collect()
}

/// `YYYY-MM-DD HH:MM:SS.ffffff`, in UTC.
fn timestamp(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Counts from 1 March of year 0, so that a leap day ends its year.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let march_based = (5 * day + 2) / 153;
    let day = day - (153 * march_based + 2) / 5 + 1;
    let month = if march_based < 10 { march_based + 3 } else { march_based - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    let micros = since.subsec_micros();
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{micros:06}")
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
