//! The JSON that the Python relay speaks, and our one key more.
//!
//! Reading is one pass: a [`Walk`] takes the value of each key to its place in [`Raw`], and
//! [`Raw::check`] makes metadata of that.

use std::{cell::Cell, str::FromStr, sync::Arc};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{DeserializeSeed, Error as _, MapAccess},
};

use super::{
    Inner, Metadata, VERSION,
    walk::{Entry, Hint, Object, Text, WHOLE, Walk},
};
use crate::{
    engine::{Identity, Instance, RemoteBuffer, Stamp, TransferId},
    error::{Error, Result},
    identity::{Hex, hex},
    tensor::{DType, Tensor},
};

const MAX_TEXT: usize = 64 * 1024;
/// A host's name has at most 253 bytes, to which a port and brackets come.
const MAX_SESSION_ID: usize = 300;
const MAX_NAME: usize = 255;
const MAX_PROTOCOL: usize = 64;
/// What the name of an abstract socket has at most.
const MAX_SOCKET: usize = 107;
const MAX_REASON: usize = 200;

impl Serialize for Metadata {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Inner { remote, tensor, lease_ms, .. } = &*self.0;
        let relay = match (remote.identity, remote.stamp, *lease_ms) {
            (Some(Identity { instance, id }), Some(stamp), Some(lease_ms)) => Some(WireRelay {
                version: VERSION,
                instance,
                slot: id.slot,
                generation: id.generation,
                stamp: stamp.value,
                stamp_ptr: stamp.ptr,
                lease_ms,
                local: remote.local.as_deref().map(|socket| WireLocal { socket }),
            }),
            _ => None,
        };
        Wire {
            engine_id: self.engine_id(),
            session_id: self.session_id(),
            protocol: self.protocol(),
            transfer_id: self.transfer_id(),
            mooncake: WireBuffer { buffer_ptr: remote.ptr, device_id: self.device_id() },
            transfer_info: WireInfo {
                size: remote.len,
                shape: &tensor.shape,
                dtype: &tensor.dtype,
                credit_id: self.credit_id(),
            },
            relay,
        }
        .serialize(serializer)
    }
}

impl FromStr for Metadata {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.len() > MAX_TEXT {
            let reason = format!("{} bytes of text are more than {MAX_TEXT}", text.len());
            return Err(Error::metadata(WHOLE, reason));
        }
        let key = Cell::new(WHOLE);
        let mut json = serde_json::Deserializer::from_str(text);
        let raw = Walk::<Raw<'_>>::new(&key).deserialize(&mut json);
        raw.and_then(|raw| json.end().map(|()| raw))
            .map_err(|error| {
                let reason = error.to_string();
                // What is not JSON is the whole text's fault. A number too big even for a float is
                // its key's, though serde_json has no category for it.
                let of_key = error.is_data() || reason.starts_with("number out of range");
                Error::metadata(if of_key { key.get() } else { WHOLE }, shortened(reason))
            })?
            .check()
    }
}

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let key = Cell::new(WHOLE);
        Walk::<Raw<'_>>::new(&key)
            .deserialize(deserializer)
            .map_err(|error| Error::metadata(key.get(), shortened(error.to_string())))
            .and_then(Raw::check)
            .map_err(D::Error::custom)
    }
}

#[derive(Serialize)]
struct Wire<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    engine_id: Option<&'a str>,
    session_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<&'a str>,
    transfer_id: &'a str,
    mooncake: WireBuffer,
    transfer_info: WireInfo<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    relay: Option<WireRelay<'a>>,
}

#[derive(Serialize)]
struct WireBuffer {
    buffer_ptr: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_id: Option<i64>,
}

#[derive(Serialize)]
struct WireInfo<'a> {
    size: usize,
    shape: &'a [u64],
    dtype: &'a DType,
    #[serde(skip_serializing_if = "Option::is_none")]
    credit_id: Option<u64>,
}

/// The version comes first, so that a later one is refused for what it is.
#[derive(Serialize)]
struct WireRelay<'a> {
    version: u64,
    #[serde(serialize_with = "as_text")]
    instance: Instance,
    slot: u32,
    generation: u32,
    #[serde(serialize_with = "as_hex")]
    stamp: u64,
    #[serde(serialize_with = "as_pointer")]
    stamp_ptr: u64,
    lease_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    local: Option<WireLocal<'a>>,
}

#[derive(Serialize)]
struct WireLocal<'a> {
    socket: &'a str,
}

fn as_text<S: Serializer>(value: &Instance, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(Hex::of(value.to_bytes()).as_str())
}

fn as_hex<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(Hex::of(value.to_be_bytes()).as_str())
}

fn as_pointer<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{value:#x}"))
}

