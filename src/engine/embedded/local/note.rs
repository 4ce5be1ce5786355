//! A notification as it lies in a ring.
//!
//! ```text
//!   len: u32   note: u8   reason: u8   name: u16   the name, the reason, and of Other the text
//! ```
//!
//! `len` counts what follows it; a record begins at a multiple of eight.

use super::region::RING;
use crate::engine::Notification;
use crate::identity::Note;

/// What each record takes a multiple of.
pub(super) const STEP: usize = 8;
/// The longest record that goes by the ring.
pub(super) const LONGEST: usize = RING / 4;

const HEADER: usize = 8;
const COMPLETE: u8 = 0;
const FAILED: u8 = 1;
const OTHER: u8 = 2;

/// Appends `note` to `out`, filled up to whole steps. False: it is too long for the ring.
pub(super) fn encode(note: &Notification, out: &mut Vec<u8>) -> bool {
    let (kind, text) = match note.note() {
        Note::Complete => (COMPLETE, ""),
        Note::Failed => (FAILED, ""),
        Note::Other(text) => (OTHER, &**text),
    };
    let (name, reason) = (note.name(), note.reason().unwrap_or_default());
    let all = HEADER + name.len() + reason.len() + text.len();
    let (Ok(name_len), Ok(reason_len)) = (u16::try_from(name.len()), u8::try_from(reason.len()))
    else {
        return false;
    };
    if all > LONGEST {
        return false;
    }
    out.extend((all as u32 - 4).to_le_bytes());
    out.extend([kind, reason_len]);
    out.extend(name_len.to_le_bytes());
    out.extend(name.as_bytes());
    out.extend(reason.as_bytes());
    out.extend(text.as_bytes());
    out.resize(out.len().next_multiple_of(STEP), 0);
    true
}

/// How many bytes the record takes that begins with `header`, if it can be one.
pub(super) fn size(header: [u8; 4]) -> Option<usize> {
    let all = (u32::from_le_bytes(header) as usize).checked_add(4)?;
    (HEADER..=LONGEST).contains(&all).then_some(all)
}

/// The note in a whole record, which [`size`] has measured.
pub(super) fn decode(record: &[u8]) -> Option<Notification> {
    let (header, rest) = record.split_first_chunk::<HEADER>()?;
    let [_, _, _, _, kind, reason, name @ ..] = header;
    let (name, rest) = rest.split_at_checked(u16::from_le_bytes(*name).into())?;
    let (reason, text) = rest.split_at_checked((*reason).into())?;
    let name = std::str::from_utf8(name).ok()?;
    let text = std::str::from_utf8(text).ok()?;
    let note = match (*kind, text) {
        (COMPLETE, "") => Notification::with_note(name, Note::Complete),
        (FAILED, "") => Notification::with_note(name, Note::Failed),
        (OTHER, text) => Notification::new(name, text),
        _ => return None,
    };
    Some(note.because(std::str::from_utf8(reason).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(note: &Notification) -> Vec<u8> {
        let mut record = Vec::new();
        assert!(encode(note, &mut record));
        assert!(record.len().is_multiple_of(STEP));
        record.truncate(size(*record.first_chunk().unwrap()).unwrap());
        record
    }

    #[test]
    fn every_note_reads_as_it_was_written() {
        let long = "é".repeat(3000);
        for note in [
            Notification::new("a_1f", "transfer_complete"),
            Notification::new("a_1f", "transfer_failed").because("TimedOut"),
            Notification::new("", ""),
            Notification::new(&long, &long),
        ] {
            assert_eq!(decode(&record(&note)), Some(note));
        }
        let too_long = Notification::new("a", &"x".repeat(LONGEST));
        assert!(!encode(&too_long, &mut Vec::new()));
    }

    #[test]
    fn no_record_that_is_cut_or_changed_is_more_than_another_note() {
        let whole = record(&Notification::new("abc", "some text").because("Io"));
        for at in 0..whole.len() {
            let _ = decode(&whole[..at]);
            for byte in [0, 1, 0x80, 0xff] {
                let mut changed = whole.clone();
                changed[at] = byte;
                let _ = decode(&changed);
            }
        }
        for (header, expected) in [(0, None), (3, None), (4, Some(8)), (u32::MAX, None)] {
            assert_eq!(size(header.to_le_bytes()), expected, "{header}");
        }
    }
}
