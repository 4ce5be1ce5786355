//! Teaches how transfers fit into an event loop: many tokens, one channel, `select!`.
//!
//! `cargo run --release --example select`
//!
//! `attach` makes a token send its outcome to a channel, under a number of yours. The producer here
//! gets its slots back that way, and fills them again; the consumer waits for finished transfers,
//! new offers, a clock's tick and a shutdown, all at once, on one thread. Both are threads of one
//! process to keep this short; the channel of offers stands for any network.

use std::{
    convert::Infallible,
    env, error,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crossbeam::{
    channel::{self, Receiver, Sender, never, tick},
    select,
};
use mooncake_relay::{Completion, Config, EmbeddedEngine, Metadata, Relay, Slot, Tensor};

type Result<T, E = Box<dyn error::Error + Send + Sync>> = std::result::Result<T, E>;

/// How many transfers may be under way.
const CREDITS: u32 = 8;

/// The size of each.
const LEN: usize = 256 << 10;

/// A tensor that is on offer, and its number.
type Offer = (u64, Metadata);

/// Nobody sends on this one: when its sender is dropped, everybody hears of it.
type Shutdown = Receiver<Infallible>;

fn main() -> Result<()> {
    let small = env::args().nth(1).as_deref() == Some("--small");
    let run = Duration::from_millis(if small { 300 } else { 2000 });

    let config = Config::default().with_credits(CREDITS).with_slot_size(LEN);
    let relay = |name| -> Result<Relay> {
        let engine = EmbeddedEngine::bind("127.0.0.1:0")?;
        Ok(Relay::new(Arc::new(engine), &config.clone().with_engine_id(name))?)
    };
    let (producer, consumer) = (relay("producer")?, relay("consumer")?);
    let (offer, offers) = channel::unbounded();
    let (stop, shutdown) = channel::bounded(0);
    thread::scope(|scope| {
        let producing = scope.spawn(|| produce(&producer, &offer, &shutdown));
        let consuming = scope.spawn(|| consume(&consumer, offers, shutdown.clone()));
        thread::sleep(run); // until somebody presses Ctrl-C
        drop(stop);
        consuming.join().expect("it does not panic")?;
        producing.join().expect("it does not panic")
    })?;
    let left = producer.close(Duration::from_secs(5)).puts;
    println!("{left} were on offer and nobody's any more: the close ended them");
    Ok(())
}

/// Keeps every slot on offer.
fn produce(relay: &Relay, offers: &Sender<Offer>, shutdown: &Shutdown) -> Result<()> {
    // One channel for all tokens. A completed put's outcome is its slot, so that the slots go
    // round: the producer never has to ask for one again.
    let (done, came_back) = channel::unbounded::<Completion<Slot>>();
    let mut number = 0;
    let mut put = |mut slot: Slot| -> Result<()> {
        slot.fill(number as u8);
        let (metadata, token) = relay.put(slot, Tensor::bytes(LEN))?;
        token.attach(&done, number);
        // An error where the consumer has heard of the shutdown first: nobody takes offers any more.
        let _ = offers.send((number, metadata));
        number += 1;
        Ok(())
    };
    for _ in 0..CREDITS {
        put(relay.try_acquire(LEN)?)?; // all are free
    }
    loop {
        select! {
            recv(came_back) -> completion => put(completion?.result?)?,
            recv(shutdown) -> _ => return Ok(()),
        }
    }
}

/// Gets everything on offer, until the shutdown, and then what it has begun.
fn consume(relay: &Relay, mut offers: Receiver<Offer>, mut shutdown: Shutdown) -> Result<()> {
    // It need not hold as many as can be under way: a completion that finds it full waits in the
    // relay, in order. `attach` itself never blocks.
    let (done, completions) = channel::bounded::<Completion<Slot>>(4);
    let clock = tick(Duration::from_millis(250));
    let begun = Instant::now();
    let (mut to_come, mut received, mut stopping) = (0u32, 0u64, false);
    while !stopping || to_come > 0 {
        select! {
            recv(offers) -> offer => match offer {
                Ok((number, metadata)) => {
                    relay.get(&metadata)?.attach(&done, number);
                    to_come += 1;
                }
                // The producer has ended, and says why. A closed channel is always ready: `never`
                // takes its place.
                Err(_) => (stopping, offers) = (true, never()),
            },
            recv(completions) -> completion => {
                let Completion { tag: number, result } = completion?;
                let slot = result?;
                if slot.iter().any(|byte| *byte != number as u8) {
                    return Err(format!("tensor {number} arrived changed").into());
                }
                (to_come, received) = (to_come - 1, received + 1);
                // Here the slot is dropped, and free for the next get.
            }
            recv(clock) -> _ => {
                let (seconds, moved) = (begun.elapsed().as_secs_f64(), received as f64 * LEN as f64);
                let rate = moved / seconds / 1e9;
                println!("{seconds:.2} s: {received:6} received, {to_come} to come, {rate:.2} GB/s");
            }
            recv(shutdown) -> _ => {
                println!("shutdown: {received} received, {to_come} to come, and no more are begun");
                (stopping, offers, shutdown) = (true, never(), never());
            }
        }
    }
    println!("{received} tensors received, every byte compared");
    Ok(())
}
