//! The real Mooncake engine: `cargo run --release --example mooncake -- --help`.
//!
//! Two processes move tensors both ways, as in `quickstart`, but over an engine of C++ that is loaded
//! when it is opened. What it takes to have one, README.md says; without it this example says it, too.

use std::{
    env, error,
    io::{self, BufRead, Lines, Write},
    path::PathBuf,
    process::{Child, Command, ExitCode, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Parser;
use mooncake_relay::{Config, DType, Metadata, MooncakeConfig, MooncakeEngine, Relay, Tensor};

type Result<T, E = Box<dyn error::Error>> = std::result::Result<T, E>;

/// Moves tensors both ways between two processes, over the real Mooncake engine.
#[derive(Parser)]
struct Args {
    /// The name or address by which peers reach this host. The engine listens on all of its
    /// addresses, and whoever reaches it may read and write what is registered: use it on trusted
    /// networks only.
    #[arg(long, default_value = "127.0.0.1", overrides_with = "hostname")]
    hostname: String,
    /// tcp, rdma or nvlink.
    #[arg(long, default_value = "tcp")]
    protocol: String,
    /// RDMA devices with commas between them; none: all.
    #[arg(long, default_value = "")]
    device: String,
    /// P2PHANDSHAKE, or a server: etcd://…, http://…, https://… or redis://…
    #[arg(long, default_value = "P2PHANDSHAKE")]
    metadata_server: String,
    /// A libtransfer_engine.so, or the folder that holds mooncake/ of the pip wheel; else it is
    /// looked for.
    #[arg(long)]
    library: Option<PathBuf>,
    #[arg(long, hide = true)]
    second: bool,
}

/// What is sent each way, and how often.
const ROWS: [(DType, &[u64], usize); 4] = [
    (DType::Bfloat16, &[32, 64], 101), // 4 KiB
    (DType::Float16, &[128, 256], 101),
    (DType::Int64, &[2, 256, 256], 51),
    (DType::Bfloat16, &[8192, 4096], 5), // 64 MiB, which fills a slot
];

/// Nobody here waits longer than this.
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let args = Args::parse();
    let done = if args.second { second(&args) } else { first(&args) };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // Of an engine that cannot be opened: what is missing, and the commands that install it.
        Err(error) => {
            eprintln!("mooncake: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A relay on the real engine. From here on it is used like any other.
fn relay(args: &Args, name: &str) -> Result<Relay> {
    let config = MooncakeConfig {
        hostname: args.hostname.clone(),
        metadata_server: args.metadata_server.clone(),
        protocol: args.protocol.clone(),
        device_name: args.device.clone(),
        library: args.library.clone(),
    };
    let engine = MooncakeEngine::open(&config)?;
    Ok(Relay::new(Arc::new(engine), &Config::default().with_engine_id(name).with_credits(1))?)
}

/// Sends each tensor, gets it back, and compares.
fn first(args: &Args) -> Result<()> {
    let relay = relay(args, "first")?;
    let health = relay.health();
    println!("an engine on {} at {}", health.protocol, health.session_id);
    let mut child = start_second(args)?;
    let mut to_second = child.stdin.take().expect("piped");
    let mut from_second = io::BufReader::new(child.stdout.take().expect("piped")).lines();

    println!("{:24} {:>9} {:>11} {:>11}", "tensor", "bytes", "µs there", "µs back");
    for (dtype, shape, times) in ROWS {
        let tensor = Tensor { dtype, shape: shape.to_vec() };
        let bytes = pattern(tensor.byte_len().expect("a known type, a small shape") as usize);
        let (mut there, mut back) = (Vec::new(), Vec::new());
        for _ in 0..times {
            there.push(send(&relay, &bytes, &tensor, &mut to_second)?);
            let metadata: Metadata = next(&mut from_second)?.parse()?;
            let received = relay.get_timeout(&metadata, PATIENCE)?.wait()?;
            assert!(received[..] == bytes[..], "{tensor:?} came back changed");
            back.push(Duration::from_nanos(next(&mut from_second)?.parse()?));
        }
        let name = format!("{} {shape:?}", tensor.dtype.name().trim_start_matches("torch."));
        let [there, back] = [there, back].map(|times| median(times).as_secs_f64() * 1e6);
        println!("{name:24} {:>9} {there:>11.1} {back:>11.1}", bytes.len());
    }

    drop(to_second); // the end of its input ends the second process
    let status = child.wait()?;
    assert!(status.success(), "the second process: {status}");
    println!(
        "\nEvery byte was compared. A time is the median from `put` to the sender's token: the"
    );
    println!("read of the bytes, the read of the stamp that proves them, and the notification.");
    Ok(())
}

/// Gets each tensor that it is told of, and sends it back.
fn second(args: &Args) -> Result<()> {
    let relay = relay(args, "second")?;
    for line in io::stdin().lines() {
        let metadata: Metadata = line?.parse()?;
        let bytes = relay.get_timeout(&metadata, PATIENCE)?.wait()?.to_vec();
        let taken = send(&relay, &bytes, metadata.tensor(), &mut io::stdout())?;
        println!("{}", taken.as_nanos());
    }
    Ok(())
}

/// Puts a tensor, tells the other process, and waits until it has read it.
fn send(relay: &Relay, bytes: &[u8], tensor: &Tensor, other: &mut impl Write) -> Result<Duration> {
    let mut slot = relay.acquire(bytes.len(), PATIENCE)?;
    slot.copy_from_slice(bytes);
    let begun = Instant::now();
    let (metadata, token) = relay.put(slot, tensor.clone())?;
    writeln!(other, "{metadata}")?;
    other.flush()?;
    drop(token.wait()?);
    Ok(begun.elapsed())
}

/// This program once more. With a metadata server its name there must be another.
fn start_second(args: &Args) -> Result<Child> {
    let mut flags: Vec<_> = env::args_os().skip(1).chain(["--second".into()]).collect();
    if args.metadata_server != "P2PHANDSHAKE" {
        let (host, port) = args.hostname.rsplit_once(':').unwrap_or((&args.hostname, "12001"));
        let port: u16 = port.parse()?;
        flags.push(format!("--hostname={host}:{}", port + 1).into());
    }
    let mut command = Command::new(env::current_exe()?);
    Ok(command.args(flags).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?)
}

/// Bytes of which no two neighbouring pages are alike.
fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn next(lines: &mut Lines<impl BufRead>) -> Result<String> {
    Ok(lines.next().ok_or("the second process ended early")??)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
