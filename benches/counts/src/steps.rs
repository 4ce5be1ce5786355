//! The steps of a transfer, each of which callgrind counts by itself.
//!
//! The program runs itself under callgrind, once, with an argument for [`run_if_asked`].
//! Callgrind counts only inside of the functions `counted_…`, hence only the calling thread; both
//! relays are in one process, so there is no kernel in it. The engine is polled by the calling thread
//! alone: what a notification takes there is counted whole, and waking a notifier that sleeps, which is
//! a system call, is not.

use std::{
    cell::Cell,
    collections::HashMap,
    env, fs,
    hint::black_box,
    os::fd::BorrowedFd,
    path::Path,
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{
    Access, Config, EmbeddedEngine, Engine, Event, Filled, InProcessEngine, Instance, LocalBuffer,
    Metadata, Notification, Publication, ReadError, Relay, RemoteBuffer, Result, Retracted, Span,
    Tensor,
    internal::{Credits, Tokens},
};

/// Nobody here waits longer than this, however slow the program is under valgrind.
const PATIENCE: Duration = Duration::from_secs(60);
const ASK: &str = "--steps";
/// So many rounds come before those that are counted.
const WARM_UP: u32 = 50;

macro_rules! steps {
    ($($step:ident, $counted:ident: $what:literal,)*) => {
        /// Their names, and what each counts.
        pub(crate) const STEPS: &[(&str, &str)] = &[$((stringify!($step), $what),)*];

        /// What callgrind counts. By name and never inlined, and no two are the same code: a linker
        /// would make one of them.
        fn count(step: &str, body: &mut dyn FnMut()) {
            match step {
                $(stringify!($step) => $counted(body),)*
                _ => body(),
            }
        }

        $(#[inline(never)]
        fn $counted(body: &mut dyn FnMut()) {
            body();
            black_box(stringify!($step));
        })*
    };
}

steps! {
    base, counted_base: "nothing: the counting itself, which is taken off the others",
    acquire, counted_acquire: "`try_acquire` of a slot, and its drop",
    credit, counted_credit: "of that, the ring: a credit taken and given back",
    put, counted_put: "`put` of an acquired slot of 64 bytes, until it returns",
    get, counted_get: "`get_into` of 64 bytes, its notification included",
    notify, counted_notify: "of that, the engine's `notify`",
    done, counted_done: "the put's token, from the notification to the slot: `poll`",
    token, counted_token: "of that and of `put`: a token made, completed and polled",
    submit, counted_submit: "`get` of 64 bytes, until its token is there; a thread is woken",
    encode, counted_encode: "the metadata to JSON text",
    decode, counted_decode: "the metadata from JSON text",
    local_put, counted_local_put: "`put`, over the embedded engine on one host",
    local_decode, counted_local_decode: "the metadata from JSON text: it says where the sender is met",
    local_get, counted_local_get: "`get_into`, likewise",
    local_done, counted_local_done: "the put's token, likewise",
}

/// Runs all steps if the program was started for that.
pub(crate) fn run_if_asked() -> bool {
    let args: Vec<_> = env::args().collect();
    let [_, ask, rounds] = &args[..] else { return false };
    let asked = ask == ASK;
    if asked {
        run(rounds.parse().expect("a number of rounds"));
    }
    asked
}

/// How many instructions a round of each step takes, over `rounds` of them.
pub(crate) fn instructions(
    rounds: u32,
    folder: &Path,
) -> Result<HashMap<&'static str, f64>, String> {
    let program = env::current_exe().map_err(|error| error.to_string())?;
    let out = folder.join(format!("callgrind.{}", std::process::id()));
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--fair-sched=yes", "--compress-strings=no"])
        .args(["--compress-pos=no", "--collect-atstart=no", "--toggle-collect=*counted_*"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(program)
        .args([ASK, &rounds.to_string()])
        .output()
        .map_err(|error| {
            format!("valgrind: {error}; install it (Debian, Ubuntu: `apt-get install valgrind`)")
        })?;
    let profile = fs::read_to_string(&out).unwrap_or_default();
    let _ = fs::remove_file(&out);
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("valgrind failed with {}:\n{said}", output.status));
    }
    let all = totals(&profile);
    let each = |step| {
        let total = all.get(step).ok_or_else(|| format!("callgrind has not seen {step}"))?;
        Ok::<_, String>(*total as f64 / f64::from(rounds))
    };
    let base = each("base")?;
    let net = |step| Ok((step, if step == "base" { base } else { each(step)? - base }));
    STEPS.iter().map(|(step, _)| net(*step)).collect()
}

/// What was counted for each step, callees included, in callgrind's own words: `fn=` begins what is
/// known of a function, and a line that begins with a number has its cost, or that of the call that was
/// named before.
fn totals(profile: &str) -> HashMap<&str, u64> {
    let mut totals = HashMap::new();
    let mut current = None;
    for line in profile.lines() {
        if let Some(function) = line.strip_prefix("fn=") {
            let name = function.split("counted_").nth(1);
            current = name.map(|name| name.split("::").next().unwrap_or(name).trim());
        } else if let (Some(step), true) = (current, line.starts_with(|c: char| c.is_ascii_digit()))
        {
            let cost = line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok());
            *totals.entry(step).or_default() += cost.unwrap_or(0);
        }
    }
    totals
}

