//! Between host and device, and between devices: every byte, and whose it is.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cudarc::driver::CudaContext;
use mooncake_relay::{
    Config, Cuda, DType, Error, Host, InProcessEngine, Memory, Metadata, Relay, Result, Slot,
    Tensor, Token,
};

use crate::{Rig, cases, common::moved_to};

cases! {
    Device []:
        every_way_carries_every_byte,
        an_empty_tensor_goes_every_way,
        a_relay_gets_its_own_put,
        a_tensor_of_cudarc_goes_in_and_comes_out,
        what_is_too_long_is_refused_before_anything_is_taken,
        metadata_and_health_name_the_device,
        o4_the_sender_s_number_of_a_device_means_nothing_here,
        an_old_identity_is_stale_on_a_device_too,
        a_peer_may_write_where_it_is_allowed;
    Standin []:
        two_devices_reach_each_other;
}

pub(crate) const SLOT: usize = 3 << 20;

pub(crate) fn config() -> Config {
    Config::default().with_slot_size(SLOT)
}

pub(crate) const SOON: Duration = Duration::from_secs(20);

pub(crate) fn engine() -> Arc<InProcessEngine> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("cuda-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    Arc::new(InProcessEngine::new(&name).unwrap())
}

pub(crate) fn on_host() -> Relay {
    Relay::new(engine(), &config()).unwrap()
}

pub(crate) fn on_device(ordinal: usize) -> Relay<Cuda> {
    Relay::with_memory(ordinal, engine(), &config()).unwrap()
}

/// Bytes that are not the same in any two places, or for any two seeds.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|n| (n % 251) as u8 ^ (n >> 12) as u8 ^ seed.wrapping_mul(37)).collect()
}

/// What tests do with a relay, wherever its slots are.
pub(crate) trait Side<M: Memory> {
    fn send(&self, bytes: &[u8]) -> (Metadata, Token<Slot<M>>);
    fn fetch(&self, metadata: &Metadata) -> Result<Vec<u8>>;
}

impl Side<Host> for Relay {
    fn send(&self, bytes: &[u8]) -> (Metadata, Token<Slot>) {
        self.put_bytes(bytes, Tensor::bytes(bytes.len())).unwrap()
    }

    fn fetch(&self, metadata: &Metadata) -> Result<Vec<u8>> {
        Ok(self.get(metadata)?.wait()?.to_vec())
    }
}

impl Side<Cuda> for Relay<Cuda> {
    fn send(&self, bytes: &[u8]) -> (Metadata, Token<Slot<Cuda>>) {
        self.put_host(bytes, Tensor::bytes(bytes.len())).unwrap()
    }

    fn fetch(&self, metadata: &Metadata) -> Result<Vec<u8>> {
        let slot = self.get(metadata)?.wait()?;
        let mut bytes = vec![0xEE; slot.len()];
        slot.copy_to_host(&mut bytes)?;
        Ok(bytes)
    }
}

#[track_caller]
fn carries<A: Memory, B: Memory>(from: &impl Side<A>, to: &impl Side<B>, bytes: &[u8]) {
    let (metadata, put) = from.send(bytes);
    let metadata: Metadata = metadata.to_string().parse().unwrap();
    assert!(to.fetch(&metadata).unwrap() == bytes, "{} bytes", bytes.len());
    assert_eq!(put.wait().unwrap().len(), bytes.len());
}

fn every_way_carries_every_byte(_: &Rig) {
    let (host, device) = ([on_host(), on_host()], [on_device(0), on_device(0)]);
    for (seed, len) in [1, 511, 4096, 4097, 1 << 20, (2 << 20) + 5, SLOT].into_iter().enumerate() {
        let bytes = pattern(len, seed as u8);
        carries(&host[0], &host[1], &bytes);
        carries(&host[0], &device[1], &bytes);
        carries(&device[0], &host[1], &bytes);
        carries(&device[0], &device[1], &bytes);
        // Straight into the caller's memory.
        let (metadata, put) = device[0].send(&bytes);
        let mut dest = vec![0; len + 3];
        assert_eq!(host[1].get_into(&metadata, &mut dest, SOON).unwrap(), len);
        assert!(dest[..len] == bytes && dest[len..] == [0; 3]);
        put.wait().unwrap();
    }
    let health = [device[0].health(), device[1].health()];
    assert!(health.iter().all(|health| (health.free, health.receive_free) == (2, 2)));
}

fn two_devices_reach_each_other(_: &Rig) {
    let (first, second) = (on_device(0), on_device(1));
    for seed in 0..4 {
        let bytes = pattern((1 << 20) + 77, seed);
        carries(&first, &second, &bytes);
        carries(&second, &first, &bytes);
    }
    assert_eq!((first.health().device, second.health().device), ("cuda:0".into(), "cuda:1".into()));
}

fn an_empty_tensor_goes_every_way(_: &Rig) {
    let (host, device) = (on_host(), on_device(0));
    carries(&host, &device, &[]);
    carries(&device, &host, &[]);
    carries(&device, &device, &[]);
}

fn a_relay_gets_its_own_put(_: &Rig) {
    let relay = on_device(0);
    for seed in 0..10 {
        carries(&relay, &relay, &pattern(5000, seed));
    }
}

