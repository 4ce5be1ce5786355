//! `--times`: how long gets take, from host or device memory into host or device memory, by every way
//! there is, beside the driver's bare copies of as many bytes.

use std::{
    io::{self, Write},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use cudarc::driver::{CudaContext, CudaStream};
use mooncake_relay::{
    Config, Cuda, EmbeddedEngine, Host, Memory, Metadata, Relay, Result as Done, Slot, Staging,
    Tensor,
};

use crate::{Args, PATIENCE, Result, median, next, pattern, pipes, start};

/// Where a relay's slots are.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum Side {
    Host,
    Device,
}

/// From, to, and whether by TCP alone.
const CASES: [(Side, Side, bool); 8] = [
    (Side::Device, Side::Device, false),
    (Side::Host, Side::Device, false),
    (Side::Device, Side::Host, false),
    (Side::Host, Side::Host, false),
    (Side::Device, Side::Device, true),
    (Side::Host, Side::Device, true),
    (Side::Device, Side::Host, true),
    (Side::Host, Side::Host, true),
];

const SIZES: [usize; 6] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30];

pub(crate) fn measure(args: &Args) -> Result<()> {
    let sizes: Vec<_> = SIZES.into_iter().filter(|size| *size <= args.largest).collect();
    let largest = *sizes.last().ok_or("--largest is at least 4096")?;
    let expected = pattern(largest);
    // Before cudarc is asked for anything: this says what is missing.
    drop(Cuda::relay(args, 4096, false)?);
    let bare = Bare::measure(args.device, &sizes)?;
    println!("bare copies by the driver, of pinned memory; medians");
    println!(
        "{:>12} {:>22} {:>22} {:>22}",
        "bytes", "device → device", "host → device", "device → host"
    );
    for (size, [within, to, from]) in sizes.iter().zip(&bare.0) {
        println!(
            "{size:>12} {:>22} {:>22} {:>22}",
            cell(*size, *within),
            cell(*size, *to),
            cell(*size, *from)
        );
    }
    for (from, to, tcp) in CASES.into_iter().filter(|(.., tcp)| *tcp || !args.tcp) {
        match to {
            Side::Host => case::<Host>(args, (from, to, tcp), &sizes, &expected, &bare)?,
            Side::Device => case::<Cuda>(args, (from, to, tcp), &sizes, &expected, &bare)?,
        }
    }
    println!(
        "\nA time is a get's, from `get_timeout` until its token has the slot. Every first get was"
    );
    println!("compared byte for byte, and is not among the times.");
    Ok(())
}

/// Gets each size from a process that puts it as often.
fn case<M: On>(
    args: &Args,
    case: (Side, Side, bool),
    sizes: &[usize],
    expected: &[u8],
    bare: &Bare,
) -> Result<()> {
    let (from, to, tcp) = case;
    let largest = sizes[sizes.len() - 1];
    let relay = M::relay(args, largest, tcp)?;
    let mut flags = vec!["--serve", from.name()];
    if tcp && !args.tcp {
        flags.push("--tcp");
    }
    let mut child = start(&flags)?;
    let (mut to_child, mut from_child) = pipes(&mut child);
    for (n, &size) in sizes.iter().enumerate() {
        let mut times = Vec::new();
        let mut get = || -> Result<(Slot<M>, Duration)> {
            writeln!(to_child, "{size}")?;
            let metadata: Metadata = next(&mut from_child)?.parse()?;
            let begun = Instant::now();
            let slot = relay.get_timeout(&metadata, PATIENCE)?.wait()?;
            Ok((slot, begun.elapsed()))
        };
        let mut bytes = vec![0; size];
        M::read(&get()?.0, &mut bytes)?;
        assert!(bytes == expected[..size], "{size} bytes are not those that were put");
        for _ in 0..repeats(size) {
            times.push(get()?.1);
        }
        let took = median(times);
        if n == 0 {
            let way = relay.health().peers[0].way.clone();
            println!("\n{} → {} by {way:?}", from.name(), to.name());
            println!("{:>12} {:>22} {:>22}", "bytes", "a get", "times a bare copy");
        }
        let ratio = match bare.of(n, from, to) {
            Some(copies) => format!("{:.2}", took.as_secs_f64() / copies.as_secs_f64()),
            None => "-".to_owned(),
        };
        println!("{size:>12} {:>22} {ratio:>22}", cell(size, took));
    }
    drop(to_child); // the end of its input ends it
    let status = child.wait()?;
    assert!(status.success(), "the process that puts: {status}");
    Ok(())
}

/// Puts as many bytes as each line says, and tells of them.
pub(crate) fn serve(side: Side, args: &Args) -> Result<()> {
    match side {
        Side::Host => puts::<Host>(args),
        Side::Device => {
            let device = args.peer_device.unwrap_or(args.device);
            puts::<Cuda>(&Args { device, ..args.clone() })
        }
    }
}

