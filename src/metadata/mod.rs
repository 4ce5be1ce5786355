//! What a sender tells a receiver of one put: JSON from outside, checked once, here.

mod json;
mod text;
mod walk;

use std::{fmt, sync::Arc, time::Duration};

use arrayvec::ArrayString;

use crate::{
    engine::{Identity, Instance, RemoteBuffer, Stamp},
    gets::Described,
    identity::Hex,
    tensor::Tensor,
};

/// Describes one put, so that a receiver can get it.
///
/// It travels as JSON text, over any channel: [`Display`](fmt::Display) writes it, and
/// [`FromStr`](std::str::FromStr) or serde reads it. Whoever has it can read the bytes and end the
/// put, so `Debug` hides the ids. A clone shares what it holds.
///
/// Reading checks every field: what comes out can be handed to `get` as it is. Unknown keys are
/// ignored; a key that appears twice, text of more than 64 KiB and JSON of more than 128 levels are
/// refused. The keys are those of the Python relay, and `relay`, which that ignores: the identity.
///
/// ```
/// use mooncake_relay::Metadata;
///
/// // What the Python relay sends; only these four are needed.
/// let text = r#"{"session_id": "127.0.0.1:15708", "transfer_id": "stage0_f38df03d",
///     "mooncake": {"buffer_ptr": 140333700214848}, "transfer_info": {"size": 12}}"#;
/// let metadata: Metadata = text.parse()?;
/// assert_eq!(metadata.size(), 12);
/// assert_eq!(metadata.to_string().parse::<Metadata>()?, metadata);
/// # Ok::<(), mooncake_relay::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Metadata(Arc<Inner>);

#[derive(PartialEq, Eq)]
struct Inner {
    engine_id: Option<Arc<str>>,
    protocol: Option<Arc<str>>,
    transfer_id: Arc<str>,
    remote: RemoteBuffer,
    device_id: Option<i64>,
    credit_id: Option<u64>,
    tensor: Tensor,
    /// Whole milliseconds, as they travel, so that reading gives what was written.
    lease_ms: Option<u64>,
}

/// What a relay knows of a put that it has published.
#[derive(Debug)]
pub(crate) struct Put {
    /// At most 94 bytes, as [`Config::check`](crate::Config) sees to.
    pub(crate) engine_id: Arc<str>,
    pub(crate) session_id: Arc<str>,
    pub(crate) protocol: Arc<str>,
    pub(crate) identity: Identity,
    /// The address of the first byte.
    pub(crate) ptr: u64,
    pub(crate) len: usize,
    /// The slot's offset in its pool.
    pub(crate) credit_id: u64,
    pub(crate) device_id: i64,
    pub(crate) stamp: Stamp,
    /// Where the engine is found on its host.
    pub(crate) local: Option<Arc<str>>,
    pub(crate) lease: Duration,
    /// Known to [fit](Tensor::fits).
    pub(crate) tensor: Tensor,
}

/// Of the key `relay`.
const VERSION: u64 = 1;

/// The longest name of a transfer that we make; [`Notification`](crate::Notification) keeps as
/// much without allocation.
const MAX_NAME: usize = 127;

impl Metadata {
    pub(crate) fn of_put(put: Put) -> Self {
        let mut transfer_id = ArrayString::<MAX_NAME>::new();
        let digits = Hex::of(put.identity.id.to_bytes());
        for part in [&put.engine_id, "_", digits.as_str()] {
            transfer_id.push_str(part); // an engine id of 94 bytes leaves room for 33
        }
        Self(Arc::new(Inner {
            engine_id: Some(put.engine_id),
            protocol: Some(put.protocol),
            transfer_id: transfer_id.as_str().into(),
            remote: RemoteBuffer {
                peer: put.session_id,
                ptr: put.ptr,
                len: put.len,
                identity: Some(put.identity),
                stamp: Some(put.stamp),
                local: put.local,
            },
            device_id: Some(put.device_id),
            credit_id: Some(put.credit_id),
            tensor: put.tensor,
            lease_ms: Some(u64::try_from(put.lease.as_millis()).unwrap_or(u64::MAX)),
        }))
    }

