//! Teaches how to send more than fits in a slot: the weights of a model, to another process.
//!
//! `cargo run --release --example weights [FILE.safetensors]`
//!
//! Every tensor of the file goes to a second process, which this program starts itself; without a
//! file it makes one, and removes it at the end. A tensor larger than a slot is sent in pieces.
//! There are two slots: while the receiver reads the one, the next piece is read from the disk
//! straight into the other. At the end each side hashes what it has, and the hashes are compared.

use std::{
    collections::VecDeque,
    env, error,
    fmt::Display,
    fs::{self, File},
    io::{self, BufRead, BufReader, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{self, Child, ChildStdin, Command, Stdio},
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};
use mooncake_relay::{Config, DType, EmbeddedEngine, Metadata, Relay, Slot, Tensor, Token};
use safetensors::{
    Dtype,
    tensor::{self, TensorView},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

type Result<T, E = Box<dyn error::Error>> = std::result::Result<T, E>;

/// The credits: how many pieces can be under way.
const SLOTS: usize = 2;

/// The longest piece; a whole number of elements, whatever their type.
const SLOT_SIZE: usize = 4 << 20;

/// Nobody here waits longer than this for anything.
const PATIENCE: Duration = Duration::from_secs(20);

fn main() -> Result<()> {
    match env::args().nth(1) {
        Some(flag) if flag == RECEIVE => receive(),
        Some(path) => send(Path::new(&path)),
        None => {
            let made = MadeFile::new()?;
            println!("made {}", made.0.display());
            send(&made.0)
        }
    }
}

/// What goes ahead of a tensor, as a line of JSON; then comes the metadata of each piece.
#[derive(Serialize, Deserialize)]
struct Header {
    name: String,
    tensor: Tensor,
    len: usize,
}

/// The line after the last tensor.
const THAT_IS_ALL: &str = "that is all";

fn send(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    let weights = contents(&file)?;
    let total: usize = weights.iter().map(|(header, _)| header.len).sum();

    let config = Config::default()
        .with_engine_id("sender")
        .with_credits(SLOTS as u32)
        .with_receive_credits(1) // it receives nothing
        .with_slot_size(SLOT_SIZE)
        .with_lease(PATIENCE); // a piece that nobody has read by then is an error
    let relay = Relay::new(Arc::new(EmbeddedEngine::bind("127.0.0.1:0")?), &config)?;
    let mut receiver = Receiving::start()?;

    let style = "{bar:32} {bytes} of {total_bytes}, {binary_bytes_per_sec}, {msg}";
    let bar = ProgressBar::new(total as u64).with_style(ProgressStyle::with_template(style)?);
    let mut under_way: VecDeque<Token<Slot>> = VecDeque::new(); // the oldest first
    let begun = Instant::now();
    for (header, place) in &weights {
        bar.set_message(header.name.clone());
        receiver.tell(serde_json::to_string(header)?)?;
        for start in (0..header.len).step_by(SLOT_SIZE) {
            // Both slots are out: the older one's token gives it back when it has been read.
            if under_way.len() == SLOTS {
                let oldest = under_way.pop_front().expect("there are two");
                bar.inc(receiver.has_read(oldest)?);
            }
            let mut slot = relay.acquire(SLOT_SIZE.min(header.len - start), PATIENCE)?;
            file.read_exact_at(&mut slot, place + start as u64)?;
            let tensor = piece(header, slot.len());
            let (metadata, token) = relay.put(slot, tensor)?;
            receiver.tell(metadata)?;
            under_way.push_back(token); // and on to the other slot
        }
    }
    for token in under_way {
        bar.inc(receiver.has_read(token)?);
    }
    let took = begun.elapsed();
    bar.finish_and_clear();

    receiver.tell(THAT_IS_ALL)?;
    println!(
        "{:28} {:>14} {:>14} {:>10} {:>6}  sha256",
        "tensor", "type", "shape", "bytes", "pieces"
    );
    for (Header { name, tensor, len }, place) in &weights {
        let (ours, theirs) = (hash_in(&file, *place, *len)?, receiver.hear()?);
        let dtype = tensor.dtype.name().trim_start_matches("torch.");
        let (shape, pieces) = (format!("{:?}", tensor.shape), len.div_ceil(SLOT_SIZE));
        println!("{name:28} {dtype:>14} {shape:>14} {len:>10} {pieces:>6}  {}…", &ours[..12]);
        if theirs != ours {
            return Err(format!("{name} arrived changed: its hash is {theirs}").into());
        }
    }
    receiver.finish()?;
    println!(
        "\n{} tensors, {:.1} MB in {:.1} ms, from file to process: {:.2} GB/s. Every hash is equal.",
        weights.len(),
        total as f64 / 1e6,
        took.as_secs_f64() * 1e3,
        total as f64 / took.as_secs_f64() / 1e9,
    );
    Ok(())
}

/// Reads each piece straight to where it belongs.
fn receive() -> Result<()> {
    // `get_into` needs no slot for this, since the embedded engine reads to any memory.
    let config = Config::default().with_engine_id("receiver").with_credits(1).with_slot_size(4096);
    let relay = Relay::new(Arc::new(EmbeddedEngine::bind("127.0.0.1:0")?), &config)?;
    let mut lines = io::stdin().lines();
    let mut next =
        || lines.next().ok_or("the sender ended early")?.map_err(Box::<dyn error::Error>::from);
    let mut weights = Vec::new();
    loop {
        let line = next()?;
        if line == THAT_IS_ALL {
            break;
        }
        let header: Header = serde_json::from_str(&line)?;
        let mut bytes = vec![0; header.len];
        for piece in bytes.chunks_mut(SLOT_SIZE) {
            let metadata: Metadata = next()?.parse()?;
            let len = relay.get_into(&metadata, piece, PATIENCE)?;
            if len < piece.len() {
                return Err(format!("a piece of {} is too short", header.name).into());
            }
        }
        weights.push(bytes);
    }
    for bytes in &weights {
        println!("{:x}", Sha256::digest(bytes));
    }
    Ok(())
}

/// What a piece of `len` bytes is: the tensor itself if it is whole, else some of its elements.
fn piece(Header { tensor, len: whole, .. }: &Header, len: usize) -> Tensor {
    if len == *whole {
        return tensor.clone();
    }
    let size = tensor.dtype.size().unwrap_or(1);
    Tensor::new(tensor.dtype.clone(), [(len / size) as u64])
}

/// Every tensor of a `.safetensors` file, and where in the file its bytes are.
///
/// The format: eight bytes that say how long the JSON after them is, the JSON, then all the bytes.
fn contents(file: &File) -> Result<Vec<(Header, u64)>> {
    let file_len = file.metadata()?.len();
    let mut start = [0; 8];
    file.read_exact_at(&mut start, 0)?;
    let json_len = u64::from_le_bytes(start);
    if json_len > file_len {
        return Err("this is no .safetensors file".into());
    }
    let mut json = vec![0; json_len as usize];
    file.read_exact_at(&mut json, 8)?;
    let contents: tensor::Metadata = serde_json::from_slice(&json)?;
    if 8 + json_len + contents.data_len() as u64 != file_len {
        return Err("a part of the file is missing".into());
    }
    let mut weights = Vec::new();
    for name in contents.offset_keys() {
        let info = contents.info(&name).expect("the file has what it lists");
        let shape: Vec<u64> = info.shape.iter().map(|axis| *axis as u64).collect();
        let tensor = Tensor::new(dtype(info.dtype), shape);
        let (start, end) = info.data_offsets;
        weights.push((Header { name, tensor, len: end - start }, 8 + json_len + start as u64));
    }
    Ok(weights)
}

/// The type as torch calls it, which is what travels.
fn dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::BOOL => DType::Bool,
        Dtype::U8 => DType::Uint8,
        Dtype::I8 => DType::Int8,
        Dtype::U16 => DType::Uint16,
        Dtype::I16 => DType::Int16,
        Dtype::U32 => DType::Uint32,
        Dtype::I32 => DType::Int32,
        Dtype::U64 => DType::Uint64,
        Dtype::I64 => DType::Int64,
        Dtype::F16 => DType::Float16,
        Dtype::BF16 => DType::Bfloat16,
        Dtype::F32 => DType::Float32,
        Dtype::F64 => DType::Float64,
        Dtype::C64 => DType::Complex64,
        Dtype::F8_E4M3 => DType::Float8E4m3fn,
        Dtype::F8_E5M2 => DType::Float8E5m2,
        Dtype::F8_E8M0 => DType::Float8E8m0fnu,
        Dtype::F8_E4M3FNUZ => DType::Float8E4m3fnuz,
        Dtype::F8_E5M2FNUZ => DType::Float8E5m2fnuz,
        // A relay carries what it does not know, too: the name travels, the shape is not checked.
        other => DType::Other(other.to_string()),
    }
}

