//! Owners of device memory that say what cannot be: they are left to TCP, and nothing of theirs stays
//! mapped.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::SealFlags;
use serde_json::{Value, json};

use crate::{
    Case, SLOT,
    common::peer::Peer,
    count, cuda, far, host, leaves_nothing, live,
    meeting::{MAGIC, dial, hear, hello, memory, next_guest, pose_as, say, socket_of},
    put, start, way, works,
};

pub(crate) const CASES: &[Case] = &[
    ("an_owner_that_lies_about_its_device_is_left_to_tcp", an_owner_that_lies),
    ("a_reader_that_says_nothing_more_keeps_no_memory", a_reader_that_is_killed_after_the_answer),
];

const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
const OWNED: SealFlags = FIXED.union(SealFlags::FUTURE_WRITE);

/// An answer, field by field.
#[derive(Clone)]
struct Said {
    version: u32,
    slots: u32,
    base: u64,
    len: u64,
    has_handle: u32,
    handle: Vec<u8>,
    /// The length and the seals of the shelf's lines.
    lines: (u64, SealFlags),
    fds: usize,
}

impl Said {
    fn bytes(&self, owner: [u8; 16], session: &str) -> Vec<u8> {
        [
            &MAGIC[..],
            &self.version.to_le_bytes(),
            &owner,
            &self.slots.to_le_bytes(),
            &self.base.to_le_bytes(),
            &self.len.to_le_bytes(),
            b"stand-in device0",
            &self.has_handle.to_le_bytes(),
            &self.handle,
            session.as_bytes(),
        ]
        .concat()
    }

    fn fds(&self) -> Vec<OwnedFd> {
        let region =
            (3 * 128 + u64::from(self.slots.min(4)) * 128).next_multiple_of(4096) + (64 << 10);
        let mut fds = vec![memory(self.lines.0, self.lines.1), memory(4096, FIXED)];
        fds.push(memory(region, FIXED));
        fds.push(memory(4096, FIXED));
        fds.truncate(self.fds);
        fds
    }
}

/// As if the sender of `metadata`, which has no shared memory, could be met.
fn pretended(metadata: &Value) -> Value {
    let mut metadata = metadata.clone();
    let instance = metadata["relay"]["instance"].as_str().unwrap().parse().unwrap();
    metadata["relay"]["local"] = json!({"socket": socket_of(instance)});
    metadata
}

/// What a real sender on a device says of itself.
fn heard(sender: &Peer) -> (Vec<u8>, Vec<OwnedFd>) {
    let sent = put(sender, 1, 1);
    let instance = sent.metadata["relay"]["instance"].as_str().unwrap().parse().unwrap();
    let socket = dial(instance);
    say(&socket, &hello(1, [9; 16], instance), &[]);
    let heard = hear(&socket);
    sender.ask(json!({"cmd": "abort", "metadata": sent.metadata}));
    heard
}

fn an_owner_that_lies() {
    let real = start(&cuda());
    let (answer, fds) = heard(&real);
    assert_eq!((&answer[8..12], fds.len()), (&2_u32.to_le_bytes()[..], 3));
    let handle = answer[68..132].to_vec();
    let len = u64::from_le_bytes(answer[40..48].try_into().unwrap());
    let good = Said {
        version: 2,
        slots: 4,
        base: 0x7000_0000,
        len,
        has_handle: 1,
        handle,
        lines: (4096, OWNED),
        fds: 3,
    };
    let lies = [
        Said { handle: vec![7; 64], ..good.clone() },
        Said { len: len * 64, ..good.clone() },
        Said { len: u64::MAX, ..good.clone() },
        Said { base: u64::MAX - 5, ..good.clone() },
        Said { slots: 0, ..good.clone() },
        Said { slots: u32::MAX, ..good.clone() },
        Said { has_handle: 2, ..good.clone() },
        Said { has_handle: 0, ..good.clone() },
        Said { handle: vec![7; 63], ..good.clone() },
        Said { lines: (8192, OWNED), ..good.clone() },
        Said { lines: (4096, FIXED), ..good.clone() },
        Said { fds: 2, ..good.clone() },
        Said { fds: 4, ..good.clone() },
        Said { version: 1, ..good.clone() },
        Said { version: 3, ..good.clone() },
    ];
    let receiver = start(&cuda());
    for (seed, lie) in (1..).zip(&lies) {
        let sender = start(&far(host()));
        let sent = put(&sender, SLOT, seed);
        let metadata = pretended(&sent.metadata);
        let instance = metadata["relay"]["instance"].as_str().unwrap().parse().unwrap();
        let listener = pose_as(instance);
        let get = receiver.send_get(&metadata);
        let guest = next_guest(&listener);
        assert_eq!(hear(&guest).0.len(), 44);
        let fds = lie.fds();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        say(&guest, &lie.bytes(instance.to_bytes(), sender.session_id()), &fds);
        let got = receiver.answer(get);
        assert_eq!(got["sha256"], sent.sha256, "lie {seed}: {got}");
        assert_eq!(way(&sender, &receiver), "staged", "lie {seed}");
        assert_eq!(live(&receiver, "ipc"), 0, "lie {seed}");
    }
    assert_eq!(count(&receiver, "reads_local"), 0);
    works(&real, &receiver, SLOT, 100);
    assert_eq!(way(&real, &receiver), "cuda-ipc");
    leaves_nothing(receiver);
    leaves_nothing(real);
}

fn a_reader_that_is_killed_after_the_answer() {
    let sender = start(&cuda());
    // It has heard of the memory, maybe mapped it, and goes without a word.
    drop(heard(&sender));
    leaves_nothing(sender);
}
