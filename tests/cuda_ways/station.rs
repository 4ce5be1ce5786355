//! The other half of each case: a process that speaks the JSON lines of the `peer` example, with its
//! slots on the host or on a stand-in's device, and does to the stand-in what it is told.

use std::{
    collections::HashMap,
    env,
    io::{self, BufRead, Write},
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use mooncake_relay::{
    Closed, Config, Cuda, EmbeddedEngine, Error, Host, Memory, Metadata, Relay, Result, Slot,
    Staging, Tensor, Token,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::standin::Standin;

/// What a station is: as an argument of the process, and as what its parent asks for.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// `None`: the host's.
    pub(crate) device: Option<usize>,
    pub(crate) local: bool,
    pub(crate) staging: Option<(usize, usize)>,
    pub(crate) slot_size: usize,
    pub(crate) credits: u32,
    pub(crate) quarantine_ms: u64,
    /// A second relay, likewise, in the same process: `"at": 1`.
    pub(crate) twin: bool,
}

impl Plan {
    pub(crate) fn to_json(&self) -> Value {
        json!([
            self.device,
            self.local,
            self.staging,
            self.slot_size,
            self.credits,
            self.quarantine_ms,
            self.twin
        ])
    }

    fn of_json(plan: &Value) -> Self {
        let number = |value: &Value| value.as_u64().unwrap();
        let staging = plan[2].as_array();
        Self {
            device: plan[0].as_u64().map(|ordinal| ordinal as usize),
            local: plan[1].as_bool().unwrap(),
            staging: staging.map(|it| (number(&it[0]) as usize, number(&it[1]) as usize)),
            slot_size: number(&plan[3]) as usize,
            credits: number(&plan[4]) as u32,
            quarantine_ms: number(&plan[5]),
            twin: plan[6].as_bool().unwrap(),
        }
    }
}

type Put = (Metadata, Box<dyn FnOnce() -> Result<()> + Send>);

/// A relay, whatever its slots are made of.
trait Station: Send + Sync {
    fn put(&self, bytes: &[u8]) -> Result<Put>;
    fn get(&self, metadata: &Metadata, timeout: Duration) -> Result<Vec<u8>>;
    fn abort(&self, metadata: &Metadata) -> Result<()>;
    fn health(&self) -> Value;
    fn close(&self) -> Closed;
}

trait Bytes: Memory {
    fn put_bytes(relay: &Relay<Self>, bytes: &[u8]) -> Result<(Metadata, Token<Slot<Self>>)>;
    fn bytes(slot: &Slot<Self>) -> Result<Vec<u8>>;
}

impl Bytes for Host {
    fn put_bytes(relay: &Relay<Self>, bytes: &[u8]) -> Result<(Metadata, Token<Slot<Self>>)> {
        relay.put_bytes(bytes, Tensor::bytes(bytes.len()))
    }

    fn bytes(slot: &Slot<Self>) -> Result<Vec<u8>> {
        Ok(slot.to_vec())
    }
}

impl Bytes for Cuda {
    fn put_bytes(relay: &Relay<Self>, bytes: &[u8]) -> Result<(Metadata, Token<Slot<Self>>)> {
        relay.put_host(bytes, Tensor::bytes(bytes.len()))
    }

    fn bytes(slot: &Slot<Self>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; slot.len()];
        slot.copy_to_host(&mut bytes)?;
        Ok(bytes)
    }
}

impl<M: Bytes> Station for Relay<M>
where
    Slot<M>: Send,
{
    fn put(&self, bytes: &[u8]) -> Result<Put> {
        let (metadata, token) = M::put_bytes(self, bytes)?;
        Ok((metadata, Box::new(move || token.wait().map(drop))))
    }

    fn get(&self, metadata: &Metadata, timeout: Duration) -> Result<Vec<u8>> {
        M::bytes(&self.get_timeout(metadata, timeout)?.wait()?)
    }

    fn abort(&self, metadata: &Metadata) -> Result<()> {
        Self::abort(self, metadata)
    }

    fn health(&self) -> Value {
        serde_json::to_value(Self::health(self)).unwrap()
    }

    fn close(&self) -> Closed {
        Self::close(self, Duration::from_secs(30))
    }
}

/// What cannot be made says why, and ends the process.
pub(crate) fn run(plan: &str) {
    let plan = Plan::of_json(&serde_json::from_str(plan).unwrap());
    let mut stations: Vec<Arc<dyn Station>> = Vec::new();
    let mut ready = Value::Null;
    for _ in 0..=usize::from(plan.twin) {
        match open(&plan) {
            Ok((station, said)) => {
                stations.push(station);
                if ready.is_null() {
                    ready = said;
                }
            }
            Err(error) => return say(&failure(json!({"event": "ready"}), &error)),
        }
    }
    say(&ready);
    let mut hall = Some(Arc::new(Hall { stations, puts: Mutex::default() }));
    for line in io::stdin().lock().lines().map_while(io::Result::ok) {
        let command: Value = serde_json::from_str(&line).unwrap();
        match (command["cmd"].as_str().unwrap(), &hall) {
            ("quit", _) => break,
            ("standin", _) => say(&with_tag(told(&command), &command)),
            ("drop", _) => {
                drop(hall.take());
                say(&with_tag(json!({"ok": true}), &command));
            }
            ("health", Some(hall)) => {
                say(&with_tag(json!({"health": hall.at(&command).health()}), &command));
            }
            (_, Some(hall)) => {
                let hall = Arc::clone(hall);
                thread::spawn(move || {
                    let answer = hall.answer(&command);
                    drop(hall);
                    say(&with_tag(answer, &command));
                });
            }
            (_, None) => say(&with_tag(json!({"ok": false}), &command)),
        }
    }
    drop(hall);
    say(&json!({"event": "bye"}));
}

