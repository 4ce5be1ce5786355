//! Names of relays and transfers, and the notes that carry them.

use std::{fmt, str::FromStr, sync::Arc};

use arrayvec::ArrayString;

use crate::error::Error;

/// A relay's random name: new with every relay, so that a restarted peer is told from its
/// predecessor. Prints, and is parsed, as 32 lower-case hexadecimal digits.
///
/// ```
/// use mooncake_relay::Instance;
/// let instance = Instance::from_bytes([0xab; 16]);
/// assert_eq!(instance.to_string(), "ab".repeat(16));
/// assert_eq!("ab".repeat(16).parse(), Ok(instance));
/// assert!("AB".repeat(16).parse::<Instance>().is_err()); // one name for one relay
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Instance([u8; 16]);

impl Instance {
    /// The instance with these bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes, in the order in which they print.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Hex::of(self.0).as_str())
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Instance({self})")
    }
}

impl FromStr for Instance {
    type Err = NotHex;

    fn from_str(text: &str) -> Result<Self, NotHex> {
        parse_hex(text).map(|value| Self(value.to_be_bytes()))
    }
}

/// Names one put: 64 unguessable bits, the slot's index, and the slot's generation.
///
/// Prints as 32 hexadecimal digits; `Debug` hides it, since whoever knows it can end the put.
///
/// ```
/// use mooncake_relay::TransferId;
/// let id = TransferId { random: 0xfeed, slot: 1, generation: 7 };
/// assert_eq!(id.to_string(), "000000000000feed0000000100000007");
/// assert_eq!(TransferId::of_name(&format!("stage_0_{id}")), Some(id));
/// assert_eq!(TransferId::from_bytes(id.to_bytes()), id);
/// assert!(!format!("{id:?}").contains("feed"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TransferId {
    /// Unguessable, and of no other put.
    pub random: u64,
    /// The slot's index in its pool.
    pub slot: u32,
    /// Which of that slot's puts it is: 1 is the first.
    pub generation: u32,
}

impl TransferId {
    /// Its 16 bytes, in the order in which they print.
    pub fn to_bytes(self) -> [u8; 16] {
        self.to_u128().to_be_bytes()
    }

    /// The id with these bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self::from_u128(u128::from_be_bytes(bytes))
    }

    /// The id at the end of a transfer's name, which is `{engine_id}_{32 hex}`.
    pub fn of_name(name: &str) -> Option<Self> {
        let (head, id) = name.split_at_checked(name.len().checked_sub(DIGITS)?)?;
        head.ends_with('_').then(|| id.parse().ok()).flatten()
    }

    fn to_u128(self) -> u128 {
        u128::from(self.random) << 64 | u128::from(self.slot) << 32 | u128::from(self.generation)
    }

    fn from_u128(value: u128) -> Self {
        Self { random: (value >> 64) as u64, slot: (value >> 32) as u32, generation: value as u32 }
    }
}

impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Hex::of(self.to_bytes()).as_str())
    }
}

impl fmt::Debug for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferId")
            .field("slot", &self.slot)
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

impl FromStr for TransferId {
    type Err = NotHex;

    fn from_str(text: &str) -> Result<Self, NotHex> {
        parse_hex(text).map(Self::from_u128)
    }
}

/// Which put of which relay: what travels with every read between our own engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The relay that put.
    pub instance: Instance,
    /// Its put.
    pub id: TransferId,
}

/// The text is not 32 lower-case hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not 32 lower-case hexadecimal digits")]
pub struct NotHex;

/// How many an id has.
const DIGITS: usize = 32;

fn parse_hex(text: &str) -> Result<u128, NotHex> {
    if text.len() != DIGITS {
        return Err(NotHex);
    }
    // In halves, since a number of one register is many times faster.
    let (high, low) = text.as_bytes().split_at(DIGITS / 2);
    let [high, low] = [high, low].map(hex);
    Ok(u128::from(high.ok_or(NotHex)?) << 64 | u128::from(low.ok_or(NotHex)?))
}

/// The number of 1 to 16 digits. No sign and no upper case, which would be two names for one id.
pub(crate) fn hex(digits: &[u8]) -> Option<u64> {
    if !(1..=16).contains(&digits.len()) {
        return None;
    }
    // Looked at when all are taken: a digit is below 16, and anything else has a higher bit.
    let (mut number, mut all) = (0, 0);
    for digit in digits {
        let value = VALUES[usize::from(*digit)];
        number = number << 4 | u64::from(value);
        all |= value;
    }
    (all < 16).then_some(number)
}