/// The hash of `len` bytes of the file.
fn hash_in(file: &File, place: u64, len: usize) -> Result<String> {
    let (mut hash, mut part) = (Sha256::new(), vec![0; 1 << 20]);
    for start in (0..len).step_by(part.len()) {
        let part_len = part.len().min(len - start);
        file.read_exact_at(&mut part[..part_len], place + start as u64)?;
        hash.update(&part[..part_len]);
    }
    Ok(format!("{:x}", hash.finalize()))
}

/// The flag with which this program starts itself as the receiver.
const RECEIVE: &str = "--receive";

/// The receiving process. Dropping it ends the process, whatever happened.
struct Receiving {
    process: Child,
    input: ChildStdin,
    lines: Receiver<io::Result<String>>,
}

impl Receiving {
    fn start() -> Result<Self> {
        let mut process = Command::new(env::current_exe()?)
            .arg(RECEIVE)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = process.stdin.take().expect("piped");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        // A pipe knows no time-out, and a channel does.
        let (tx, lines) = mpsc::channel();
        thread::spawn(move || output.lines().try_for_each(|line| tx.send(line)));
        Ok(Self { process, input, lines })
    }

    fn tell(&mut self, line: impl Display) -> Result<()> {
        Ok(writeln!(self.input, "{line}")?)
    }