fn open(plan: &Plan) -> Result<(Arc<dyn Station>, Value)> {
    let mut builder = EmbeddedEngine::builder("127.0.0.1:0").local(plan.local);
    if let Some((chunk, chunks)) = plan.staging {
        builder = builder.staging(Staging { chunk, chunks });
    }
    let engine = Arc::new(builder.bind()?);
    let ready = json!({
        "event": "ready",
        "session_id": engine.session_id(),
        "control": engine.control_addr().to_string(),
        "data": engine.data_addr().to_string(),
    });
    let config = Config::default()
        .with_slot_size(plan.slot_size)
        .with_credits(plan.credits)
        .with_quarantine(Duration::from_millis(plan.quarantine_ms))
        .with_transfer_threads(4);
    Ok(match plan.device {
        None => (Arc::new(Relay::new(engine, &config)?), ready),
        Some(ordinal) => (Arc::new(Relay::<Cuda>::with_memory(ordinal, engine, &config)?), ready),
    })
}

struct Hall {
    stations: Vec<Arc<dyn Station>>,
    puts: Mutex<HashMap<u64, Put>>,
}

impl Hall {
    fn at(&self, command: &Value) -> &dyn Station {
        &*self.stations[command["at"].as_u64().unwrap_or(0) as usize]
    }

    fn answer(&self, command: &Value) -> Value {
        self.try_answer(command).unwrap_or_else(|error| failure(json!({}), &error))
    }

    fn try_answer(&self, command: &Value) -> Result<Value> {
        let station = self.at(command);
        let metadata = || command["metadata"].to_string().parse::<Metadata>();
        Ok(match command["cmd"].as_str().unwrap() {
            "put" => {
                let (size, seed) = (&command["bytes"]["size"], &command["bytes"]["seed"]);
                let bytes = bytes(seed.as_u64().unwrap(), size.as_u64().unwrap() as usize);
                let put = station.put(&bytes)?;
                let metadata = serde_json::to_value(&put.0).unwrap();
                self.puts.lock().insert(command["tag"].as_u64().unwrap(), put);
                json!({"ok": true, "metadata": metadata, "sha256": sha256(&bytes)})
            }
            "wait" => {
                let put = self.puts.lock().remove(&command["of"].as_u64().unwrap());
                put.unwrap().1()?;
                json!({"ok": true})
            }
            "abort" => {
                station.abort(&metadata()?)?;
                json!({"ok": true})
            }
            "get" => {
                let timeout = command["timeout_ms"].as_u64().unwrap_or(60_000);
                let bytes = station.get(&metadata()?, Duration::from_millis(timeout))?;
                json!({"ok": true, "sha256": sha256(&bytes)})
            }
            "close" => {
                let closed = station.close();
                json!({"ok": true, "spans_kept": closed.spans_kept, "threads": closed.threads})
            }
            other => panic!("{other} is no command"),
        })
    }
}

fn failure(mut answer: Value, error: &Error) -> Value {
    answer["ok"] = false.into();
    answer["kind"] = error.kind().into();
    answer["error"] = error.to_string().into();
    answer
}

fn with_tag(mut answer: Value, command: &Value) -> Value {
    answer["tag"] = command["tag"].clone();
    answer
}

fn say(line: &Value) {
    let mut out = io::stdout().lock();
    // Whoever does not listen any more has ended the case.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Bytes that tell of whom they are.
pub(crate) fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let word = |n: u64| (n ^ seed << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    let words = (0..len.div_ceil(8) as u64).flat_map(|n| word(n + 1).to_le_bytes());
    words.take(len).collect()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What the stand-in counts.
pub(crate) const KINDS: [&str; 7] =
    ["device", "pinned", "ipc", "stream", "event", "context", "violation"];

/// Does what a command says, to the stand-in of this process.
fn told(command: &Value) -> Value {
    static FOUND: OnceLock<Standin> = OnceLock::new();
    let standin = FOUND.get_or_init(Standin::found);
    let number = |key: &str| command[key].as_u64().unwrap_or(0) as u32;
    let name = command["name"].as_str().unwrap_or_default();
    let mut answer = json!({"ok": true});
    match command["do"].as_str().unwrap() {
        "fail" if number("after") == 0 => standin.fail(name, number("nth"), number("code")),
        "fail" => standin.fail_late(name, number("nth"), number("code")),
        "hold" => standin.hold(number("on") != 0),
        "calls" => answer["calls"] = standin.calls(name).into(),
        "live" => KINDS.iter().for_each(|kind| answer[kind] = standin.live(kind).into()),
        other => panic!("{other} is nothing that a stand-in does"),
    }
    answer
}

/// Where a child finds its plan.
pub(crate) const PLAN: &str = "MOONCAKE_RELAY_TEST_STATION";

/// The plan, in a child.
pub(crate) fn asked() -> Option<String> {
    env::var(PLAN).ok()
}
