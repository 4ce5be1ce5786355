//! A relay driven by JSON lines: the black box that tests and other programs talk to. `--help`
//! describes the lines.

mod bytes;
mod line;

use std::{
    collections::HashMap,
    io::{self, BufRead, IsTerminal, Write},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, Scope},
    time::{Duration, Instant},
};

use clap::Parser;
use crossbeam::channel::{self, Receiver, Sender};
use mooncake_relay::{
    Completion, Config, EngineOptions, Error, Metadata, Relay, Result, Slot, Tensor, WaitStrategy,
    open_engine,
};
use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json, value::RawValue};
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

use crate::{
    bytes::{Bytes, Spec, hex, sha256},
    line::{Command, Failure, answer, bad, say},
};

/// What `--help` says after the flags.
const LINES: &str = r#"The first line out is {"event":"ready",…}. Each line in is a command; each command is answered
by one line that echoes its tag, in any order:

  {"cmd":"put","tag":1,"bytes":SPEC}     optional: "timeout" (seconds, for a slot), "dtype", "shape"
  {"cmd":"wait","tag":2,"of":1}          how the put with tag 1 ended
  {"cmd":"get","tag":3,"metadata":{…}}   optional: "timeout" (seconds, for all of it), "dest_size"
  {"cmd":"abort","tag":4,"of":1}         ends the put or get with tag 1
  {"cmd":"health"}  {"cmd":"free_credits"}  {"cmd":"quit"}

SPEC is {"hex":".."}, {"text":".."}, {"size":N,"fill":B} or {"size":N,"seed":S}, where byte i is
((i * 2654435761 + S) mod 2^64 >> 24) & 255. A failure is
{"event":..,"tag":..,"ok":false,"kind":"Stale","error":".."}. Logs go to stderr (RUST_LOG)."#;

/// A relay driven by JSON lines on stdin and stdout.
#[derive(Parser)]
#[command(after_help = LINES)]
struct Args {
    /// This peer's name; transfer ids begin with it.
    #[arg(long, default_value_t = Config::default().engine_id)]
    engine_id: String,
    /// How bytes travel: embedded or mooncake.
    #[arg(long, default_value = "embedded")]
    engine: String,
    /// Where the control port listens; port 0 lets the system choose.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: String,
    /// How peers reach it, if not by where it listens: HOST[:CONTROL[:DATA]].
    #[arg(long)]
    advertise: Option<String>,
    /// Bytes a slot.
    #[arg(long, default_value_t = Config::default().slot_size)]
    slot_size: usize,
    /// Slots to put from, and as many to get into.
    #[arg(long, default_value_t = Config::default().credits)]
    credits: u32,
    /// How long a put waits to be acknowledged.
    #[arg(long, default_value_t = Config::default().lease.as_millis() as u64)]
    lease_ms: u64,
    /// How long an ended put's slot may still be read.
    #[arg(long, default_value_t = Config::default().quarantine.as_millis() as u64)]
    quarantine_ms: u64,
    /// Threads that read for callers who do not wait.
    #[arg(long, default_value_t = Config::default().transfer_threads)]
    transfer_threads: usize,
    /// What a thread does between looks: auto, spin, yield or park.
    #[arg(long, default_value = "auto", value_parser = wait_strategy)]
    wait: WaitStrategy,
    /// Use TCP also between processes of one host.
    #[arg(long)]
    no_local: bool,
}

fn wait_strategy(name: &str) -> Result<WaitStrategy, String> {
    Ok(match name {
        "auto" => WaitStrategy::Auto,
        "spin" => WaitStrategy::Spin,
        "yield" => WaitStrategy::Yield,
        "park" => WaitStrategy::Park,
        _ => return Err("expected auto, spin, yield or park".to_owned()),
    })
}

