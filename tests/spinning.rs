//! While both sides spin, no transfer on one host makes a system call.
//!
//! Two threads, each with a relay of its own, put and get in turn, in a process of their own whose
//! kernel forbids them every call from some round on. Who puts waits at once; who gets does so only when
//! the other has looked at its engine, and that one looks no more before the get has ended. So both spin
//! at once in whatever order they run: a receiver that were stopped between its note and its ring would
//! find that nobody spins any more, and wake who sleeps.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    cell::Cell,
    env,
    hint::spin_loop,
    io, mem,
    process::{self, Command, ExitCode},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam::queue::ArrayQueue;
use libtest_mimic::{Arguments, Failed, Trial};
use mooncake_relay::{Config, EmbeddedEngine, Metadata, Relay, Tensor, WaitStrategy};

use crate::common::hooked::Hooked;

const WARM_UP: u64 = 200;
const ROUNDS: u64 = 1000;
/// Beside them two notifiers spin, and cores may be two.
const PATIENCE: Duration = Duration::from_secs(300);
/// How often it is tried: a notifier that is stopped between its last look and its sleep is woken by a call.
/// That is rare, and what a transfer does, it does each time.
const TRIES: usize = 3;
const ASK: &str = "--spin";
/// How the child ends when a thread has made a call.
const CALLED: i32 = 3;
const LATE: i32 = 4;

fn main() -> ExitCode {
    if env::args().nth(1).is_some_and(|arg| arg == ASK) {
        spin();
    }
    let name = "while_both_sides_spin_no_transfer_makes_a_system_call";
    let trial = Trial::test(name, while_both_sides_spin_no_transfer_makes_a_system_call);
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code()
}

fn while_both_sides_spin_no_transfer_makes_a_system_call() -> Result<(), Failed> {
    let mut failed = String::new();
    for _ in 0..TRIES {
        let child = Command::new(env::current_exe()?).arg(ASK).output()?;
        if child.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&child.stderr);
        failed += &format!("it ended with {}: {said}", child.status);
        if child.status.code() != Some(CALLED) {
            break;
        }
    }
    Err(failed.into())
}

/// One thread's part, which the other looks into.
struct Side {
    relay: Relay,
    /// What the other is to get. It is dropped by who has put, so that no memory changes hands.
    offer: ArrayQueue<Metadata>,
    /// The round in which its thread, waiting, has looked at its engine.
    looked: Arc<AtomicU64>,
    /// The round whose get has ended here.
    got: Arc<AtomicU64>,
}

thread_local! {
    /// The round for whose end this thread waits.
    static WAITS_FOR: Cell<u64> = const { Cell::new(0) };
}

/// How many threads have done all their rounds.
static DONE: AtomicUsize = AtomicUsize::new(0);
/// The call that was made, or less than none.
static CALL: AtomicI64 = AtomicI64::new(-1);

fn spin() -> ! {
    let got = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
    let sides = Arc::new([side(&got[0], &got[1]), side(&got[1], &got[0])]);
    for own in [0, 1] {
        let sides = Arc::clone(&sides);
        thread::spawn(move || {
            for round in 1..=WARM_UP + ROUNDS {
                if round == WARM_UP + 1 {
                    forbid_calls();
                }
                if round % 2 == own as u64 {
                    put(&sides[own], round);
                } else {
                    get(&sides[own], &sides[1 - own], round);
                }
            }
            DONE.fetch_add(1, SeqCst);
            // It may not even end.
            loop {
                spin_loop();
            }
        });
    }
    let until = Instant::now() + PATIENCE;
    while DONE.load(SeqCst) < 2 {
        let call = CALL.load(SeqCst);
        if call >= 0 {
            eprintln!("a thread made system call number {call} (that of `write`: perhaps a panic)");
            process::exit(CALLED);
        }
        if Instant::now() > until {
            eprintln!("{} threads had ended after {PATIENCE:?}", DONE.load(SeqCst));
            process::exit(LATE);
        }
        thread::sleep(Duration::from_millis(1)); // leaves the cores to the two
    }
    for side in &*sides {
        let counters = side.relay.health().counters;
        assert_eq!(counters.engine["reads_local"], (WARM_UP + ROUNDS) / 2, "all by shared memory");
    }
    process::exit(0);
}

fn side(own: &Arc<AtomicU64>, other: &Arc<AtomicU64>) -> Side {
    let engine = Hooked::over(Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap()));
    let looked = Arc::new(AtomicU64::new(0));
    let (seen, got) = (Arc::clone(&looked), Arc::clone(other));
    engine.after_poll(move |events| {
        if let round @ 1.. = WAITS_FOR.get() {
            seen.store(round, SeqCst);
            while events > 0 && got.load(SeqCst) < round {
                spin_loop();
            }
        }
    });
    let config =
        Config::default().with_slot_size(4096).with_credits(1).with_wait(WaitStrategy::Spin);
    let relay = Relay::new(engine.engine(), &config).unwrap();
    Side { relay, offer: ArrayQueue::new(1), looked, got: Arc::clone(own) }
}

fn put(own: &Side, round: u64) {
    let bytes = round.to_le_bytes();
    let (metadata, token) = own.relay.put_bytes(&bytes, Tensor::bytes(bytes.len())).unwrap();
    own.offer.push(metadata.clone()).unwrap();
    WAITS_FOR.set(round);
    drop(token.wait().unwrap());
    WAITS_FOR.set(0);
    drop(metadata);
}

fn get(own: &Side, other: &Side, round: u64) {
    let metadata = loop {
        match other.offer.pop() {
            Some(metadata) => break metadata,
            None => spin_loop(),
        }
    };
    while other.looked.load(SeqCst) < round {
        spin_loop();
    }
    let mut dest = [0; 8];
    let got = own.relay.get_into(&metadata, &mut dest, PATIENCE).unwrap();
    assert_eq!((got, u64::from_le_bytes(dest)), (8, round));
    drop(metadata);
    own.got.store(round, SeqCst);
}

/// From here on each call of this thread is a trap, but those that end it. A clock that cannot be read
/// without one is the machine's, and not the relay's.
fn forbid_calls() {
    // SAFETY: all of it is numbers, of which 0 is none.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = caught as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: a whole `sigaction`, whose handler only stores a number.
    let set = unsafe { libc::sigaction(libc::SIGSYS, &raw const action, ptr::null_mut()) };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());

    let step = |code: u32, k: u32, jt: u8| libc::sock_filter { code: code as u16, jt, jf: 0, k };
    let allowed = [libc::SYS_exit, libc::SYS_exit_group, libc::SYS_clock_gettime];
    let mut filter = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (n, call) in allowed.iter().enumerate() {
        let to_the_end = (allowed.len() - n) as u8;
        filter.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, *call as u32, to_the_end));
    }
    filter.push(step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_TRAP, 0));
    filter.push(step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: sets a flag of this thread.
    let given_up = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(given_up, 0, "{}", io::Error::last_os_error());
    let mode = libc::SECCOMP_MODE_FILTER;
    // SAFETY: the program and its steps live until the call returns.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
    // What is freed now was never asked of the system.
    mem::forget(filter);
}

extern "C" fn caught(_: i32, info: *const libc::siginfo_t, _: *const libc::c_void) {
    /// Where the kernel says which call it was.
    const SYSCALL: usize = 24;
    // SAFETY: the kernel hands out a whole `siginfo_t`, whose words are there.
    let call = unsafe { info.cast::<i32>().wrapping_byte_add(SYSCALL).read() };
    CALL.store(call.into(), SeqCst);
    loop {
        spin_loop();
    }
}