/// What each byte is worth as a digit, 255 if it is none.
static VALUES: [u8; 256] = {
    let mut values = [u8::MAX; 256];
    let mut value = 0;
    while value < 16 {
        values[b"0123456789abcdef"[value] as usize] = value as u8;
        value += 1;
    }
    values
};

/// The two digits of each byte.
static PAIRS: [[u8; 2]; 256] = {
    let digits = b"0123456789abcdef";
    let mut pairs = [[0; 2]; 256];
    let mut byte = 0;
    while byte < pairs.len() {
        pairs[byte] = [digits[byte >> 4], digits[byte & 0xf]];
        byte += 1;
    }
    pairs
};

/// `N` bytes as they print, two lower-case digits each: without the machinery of `fmt`, which takes ten
/// times as long.
#[derive(Clone, Copy)]
pub(crate) struct Hex<const N: usize>([[u8; 2]; N]);

impl<const N: usize> Hex<N> {
    pub(crate) fn of(bytes: [u8; N]) -> Self {
        Self(bytes.map(|byte| PAIRS[usize::from(byte)]))
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.0.as_flattened()
    }

    pub(crate) fn as_str(&self) -> &str {
        str::from_utf8(self.as_bytes()).expect("digits are ASCII")
    }

    /// As a number is written: "0" for none.
    pub(crate) fn without_zeros(&self) -> &[u8] {
        let digits = self.as_bytes();
        let zeros = digits.iter().take_while(|digit| **digit == b'0').count();
        &digits[zeros.min(digits.len() - 1)..]
    }
}

/// What a notification says of the transfer it names.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Note {
    /// `transfer_complete`: the receiver has the bytes.
    Complete,
    /// `transfer_failed`: the receiver gave up.
    Failed,
    /// Any other text; no relay of ours sends it.
    Other(Arc<str>),
}

/// A message from one peer's [`notify`](crate::Engine::notify) to another's
/// [`poll`](crate::Engine::poll). Names of up to 127 bytes are kept without allocation.
///
/// ```
/// use mooncake_relay::{Note, Notification};
/// let note = Notification::new("stage0_1f", "transfer_complete");
/// assert_eq!(note.note(), &Note::Complete);
/// assert_eq!((note.name(), note.message()), ("stage0_1f", "transfer_complete"));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Notification {
    name: Name,
    note: Note,
    reason: Option<&'static str>,
}

#[derive(Clone, PartialEq, Eq)]
enum Name {
    Inline(ArrayString<127>),
    Shared(Arc<str>),
}

const COMPLETE: &str = "transfer_complete";
const FAILED: &str = "transfer_failed";

impl Notification {
    /// The notification with these two texts, as they travel: `name` and `notify_msg` of a type-2
    /// control frame, as the real engine 0.3.13.post1 has it on the wire.
    pub fn new(name: &str, message: &str) -> Self {
        let note = match message {
            COMPLETE => Note::Complete,
            FAILED => Note::Failed,
            other => Note::Other(other.into()),
        };
        Self::with_note(name, note)
    }

    pub(crate) fn with_note(name: &str, note: Note) -> Self {
        let name = ArrayString::from(name).map_or_else(|_| Name::Shared(name.into()), Name::Inline);
        Self { name, note, reason: None }
    }

    /// The same, with the [kind](Error::kind) of the error that the sender of the note had; anything
    /// else is dropped. Between relays of this library it travels beside the two texts.
    pub fn because(mut self, kind: &str) -> Self {
        self.reason = Error::known_kind(kind);
        self
    }

    /// Why a transfer failed: the [kind](Error::kind) of its receiver's error, if that said so.
    ///
    /// ```
    /// use mooncake_relay::Notification;
    /// let note = Notification::new("stage0_1f", "transfer_failed");
    /// assert_eq!(note.clone().because("TimedOut").reason(), Some("TimedOut"));
    /// assert_eq!(note.because("whatever").reason(), None);
    /// ```
    pub fn reason(&self) -> Option<&'static str> {
        self.reason
    }

    /// Which transfer it is about.
    pub fn name(&self) -> &str {
        match &self.name {
            Name::Inline(name) => name,
            Name::Shared(name) => name,
        }
    }

    /// What it says.
    pub fn note(&self) -> &Note {
        &self.note
    }

    /// What it says, as text.
    pub fn message(&self) -> &str {
        match &self.note {
            Note::Complete => COMPLETE,
            Note::Failed => FAILED,
            Note::Other(text) => text,
        }
    }
}

impl fmt::Debug for Notification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notification").field("note", &self.note).finish_non_exhaustive()
    }
}