/// How long `quit` waits for reads that are under way.
const GRACE: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            EnvFilter::builder().with_default_directive(LevelFilter::WARN.into()).from_env_lossy(),
        )
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .log_internal_errors(false) // a closed stderr must not end the peer
        .init();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "peer: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let options = EngineOptions {
        listen: args.listen.clone(),
        advertise: args.advertise.clone(),
        local: !args.no_local,
        ..EngineOptions::default()
    };
    let config = Config::default()
        .with_engine_id(args.engine_id.as_str())
        .with_slot_size(args.slot_size)
        .with_credits(args.credits)
        .with_lease(Duration::from_millis(args.lease_ms))
        .with_quarantine(Duration::from_millis(args.quarantine_ms))
        .with_transfer_threads(args.transfer_threads)
        .with_wait(args.wait);
    let relay = Relay::new(open_engine(&args.engine, &options)?, &config)?;

    let health = relay.health();
    say(&json!({
        "event": "ready", "session_id": health.session_id, "pid": std::process::id(),
        "slot_size": health.slot_size, "credits": health.credits,
    }));
    let peer = Peer {
        relay,
        patience: config.read_timeout,
        transfers: Mutex::default(),
        open: Mutex::default(),
        puts: AtomicU64::new(0),
    };
    thread::scope(|scope| {
        let (ended, endings) = channel::unbounded();
        let peer = &peer;
        scope.spawn(move || peer.settle(&endings));
        peer.serve(scope, &ended);
        // Ends every command that still waits; the scope then joins their threads.
        let left = peer.relay.close(GRACE);
        tracing::debug!(?left, "closed");
    });
    say(&json!({"event": "bye"}));
    Ok(())
}

struct Peer {
    relay: Relay,
    /// The limit of what was given none.
    patience: Duration,
    /// Every put and get by the text of its tag, the ended ones included.
    transfers: Mutex<HashMap<String, Arc<Transfer>>>,
    /// The puts that have not ended, by the number under which their token reports.
    open: Mutex<HashMap<u64, Arc<Transfer>>>,
    puts: AtomicU64,
}

impl Peer {
    /// Reads commands until `quit` or the end of input.
    fn serve<'s>(&'s self, scope: &'s Scope<'s, '_>, ended: &Sender<Completion<Slot>>) {
        for line in io::stdin().lock().split(b'\n').map_while(io::Result::ok) {
            if line.trim_ascii().is_empty() {
                continue;
            }
            let command = match Command::parse(&line) {
                Ok(command) => Arc::new(command),
                Err(error) => {
                    answer(None, Err(error.into()));
                    continue;
                }
            };
            match command.cmd.as_str() {
                "quit" => break,
                "health" => answer(Some(&command), Ok(json!({"health": self.relay.health()}))),
                "free_credits" => {
                    let health = self.relay.health();
                    let free = json!({"free": health.free, "receive_free": health.receive_free});
                    answer(Some(&command), Ok(free));
                }
                _ => self.begin(scope, &command, ended),
            }
        }
    }

    /// Runs a command on a thread that ends with it.
    fn begin<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        command: &Arc<Command>,
        ended: &Sender<Completion<Slot>>,
    ) {
        let transfer = Arc::new(Transfer::default());
        if matches!(command.cmd.as_str(), "put" | "get") {
            // Before the next line is read, since that may already be about this transfer.
            self.transfers.lock().insert(command.tag_text().to_owned(), Arc::clone(&transfer));
        }
        let (job, ended) = (Arc::clone(command), ended.clone());
        let run = move || answer(Some(&job), self.execute(&job, &transfer, &ended));
        let thread = thread::Builder::new().name("command".to_owned());
        if let Err(error) = thread.spawn_scoped(scope, run) {
            answer(Some(command), Err(Error::Io(error).into()));
        }
    }

    /// Ends puts: frees the slot, and only then lets `wait` tell of it.
    fn settle(&self, endings: &Receiver<Completion<Slot>>) {
        for Completion { tag, result } in endings {
            let outcome = result.map(drop).map_err(Failure::from);
            if let Some(transfer) = self.open.lock().remove(&tag) {
                transfer.end(outcome);
            }
        }
    }

    fn execute(
        &self,
        command: &Command,
        transfer: &Arc<Transfer>,
        ended: &Sender<Completion<Slot>>,
    ) -> Result<Value, Failure> {
        match command.cmd.as_str() {
            "put" => self
                .put(command, transfer, ended)
                .map_err(Failure::from)
                .inspect_err(|failure| transfer.end(Err(failure.clone()))),
            "get" => {
                let answer = self.get(command, transfer).map_err(Failure::from);
                transfer.end(answer.as_ref().map(|_| ()).map_err(Failure::clone));
                answer
            }
            "wait" => {
                let begun = Instant::now();
                self.named_by(command)?.outcome()?;
                Ok(json!({"ms": milliseconds(begun)}))
            }
            "abort" => {
                if let Some(metadata) = self.named_by(command)?.abort() {
                    self.relay.abort(&metadata)?;
                }
                Ok(json!({}))
            }
            other => Err(Error::Config {
                field: "cmd",
                reason: format!(
                    "{other:?} is none of put, wait, get, abort, health, free_credits, quit"
                ),
            }
            .into()),
        }
    }

    fn put(
        &self,
        command: &Command,
        transfer: &Arc<Transfer>,
        ended: &Sender<Completion<Slot>>,
    ) -> Result<Value> {
        let bytes = Bytes::try_from(command.required::<Spec>("bytes")?)?;
        let tensor = command.tensor(bytes.len())?;
        let patience = command.seconds("timeout")?.unwrap_or(self.patience);
        let mut slot = self.relay.acquire(bytes.len(), patience)?;
        bytes.fill(&mut slot);
        let sha256 = sha256(&slot);
        let (metadata, token) = self.relay.put(slot, tensor)?;
        let number = self.puts.fetch_add(1, Ordering::Relaxed);
        self.open.lock().insert(number, Arc::clone(transfer));
        token.attach(ended, number);
        self.expose(transfer, &metadata)?;
        Ok(json!({"metadata": metadata, "sha256": sha256, "size": bytes.len()}))
    }

    fn get(&self, command: &Command, transfer: &Transfer) -> Result<Value> {
        let begun = Instant::now();
        let metadata = command.metadata()?;
        let timeout = command.seconds("timeout")?;
        if let Some(len) = command.field::<usize>("dest_size")? {
            let mut dest = zeroes(len)?;
            self.expose(transfer, &metadata)?;
            let patience = timeout.unwrap_or(self.patience);
            let filled = self.relay.get_into(&metadata, &mut dest, patience)?;
            return Ok(received(&metadata, &dest[..filled], begun));
        }
        let token = match timeout {
            Some(timeout) => self.relay.get_timeout(&metadata, timeout)?,
            None => self.relay.get(&metadata)?,
        };
        self.expose(transfer, &metadata)?;
        Ok(received(&metadata, &token.wait()?, begun))
    }

    /// From here on `abort` finds the transfer; one that came before is carried out now.
    fn expose(&self, transfer: &Transfer, metadata: &Metadata) -> Result<()> {
        if transfer.expose(metadata) { self.relay.abort(metadata) } else { Ok(()) }
    }

    /// The put or get whose tag is in `of`.
    fn named_by(&self, command: &Command) -> Result<Arc<Transfer>> {
        let tag = command.required::<Box<RawValue>>("of")?;
        let transfer = self.transfers.lock().get(tag.get()).cloned();
        transfer.ok_or_else(|| bad("of", format!("no put or get had the tag {tag}")))
    }
}

