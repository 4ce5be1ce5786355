//! The bytes of a put, as a command describes them, and how they are shown.

use mooncake_relay::{Error, Result};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::line::bad;

/// What a command may say.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum Spec {
    Hex { hex: String },
    Text { text: String },
    Fill { size: usize, fill: u8 },
    Seed { size: usize, seed: serde_json::Number },
}

/// The same, checked.
pub(crate) enum Bytes {
    Given(Vec<u8>),
    Fill { size: usize, fill: u8 },
    Seed { size: usize, seed: u64 },
}

impl TryFrom<Spec> for Bytes {
    type Error = Error;

    fn try_from(spec: Spec) -> Result<Self> {
        Ok(match spec {
            Spec::Hex { hex } => Self::Given(from_hex(&hex)?),
            Spec::Text { text } => Self::Given(text.into_bytes()),
            Spec::Fill { size, fill } => Self::Fill { size, fill },
            Spec::Seed { size, seed } => {
                let negative = || seed.as_i64().map(|seed| seed as u64); // mod 2^64
                let seed = seed.as_u64().or_else(negative);
                Self::Seed { size, seed: seed.ok_or_else(|| bad("bytes", "no 64-bit seed"))? }
            }
        })
    }
}

impl Bytes {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Given(bytes) => bytes.len(),
            Self::Fill { size, .. } | Self::Seed { size, .. } => *size,
        }
    }

    pub(crate) fn fill(&self, slot: &mut [u8]) {
        match self {
            Self::Given(bytes) => slot.copy_from_slice(bytes),
            Self::Fill { fill, .. } => slot.fill(*fill),
            Self::Seed { seed, .. } => {
                let mut product = *seed;
                for byte in slot {
                    *byte = (product >> 24) as u8;
                    product = product.wrapping_add(2_654_435_761);
                }
            }
        }
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Result<Vec<u8>> {
    let digit = |c: u8| (c as char).to_digit(16).ok_or_else(|| bad("bytes", "not hexadecimal"));
    let digits = text.bytes().map(digit).collect::<Result<Vec<_>>>()?;
    if digits.len() % 2 != 0 {
        return Err(bad("bytes", "an odd number of hexadecimal digits"));
    }
    Ok(digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect())
}
