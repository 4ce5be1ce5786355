//! How many instructions does each step take on the thread that calls it? `make counts` prints them.
//!
//! This program runs itself under callgrind, for each step with N and with 2N rounds; the difference
//! by N is what a round takes, whatever came before and after. Callgrind counts only inside
//! [`measured`], hence only the calling thread. Both relays are in one process, so there is no
//! kernel in it. The engine is polled by the calling thread alone: what a notification takes there
//! is counted whole, and waking a notifier that sleeps, which is a system call, is not.

mod common;

use std::{
    cell::Cell,
    env,
    hint::black_box,
    process::{Command, ExitCode},
    sync::Arc,
    thread,
    time::Instant,
};

use mooncake_relay::{
    Access, Engine, Event, Filled, InProcessEngine, Instance, LocalBuffer, Metadata, Notification,
    Publication, ReadError, Relay, RemoteBuffer, Result, Retracted, Span, Tensor,
    internal::{Credits, Tokens},
};

use crate::common::{PATIENCE, relay};

/// The names that the program's own command line knows, and what each counts.
const STEPS: [(&str, &str); 10] = [
    ("base", "nothing: the measuring itself, which is taken off below"),
    ("acquire", "`try_acquire` of a slot, and its drop"),
    ("credit", "of that, the ring: a credit taken and given back"),
    ("put", "`put` of an acquired slot of 64 bytes, until it returns"),
    ("get", "`get_into` of 64 bytes, its notification included"),
    ("notify", "of that, the engine's `notify`"),
    ("done", "the put's token, from the notification to the slot: `poll`"),
    ("token", "of that and of `put`: a token made, completed and polled"),
    ("encode", "the metadata to JSON text"),
    ("decode", "the metadata from JSON text"),
];
const ROUNDS: u32 = 500;

fn main() -> ExitCode {
    let args: Vec<_> = env::args().collect();
    if let [_, flag, step, rounds] = &args[..]
        && flag == "--step"
    {
        run(step, rounds.parse().expect("a number of rounds"));
        return ExitCode::SUCCESS;
    }
    if !args.iter().any(|arg| arg == "--bench") {
        STEPS.iter().for_each(|(step, _)| run(step, 2)); // a try, without valgrind
        return ExitCode::SUCCESS;
    }
    match table() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

fn table() -> Result<(), String> {
    println!("{:>12}  {:8} what", "instructions", "step");
    let mut base = None;
    for (step, what) in STEPS {
        let [once, twice] = [ROUNDS, 2 * ROUNDS].map(|rounds| callgrind(step, rounds));
        let each = twice?.saturating_sub(once?) as f64 / f64::from(ROUNDS);
        let base = *base.get_or_insert(each);
        let net = if step == "base" { each } else { each - base };
        println!("{net:>12.0}  {step:8} {what}");
    }
    Ok(())
}

/// How many instructions `rounds` rounds take inside of [`measured`].
fn callgrind(step: &str, rounds: u32) -> Result<u64, String> {
    let program = env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--fair-sched=yes"])
        .args(["--collect-atstart=no", "--toggle-collect=*measured*"])
        .arg(program)
        .args(["--step", step, &rounds.to_string()])
        .output()
        .map_err(|error| {
            format!("valgrind: {error}; install it (Debian, Ubuntu: `apt-get install valgrind`)")
        })?;
    let text = String::from_utf8_lossy(&output.stderr);
    let count =
        text.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok());
    match count {
        Some(count) if output.status.success() => Ok(count),
        _ => Err(format!("valgrind failed with {}:\n{text}", output.status)),
    }
}

/// What callgrind counts. By name, and never inlined: see [`callgrind`].
#[inline(never)]
fn measured(step: &mut dyn FnMut()) {
    step();
}

fn run(step: &str, rounds: u32) {
    match step {
        "base" => each(rounds, || {}),
        "credit" => {
            let credits = Credits::full(2);
            each(rounds, || credits.give_back(credits.try_take().expect("two are free")));
        }
        "token" => {
            let tokens = Tokens::<u64>::new();
            each(rounds, || {
                let (completer, mut token) = Tokens::make(&tokens);
                completer.complete(Ok(7));
                black_box(token.poll());
            });
        }
        "notify" => {
            let pair = [0, 1].map(|n| InProcessEngine::new(&format!("notify-{n}")));
            let [a, b] = pair.map(|engine| engine.expect("each name is used once"));
            b.start(&Instance::from_bytes([7; 16])).expect("nobody else uses it");
            let note = Notification::new(&format!("stage0_{:032x}", 7), "transfer_complete");
            for _ in 0..rounds {
                let deadline = Instant::now() + PATIENCE;
                measured(&mut || a.notify("notify-1", &note, deadline).expect("it is polled"));
                b.poll(&mut |_| ()).expect("it never fails");
            }
        }
        _ => transfers(step, rounds),
    }
}