    fn hear(&self) -> Result<String> {
        Ok(self.lines.recv_timeout(PATIENCE)??)
    }

    /// Waits until a piece was read; how long it was.
    ///
    /// `token.wait()` would do. But if the receiver dies, only the end of the lease would tell, and
    /// we can know sooner.
    fn has_read(&mut self, mut token: Token<Slot>) -> Result<u64> {
        loop {
            if let Some(outcome) = token.wait_timeout(Duration::from_millis(100)) {
                return Ok(outcome?.len() as u64);
            }
            if let Some(status) = self.process.try_wait()? {
                return Err(format!("the receiver ended early: {status}").into());
            }
        }
    }

    /// It has said everything: it ends by itself, and well.
    fn finish(mut self) -> Result<()> {
        match self.lines.recv_timeout(PATIENCE) {
            Err(RecvTimeoutError::Disconnected) => {}
            more => return Err(format!("the receiver did not end: {more:?}").into()),
        }
        let status = self.process.wait()?;
        if status.success() { Ok(()) } else { Err(format!("the receiver: {status}").into()) }
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        // Does nothing if it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A small file of weights, removed when dropped.
struct MadeFile(PathBuf);

impl MadeFile {
    fn new() -> Result<Self> {
        let made = Self(env::temp_dir().join(format!("weights-{}.safetensors", process::id())));
        let tensors: [(&str, Dtype, &[usize], usize); 8] = [
            ("embedding.weight", Dtype::BF16, &[4096, 2048], 2),
            ("layers.0.attention.weight", Dtype::F16, &[1024, 3072], 2),
            ("layers.0.mlp.weight", Dtype::F8_E4M3, &[2048, 3072], 1),
            ("layers.0.norm.weight", Dtype::F32, &[2048], 4),
            ("head.weight", Dtype::F32, &[512, 1536], 4),
            ("step", Dtype::I64, &[], 8), // no axes: one element
            ("mask", Dtype::BOOL, &[3, 5], 1),
            ("unused", Dtype::U8, &[0, 7], 1), // an empty tensor is a tensor
        ];
        let bytes: Vec<_> = (1..)
            .zip(&tensors)
            .map(|(seed, (.., shape, size))| pattern(seed, shape.iter().product::<usize>() * size))
            .collect();
        let mut views = Vec::new();
        for ((name, dtype, shape, _), bytes) in tensors.iter().zip(&bytes) {
            views.push((*name, TensorView::new(*dtype, shape.to_vec(), bytes)?));
        }
        safetensors::serialize_to_file(views, None, &made.0)?;
        Ok(made)
    }
}

impl Drop for MadeFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Bytes of which no two pages are alike.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let words = (seed << 32..).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    words.flatten().take(len).collect()
}