/// What stood in the text, each value of its key's type, nothing else checked.
#[derive(Default)]
struct Raw<'a> {
    engine_id: Option<Text<'a>>,
    session_id: Option<Text<'a>>,
    protocol: Option<Text<'a>>,
    transfer_id: Option<Text<'a>>,
    mooncake: Option<RawBuffer>,
    transfer_info: Option<RawInfo>,
    relay: Option<RawRelay<'a>>,
}

#[derive(Default)]
struct RawBuffer {
    buffer_ptr: Option<u64>,
    device_id: Option<i64>,
}

#[derive(Default)]
struct RawInfo {
    size: Option<u64>,
    shape: Option<Vec<u64>>,
    dtype: Option<DType>,
    credit_id: Option<u64>,
}

#[derive(Default)]
struct RawRelay<'a> {
    version: Option<Version>,
    instance: Option<Text<'a>>,
    slot: Option<u32>,
    generation: Option<u32>,
    stamp: Option<Text<'a>>,
    stamp_ptr: Option<Text<'a>>,
    lease_ms: Option<u64>,
    /// Of any shape: only a hint, which a later version may give in another way.
    local: Option<Hint>,
}

/// The only version there is: another is refused before what follows it is looked at.
struct Version;

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u64::deserialize(deserializer)? {
            VERSION => Ok(Self),
            other => Err(D::Error::custom(format_args!(
                "the sender speaks version {other}, this relay only {VERSION}: update the older one"
            ))),
        }
    }
}

impl Raw<'_> {
    fn check(self) -> Result<Metadata> {
        let session_id = required(self.session_id, "session_id")?;
        let session_id = printable(&session_id, "session_id", MAX_SESSION_ID)?;
        let transfer_id = required(self.transfer_id, "transfer_id")?;
        let transfer_id = named(&transfer_id, "transfer_id")?;
        let buffer = required(self.mooncake, "mooncake")?;
        let ptr = required(buffer.buffer_ptr, "buffer_ptr")?;
        let info = required(self.transfer_info, "transfer_info")?;
        let len = sized(required(info.size, "size")?, ptr)?;
        let tensor = match (info.dtype, info.shape) {
            (Some(dtype), Some(shape)) => Tensor { dtype, shape },
            _ => Tensor::bytes(len),
        };
        tensor.fits(len)?;
        let relay = self.relay.map(|relay| relay.check(transfer_id)).transpose()?;
        let engine_id = self.engine_id.as_ref().map(|id| named(id, "engine_id")).transpose()?;
        let protocol = self.protocol.as_ref();
        let protocol =
            protocol.map(|name| printable(name, "protocol", MAX_PROTOCOL)).transpose()?;
        Ok(Metadata(Arc::new(Inner {
            engine_id: engine_id.map(Arc::from),
            protocol: protocol.map(Arc::from),
            transfer_id: transfer_id.into(),
            remote: RemoteBuffer {
                peer: session_id.into(),
                ptr,
                len,
                identity: relay.as_ref().map(|relay| relay.identity),
                stamp: relay.as_ref().map(|relay| relay.stamp),
                local: relay.as_ref().and_then(|relay| relay.local.clone()),
            },
            device_id: buffer.device_id,
            credit_id: info.credit_id,
            tensor,
            lease_ms: relay.map(|relay| relay.lease_ms),
        })))
    }
}

struct Relay {
    identity: Identity,
    stamp: Stamp,
    lease_ms: u64,
    local: Option<Arc<str>>,
}

impl RawRelay<'_> {
    fn check(self, transfer_id: &str) -> Result<Relay> {
        required(self.version, "version")?;
        let instance = required(self.instance, "instance")?.0.parse::<Instance>();
        let instance = instance.map_err(|error| Error::metadata("instance", error.to_string()))?;
        let slot = required(self.slot, "slot")?;
        let generation = required(self.generation, "generation")?;
        let id = TransferId::of_name(transfer_id)
            .filter(|id| (id.slot, id.generation) == (slot, generation))
            .ok_or_else(|| {
                let reason = "does not end in 32 lower-case hexadecimal digits that agree with \
                              relay.slot and relay.generation";
                Error::metadata("transfer_id", reason)
            })?;
        let value = required(self.stamp, "stamp")?.0;
        let value = hex(value.as_bytes())
            .filter(|_| value.len() == 16)
            .ok_or_else(|| Error::metadata("stamp", "not 16 lower-case hexadecimal digits"))?;
        let ptr = required(self.stamp_ptr, "stamp_ptr")?;
        let ptr = ptr.0.strip_prefix("0x").and_then(|digits| hex(digits.as_bytes()));
        let ptr = ptr
            .filter(|&ptr| ptr != 0 && ptr.checked_add(8).is_some())
            .ok_or_else(|| Error::metadata("stamp_ptr", "not the \"0x…\" of eight bytes"))?;
        let lease_ms = required(self.lease_ms, "lease_ms")?;
        let local = self.local.and_then(|local| local.socket).map(|name| Text(name.into()));
        let local = local.as_ref().map(|name| printable(name, "socket", MAX_SOCKET)).transpose()?;
        let (identity, stamp) = (Identity { instance, id }, Stamp { ptr, value });
        Ok(Relay { identity, stamp, lease_ms, local: local.map(Arc::from) })
    }
}

