//! Tensors in the memory of an NVIDIA device:
//! `cargo run --release --features cuda --example cuda -- --help`.
//!
//! Two processes move tensors both ways, as in `quickstart`, but from device memory into device
//! memory, and every byte is compared. Without a device it says what is missing.

mod times;

use std::{
    env, error,
    io::{self, BufRead, Lines, Write},
    process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Parser;
use cudarc::driver::CudaContext;
use mooncake_relay::{
    Config, Cuda, DType, EmbeddedEngine, Error, Metadata, Relay, Slot, Staging, Tensor, Token,
};

type Result<T, E = Box<dyn error::Error>> = std::result::Result<T, E>;

/// Moves tensors in device memory both ways between two processes.
#[derive(Clone, Parser)]
struct Args {
    /// Whose memory the first process uses, as the driver counts: `nvidia-smi -L` lists them.
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// The second process's; else the same.
    #[arg(long)]
    peer_device: Option<usize>,
    /// By TCP through pinned host memory, as between two hosts.
    #[arg(long)]
    tcp: bool,
    /// Measures instead: gets between host and device memory by every way, beside bare copies.
    #[arg(long)]
    times: bool,
    /// The largest of those gets, in bytes; 1 GiB takes about 4 GiB of the device, and of the host.
    #[arg(long, default_value_t = 1 << 30, requires = "times")]
    largest: usize,
    #[arg(long, hide = true)]
    second: bool,
    #[arg(long, hide = true)]
    serve: Option<times::Side>,
}

/// What is sent each way, and how often.
const ROWS: [(DType, &[u64], usize); 4] = [
    (DType::Bfloat16, &[32, 64], 51), // 4 KiB
    (DType::Float16, &[128, 256], 51),
    (DType::Float8E4m3fn, &[1024, 1024], 21),
    (DType::Bfloat16, &[4096, 2048], 5), // 16 MiB, which fills a slot
];
const SLOT: usize = 16 << 20;

/// Nobody here waits longer than this.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match &args.serve {
        Some(side) => times::serve(*side, &args),
        None if args.times => times::measure(&args),
        None if args.second => second(&args),
        None => first(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cuda: {error}");
            if let Some(Error::Config { field: "memory", .. }) = error.downcast_ref() {
                eprintln!("{NEEDS}");
            }
            ExitCode::FAILURE
        }
    }
}

const NEEDS: &str = "
What this example needs:
  - an NVIDIA device, and its driver, 470 or later: `nvidia-smi` shows both. The CUDA toolkit is not
    needed, neither to build nor to run
  - in a container, to be let in: `docker run --gpus all`, and libcuda.so.1 where the loader looks
  - a device that CUDA_VISIBLE_DEVICES leaves, and that --device names by its number among those";

/// A relay whose slots are on that device. Staging is what the embedded engine needs beside it: pinned
/// host memory, for peers whose bytes cannot come from device to device.
fn relay(ordinal: usize, args: &Args, name: &str) -> Result<Relay<Cuda>> {
    let engine = EmbeddedEngine::builder("127.0.0.1:0")
        .local(!args.tcp)
        .staging(Staging::default())
        .bind()?;
    let config = Config::default().with_engine_id(name).with_credits(1).with_slot_size(SLOT);
    Ok(Relay::with_memory(ordinal, Arc::new(engine), &config)?)
}

