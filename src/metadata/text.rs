//! The JSON text of metadata, written straight: it is on the way of every transfer, and serde takes four
//! times as long. A test holds that both write the same.

use std::fmt;

use super::{Inner, Metadata};
use crate::{
    engine::{Identity, Stamp},
    identity::Hex,
};

/// As long as that of a relay of ours mostly is, so that it does not grow.
const USUAL: usize = 768;

impl fmt::Display for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Text(Vec::with_capacity(USUAL));
        text.all(self.inner())?;
        f.write_str(str::from_utf8(&text.0).map_err(|_| fmt::Error)?)
    }
}

/// Bytes, which are looked at once, when all are there.
struct Text(Vec<u8>);

impl Text {
    fn all(&mut self, inner: &Inner) -> fmt::Result {
        let Inner { engine_id, protocol, transfer_id, remote, tensor, .. } = inner;
        self.raw("{");
        if let Some(engine_id) = engine_id {
            self.text("\"engine_id\":", engine_id)?;
            self.raw(",");
        }
        self.text("\"session_id\":", &remote.peer)?;
        if let Some(protocol) = protocol {
            self.text(",\"protocol\":", protocol)?;
        }
        self.text(",\"transfer_id\":", transfer_id)?;
        self.number(",\"mooncake\":{\"buffer_ptr\":", remote.ptr);
        if let Some(device_id) = inner.device_id {
            let sign = if device_id < 0 { "-" } else { "" };
            self.raw(",\"device_id\":");
            self.number(sign, device_id.unsigned_abs());
        }
        self.number("},\"transfer_info\":{\"size\":", remote.len as u64);
        self.raw(",\"shape\":[");
        for (n, axis) in tensor.shape.iter().enumerate() {
            self.number(if n == 0 { "" } else { "," }, *axis);
        }
        self.text("],\"dtype\":", tensor.dtype.name())?;
        if let Some(credit_id) = inner.credit_id {
            self.number(",\"credit_id\":", credit_id);
        }
        self.raw("}");
        if let (Some(identity), Some(stamp), Some(lease_ms)) =
            (remote.identity, remote.stamp, inner.lease_ms)
        {
            self.relay(identity, stamp, lease_ms, remote.local.as_deref())?;
        }
        self.raw("}");
        Ok(())
    }

    fn relay(
        &mut self,
        Identity { instance, id }: Identity,
        Stamp { ptr, value }: Stamp,
        lease_ms: u64,
        local: Option<&str>,
    ) -> fmt::Result {
        self.number(",\"relay\":{\"version\":", super::VERSION);
        self.digits(",\"instance\":\"", Hex::of(instance.to_bytes()).as_bytes());
        self.number("\",\"slot\":", id.slot.into());
        self.number(",\"generation\":", id.generation.into());
        self.digits(",\"stamp\":\"", Hex::of(value.to_be_bytes()).as_bytes());
        let ptr = Hex::of(ptr.to_be_bytes());
        self.digits("\",\"stamp_ptr\":\"0x", ptr.without_zeros());
        self.number("\",\"lease_ms\":", lease_ms);
        if let Some(socket) = local {
            self.text(",\"local\":{\"socket\":", socket)?;
            self.raw("}");
        }
        self.raw("}");
        Ok(())
    }

    fn raw(&mut self, text: &str) {
        self.0.extend_from_slice(text.as_bytes());
    }

    fn digits(&mut self, before: &str, digits: &[u8]) {
        self.raw(before);
        self.0.extend_from_slice(digits);
    }

    fn number(&mut self, before: &str, mut number: u64) {
        let mut digits = [0; 20]; // as many as the highest has
        let mut first = digits.len();
        loop {
            first -= 1;
            digits[first] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                break;
            }
        }
        self.digits(before, &digits[first..]);
    }

    fn text(&mut self, before: &str, text: &str) -> fmt::Result {
        self.raw(before);
        // No early end: so it is done many bytes at a time.
        let escapes = |byte: u8| byte < b' ' || byte == b'"' || byte == b'\\';
        if text.bytes().fold(false, |any, byte| any | escapes(byte)) {
            self.raw(&serde_json::to_string(text).map_err(|_| fmt::Error)?);
        } else {
            self.raw("\"");
            self.raw(text);
            self.raw("\"");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_text_is_what_serde_writes() {
        let id = "00000000000000000000000700000009";
        let bare = json!({"session_id": "h:1", "transfer_id": "t", "mooncake": {"buffer_ptr": 0},
            "transfer_info": {"size": 0}});
        let odd = json!({"engine_id": "ü \"\\ /", "session_id": "[::1]:1", "protocol": "\"\\",
            "transfer_id": format!("ü\"_{id}"),
            "mooncake": {"buffer_ptr": u64::MAX - 12, "device_id": i64::MIN},
            "transfer_info": {"size": 12, "shape": [], "dtype": "torch.ü\"", "credit_id": u64::MAX}});
        let mut full = odd.clone();
        full["transfer_info"]["shape"] = json!([2, 0, u64::MAX]);
        full["relay"] = json!({"version": 1, "instance": "0".repeat(31) + "a", "slot": 7,
            "generation": 9, "stamp": "00000000000000ab", "stamp_ptr": "0x10",
            "lease_ms": u64::MAX, "local": {"socket": "a\"b"}});
        let mut elsewhere = full.clone();
        elsewhere["relay"]["local"] = json!(null);
        for value in [bare, odd, full, elsewhere] {
            let text = value.to_string();
            let metadata: Metadata = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(metadata.to_string(), serde_json::to_string(&metadata).unwrap());
            assert_eq!(metadata.to_string().parse::<Metadata>().unwrap(), metadata);
        }
    }
}