fn required<T>(value: Option<T>, key: &'static str) -> Result<T> {
    value.ok_or_else(|| Error::metadata(key, "is missing"))
}

/// What an address or a keyword is made of.
fn printable<'a>(text: &'a Text<'_>, key: &'static str, max: usize) -> Result<&'a str> {
    if text.0.bytes().all(|b| b.is_ascii_graphic()) {
        return bounded(text, key, max);
    }
    Err(Error::metadata(key, "has a character other than those of ASCII that print"))
}

/// Any words, but nothing that could forge a line of a log.
fn named<'a>(text: &'a Text<'_>, key: &'static str) -> Result<&'a str> {
    // Of ASCII alone, as it mostly is, there is no character to be taken apart.
    let is_odd = |byte: u8| !(b' '..=b'~').contains(&byte);
    if text.0.bytes().fold(false, |any, byte| any | is_odd(byte))
        && text.0.contains(char::is_control)
    {
        return Err(Error::metadata(key, "has a control character"));
    }
    bounded(text, key, MAX_NAME)
}

/// The reason never shows the text: it may be a transfer's name.
fn bounded<'a>(Text(text): &'a Text<'_>, key: &'static str, max: usize) -> Result<&'a str> {
    if text.is_empty() || text.len() > max {
        return Err(Error::metadata(key, format!("has {} bytes, not 1 to {max}", text.len())));
    }
    Ok(text)
}

/// Makes sure that `size` bytes at `ptr` can exist.
fn sized(size: u64, ptr: u64) -> Result<usize> {
    let len = usize::try_from(size).ok().filter(|&len| isize::try_from(len).is_ok());
    let len = len.ok_or_else(|| Error::metadata("size", "is more than any memory"))?;
    if len > 0 && ptr == 0 {
        return Err(Error::metadata("buffer_ptr", "is null"));
    }
    if ptr.checked_add(size).is_none() {
        return Err(Error::metadata("buffer_ptr", format!("{size} bytes there would wrap")));
    }
    Ok(len)
}

/// A hostile text must not come back whole in an error.
fn shortened(reason: String) -> String {
    match reason.char_indices().nth(MAX_REASON) {
        Some((end, _)) => format!("{}…", &reason[..end]),
        None => reason,
    }
}

impl<'de> Object<'de> for Raw<'de> {
    fn take<A: MapAccess<'de>>(&mut self, key: &str, entry: Entry<'_, A>) -> Result<(), A::Error> {
        match key {
            "engine_id" => entry.value("engine_id", &mut self.engine_id),
            "session_id" => entry.value("session_id", &mut self.session_id),
            "protocol" => entry.value("protocol", &mut self.protocol),
            "transfer_id" => entry.value("transfer_id", &mut self.transfer_id),
            "mooncake" => entry.object("mooncake", &mut self.mooncake),
            "transfer_info" => entry.object("transfer_info", &mut self.transfer_info),
            "relay" => entry.object("relay", &mut self.relay),
            _ => entry.skip(),
        }
    }
}

impl<'de> Object<'de> for RawBuffer {
    fn take<A: MapAccess<'de>>(&mut self, key: &str, entry: Entry<'_, A>) -> Result<(), A::Error> {
        match key {
            "buffer_ptr" => entry.value("buffer_ptr", &mut self.buffer_ptr),
            "device_id" => entry.value("device_id", &mut self.device_id),
            _ => entry.skip(),
        }
    }
}

impl<'de> Object<'de> for RawInfo {
    fn take<A: MapAccess<'de>>(&mut self, key: &str, entry: Entry<'_, A>) -> Result<(), A::Error> {
        match key {
            "size" => entry.value("size", &mut self.size),
            "shape" => entry.value("shape", &mut self.shape),
            "dtype" => entry.value("dtype", &mut self.dtype),
            "credit_id" => entry.value("credit_id", &mut self.credit_id),
            _ => entry.skip(),
        }
    }
}

impl<'de> Object<'de> for RawRelay<'de> {
    fn take<A: MapAccess<'de>>(&mut self, key: &str, entry: Entry<'_, A>) -> Result<(), A::Error> {
        match key {
            "version" => entry.value("version", &mut self.version),
            "instance" => entry.value("instance", &mut self.instance),
            "slot" => entry.value("slot", &mut self.slot),
            "generation" => entry.value("generation", &mut self.generation),
            "stamp" => entry.value("stamp", &mut self.stamp),
            "stamp_ptr" => entry.value("stamp_ptr", &mut self.stamp_ptr),
            "lease_ms" => entry.value("lease_ms", &mut self.lease_ms),
            "local" => entry.value("local", &mut self.local),
            _ => entry.skip(),
        }
    }
}