fn a_tensor_of_cudarc_goes_in_and_comes_out(_: &Rig) {
    let (from, to) = (on_device(0), on_device(0));
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let numbers: Vec<f32> = (0..5000).map(|n| n as f32 / 7.0).collect();
    let tensor = stream.clone_htod(&numbers).unwrap();

    let (metadata, put) =
        from.put_device(&tensor, Some(&stream), Tensor::new(DType::Float32, [5000])).unwrap();
    let mut into = context.default_stream().alloc_zeros::<f32>(5001).unwrap();
    assert_eq!(to.get_into(&metadata, &mut into, None, SOON).unwrap(), 20_000);
    put.wait().unwrap();
    let got = context.default_stream().clone_dtoh(&into).unwrap();
    assert!(got[..5000] == numbers[..] && got[5000] == 0.0);

    // A part of one, by addresses, and in place.
    let mut slot = from.try_acquire(400).unwrap();
    slot.copy_from_device(&tensor.slice(100..200), None).unwrap();
    let mut part = stream.alloc_zeros::<f32>(100).unwrap();
    let at = {
        use cudarc::driver::DevicePtrMut;
        part.device_ptr_mut(&stream).0
    };
    stream.synchronize().unwrap(); // ours knows nothing of what zeroes it there
    // SAFETY: 400 bytes of `part`, which nobody else uses.
    unsafe { slot.copy_to_device_ptr(at, None) }.unwrap();
    assert_eq!(stream.clone_dtoh(&part).unwrap(), numbers[100..200]);
    // SAFETY: as above.
    unsafe { slot.copy_from_device_ptr(at, Some(&stream)) }.unwrap();
    let mut bytes = vec![0; 400];
    slot.copy_to_host(&mut bytes).unwrap();
    let expected: Vec<u8> = numbers[100..200].iter().flat_map(|n| n.to_le_bytes()).collect();
    assert!(bytes == expected);
}

fn what_is_too_long_is_refused_before_anything_is_taken(_: &Rig) {
    let (from, to) = (on_device(0), on_device(0));
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let (metadata, put) = from.send(&pattern(4000, 1));
    let mut short = stream.alloc_zeros::<u8>(3999).unwrap();
    let refused = to.get_into(&metadata, &mut short, Some(&stream), SOON);
    assert!(matches!(refused, Err(Error::TooLarge { len: 4000, slot_size: 3999 })), "{refused:?}");
    assert!(!put.is_done() && to.health().counters.relay.gets == 0);

    let mut slot = from.try_acquire(10).unwrap();
    for wrong in [9, 11] {
        let refused = slot.copy_from_host(&vec![0; wrong]);
        assert!(matches!(refused, Err(Error::Config { field: "src", .. })), "{refused:?}");
    }
    let refused = slot.copy_to_host(&mut [0; 9]);
    assert!(matches!(refused, Err(Error::TooLarge { len: 10, slot_size: 9 })), "{refused:?}");
    let refused = slot.copy_from_device(&short, None);
    assert!(matches!(refused, Err(Error::Config { field: "src", .. })), "{refused:?}");
    let refused = from.put_host(&vec![0; SLOT + 1], Tensor::bytes(SLOT + 1));
    assert!(matches!(refused, Err(Error::TooLarge { .. })), "{refused:?}");
}

fn metadata_and_health_name_the_device(rig: &Rig) {
    let ordinal = usize::from(rig.standin.is_some()); // the second, where there is one
    let relay = on_device(ordinal);
    let (metadata, put) = relay.send(b"hello");
    let json: serde_json::Value = serde_json::from_str(&metadata.to_string()).unwrap();
    assert_eq!(json["mooncake"]["device_id"], ordinal);
    let health = relay.health();
    assert_eq!(health.device, format!("cuda:{ordinal}"));
    assert_eq!((health.free, health.published, health.huge_pages), (1, 1, false));
    let slot = relay.try_acquire(1).unwrap();
    assert_eq!(slot.span().addr() % 512, 0);
    drop(put);
}

/// Whatever it is: the bytes come, and no other device is asked for anything.
fn o4_the_sender_s_number_of_a_device_means_nothing_here(_: &Rig) {
    let (from, device, host) = (on_device(0), on_device(0), on_host());
    for number in ["7", "-1", "2147483648", "0"] {
        let bytes = pattern(5000, number.len() as u8);
        let renumbered = |metadata: &Metadata| -> Metadata {
            let text = metadata.to_string();
            let changed = text.replace("\"device_id\":0", &format!("\"device_id\":{number}"));
            changed.parse().unwrap()
        };
        let (metadata, put) = from.send(&bytes);
        assert!(device.fetch(&renumbered(&metadata)).unwrap() == bytes);
        put.wait().unwrap();
        let (metadata, put) = from.send(&bytes);
        assert!(host.fetch(&renumbered(&metadata)).unwrap() == bytes);
        put.wait().unwrap();
    }
}

fn an_old_identity_is_stale_on_a_device_too(_: &Rig) {
    let (from, to) = (on_device(0), on_device(0));
    let (old, put) = from.send(&pattern(100, 1));
    assert!(to.fetch(&old).unwrap() == pattern(100, 1));
    put.wait().unwrap();
    let (_fresh, _put) = from.send(&pattern(100, 2));
    assert!(matches!(to.fetch(&old), Err(Error::Stale { .. })));
    let elsewhere = moved_to("nobody", &old);
    assert!(matches!(to.fetch(&elsewhere), Err(Error::PeerFailed { .. })));
    assert_eq!(to.health().receive_free, 2);
}

fn a_peer_may_write_where_it_is_allowed(_: &Rig) {
    // Through the engine alone: no relay writes.
    crate::plain::writes();
}
