//! Two processes of this program, and memory that they share for requests.

use std::{
    env,
    fs::File,
    io::{self, Read},
    process::{self, Child, Command, Stdio},
    sync::atomic::Ordering,
    thread,
};

use crate::{
    mailbox::{self, LANES, Lane},
    measure::{Plan, clock, look, pin},
    rows::Start,
};

const END: u64 = 0;
/// The receiver shall sleep while it waits for requests, or look without a pause.
const SLEEPS: u64 = 255;
/// How many bits of a request's word say what is asked.
const WHAT: u32 = 8;

/// The sender's end.
pub(crate) struct Pair {
    lanes: &'static [Lane; LANES],
    asked: u32,
    answered: u32,
    told: u32,
    child: Child,
    _file: File,
}

impl Pair {
    pub(crate) fn start(start: Start, plan: &Plan) -> io::Result<Self> {
        let (lanes, file, name) = mailbox::create()?;
        let mut command = Command::new(env::current_exe()?);
        command.arg("receive").arg(start.name()).arg(name);
        if let [_, core] = plan.cores[..] {
            command.arg("--core").arg(core.to_string());
        }
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        Ok(Self { lanes, asked: 0, answered: 0, told: 0, child, _file: file })
    }

    /// Asks, and waits for no answer: for what ends in another way before the next request. `what` is
    /// not 0; `number` goes with it.
    pub(crate) fn ask(&mut self, what: u64, number: u64, text: &str) {
        self.asked += 1;
        self.lanes[0].ask(what | number << WHAT, text);
    }

    /// Asks, and waits until the receiver has done it.
    pub(crate) fn call(&mut self, what: u64, text: &str) {
        self.ask(what, 0, text);
        self.reply();
    }

    fn reply(&mut self) {
        self.answered += 1;
        self.lanes[0].await_reply(self.answered);
    }

    /// Whether the receiver sleeps while it waits for requests. At first it looks without a pause: so do
    /// those who wait for no request, but for the bytes.
    pub(crate) fn sleeps(&mut self, sleeps: bool) {
        self.ask(SLEEPS, sleeps.into(), "");
        self.reply();
    }

    /// When the receiver began with what it was asked last; known once that has ended.
    pub(crate) fn begun(&self) -> u64 {
        self.lanes[0].begun.load(Ordering::Acquire)
    }

    /// What the receiver says of it.
    pub(crate) fn told(&mut self) -> u64 {
        self.told += 1;
        self.lanes[1].hear(self.told, &mut Vec::new())
    }

    /// Ends the receiver, which looks at its counters first.
    pub(crate) fn end(mut self) -> io::Result<()> {
        self.ask(END, 0, "");
        let _open = self.child.stdin.take(); // `wait` would close it first
        match self.child.wait()? {
            status if status.success() => Ok(()),
            status => Err(io::Error::other(format!("the receiver ended with {status}"))),
        }
    }
}

/// The receiver's end.
pub(crate) struct Requests {
    lanes: &'static [Lane; LANES],
    heard: u32,
    text: Vec<u8>,
    core: Option<usize>,
    sleeps: bool,
}

pub(crate) struct Request<'a> {
    pub(crate) what: u64,
    pub(crate) number: u64,
    pub(crate) text: &'a str,
}

impl Requests {
    pub(crate) fn open(name: &str, core: Option<usize>) -> io::Result<Self> {
        let lanes = mailbox::open(name)?;
        thread::spawn(|| {
            let _ = io::stdin().read(&mut [0]);
            process::exit(1); // the sender has ended without a word
        });
        Ok(Self { lanes, heard: 0, text: Vec::new(), core, sleeps: false })
    }

    /// Pins the calling thread, if it is wanted: after everything else has its threads.
    pub(crate) fn pin(&self) {
        if let Some(core) = self.core {
            pin(core);
        }
    }

    /// None at the end.
    pub(crate) fn next(&mut self) -> Option<Request<'_>> {
        let (what, number) = loop {
            self.heard += 1;
            if !self.sleeps {
                let has = || Ok(self.lanes[0].has(self.heard).then_some(()));
                look(has).expect("it looks, and does nothing else");
            }
            let word = self.lanes[0].hear(self.heard, &mut self.text);
            match (word & ((1 << WHAT) - 1), word >> WHAT) {
                (SLEEPS, sleeps) => {
                    self.sleeps = sleeps != 0;
                    self.reply();
                }
                request => break request,
            }
        };
        let text = str::from_utf8(&self.text).expect("`ask` takes text");
        (what != END).then_some(Request { what, number, text })
    }

    /// From here on it is the transfer.
    pub(crate) fn begin(&self) {
        self.lanes[0].begun.store(clock(), Ordering::Release);
    }

    pub(crate) fn reply(&self) {
        self.lanes[0].reply();
    }

    pub(crate) fn tell(&self, what: u64) {
        self.lanes[1].ask(what, "");
    }
}
