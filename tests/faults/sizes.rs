//! Sizes and shapes.

use std::time::Duration;

use mooncake_relay::{Config, DType, Error, Tensor};
use serde_json::json;

use crate::{
    common::{
        Random,
        bytes::{Canary, Pattern},
        proxy::Proxy,
    },
    on::{On, cases, in_full},
};

cases! {
    Any:
        n1_calls_that_are_interrupted_move_every_byte = 600,
        n2_nothing_is_a_transfer_like_any_other,
        n2_a_tensor_without_dimensions_is_one_element,
        n4_each_size_and_alignment_arrives_and_one_byte_too_many_costs_nothing = 120;
    Processes: n2_nothing_goes_from_process_to_process;
    Proxy:
        n1_bytes_that_come_in_small_pieces_are_all_there = 120,
        n6_a_transfer_that_is_long_and_goes_on_meets_no_inner_limit = 120;
}

const PATIENCE: Duration = Duration::from_secs(60);

fn small() -> Config {
    Config::default().with_slot_size(4096)
}

fn n2_nothing_is_a_transfer_like_any_other(on: &On) {
    let (a, b) = on.pair(&small());
    let shapes = [
        Tensor::bytes(0),
        Tensor::new(DType::Float32, [0, 128]),
        Tensor::new(DType::Bfloat16, [128, 0, 7]),
        Tensor::new(DType::Other("torch.qint8".into()), []),
    ];
    for (n, tensor) in (1..).zip(shapes) {
        let (metadata, token) = a.put_bytes(b"", tensor.clone()).unwrap();
        assert_eq!((metadata.size(), metadata.tensor()), (0, &tensor));
        let got = b.get(&metadata.to_string().parse().unwrap()).unwrap().wait().unwrap();
        assert!(got.is_empty());
        assert!(token.wait().unwrap().is_empty());

        let (metadata, token) = a.put_bytes(b"", tensor).unwrap();
        let mut canary = Canary::new(16);
        assert_eq!(b.get_into(&metadata, canary.dest(), PATIENCE).unwrap(), 0);
        canary.is_untouched();
        drop(token.wait().unwrap());
        assert_eq!(a.health().counters.relay.notes_taken, 2 * n, "one ends each");
    }
}

fn n2_a_tensor_without_dimensions_is_one_element(on: &On) {
    let (a, b) = on.pair(&small());
    let tensor = Tensor::new(DType::Float64, []);
    let (metadata, token) = a.put_bytes(&1.5_f64.to_le_bytes(), tensor.clone()).unwrap();
    assert_eq!((metadata.size(), metadata.tensor()), (8, &tensor));
    let mut canary = Canary::new(8);
    assert_eq!(b.get_into(&metadata, canary.dest(), PATIENCE).unwrap(), 8);
    canary.holds(&1.5_f64.to_le_bytes());
    drop(token.wait().unwrap());
}

fn n2_nothing_goes_from_process_to_process(on: &On) {
    let (a, b) = (on.peer(&[]), on.peer(&[]));
    for dest in [None, Some(0), Some(16)] {
        let bytes = json!({"size": 0, "fill": 0});
        let put = json!({
            "cmd": "put", "bytes": bytes, "dtype": "torch.float32", "shape": [0, 128],
        });
        let sent = a.sent(a.send(put));
        let mut get = json!({"cmd": "get", "metadata": sent.metadata});
        if let Some(len) = dest {
            get["dest_size"] = json!(len);
        }
        let got = b.ask(get);
        assert_eq!((&got["size"], &got["shape"]), (&json!(0), &json!([0, 128])), "{got}");
        assert_eq!(got["sha256"], *sent.sha256);
        let ended = a.wait(sent.tag);
        assert_eq!(ended["ok"], true, "{ended}");
    }
}

/// Signals to every thread of this process, again and again, until it is dropped: a call that a
/// handler interrupts moves less than it was asked, or nothing.
#[cfg(feature = "embedded")]
struct Signals {
    over: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[cfg(feature = "embedded")]
impl Signals {
    fn begin() -> Self {
        use std::sync::atomic::Ordering;

        extern "C" fn ignores(_: libc::c_int) {}
        let handler: extern "C" fn(libc::c_int) = ignores;
        // SAFETY: all zeroes is a signal action without flags: calls are not restarted.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as usize;
        // SAFETY: the handler does nothing, and the old action is not asked for.
        let set = unsafe { libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()) };
        assert_eq!(set, 0);
        let over = std::sync::Arc::<std::sync::atomic::AtomicBool>::default();
        let ends = std::sync::Arc::clone(&over);
        let own = std::process::id() as libc::c_int;
        let sends = move || {
            while !ends.load(Ordering::Relaxed) {
                for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
                    let task: libc::c_int = task.file_name().to_str().unwrap().parse().unwrap();
                    // SAFETY: a signal with a handler, to a thread of this process or to none.
                    unsafe { libc::syscall(libc::SYS_tgkill, own, task, libc::SIGUSR1) };
                }
                std::thread::sleep(Duration::from_micros(200)); // between two volleys
            }
        };
        Self { over, thread: Some(std::thread::spawn(sends)) }
    }
}

#[cfg(feature = "embedded")]
impl Drop for Signals {
    fn drop(&mut self) {
        self.over.store(true, std::sync::atomic::Ordering::Relaxed);
        drop(self.thread.take().unwrap().join());
    }
}

