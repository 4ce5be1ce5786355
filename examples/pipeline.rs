//! Teaches how stages are chained: three processes, A → B → C, with one credit each.
//!
//! `cargo run --release --example pipeline`
//!
//! A makes chunks, B changes each, C checks what arrives, in order. The metadata goes from process
//! to process through an ordinary pipe, a line for each chunk. One credit a stage keeps all three at
//! work: while C checks a chunk, B changes the next and A makes the one after. And it holds back
//! whoever is faster: a stage that waits for its credit waits for the stage behind it.

use std::{
    env, error,
    io::{self, Write},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{Config, EmbeddedEngine, Metadata, Relay, Slot, Tensor, Token};

type Result<T, E = Box<dyn error::Error>> = std::result::Result<T, E>;

/// The longest chunk.
const SLOT_SIZE: usize = 4 << 20;

/// Nobody here waits longer than this for another stage.
const PATIENCE: Duration = Duration::from_secs(20);

fn main() -> Result<()> {
    let args: Vec<_> = env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--b"] => change(),
        ["--c", count] => check(count.parse()?),
        ["--small"] => make(16, 64 << 10),
        _ => make(100, SLOT_SIZE),
    }
}

/// One slot for puts, and one for gets.
fn relay(name: &str) -> Result<Relay> {
    let config = Config::default()
        .with_engine_id(name)
        .with_credits(1)
        .with_slot_size(SLOT_SIZE)
        .with_lease(PATIENCE) // so long a put's token may take,
        .with_read_timeout(PATIENCE); // and so long a get's
    Ok(Relay::new(Arc::new(EmbeddedEngine::bind("127.0.0.1:0")?), &config)?)
}

/// A makes `count` chunks of `len` bytes. It also starts the other two, as a shell would with
/// `a | b | c`, and sees to their end.
fn make(count: u64, len: usize) -> Result<()> {
    let relay = relay("a")?;
    let mut b = Stage::start(&["--b"], Stdio::piped(), Stdio::piped())?;
    let mut to_b = b.0.stdin.take().expect("piped");
    let from_b = b.0.stdout.take().expect("piped");
    let mut c = Stage::start(&["--c", &count.to_string()], from_b.into(), Stdio::inherit())?;

    let mut waited = Duration::ZERO;
    let mut slot = relay.acquire(len, PATIENCE)?;
    for number in 0..count {
        fill(number, &mut slot);
        let (metadata, mut token) = relay.put(slot, Tensor::bytes(len))?;
        writeln!(to_b, "{metadata}")?;
        // Our only slot: the token gives it back when B has read the chunk. `token.wait()` would
        // do; but if a stage dies, only the end of the lease would tell, and we can know sooner.
        slot = loop {
            match timed(&mut waited, || token.wait_timeout(Duration::from_millis(100))) {
                Some(outcome) => break outcome?,
                None => [&mut b, &mut c].into_iter().try_for_each(Stage::check)?,
            }
        };
    }
    println!("A made    {count} chunks of {len} bytes; it waited {waited:.1?} for B");
    drop(to_b); // the end of B's input, and so in turn of C's
    b.finish()?;
    c.finish()
}

/// B changes what comes from A.
fn change() -> Result<()> {
    let relay = relay("b")?;
    let mut to_c = io::stdout();
    let (mut waited, mut count) = (Duration::ZERO, 0);
    let mut before: Option<Token<Slot>> = None;
    for line in io::stdin().lines() {
        let line = line?;
        let metadata: Metadata = line.parse()?;
        // A has its slot back as soon as this is here.
        let chunk = relay.get(&metadata)?.wait()?;
        // Our own comes back when C has read the chunk before.
        if let Some(token) = before.take() {
            timed(&mut waited, || token.wait())?;
        }
        let mut slot = relay.acquire(chunk.len(), PATIENCE)?;
        slot.copy_from_slice(&chunk);
        drop(chunk); // the slot for gets is free for the next
        transform(&mut slot);
        let (metadata, token) = relay.put(slot, metadata.tensor().clone())?;
        writeln!(to_c, "{metadata}")?;
        before = Some(token);
        count += 1;
    }
    // This process, and with it the slot, must last until C has read it.
    if let Some(token) = before {
        token.wait()?;
    }
    writeln!(to_c, "B changed {count} chunks; it waited {waited:.1?} for C")?;
    Ok(())
}

/// C checks that all chunks come, changed, and in order.
fn check(expected: u64) -> Result<()> {
    let relay = relay("c")?;
    let (mut waited, mut count, mut bytes) = (Duration::ZERO, 0, 0);
    let (mut begun, mut took) = (None, Duration::ZERO);
    let mut right = Vec::new();
    loop {
        let mut line = String::new();
        if timed(&mut waited, || io::stdin().read_line(&mut line))? == 0 {
            break;
        }
        if !line.starts_with('{') {
            print!("{line}"); // a remark of B's, and no metadata
            continue;
        }
        let begun = *begun.get_or_insert_with(Instant::now);
        let chunk = relay.get(&line.trim().parse()?)?.wait()?;
        right.resize(chunk.len(), 0);
        fill(count, &mut right);
        transform(&mut right);
        if chunk[..] != right[..] {
            return Err(format!("chunk {count} is not what it should be").into());
        }
        (count, bytes, took) = (count + 1, bytes + chunk.len(), begun.elapsed());
    }
    if count != expected {
        return Err(format!("{count} chunks of {expected} came").into());
    }
    let rate = bytes as f64 / took.as_secs_f64() / 1e9;
    println!("C checked {count} chunks; it waited {waited:.1?} for B");
    println!("\n{:.1} MB went down the line in {took:.1?}: {rate:.2} GB/s", bytes as f64 / 1e6);
    Ok(())
}

/// Chunk `number` as A makes it; no two are alike.
fn fill(number: u64, chunk: &mut [u8]) {
    for (word, at) in chunk.chunks_exact_mut(8).zip(number << 32..) {
        word.copy_from_slice(&at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
}

/// What B does to a chunk: a layer of a model, say.
fn transform(chunk: &mut [u8]) {
    chunk.iter_mut().for_each(|byte| *byte = byte.rotate_left(1) ^ 0x5a);
}

/// Adds to `total` the time that `f` takes.
fn timed<T>(total: &mut Duration, f: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let value = f();
    *total += begun.elapsed();
    value
}

/// A process of ours. Dropping it ends the process, whatever happened.
struct Stage(Child);

impl Stage {
    /// Starts this program again, as another stage.
    fn start(args: &[&str], input: Stdio, output: Stdio) -> Result<Self> {
        let program = env::current_exe()?;
        Ok(Self(Command::new(program).args(args).stdin(input).stdout(output).spawn()?))
    }

    /// Fails if it has ended.
    fn check(&mut self) -> Result<()> {
        match self.0.try_wait()? {
            None => Ok(()),
            Some(status) => Err(format!("a stage ended early: {status}").into()),
        }
    }

    /// It has all it needs: it ends by itself, and well.
    fn finish(mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.0.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("a stage failed: {status}").into()),
                None if Instant::now() >= deadline => return Err("a stage does not end".into()),
                None => thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // Does nothing if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
