//! What `fuzz/` does with bytes from outside, and what must hold of them. A unit test does the
//! same with the seeds.

use super::frame::{
    Descriptor, Header, IDENTITY_LEN, Status, check_json, decode_control, decode_identity,
    encode_control, encode_identity, encode_notification, parse_notification,
};
use super::local::fuzzing::note_record;
pub use super::local::fuzzing::{control_region, meeting};

/// Whatever frame it is: of the control port, of the data port, of the notes of a ring.
pub fn frames(input: &[u8]) {
    control_frame(input);
    data_frame(input);
    note_record(input);
}

/// A control frame: decoded, its JSON taken for each thing that it can be, and written again.
fn control_frame(input: &[u8]) {
    let _ = check_json(input);
    let Ok(Some(frame)) = decode_control(input) else { return };
    assert_eq!(encode_control(frame.kind, frame.json), input[..frame.len]);
    for cut in [0, 8, 9, frame.len / 2, frame.len - 1] {
        assert_eq!(decode_control(&input[..cut.min(frame.len - 1)]), Ok(None), "it was whole");
    }
    let is_json = check_json(frame.json).is_ok();
    if let Ok(descriptor) = Descriptor::parse(frame.json) {
        assert!(is_json && descriptor.data_port != 0);
        assert_eq!(Descriptor::parse(&descriptor.encode()), Ok(descriptor));
    }
    if let Ok(note) = parse_notification(frame.json) {
        assert!(is_json);
        let mut body = Vec::new();
        encode_notification(&note, &mut body);
        assert_eq!(parse_notification(&body), Ok(note));
    }
}

/// The fixed parts of data frames.
fn data_frame(input: &[u8]) {
    if let Some(bytes) = input.first_chunk() {
        let header = Header::decode(bytes);
        assert_eq!(header.encode()[..17], bytes[..17]);
    }
    if let Some(bytes) = input.first_chunk::<IDENTITY_LEN>() {
        assert_eq!(encode_identity(&decode_identity(bytes)), *bytes);
    }
    if let Some(bytes) = input.first_chunk()
        && let Ok(status) = Status::decode(bytes)
    {
        assert_eq!(status.encode(), *bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    fn each_seed(target: &str, run: fn(&[u8])) {
        let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
        if !fuzz.exists() {
            return; // a package has none
        }
        let folder = fuzz.join("seeds").join(target);
        let seeds =
            fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let mut count = 0;
        for seed in seeds {
            let seed = fs::read(seed.unwrap().path()).unwrap();
            run(&seed);
            // Cut short it is another input.
            (0..seed.len().min(64)).for_each(|len| run(&seed[..len]));
            count += 1;
        }
        assert!(count > 0, "{} is empty", folder.display());
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads files")]
    fn the_seeds_of_the_frames_pass() {
        each_seed("frames", frames);
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps memfds")]
    fn the_seeds_of_shared_memory_pass() {
        each_seed("meeting", meeting);
        each_seed("control_region", control_region);
    }
}
