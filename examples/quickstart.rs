//! Two processes move tensors both ways: `cargo run --release --example quickstart`.
//!
//! This program starts itself a second time. The two share nothing but two pipes, over which each
//! tells the other about its tensors in JSON text. The bytes take a way of their own: the receiver
//! reads them out of the sender's memory.

use std::{
    env, error,
    io::{self, BufRead, Lines, Write},
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use mooncake_relay::{Config, DType, EmbeddedEngine, Metadata, Relay, Tensor};

type Result<T, E = Box<dyn error::Error>> = std::result::Result<T, E>;

/// What each row of the table sends, and how often.
const ROWS: [(DType, &[u64], usize); 8] = [
    (DType::Uint8, &[0], 21), // an empty tensor is a tensor
    (DType::Float32, &[2, 3], 101),
    (DType::Bfloat16, &[32, 64], 101),
    (DType::Float16, &[128, 256], 101),
    (DType::Int64, &[8, 128, 128], 51),
    (DType::Float8E4m3fn, &[2048, 2048], 21),
    (DType::Float32, &[2048, 2048], 11),
    (DType::Bfloat16, &[8192, 4096], 11), // 64 MiB, which fills a slot
];

/// Nobody here waits longer than this for a slot.
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Result<()> {
    if env::args().nth(1).as_deref() == Some("--second") { second() } else { first() }
}

/// An engine moves the bytes; a relay lends its memory, slot by slot. These are the defaults, but
/// for one slot each way in place of two.
fn relay(name: &str) -> Result<Relay> {
    let engine = EmbeddedEngine::bind("127.0.0.1:0")?; // the system chooses the port
    let config = Config::default().with_engine_id(name).with_credits(1);
    Ok(Relay::new(Arc::new(engine), &config)?)
}

/// Sends each tensor, gets it back, and compares.
fn first() -> Result<()> {
    let relay = relay("first")?;
    let mut child = Command::new(env::current_exe()?)
        .arg("--second")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut to_second = child.stdin.take().expect("piped");
    let mut from_second = io::BufReader::new(child.stdout.take().expect("piped")).lines();

    println!(
        "{:26} {:>9} {:>10} {:>6} {:>10} {:>6}",
        "tensor", "bytes", "µs there", "GB/s", "µs back", "GB/s"
    );
    for (dtype, shape, times) in ROWS {
        let tensor = Tensor { dtype, shape: shape.to_vec() };
        let bytes = pattern(tensor.byte_len().expect("a known type, a small shape") as usize);
        let (mut there, mut back) = (Vec::new(), Vec::new());
        for _ in 0..times {
            // A slot is registered memory. Fill it, then give it away: from `put` on, its bytes
            // belong to the transfer.
            let mut slot = relay.acquire(bytes.len(), PATIENCE)?;
            slot.copy_from_slice(&bytes);
            let begun = Instant::now();
            let (metadata, token) = relay.put(slot, tensor.clone())?;
            writeln!(to_second, "{metadata}")?;
            // The token gives the slot back once the other side has read it.
            drop(token.wait()?);
            there.push(begun.elapsed());

            // The same tensor comes back; every byte is compared.
            let metadata: Metadata = next(&mut from_second)?.parse()?;
            let received = relay.get(&metadata)?.wait()?;
            assert_eq!(metadata.tensor(), &tensor);
            assert!(received[..] == bytes[..], "{tensor:?} came back changed");
            let nanoseconds = next(&mut from_second)?.parse()?;
            back.push(Duration::from_nanos(nanoseconds));
        }
        let name = format!("{} {shape:?}", tensor.dtype.name().trim_start_matches("torch."));
        let (there, back) = (median(there), median(back));
        println!(
            "{name:26} {:>9} {} {}",
            bytes.len(),
            speed(bytes.len(), there),
            speed(bytes.len(), back)
        );
    }

    drop(to_second); // the end of its input ends the second process
    let status = child.wait()?;
    assert!(status.success(), "the second process: {status}");
    println!("\nEvery byte was compared. A time is the median from `put` to the sender's token,");
    println!("the JSON text and the acknowledgement included; both processes ran on this machine.");
    println!(
        "Next: `cargo doc --no-deps --open`, README.md, examples/peer (driven by JSON lines)."
    );
    Ok(())
}

/// Gets each tensor that it is told of, and sends it back.
fn second() -> Result<()> {
    let relay = relay("second")?;
    for line in io::stdin().lines() {
        let metadata: Metadata = line?.parse()?;
        let received = relay.get(&metadata)?.wait()?;
        let mut slot = relay.acquire(received.len(), PATIENCE)?;
        slot.copy_from_slice(&received);
        drop(received);

        let begun = Instant::now();
        let (metadata, token) = relay.put(slot, metadata.tensor().clone())?;
        println!("{metadata}");
        token.wait()?;
        println!("{}", begun.elapsed().as_nanos());
    }
    Ok(())
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

/// A time in microseconds, and what it means in gigabytes a second.
fn speed(bytes: usize, time: Duration) -> String {
    let rate = bytes as f64 / time.as_secs_f64() / 1e9;
    format!("{:>10.1} {rate:>6.2}", time.as_secs_f64() * 1e6)
}
