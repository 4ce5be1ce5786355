//! What a peer has registered, as it tells whoever asks.
//!
//! A real engine answers a read of anything else by closing the connection, and pauses for a second
//! once its few connections to a peer are closed: other reads from that peer fail or wait. So a range
//! that the peer does not have is refused here, and never asked for.

use std::{
    io::{self, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    time::{Duration, Instant},
};

use serde::{Deserialize, de::IgnoredAny};

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges {
    /// Sorted, and none overlaps another.
    all: Vec<(u64, u64)>,
    /// It is a relay that serves of them only what is published.
    guarded: bool,
}

/// For all of it: the peer has just answered the same question, and may be busy. Whoever waits for the
/// answer has a deadline of his own.
const LIMIT: Duration = Duration::from_secs(20);
/// The longest frame that an engine takes by default.
const LONGEST: u64 = 1 << 20;
/// A question for the descriptor: the length of what follows, its type, and any JSON.
const QUESTION: &[u8] = b"\x03\0\0\0\0\0\0\0\x01{}";

#[derive(Deserialize)]
struct Descriptor {
    #[serde(default)]
    buffers: Vec<Buffer>,
    relay: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Buffer {
    addr: u64,
    length: u64,
}

impl Ranges {
    /// Asks the peer at `address`, `host:port`. Blocks.
    pub(super) fn ask(address: &str) -> io::Result<Self> {
        let deadline = Instant::now() + LIMIT;
        let left = || {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
        };
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for socket in address.to_socket_addrs()?.take(8) {
            match TcpStream::connect_timeout(&socket, left()?) {
                Ok(mut stream) => {
                    stream.set_write_timeout(Some(left()?))?;
                    stream.write_all(QUESTION)?;
                    return Self::decode(&answer(&mut stream, left)?);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn decode(json: &[u8]) -> io::Result<Self> {
        // An array would do for serde: its elements in the order of the fields.
        if json.trim_ascii_start().first() != Some(&b'{') {
            return Err(io::Error::other("it is no JSON object"));
        }
        let descriptor: Descriptor = serde_json::from_slice(json).map_err(io::Error::other)?;
        let mut ranges: Vec<_> =
            descriptor.buffers.iter().map(|buffer| (buffer.addr, buffer.length)).collect();
        ranges.sort_unstable();
        Ok(Self { all: ranges, guarded: descriptor.relay.is_some() })
    }

    /// Whether `len` bytes at `addr` lie in one of them.
    pub(super) fn contain(&self, addr: u64, len: usize) -> bool {
        let next = self.all.partition_point(|(start, _)| *start <= addr);
        let Some((start, length)) = next.checked_sub(1).and_then(|at| self.all.get(at)) else {
            return false;
        };
        length.checked_sub(addr - start).is_some_and(|room| len as u64 <= room)
    }

    /// Where anybody may read `len` bytes at any time.
    pub(super) fn open_to_all(&self, len: u64) -> Option<u64> {
        let (addr, _) = *self.all.iter().find(|(_, length)| *length >= len)?;
        (!self.guarded).then_some(addr)
    }
}

/// One frame, read to its end by the time that is left.
fn answer(stream: &mut TcpStream, left: impl Fn() -> io::Result<Duration>) -> io::Result<Vec<u8>> {
    let mut read = |buffer: &mut [u8]| {
        let mut filled = 0;
        while filled < buffer.len() {
            stream.set_read_timeout(Some(left()?))?;
            match stream.read(&mut buffer[filled..]) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                Ok(more) => filled += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let silent = format!("no answer in {LIMIT:?}");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, silent));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    };
    let mut head = [0; 9];
    read(&mut head)?;
    let (length, kind) = head.split_at(8);
    let length = length.try_into().map(u64::from_le_bytes).map_err(io::Error::other)?;
    if kind != [1] || !(1..=LONGEST).contains(&length) {
        return Err(io::Error::from(io::ErrorKind::InvalidData));
    }
    let mut json = vec![0; length as usize - 1];
    read(&mut json)?;
    Ok(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_lies_in_one_buffer_or_in_none() {
        let json =
            br#"{"buffers":[{"addr":4096,"length":4096},{"addr":100,"length":10,"name":"x"}]}"#;
        let ranges = Ranges::decode(json).unwrap();
        for (addr, len) in [(4096, 4096), (4096, 1), (8191, 1), (100, 10), (109, 1)] {
            assert!(ranges.contain(addr, len), "{addr} {len}");
        }
        for (addr, len) in [(4095, 2), (4096, 4097), (8192, 1), (0, 1), (99, 1), (109, 2)] {
            assert!(!ranges.contain(addr, len), "{addr} {len}");
        }
        assert!(!ranges.contain(u64::MAX, usize::MAX));
        assert_eq!((ranges.open_to_all(8), ranges.open_to_all(8192)), (Some(100), None));
        let ours = br#"{"buffers":[{"addr":4096,"length":4096}],"relay":{"version":1}}"#;
        assert_eq!(Ranges::decode(ours).unwrap().open_to_all(8), None);
        assert!(!Ranges::default().contain(0, 0));
    }

    #[test]
    fn a_descriptor_that_is_none_is_an_error() {
        for json in ["null", "[]", "", "{\"buffers\":{}}", "{\"buffers\":[{\"addr\":-1}]}", "1"] {
            assert!(Ranges::decode(json.as_bytes()).is_err(), "{json}");
        }
        assert_eq!(Ranges::decode(b"{}").unwrap(), Ranges::default());
    }
}
