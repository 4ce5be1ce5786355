//! Bytes that tell whose they are.

use super::Random;

/// Bytes of which each round has a window of its own.
pub(crate) struct Pattern(Vec<u8>);

impl Pattern {
    const WINDOWS: usize = 4096;

    /// For payloads of up to `most` bytes.
    pub(crate) fn new(random: &mut Random, most: usize) -> Self {
        Self(
            (0..(most + Self::WINDOWS) / 8 + 1).flat_map(|_| random.next().to_ne_bytes()).collect(),
        )
    }

    pub(crate) fn of(&self, round: usize, len: usize) -> &[u8] {
        &self.0[round % Self::WINDOWS..][..len]
    }
}

/// A destination between two guards, all filled with a byte that no test sends in rows.
pub(crate) struct Canary(Vec<u8>);

impl Canary {
    const GUARD: usize = 64;
    const BYTE: u8 = 0xC7;

    pub(crate) fn new(len: usize) -> Self {
        Self(vec![Self::BYTE; len + 2 * Self::GUARD])
    }

    /// The destination, to be written. The guards are looked at first.
    #[track_caller]
    pub(crate) fn dest(&mut self) -> &mut [u8] {
        self.is_guarded();
        let end = self.0.len() - Self::GUARD;
        &mut self.0[Self::GUARD..end]
    }

    /// Nobody has written a byte of it.
    #[track_caller]
    pub(crate) fn is_untouched(&self) {
        assert!(self.0.iter().all(|byte| *byte == Self::BYTE), "the destination was written");
    }

    /// It holds these bytes, and nobody wrote before or behind it.
    #[track_caller]
    pub(crate) fn holds(&self, expected: &[u8]) {
        self.is_guarded();
        let found = &self.0[Self::GUARD..self.0.len() - Self::GUARD];
        assert!(found == expected, "bytes of something else");
    }

    #[track_caller]
    fn is_guarded(&self) {
        let (before, after) = (&self.0[..Self::GUARD], &self.0[self.0.len() - Self::GUARD..]);
        assert!(before.iter().chain(after).all(|byte| *byte == Self::BYTE), "written outside");
    }
}
