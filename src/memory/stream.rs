//! Copies whose stores go past the caches: what they write is large and not read again at once.

use std::ptr;

/// A line of the cache, written whole or the store waits for a read.
const LINE: usize = 64;

/// Copies whole lines to an address that is a line's. Ends with a store fence: such stores are in no
/// order with others, and whoever is told of them by an ordinary store must see them.
type Lines = unsafe fn(from: *const u8, to: *mut u8, len: usize);

/// A processor's way to do so.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    lines: Lines,
}

impl Stream {
    /// The widest that this processor has.
    pub(super) fn best() -> Option<Self> {
        Self::all().next()
    }

    /// All that it has, the widest first.
    fn all() -> impl Iterator<Item = Self> {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        let all = [
            is_x86_feature_detected!("avx512f").then_some(Self { lines: x86::avx512 }),
            is_x86_feature_detected!("avx2").then_some(Self { lines: x86::avx2 }),
        ];
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let all = [None];
        all.into_iter().flatten()
    }

    /// Copies `len` bytes.
    ///
    /// # Safety
    ///
    /// As for [`ptr::copy_nonoverlapping`].
    pub(super) unsafe fn copy(self, from: *const u8, to: *mut u8, len: usize) {
        // An unaligned streaming store is a fault, so the ends are copied in the plain way.
        let head = (to.addr().wrapping_neg() % LINE).min(len);
        let body = (len - head) / LINE * LINE;
        let tail = head + body;
        // SAFETY: the first of the `len` bytes, which the caller vouches for.
        unsafe { ptr::copy_nonoverlapping(from, to, head) };
        // SAFETY: the next of them; `to` is a line's address after `head` bytes, unless none is left.
        unsafe { (self.lines)(from.wrapping_add(head), to.wrapping_add(head), body) };
        let (from, to) = (from.wrapping_add(tail), to.wrapping_add(tail));
        // SAFETY: the last of them.
        unsafe { ptr::copy_nonoverlapping(from, to, len - tail) };
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use std::arch::x86_64::{
        _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512,
        _mm512_stream_si512,
    };

    use super::LINE;

    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512(from: *const u8, to: *mut u8, len: usize) {
        for at in (0..len).step_by(LINE) {
            // SAFETY: `len` is whole lines, so this one is the caller's to read.
            let line = unsafe { _mm512_loadu_si512(from.wrapping_add(at).cast()) };
            // SAFETY: likewise to write; `to` is a line's address.
            unsafe { _mm512_stream_si512(to.wrapping_add(at).cast(), line) };
        }
        _mm_sfence();
    }

    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(from: *const u8, to: *mut u8, len: usize) {
        for at in (0..len).step_by(LINE / 2) {
            // SAFETY: `len` is whole lines, so this half is the caller's to read.
            let half = unsafe { _mm256_loadu_si256(from.wrapping_add(at).cast()) };
            // SAFETY: likewise to write; `to` is a line's address.
            unsafe { _mm256_stream_si256(to.wrapping_add(at).cast(), half) };
        }
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What lies around the copy and must stay as it is.
    const MARGIN: usize = 2 * LINE;
    const CANARY: u8 = 0xc5;

    #[test]
    fn every_alignment_of_both_ends_and_every_short_length_is_copied_and_nothing_else() {
        let (offsets, most) = (0..LINE, 5 * LINE);
        let source: Vec<u8> = (0..most + 2 * LINE).map(|n| (n % 251) as u8 ^ 0x5a).collect();
        for (way, stream) in Stream::all().enumerate() {
            for to in offsets.clone() {
                // Loads may be unaligned in any way; a few stand for all.
                for from in [0, 1, 31, 32, 63] {
                    for len in 0..=most {
                        let mut room = vec![CANARY; 2 * MARGIN + LINE + most];
                        let start = MARGIN + room[MARGIN..].as_ptr().align_offset(LINE) + to;
                        let dest = room[start..].as_mut_ptr();
                        // SAFETY: both ranges are inside their vectors, which are two.
                        unsafe { stream.copy(source[from..].as_ptr(), dest, len) };
                        let case = (way, to, from, len);
                        assert!(room[start..start + len] == source[from..from + len], "{case:?}");
                        let around = room[..start].iter().chain(&room[start + len..]);
                        assert!(around.copied().all(|byte| byte == CANARY), "{case:?}");
                    }
                }
            }
        }
    }
}