/// In full: more bytes than one call of the system moves at most, which is 2 GiB less a page.
fn n1_calls_that_are_interrupted_move_every_byte(on: &On) {
    let most = if in_full() { (5 << 30) / 2 } else { 16 << 20 };
    let config = Config::default().with_slot_size(most).with_credits(1);
    let (a, b) = on.pair(&config);
    #[cfg(feature = "embedded")]
    let _signals = Signals::begin();
    let pattern = Pattern::new(&mut Random::new(0x91), 1 << 20);
    for len in [most, 1, 4097, 1 << 20, most - 1] {
        for into in [false, true] {
            let mut slot = a.acquire(len, PATIENCE).unwrap();
            let piece = |n: usize, len| &pattern.of(n, 1 << 20)[..len];
            for (n, part) in slot.chunks_mut(1 << 20).enumerate() {
                part.copy_from_slice(piece(n, part.len()));
            }
            let (metadata, token) = a.put(slot, Tensor::bytes(len)).unwrap();
            let is_whole = |bytes: &[u8]| {
                bytes.len() == len
                    && bytes
                        .chunks(1 << 20)
                        .enumerate()
                        .all(|(n, part)| *part == *piece(n, part.len()))
            };
            if into {
                let mut dest = vec![0; len];
                assert_eq!(b.get_into(&metadata, &mut dest, 10 * PATIENCE).unwrap(), len);
                assert!(is_whole(&dest), "{len} bytes, in place");
            } else {
                assert!(is_whole(&b.get(&metadata).unwrap().wait().unwrap()), "{len} bytes");
            }
            drop(token.wait().unwrap());
        }
    }
}

fn n1_bytes_that_come_in_small_pieces_are_all_there(on: &On) {
    const LEN: usize = 256 << 10;
    let proxy = Proxy::new();
    let config = Config::default().with_slot_size(LEN);
    let (a, b) = (on.behind(&proxy, &config), on.relay(&config));
    let pattern = Pattern::new(&mut Random::new(0x92), LEN);
    #[cfg(feature = "embedded")]
    let _signals = Signals::begin();
    // Up to a few KiB at a time, and long waits between them.
    proxy.data().down().throttle(1 << 20);
    for (round, into) in [false, true].into_iter().enumerate() {
        let expected = pattern.of(round, LEN - round);
        let (metadata, token) = a.sends(expected);
        if into {
            let mut canary = Canary::new(expected.len());
            b.get_into(&metadata, canary.dest(), PATIENCE).unwrap();
            canary.holds(expected);
        } else {
            assert!(b.get(&metadata).unwrap().wait().unwrap()[..] == *expected);
        }
        drop(token.wait().unwrap());
    }
}

fn n4_each_size_and_alignment_arrives_and_one_byte_too_many_costs_nothing(on: &On) {
    const SLOT: usize = 128 << 10;
    let (a, b) = on.pair(&Config::default().with_slot_size(SLOT));
    let pattern = Pattern::new(&mut Random::new(0x94), SLOT);
    let edges = [512, 4096, 65_536].map(|edge| [edge - 1, edge, edge + 1]).concat();
    let sizes = (1..=130).chain(edges).chain([SLOT - 1, SLOT]);
    for (round, len) in sizes.enumerate() {
        let expected = pattern.of(round, len);
        let (metadata, token) = a.sends(expected);
        if round % 2 == 0 {
            // At each distance from a word's start.
            let shift = round / 2 % 16;
            let mut canary = Canary::new(len + shift);
            b.get_into(&metadata, &mut canary.dest()[shift..], PATIENCE).unwrap();
            assert!(canary.dest()[shift..] == *expected, "{len} bytes at {shift}");
        } else {
            assert!(b.get(&metadata).unwrap().wait().unwrap()[..] == *expected, "{len} bytes");
        }
        drop(token.wait().unwrap());
    }
    let more = vec![0; SLOT + 1];
    let refused = [
        a.try_acquire(SLOT + 1).map(drop),
        a.acquire(SLOT + 1, PATIENCE).map(drop),
        a.put_bytes(&more, Tensor::bytes(SLOT + 1)).map(drop),
    ];
    let named = |it: &Result<(), Error>| matches!(it, Err(Error::TooLarge { len, slot_size: SLOT }) if *len == SLOT + 1);
    assert!(refused.iter().all(named), "{refused:?}");
    assert_eq!(a.health().free, 2);
}

/// Behind a link that is slow and never still. In full: 1 GiB at 100 MB a second.
fn n6_a_transfer_that_is_long_and_goes_on_meets_no_inner_limit(on: &On) {
    let (len, rate) = if in_full() { (1 << 30, 100_000_000) } else { (32 << 20, 16 << 20) };
    let proxy = Proxy::new();
    // All times are as they come.
    let config = Config::default().with_slot_size(len).with_credits(1);
    let (a, b) = (on.behind(&proxy, &config), on.relay(&config));
    proxy.data().down().throttle(rate);
    let mut slot = a.try_acquire(len).unwrap();
    slot.fill(0x46);
    let (metadata, token) = a.put(slot, Tensor::bytes(len)).unwrap();
    let got = b.get(&metadata).unwrap().wait().unwrap();
    assert!(got.len() == len && got.iter().all(|byte| *byte == 0x46));
    drop(token.wait().unwrap());
}
