//! The two messages of a meeting: who wants to read from whom, and what that one lends.

use crate::engine::Instance;

const MAGIC: &[u8; 8] = b"mnckrly\n";
const VERSION: u32 = 1;

/// From the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Who reads.
    pub(super) reader: Instance,
    /// From whom it would read.
    pub(super) wanted: Instance,
}

/// From the owner of the slots, with descriptors of: the slots, the shelf's lines, the doorbell's
/// page and the pair's region. Its session id follows, so that nobody takes one relay's address for
/// another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) owner: Instance,
    /// Where it has its slots, how many bytes they are, and how many of them there are.
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) slots: u32,
    /// The length of their memfd.
    pub(super) file: u64,
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
        let rest = versioned(bytes, Self::LEN)?;
        let (reader, wanted) = rest.split_first_chunk()?;
        Some(Self {
            reader: Instance::from_bytes(*reader),
            wanted: Instance::from_bytes(*wanted.first_chunk()?),
        })
    }
}

impl Answer {
    pub(super) const LEN: usize = 56;

    pub(super) fn encode(&self, session: &str) -> Vec<u8> {
        let mut bytes = vec![0; Self::LEN];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..28].copy_from_slice(&self.owner.to_bytes());
        bytes[28..32].copy_from_slice(&self.slots.to_le_bytes());
        for (place, number) in bytes[32..].chunks_mut(8).zip([self.base, self.len, self.file]) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes.extend(session.as_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8], session: &str) -> Option<Self> {
        let bytes = bytes.strip_suffix(session.as_bytes())?;
        let rest = versioned(bytes, Self::LEN)?;
        let (owner, rest) = rest.split_first_chunk()?;
        let (slots, rest) = rest.split_first_chunk()?;
        let (base, rest) = rest.split_first_chunk()?;
        let (len, file) = rest.split_first_chunk()?;
        Some(Self {
            owner: Instance::from_bytes(*owner),
            base: u64::from_le_bytes(*base),
            len: u64::from_le_bytes(*len),
            slots: u32::from_le_bytes(*slots),
            file: u64::from_le_bytes(*file.first_chunk()?),
        })
    }
}

/// What follows magic and version, if the message is that long and of this version.
fn versioned(bytes: &[u8], len: usize) -> Option<&[u8]> {
    let rest = bytes.strip_prefix(MAGIC)?.strip_prefix(&VERSION.to_le_bytes())?;
    (bytes.len() == len).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_messages_read_as_they_were_written_and_no_other_length_does() {
        let (reader, wanted) = (Instance::from_bytes([1; 16]), Instance::from_bytes([2; 16]));
        let hello = Hello { reader, wanted };
        let answer = Answer { owner: wanted, base: 0x7000, len: 8192, slots: 2, file: u64::MAX };
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        let whole = answer.encode("a:1");
        assert_eq!(Answer::decode(&whole, "a:1"), Some(answer));
        assert_eq!(Answer::decode(&whole, "a:2"), None);
        for len in 0..whole.len() {
            assert_eq!(Answer::decode(&whole[..len], "a:1"), None, "{len}");
        }
        let mut later = hello.encode();
        later[8] = 2;
        assert_eq!(Hello::decode(&later), None);
    }
}
