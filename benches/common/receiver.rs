//! The second process: this program again, told what to do over a control channel.
//!
//! The channel is a loopback TCP stream whose both ends look without pause. A request is one byte
//! for what, four for a length, and as many bytes of text; what it asks for is in [`serve`].

use std::{
    env,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    thread,
    time::Instant,
};

use hdrhistogram::Histogram;
use mooncake_relay::Metadata;
use rustix::{
    io::Errno,
    net::{RecvFlags, recv},
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};

use super::{PATIENCE, embedded};

const BASE: u8 = b'b';
const GET: u8 = b'g';
const BARE: u8 = b's';
const TIMES: u8 = b't';

/// A running receiver; dropping it ends it.
pub(crate) struct Receiver {
    control: TcpStream,
    /// For bytes that travel without a relay.
    data: TcpStream,
    child: Child,
}

/// The percentiles of a histogram of nanoseconds: 50, 90, 99, 99.9, 100.
pub(crate) type Times = [u64; 5];

impl Receiver {
    /// Starts this program again. Its `main` must begin with [`serve_if_asked`].
    pub(crate) fn start(slot_size: usize, core: Option<usize>) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut command = Command::new(env::current_exe()?);
        command.arg("--receiver").arg(listener.local_addr()?.to_string());
        command.arg(slot_size.to_string());
        command.args(core.map(|core| core.to_string()));
        let child = command.spawn()?;
        let (control, _) = listener.accept()?;
        let (data, _) = listener.accept()?;
        control.set_nodelay(true)?;
        data.set_nodelay(true)?;
        Ok(Self { control, data, child })
    }

    /// Nothing but the text there and a byte back.
    pub(crate) fn base(&mut self, text: &str) -> io::Result<()> {
        send(&mut self.control, BASE, text.as_bytes())?;
        receive(&self.control, &mut [0])
    }

    /// Has the receiver get it; returns as soon as the request is sent.
    pub(crate) fn get(&mut self, metadata: &Metadata) -> io::Result<()> {
        send(&mut self.control, GET, metadata.to_string().as_bytes())
    }

    /// The same without a relay: the text there, a byte that asks, `bytes` there, a byte back.
    pub(crate) fn bare(&mut self, text: &str, bytes: &[u8]) -> io::Result<()> {
        let text = format!("{text}{:016x}", bytes.len());
        send(&mut self.control, BARE, text.as_bytes())?;
        receive(&self.data, &mut [0])?;
        self.data.write_all(bytes)?;
        receive(&self.data, &mut [0])
    }

    /// How long the gets took in the receiver's own `get_into`, since it was last asked.
    pub(crate) fn times(&mut self) -> io::Result<Times> {
        send(&mut self.control, TIMES, &[])?;
        let mut times = [0; 5];
        for time in &mut times {
            let mut bytes = [0; 8];
            receive(&self.control, &mut bytes)?;
            *time = u64::from_le_bytes(bytes);
        }
        Ok(times)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// Whether this process was started by [`Receiver::start`]; if so, its work is done.
pub(crate) fn serve_if_asked() -> bool {
    let args: Vec<_> = env::args().skip(1).collect();
    if args.first().is_none_or(|first| first != "--receiver") {
        return false;
    }
    let slot_size = args[2].parse().expect("`start` wrote a number");
    let core = args.get(3).map(|core| core.parse().expect("`start` wrote a number"));
    serve(&args[1], slot_size, core).expect("the sender's side lives");
    true
}

/// The cores that this process may use.
pub(crate) fn allowed() -> Vec<usize> {
    let mask = sched_getaffinity(None).expect("every thread has one");
    (0..CpuSet::MAX_CPU).filter(|&core| mask.is_set(core)).collect()
}

/// Pins the calling thread.
pub(crate) fn pin(core: usize) {
    let mut mask = CpuSet::new();
    mask.set(core);
    sched_setaffinity(None, &mask).expect("an allowed core");
}

/// 50, 90, 99, 99.9, 100.
pub(crate) fn percentiles(histogram: &Histogram<u64>) -> Times {
    [50.0, 90.0, 99.0, 99.9, 100.0].map(|part| histogram.value_at_percentile(part))
}

/// Three digits, from a nanosecond to a minute.
pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("bounds in order")
}

fn serve(address: &str, slot_size: usize, core: Option<usize>) -> io::Result<()> {
    let mut control = TcpStream::connect(address)?;
    let mut data = TcpStream::connect(address)?;
    control.set_nodelay(true)?;
    data.set_nodelay(true)?;
    let relay = embedded(slot_size);
    if let Some(core) = core {
        pin(core); // after the relay, whose threads run where they like
    }
    let mut dest = vec![0; slot_size];
    let mut text = Vec::new();
    let mut times = histogram();
    loop {
        let mut head = [0; 5];
        match receive(&control, &mut head) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            outcome => outcome?,
        }
        let [what, len @ ..] = head;
        text.resize(u32::from_le_bytes(len) as usize, 0);
        receive(&control, &mut text)?;
        match what {
            BASE => control.write_all(&[0])?,
            GET => {
                let text = str::from_utf8(&text).expect("`get` wrote text");
                let metadata: Metadata = text.parse().map_err(io::Error::other)?;
                let begun = Instant::now();
                relay.get_into(&metadata, &mut dest, PATIENCE).map_err(io::Error::other)?;
                times.saturating_record(begun.elapsed().as_nanos() as u64);
            }
            BARE => {
                let digits = str::from_utf8(&text[text.len() - 16..]).expect("`bare` wrote text");
                let len = usize::from_str_radix(digits, 16).expect("`bare` wrote a number");
                data.write_all(&[0])?;
                receive(&data, &mut dest[..len.min(1)])?;
                data.read_exact(&mut dest[len.min(1)..len])?; // the kernel fills it as it can
                data.write_all(&[0])?;
            }
            TIMES => {
                let bytes = percentiles(&times).map(u64::to_le_bytes);
                control.write_all(bytes.as_flattened())?;
                times.reset();
            }
            _ => return Err(io::Error::other("an unknown request")),
        }
    }
}

fn send(control: &mut TcpStream, what: u8, text: &[u8]) -> io::Result<()> {
    let mut request = [0; 4096];
    let len = 5 + text.len();
    request[0] = what;
    request[1..5].copy_from_slice(&(text.len() as u32).to_le_bytes());
    request[5..len].copy_from_slice(text);
    control.write_all(&request[..len]) // a few hundred bytes never fill the socket
}

/// Looks without pause until `bytes` is full.
fn receive(stream: &TcpStream, bytes: &mut [u8]) -> io::Result<()> {
    let (mut filled, mut looks) = (0, 0_u32);
    while filled < bytes.len() {
        match recv(stream, &mut bytes[filled..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((read, _)) => filled += read,
            Err(Errno::AGAIN) => {
                looks = looks.wrapping_add(1);
                if looks.is_multiple_of(64) {
                    thread::yield_now(); // both ends may share a core
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