    /// The sender's name for itself.
    ///
    /// ```
    /// # use mooncake_relay::*; let engine = InProcessEngine::new("doc-metadata")?;
    /// # let config = Config::default().with_slot_size(4096).with_engine_id("stage0");
    /// # let relay = Relay::new(std::sync::Arc::new(engine), &config)?;
    /// let (metadata, _put) = relay.put_bytes(&[0; 12], Tensor::new(DType::Bfloat16, [2, 3]))?;
    /// assert_eq!((metadata.engine_id(), metadata.protocol()), (Some("stage0"), Some("inprocess")));
    /// assert!(metadata.transfer_id().starts_with("stage0_") && metadata.size() == 12);
    /// assert_eq!(metadata.tensor().shape, [2, 3]);
    /// assert_eq!(metadata.lease(), Some(config.lease));
    /// assert_eq!(metadata.instance().expect("a relay's").to_string(), relay.health().instance);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn engine_id(&self) -> Option<&str> {
        self.0.engine_id.as_deref()
    }

    /// Where the sender's engine is reached: `host:port`.
    pub fn session_id(&self) -> &str {
        &self.0.remote.peer
    }

    /// The sender's transport: `"tcp"`, `"rdma"`, …
    pub fn protocol(&self) -> Option<&str> {
        self.0.protocol.as_deref()
    }

    /// The transfer's name, by which a receiver acknowledges it. Whoever knows it can end the put:
    /// keep it out of logs.
    pub fn transfer_id(&self) -> &str {
        &self.0.transfer_id
    }

    /// The number of bytes: the length of the slot that was put.
    pub fn size(&self) -> usize {
        self.0.remote.len
    }

    /// What the bytes are; plain bytes if the sender did not give both a type and a shape.
    pub fn tensor(&self) -> &Tensor {
        &self.0.tensor
    }

    /// The ordinal of the sender's device; 0 is also the host.
    pub fn device_id(&self) -> Option<i64> {
        self.0.device_id
    }

    /// The offset of the slot in the sender's pool.
    pub fn credit_id(&self) -> Option<u64> {
        self.0.credit_id
    }

    /// How long the sender keeps the bytes, from the put on, in whole milliseconds; `None` from a
    /// Python relay. For information: clocks are not compared.
    pub fn lease(&self) -> Option<Duration> {
        self.0.lease_ms.map(Duration::from_millis)
    }

    /// Which relay put it; `None` from a Python relay, which has no such name.
    pub fn instance(&self) -> Option<Instance> {
        self.0.remote.identity.map(|identity| identity.instance)
    }

    /// What a get needs of it, to be kept.
    pub(crate) fn described(&self) -> Arc<dyn Described> {
        Arc::<Inner>::clone(&self.0)
    }

    fn inner(&self) -> &Inner {
        &self.0
    }

    /// What to read.
    pub(crate) fn remote(&self) -> &RemoteBuffer {
        &self.0.remote
    }
}

impl Described for Inner {
    fn remote(&self) -> &RemoteBuffer {
        &self.remote
    }

    fn name(&self) -> &str {
        &self.transfer_id
    }
}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metadata")
            .field("engine_id", &self.0.engine_id)
            .field("protocol", &self.0.protocol)
            .field("remote", &self.0.remote) // hides the id and the stamp
            .field("tensor", &self.0.tensor)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{engine::TransferId, tensor::DType};

    #[test]
    fn the_metadata_of_a_put_reads_as_it_was_written() {
        let id = TransferId { random: 0xfeed_0000_0000_0001, slot: 1, generation: 7 };
        let engine_id = "e".repeat(94);
        let put = Put {
            engine_id: engine_id.as_str().into(),
            session_id: "[::1]:15708".into(),
            protocol: "tcp".into(),
            identity: Identity { instance: Instance::from_bytes([0xab; 16]), id },
            ptr: 0x7f00_0000_1000,
            len: 12,
            credit_id: 4096,
            device_id: 0,
            stamp: Stamp { ptr: 0x7f00_1000_0008, value: 0xdead_beef },
            local: Some("mooncake-relay-abab".into()),
            lease: Duration::MAX,
            tensor: Tensor::new(DType::Bfloat16, [2, 3]),
        };
        let metadata = Metadata::of_put(put);
        let name = format!("{engine_id}_feed0000000000010000000100000007");
        assert_eq!(metadata.transfer_id(), name);
        let read = metadata.to_string().parse::<Metadata>().unwrap();
        assert_eq!(read, metadata);
        assert_eq!(read.remote(), metadata.remote());
        assert_eq!(read.lease(), Some(Duration::from_millis(u64::MAX)));
        let shown = format!("{metadata:?}");
        for secret in ["feed", "deadbeef", &0xdead_beef_u32.to_string()] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }
}
