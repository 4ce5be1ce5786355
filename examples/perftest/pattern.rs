//! Bytes by which a put is known: of two puts no eight bytes at one place are alike.

/// Of put number `put` of a lane.
fn seed(lane: usize, put: u64) -> u64 {
    mix((lane as u64) << 48 ^ put)
}

/// Murmur's finisher: every bit of the input is in every bit of the output.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

pub(crate) fn fill(bytes: &mut [u8], lane: usize, put: u64) {
    let mut word = seed(lane, put);
    for eight in bytes.chunks_mut(8) {
        eight.copy_from_slice(&word.to_le_bytes()[..eight.len()]);
        word = word.wrapping_add(STEP);
    }
}

/// Where the first byte is that is not that put's.
pub(crate) fn difference(bytes: &[u8], lane: usize, put: u64) -> Option<usize> {
    let mut word = seed(lane, put);
    for (number, eight) in bytes.chunks(8).enumerate() {
        let expected = word.to_le_bytes();
        if eight != &expected[..eight.len()] {
            let within = eight.iter().zip(expected).position(|(is, should)| *is != should);
            return Some(number * 8 + within.unwrap_or(0));
        }
        word = word.wrapping_add(STEP);
    }
    None
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
