//! Teaches how a loop that must never block moves tensors: it looks at its token between its steps.
//!
//! `cargo run --release --example spin_loop`
//!
//! The loop stands for a model: it steps, and steps, and takes in an input whenever one is there.
//! `get` starts a transfer and returns at once; threads of the relay carry it out; `poll` says
//! whether it has ended. What sends is a thread here; it could as well be another machine.

use std::{
    env, error,
    hint::black_box,
    sync::{
        Arc,
        mpsc::{self, Receiver, SyncSender, TryRecvError},
    },
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{Config, EmbeddedEngine, Metadata, Relay, Slot, Tensor, Token};

type Result<T, E = Box<dyn error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Nothing here takes longer than this.
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Result<()> {
    let small = env::args().nth(1).as_deref() == Some("--small");
    let (inputs, len, looks) =
        if small { (8, 64 << 10, 10_000) } else { (100, 4 << 20, 1_000_000) };
    let config = Config::default().with_slot_size(len).with_read_timeout(PATIENCE);
    let relay = |name| -> Result<Relay> {
        let engine = EmbeddedEngine::bind("127.0.0.1:0")?;
        Ok(Relay::new(Arc::new(engine), &config.clone().with_engine_id(name))?)
    };
    let (sender, model) = (relay("sender")?, relay("model")?);

    let alone = a_step_alone();
    thread::scope(|scope| {
        let (tx, offers) = mpsc::sync_channel(1);
        let sending = scope.spawn(|| send(&sender, inputs, len, tx));
        step_and_receive(&model, inputs, alone, offers)?;
        sending.join().expect("it does not panic")
    })?;
    cost_of_a_look(&model, looks)
}

/// The loop: no call in it blocks.
fn step_and_receive(
    relay: &Relay,
    inputs: u64,
    alone: Duration,
    offers: Receiver<Metadata>,
) -> Result<()> {
    let mut model = Model::new();
    let mut under_way: Option<Token<Slot>> = None;
    let (mut received, mut bytes) = (0, 0);
    let mut steps = Vec::new(); // how long each took that was done while an input was on its way
    let begun = Instant::now();
    while received < inputs {
        let before = Instant::now();
        model.step();
        if under_way.is_some() {
            steps.push(before.elapsed());
        }

        match &mut under_way {
            // Nothing is on its way: start the next input's, if it has been offered.
            None => match offers.try_recv() {
                Ok(metadata) => under_way = Some(relay.get(&metadata)?),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return Err("the sender ended early".into()),
            },
            // Has it come? If not, the next step comes first.
            Some(token) => {
                if let Some(outcome) = token.poll() {
                    let input = outcome?;
                    model.take_in(&input, received)?;
                    (received, bytes) = (received + 1, bytes + input.len());
                    under_way = None;
                } // here the input is dropped, and its slot is free for the next
            }
        }
    }
    let rate = bytes as f64 / begun.elapsed().as_secs_f64() / 1e9;
    println!(
        "{} steps were done while {received} inputs of {:.1} MB came in ({rate:.2} GB/s)",
        steps.len(),
        (bytes / received as usize) as f64 / 1e6,
    );
    println!("a step took {:.2?} then, and {alone:.2?} while nothing else went on", median(steps));
    Ok(())
}

/// What the loop pays for a look at a token whose transfer has not ended.
fn cost_of_a_look(relay: &Relay, looks: u32) -> Result<()> {
    let (metadata, mut pending) = relay.put_bytes(b"that nobody reads", Tensor::bytes(17))?;
    let mut cost = |look: &mut dyn FnMut(&mut Token<Slot>) -> bool| -> Result<f64> {
        let begun = Instant::now();
        for _ in 0..looks {
            if look(&mut pending) {
                return Err("it has ended, and nobody read it".into());
            }
        }
        Ok(begun.elapsed().as_secs_f64() * 1e9 / f64::from(looks))
    };
    // One atomic load. It hears of what the relay's threads have done.
    let is_done = cost(&mut |token| token.is_done())?;
    // Looks for news as well, so that an acknowledgement is heard at once. Takes the outcome.
    let poll = cost(&mut |token| token.poll().is_some())?;
    println!("a look costs {is_done:.1} ns by `is_done`, {poll:.1} ns by `poll`");
    // A loop that loses interest says so: the slot is free at once, and not after the lease.
    relay.abort(&metadata)?;
    Ok(())
}

/// Puts the inputs, one after the other, and offers their metadata.
fn send(relay: &Relay, inputs: u64, len: usize, offers: SyncSender<Metadata>) -> Result<()> {
    for number in 0..inputs {
        // Two slots: it fills one while the other is read. Whoever lets go of a token lets go of
        // the news, not of the transfer, and the slot comes back all the same.
        let mut slot = relay.acquire(len, PATIENCE)?;
        slot.fill(number as u8);
        let (metadata, _token) = relay.put(slot, Tensor::bytes(len))?;
        if offers.send(metadata).is_err() {
            break; // the loop has ended, and says why
        }
    }
    Ok(())
}

/// Stands for a model.
struct Model {
    weights: [[f32; 64]; 64],
    state: [f32; 64],
}

impl Model {
    fn new() -> Self {
        Self { weights: [[1.0 / 64.0; 64]; 64], state: [1.0; 64] }
    }

    fn step(&mut self) {
        let dot = |row: &[f32; 64]| row.iter().zip(&self.state).map(|(a, b)| a * b).sum::<f32>();
        self.state = black_box(self.weights.each_ref().map(dot));
    }

    fn take_in(&mut self, input: &[u8], number: u64) -> Result<()> {
        if input.iter().any(|byte| *byte != number as u8) {
            return Err(format!("input {number} arrived changed").into());
        }
        self.state[0] += 1.0;
        Ok(())
    }
}

/// The median, so that what else the machine does counts little.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn a_step_alone() -> Duration {
    let mut model = Model::new();
    let step = |_| {
        let begun = Instant::now();
        model.step();
        begun.elapsed()
    };
    median((0..10_000).map(step).collect())
}
