//! The two messages of a meeting: who wants to read from whom, and what that one lends.

use crate::engine::Instance;

/// Its last byte is of how the shared pages are laid out: who knows another layout goes by TCP.
const MAGIC: &[u8; 8] = b"mnckrly2";
const VERSION: u32 = 1;
/// Of an answer whose slots are on a device: who knows nothing of such goes by TCP.
const DEVICE_VERSION: u32 = 2;

/// From the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Who reads.
    pub(super) reader: Instance,
    /// From whom it would read.
    pub(super) wanted: Instance,
}

/// From the owner of the slots, with descriptors of: the slots (if they are a file), the shelf's lines,
/// the doorbell's page and the pair's region. Its session id follows, so that nobody takes one relay's
/// address for another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) owner: Instance,
    /// Where it has its slots, how many bytes they are, and how many of them there are.
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) slots: u32,
    pub(super) lends: Lends,
}

/// How the slots are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lends {
    /// A memfd of that length.
    File(u64),
    /// Memory of the device of that uuid, by that handle; without one nobody else can map it.
    Device { uuid: [u8; 16], handle: Option<[u8; 64]> },
}

impl Hello {
    pub(super) const LEN: usize = 44;

    pub(super) fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..28].copy_from_slice(&self.reader.to_bytes());
        bytes[28..].copy_from_slice(&self.wanted.to_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let rest = versioned(bytes, VERSION, Self::LEN)?;
        let (reader, wanted) = rest.split_first_chunk()?;
        Some(Self {
            reader: Instance::from_bytes(*reader),
            wanted: Instance::from_bytes(*wanted.first_chunk()?),
        })
    }
}

impl Answer {
    const LEN: usize = 56;
    const DEVICE_LEN: usize = 132;

    pub(super) fn encode(&self, session: &str) -> Vec<u8> {
        let version = match self.lends {
            Lends::File(_) => VERSION,
            Lends::Device { .. } => DEVICE_VERSION,
        };
        let mut bytes = Vec::with_capacity(Self::DEVICE_LEN + session.len());
        bytes.extend(MAGIC);
        bytes.extend(version.to_le_bytes());
        bytes.extend(self.owner.to_bytes());
        bytes.extend(self.slots.to_le_bytes());
        bytes.extend(self.base.to_le_bytes());
        bytes.extend(self.len.to_le_bytes());
        match self.lends {
            Lends::File(file) => bytes.extend(file.to_le_bytes()),
            Lends::Device { uuid, handle } => {
                bytes.extend(uuid);
                bytes.extend(u32::from(handle.is_some()).to_le_bytes());
                bytes.extend(handle.unwrap_or([0; 64]));
            }
        }
        bytes.extend(session.as_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8], session: &str) -> Option<Self> {
        let bytes = bytes.strip_suffix(session.as_bytes())?;
        let (rest, on_device) = match versioned(bytes, VERSION, Self::LEN) {
            Some(rest) => (rest, false),
            None => (versioned(bytes, DEVICE_VERSION, Self::DEVICE_LEN)?, true),
        };
        let (owner, rest) = rest.split_first_chunk()?;
        let (slots, rest) = rest.split_first_chunk()?;
        let (base, rest) = rest.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let lends = if on_device {
            let (uuid, rest) = rest.split_first_chunk()?;
            let (has_handle, handle) = rest.split_first_chunk()?;
            let handle = match u32::from_le_bytes(*has_handle) {
                0 => None,
                1 => Some(*handle.first_chunk()?),
                _ => return None,
            };
            Lends::Device { uuid: *uuid, handle }
        } else {
            Lends::File(u64::from_le_bytes(*rest.first_chunk()?))
        };
        Some(Self {
            owner: Instance::from_bytes(*owner),
            slots: u32::from_le_bytes(*slots),
            base: u64::from_le_bytes(*base),
            len: u64::from_le_bytes(*len),
            lends,
        })
    }
}

/// What follows magic and version, if the message is that long and of that version.
fn versioned(bytes: &[u8], version: u32, len: usize) -> Option<&[u8]> {
    let rest = bytes.strip_prefix(MAGIC)?.strip_prefix(&version.to_le_bytes())?;
    (bytes.len() == len).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_messages_read_as_they_were_written_and_no_other_length_does() {
        let (reader, wanted) = (Instance::from_bytes([1; 16]), Instance::from_bytes([2; 16]));
        let hello = Hello { reader, wanted };
        for lends in [
            Lends::File(u64::MAX),
            Lends::Device { uuid: [3; 16], handle: Some([4; 64]) },
            Lends::Device { uuid: [3; 16], handle: None },
        ] {
            let answer = Answer { owner: wanted, base: 0x7000, len: 8192, slots: 2, lends };
            let whole = answer.encode("a:1");
            assert_eq!(Answer::decode(&whole, "a:1"), Some(answer));
            assert_eq!(Answer::decode(&whole, "a:2"), None);
            for len in 0..whole.len() {
                assert_eq!(Answer::decode(&whole[..len], "a:1"), None, "{len}");
            }
        }
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        let mut later = hello.encode();
        later[8] = 2;
        assert_eq!(Hello::decode(&later), None);
    }
}