/// Sends each tensor, gets it back, and compares.
fn first(args: &Args) -> Result<()> {
    // First of all, since it says what is missing; cudarc panics without a driver.
    let relay = relay(args.device, args, "first")?;
    let stream = CudaContext::new(args.device)?.new_stream()?;
    let mut child = start(&["--second"])?;
    let (mut to_second, mut from_second) = pipes(&mut child);
    println!("slots in the memory of {}", relay.health().device);

    println!("{:28} {:>9} {:>11} {:>11}", "tensor", "bytes", "µs there", "µs back");
    for (dtype, shape, times) in ROWS {
        let tensor = Tensor { dtype, shape: shape.to_vec() };
        let bytes = pattern(tensor.byte_len().expect("a known type, a small shape") as usize);
        // What a kernel of yours would have computed, on the same stream.
        let computed = stream.clone_htod(&bytes)?;
        let (mut there, mut back) = (Vec::new(), Vec::new());
        for _ in 0..times {
            let begun = Instant::now();
            let put = relay.put_device(&computed, Some(&stream), tensor.clone())?;
            finish(put, &mut to_second)?;
            there.push(begun.elapsed());

            let metadata: Metadata = next(&mut from_second)?.parse()?;
            let mut received = stream.alloc_zeros::<u8>(bytes.len())?;
            relay.get_into(&metadata, &mut received, Some(&stream), PATIENCE)?;
            back.push(Duration::from_nanos(next(&mut from_second)?.parse()?));
            assert!(stream.clone_dtoh(&received)? == bytes, "{tensor:?} came back changed");
        }
        let name = format!("{} {shape:?}", tensor.dtype.name().trim_start_matches("torch."));
        let [there, back] = [there, back].map(|times| median(times).as_secs_f64() * 1e6);
        println!("{name:28} {:>9} {there:>11.1} {back:>11.1}", bytes.len());
    }

    // From host memory, and back there: the slots are the device's all the same.
    let bytes = pattern(12_345);
    let put = relay.put_host(&bytes, Tensor::bytes(bytes.len()))?;
    finish(put, &mut to_second)?;
    let received = relay.get_timeout(&next(&mut from_second)?.parse()?, PATIENCE)?.wait()?;
    let mut on_host = vec![0; received.len()];
    received.copy_to_host(&mut on_host)?;
    assert!(on_host == bytes, "the bytes came back changed");
    drop(received);
    next(&mut from_second)?;

    let way = relay.health().peers[0].way.clone();
    drop(to_second); // the end of its input ends the second process
    let status = child.wait()?;
    assert!(status.success(), "the second process: {status}");
    println!("\nEvery byte was compared. The way was {way:?}: {}", meaning(&way));
    println!("A time is the median from `put_device` to the sender's token.");
    Ok(())
}

/// Gets each tensor that it is told of into a tensor of its own, and sends that back.
fn second(args: &Args) -> Result<()> {
    let device = args.peer_device.unwrap_or(args.device);
    let relay = relay(device, args, "second")?;
    let stream = CudaContext::new(device)?.new_stream()?;
    for line in io::stdin().lines() {
        let metadata: Metadata = line?.parse()?;
        let mut tensor = stream.alloc_zeros::<u8>(metadata.size())?;
        // Neither waits for the device: the copy out of one slot and into the other is on the stream.
        relay.get_into(&metadata, &mut tensor, Some(&stream), PATIENCE)?;
        let begun = Instant::now();
        let put = relay.put_device(&tensor, Some(&stream), metadata.tensor().clone())?;
        finish(put, &mut io::stdout())?;
        println!("{}", begun.elapsed().as_nanos());
    }
    Ok(())
}

/// Tells the other process of a put, and waits until it has read it.
fn finish(put: (Metadata, Token<Slot<Cuda>>), other: &mut impl Write) -> Result<()> {
    let (metadata, token) = put;
    writeln!(other, "{metadata}")?;
    other.flush()?;
    drop(token.wait()?);
    Ok(())
}

fn meaning(way: &str) -> &'static str {
    match way {
        "cuda-ipc" => "one copy, from device memory to device memory.",
        "staged" => "by TCP, through pinned host memory at both ends.",
        "local-staged" => "from shared memory, through pinned host memory.",
        _ => "as `health().peers[].way` says.",
    }
}

/// This program once more, with these flags beside its own.
fn start(flags: &[&str]) -> Result<Child> {
    let mut command = Command::new(env::current_exe()?);
    command.args(env::args_os().skip(1)).args(flags);
    Ok(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?)
}

type Said = Lines<io::BufReader<ChildStdout>>;

fn pipes(child: &mut Child) -> (ChildStdin, Said) {
    let (input, output) = (child.stdin.take(), child.stdout.take());
    (input.expect("piped"), io::BufReader::new(output.expect("piped")).lines())
}

fn next(lines: &mut Said) -> Result<String> {
    Ok(lines.next().ok_or("the second process ended early")??)
}

/// Bytes of which no two neighbouring pages are alike.
fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