fn puts<M: On>(args: &Args) -> Result<()> {
    let largest = SIZES.into_iter().rfind(|size| *size <= args.largest).ok_or("--largest")?;
    let relay = M::relay(args, largest, args.tcp)?;
    let mut filled: Option<Slot<M>> = None;
    for line in io::stdin().lines() {
        let size: usize = line?.parse()?;
        let slot = match filled.take().filter(|slot| slot.len() == size) {
            Some(slot) => slot,
            None => {
                let mut slot = relay.acquire(size, PATIENCE)?;
                M::write(&mut slot, &pattern(size))?;
                slot
            }
        };
        let (metadata, token) = relay.put(slot, Tensor::bytes(size))?;
        println!("{metadata}");
        filled = Some(token.wait()?); // the same bytes again
    }
    Ok(())
}

/// What differs between host and device memory.
trait On: Memory {
    fn relay(args: &Args, slot_size: usize, tcp: bool) -> Result<Relay<Self>>;
    fn write(slot: &mut Slot<Self>, bytes: &[u8]) -> Done<()>;
    fn read(slot: &Slot<Self>, bytes: &mut [u8]) -> Done<()>;
}

fn config(slot_size: usize) -> Config {
    Config::default().with_credits(1).with_slot_size(slot_size)
}

fn engine(tcp: bool) -> Result<Arc<EmbeddedEngine>> {
    let builder = EmbeddedEngine::builder("127.0.0.1:0").local(!tcp);
    Ok(Arc::new(builder.staging(Staging::default()).bind()?))
}

impl On for Host {
    fn relay(_: &Args, slot_size: usize, tcp: bool) -> Result<Relay> {
        Ok(Relay::new(engine(tcp)?, &config(slot_size))?)
    }

    fn write(slot: &mut Slot, bytes: &[u8]) -> Done<()> {
        slot.copy_from_slice(bytes);
        Ok(())
    }

    fn read(slot: &Slot, bytes: &mut [u8]) -> Done<()> {
        bytes.copy_from_slice(slot);
        Ok(())
    }
}

impl On for Cuda {
    fn relay(args: &Args, slot_size: usize, tcp: bool) -> Result<Relay<Self>> {
        Ok(Relay::with_memory(args.device, engine(tcp)?, &config(slot_size))?)
    }

    fn write(slot: &mut Slot<Self>, bytes: &[u8]) -> Done<()> {
        slot.copy_from_host(bytes)
    }

    fn read(slot: &Slot<Self>, bytes: &mut [u8]) -> Done<()> {
        slot.copy_to_host(bytes)
    }
}

/// For each size: within the device, to it, and from it.
struct Bare(Vec<[Duration; 3]>);

impl Bare {
    fn measure(device: usize, sizes: &[usize]) -> Result<Self> {
        let context = CudaContext::new(device)?;
        let stream = context.new_stream()?;
        let measured = sizes.iter().map(|&size| {
            // SAFETY: it is written before it is read, two lines below.
            let mut pinned = unsafe { context.alloc_pinned::<u8>(size) }?;
            let source = stream.clone_htod(&pattern(size))?;
            let mut dest = stream.alloc_zeros::<u8>(size)?;
            stream.memcpy_dtoh(&source, &mut pinned)?;
            let from = timed(&stream, size, || Ok(stream.memcpy_dtoh(&source, &mut pinned)?))?;
            let to = timed(&stream, size, || Ok(stream.memcpy_htod(&pinned, &mut dest)?))?;
            let within = timed(&stream, size, || Ok(stream.memcpy_dtod(&source, &mut dest)?))?;
            Ok([within, to, from])
        });
        Ok(Self(measured.collect::<Result<_>>()?))
    }

    /// The copies by the driver that a get of the n-th size cannot do without.
    fn of(&self, n: usize, from: Side, to: Side) -> Option<Duration> {
        let [within, up, down] = self.0[n];
        match (from, to) {
            (Side::Host, Side::Host) => None,
            (Side::Host, Side::Device) => Some(up),
            (Side::Device, Side::Host) => Some(down),
            (Side::Device, Side::Device) => Some(within),
        }
    }
}

fn timed(
    stream: &CudaStream,
    size: usize,
    mut copy: impl FnMut() -> Result<()>,
) -> Result<Duration> {
    let mut times = Vec::new();
    for _ in 0..=repeats(size) {
        let begun = Instant::now();
        copy()?;
        stream.synchronize()?;
        times.push(begun.elapsed());
    }
    Ok(median(times.split_off(1))) // the first one warms it up
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Device => "device",
        }
    }
}

/// As many as one second is enough for, about.
fn repeats(size: usize) -> usize {
    ((256 << 20) / size).clamp(3, 51)
}

fn cell(size: usize, took: Duration) -> String {
    let seconds = took.as_secs_f64();
    format!("{:.1} µs {:>7.2} GB/s", seconds * 1e6, size as f64 / seconds / 1e9)
}