/// All steps, `rounds` times each.
pub(crate) fn run(rounds: u32) {
    each(rounds, "base", || {});
    let credits = Credits::full(2);
    each(rounds, "credit", || credits.give_back(credits.try_take().expect("two are free")));
    let tokens = Tokens::<u64>::new();
    each(rounds, "token", || {
        let (completer, mut token) = Tokens::make(&tokens);
        completer.complete(Ok(7));
        black_box(token.poll());
    });
    notes(rounds);
    let named = |name: &str| InProcessEngine::new(name).expect("each name is used once");
    let pair = Pair::of(named("counts-sender"), named("counts-receiver"));
    for round in 0..WARM_UP + rounds {
        pair.transfer(round >= WARM_UP, ["put", "get", "done"]);
    }
    for round in 0..WARM_UP + rounds {
        pair.submit(round >= WARM_UP);
    }
    let bound = || EmbeddedEngine::bind("127.0.0.1:0").expect("a port is free");
    let pair = Pair::of(bound(), bound());
    for round in 0..WARM_UP + rounds {
        pair.transfer(round >= WARM_UP, ["local_put", "local_get", "local_done"]);
    }
    let local = pair.receiver.health().counters.engine["reads_local"];
    assert_eq!(local, u64::from(WARM_UP + rounds), "every get is by shared memory");
}

fn each(rounds: u32, step: &str, mut body: impl FnMut()) {
    for round in 0..WARM_UP + rounds {
        count(if round < WARM_UP { "" } else { step }, &mut body);
    }
}

fn notes(rounds: u32) {
    let pair = [0, 1].map(|n| InProcessEngine::new(&format!("notify-{n}")));
    let [a, b] = pair.map(|engine| engine.expect("each name is used once"));
    b.start(&Instance::from_bytes([7; 16])).expect("nobody else uses it");
    let note = Notification::new(&format!("stage0_{:032x}", 7), "transfer_complete");
    for _ in 0..rounds {
        let deadline = Instant::now() + PATIENCE;
        count("notify", &mut || a.notify("notify-1", &note, deadline).expect("it is polled"));
        b.poll(&mut |_| ()).expect("it never fails");
    }
}

/// Two relays that send 64 bytes from one to the other.
struct Pair {
    sender: Relay,
    receiver: Relay,
}

impl Pair {
    fn of<E: Engine>(sender: E, receiver: E) -> Self {
        let config = Config::default().with_credits(1).with_slot_size(64);
        let relay = |engine| {
            let engine = Arc::new(PolledByCaller(engine));
            Relay::new(engine, &config).expect("the memory and the threads are there")
        };
        Self { sender: relay(sender), receiver: relay(receiver) }
    }

    /// A transfer, whose steps have these names if they are counted.
    fn transfer(&self, counts: bool, [put_step, get_step, done_step]: [&str; 3]) {
        let Self { sender, receiver } = self;
        let step = |name, body: &mut dyn FnMut()| count(if counts { name } else { "" }, body);
        let in_process = put_step == "put";
        let once = |name, body: &mut dyn FnMut()| step(if in_process { name } else { "" }, body);

        once("acquire", &mut || drop(sender.try_acquire(64).expect("its only slot is free")));
        let mut slot = sender.try_acquire(64).ok();
        let mut tensor = Some(Tensor::bytes(64));
        let mut put = None;
        step(put_step, &mut || {
            let (Some(slot), Some(tensor)) = (slot.take(), tensor.take()) else { return };
            put = sender.put(slot, tensor).ok();
        });
        let (metadata, mut token) = put.expect("a slot of its own");

        let mut text = String::new();
        once("encode", &mut || text = metadata.to_string());
        let mut parsed = None;
        let decode = if in_process { "decode" } else { "local_decode" };
        step(decode, &mut || parsed = text.parse::<Metadata>().ok());
        // As it comes to a receiver in another process.
        let metadata = parsed.expect("it was just written");
        let mut dest = [0; 64];
        step(get_step, &mut || {
            receiver.get_into(&metadata, &mut dest, PATIENCE).expect("the sender lives");
        });

        MAY_POLL.set(true);
        let mut done = None;
        while done.is_none() {
            step(done_step, &mut || done = token.poll());
            thread::yield_now(); // the notifier may be just looking, and has to end that first
        }
        MAY_POLL.set(false);
        done.expect("the loop ended").expect("it was acknowledged");
    }

    /// A transfer by a token, of which only the call that makes it is counted.
    fn submit(&self, counts: bool) {
        let Self { sender, receiver } = self;
        let put = sender.put_bytes(&[7; 64], Tensor::bytes(64));
        let (metadata, mut put) = put.expect("its only slot is free");
        let mut get = None;
        count(if counts { "submit" } else { "" }, &mut || get = receiver.get(&metadata).ok());
        let get = get.expect("the relay is open");
        // Not waited for: that would be a get that needs no thread.
        while !get.is_done() {
            thread::yield_now();
        }
        drop(get);
        MAY_POLL.set(true);
        while put.poll().is_none() {
            thread::yield_now();
        }
        MAY_POLL.set(false);
        thread::sleep(Duration::from_millis(1)); // so that its thread has gone to sleep, mostly
    }
}

thread_local! {
    static MAY_POLL: Cell<bool> = const { Cell::new(false) };
}

/// An engine whose events only the counted thread hears, and only when it asks. Without a doorbell
/// the notifier sleeps meanwhile.
struct PolledByCaller<E>(E);

impl<E: Engine> Engine for PolledByCaller<E> {
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

    fn local(&self) -> Option<Arc<str>> {
        self.0.local()
    }

    fn backed_by(&self, span: Span, slots: u32, fd: BorrowedFd<'_>) {
        self.0.backed_by(span, slots, fd);
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

    fn counters(&self, each: &mut dyn FnMut(&'static str, u64)) {
        self.0.counters(each);
    }
}