fn each(rounds: u32, mut step: impl FnMut()) {
    for _ in 0..rounds {
        measured(&mut step);
    }
}

/// Whole transfers, of which one step is measured.
fn transfers(step: &str, rounds: u32) {
    let engine = |side| {
        let name = format!("counts-{step}-{side}");
        Arc::new(PolledByCaller(InProcessEngine::new(&name).expect("each name is used once")))
    };
    let (sender, receiver) = (relay(engine("sender"), 64), relay(engine("receiver"), 64));
    let mut dest = [0; 64];
    for _ in 0..rounds {
        transfer(step, &sender, &receiver, &mut dest);
    }
}

fn transfer(step: &str, sender: &Relay, receiver: &Relay, dest: &mut [u8]) {
    let count = |name, body: &mut dyn FnMut()| {
        if step == name { measured(body) } else { body() }
    };
    count("acquire", &mut || drop(sender.try_acquire(64).expect("its only slot is free")));
    let mut slot = sender.try_acquire(64).ok();
    let mut tensor = Some(Tensor::bytes(64));
    let mut put = None;
    count("put", &mut || {
        let (Some(slot), Some(tensor)) = (slot.take(), tensor.take()) else { return };
        put = sender.put(slot, tensor).ok();
    });
    let (metadata, mut token) = put.expect("a slot of its own");

    let mut text = String::new();
    count("encode", &mut || text = metadata.to_string());
    count("decode", &mut || {
        black_box(text.parse::<Metadata>().expect("it was just written"));
    });
    count("get", &mut || {
        receiver.get_into(&metadata, dest, PATIENCE).expect("the sender lives");
    });

    MAY_POLL.set(true);
    let mut done = None;
    while done.is_none() {
        count("done", &mut || done = token.poll());
        thread::yield_now(); // the notifier may be just looking, and has to end that first
    }
    MAY_POLL.set(false);
    done.expect("the loop ended").expect("it was acknowledged");
}

thread_local! {
    static MAY_POLL: Cell<bool> = const { Cell::new(false) };
}

/// An engine whose events only the measured thread hears, and only when it asks. Without a doorbell
/// the notifier sleeps meanwhile.
struct PolledByCaller(InProcessEngine);

impl Engine for PolledByCaller {
    fn session_id(&self) -> &str {
        self.0.session_id()
    }

    fn protocol(&self) -> &str {
        self.0.protocol()
    }

    fn start(&self, instance: &Instance) -> Result<()> {
        self.0.start(instance)
    }

    fn stop(&self, deadline: Instant) {
        self.0.stop(deadline);
    }

    #[expect(unsafe_code, reason = "the contract passes the caller's promise on")]
    unsafe fn register(&self, span: Span, access: Access) -> Result<()> {
        // SAFETY: the caller promises the same.
        unsafe { self.0.register(span, access) }
    }

    fn unregister(&self, span: Span) -> Result<()> {
        self.0.unregister(span)
    }

    fn read(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<Filled, ReadError> {
        self.0.read(remote, local, deadline)
    }

    fn read_into(
        &self,
        remote: &RemoteBuffer,
        dest: &mut [u8],
        deadline: Instant,
    ) -> Option<Result<()>> {
        self.0.read_into(remote, dest, deadline)
    }

    fn write(
        &self,
        remote: &RemoteBuffer,
        local: LocalBuffer,
        deadline: Instant,
    ) -> Result<LocalBuffer, ReadError> {
        self.0.write(remote, local, deadline)
    }

    fn notify(&self, peer: &str, note: &Notification, deadline: Instant) -> Result<()> {
        self.0.notify(peer, note, deadline)
    }

    fn poll(&self, events: &mut dyn FnMut(Event)) -> Result<()> {
        if MAY_POLL.get() { self.0.poll(events) } else { Ok(()) }
    }

    fn publish(&self, slot: &Publication) {
        self.0.publish(slot);
    }

    fn retract(&self, slot: &Publication) -> Retracted {
        self.0.retract(slot)
    }

    fn cut(&self, slot: &Publication) -> Retracted {
        self.0.cut(slot)
    }
}