/// A put or a get, from the line that asked for it on; kept, since `wait` may ask at any time.
#[derive(Default)]
struct Transfer {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    /// What `abort` needs, once it is known.
    metadata: Option<Metadata>,
    aborted: bool,
    outcome: Option<Result<(), Failure>>,
}

impl Transfer {
    /// True: it was aborted before.
    fn expose(&self, metadata: &Metadata) -> bool {
        let mut state = self.state.lock();
        state.metadata = Some(metadata.clone());
        state.aborted
    }

    /// What to abort; `None`: `expose` will say that it was.
    fn abort(&self) -> Option<Metadata> {
        let mut state = self.state.lock();
        state.aborted = true;
        state.metadata.clone()
    }

    fn end(&self, outcome: Result<(), Failure>) {
        self.state.lock().outcome = Some(outcome);
        self.ended.notify_all();
    }

    /// Waits for its end, and may be asked again.
    fn outcome(&self) -> Result<(), Failure> {
        let mut state = self.state.lock();
        loop {
            match &state.outcome {
                Some(outcome) => return outcome.clone(),
                None => self.ended.wait(&mut state),
            }
        }
    }
}

/// A buffer of a length that a command chose: too much is an answer, no abort.
fn zeroes(len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|error| bad("dest_size", error))?;
    bytes.resize(len, 0);
    Ok(bytes)
}

fn received(metadata: &Metadata, bytes: &[u8], begun: Instant) -> Value {
    let ms = milliseconds(begun);
    let Tensor { dtype, shape } = metadata.tensor();
    let head = hex(&bytes[..bytes.len().min(16)]);
    json!({
        "sha256": sha256(bytes), "size": bytes.len(), "ms": ms, "head": head,
        "dtype": dtype, "shape": shape,
    })
}

fn milliseconds(begun: Instant) -> f64 {
    begun.elapsed().as_micros() as f64 / 1e3
}
