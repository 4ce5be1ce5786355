//! What others take for the job of a relay, beside what ours takes.
//!
//! The job: a sender has bytes in its memory; then a receiver in another process has them in its own;
//! then the sender knows. [`rows`] says how each does it, and what it leaves out. One start of
//! two processes measures one of them by all sizes; then the next one starts; and when all had their
//! turn the next round begins, so that whatever else the machine does falls on all alike.
//!
//! `make compare` installs what is wanted and runs this; a rival that cannot be had is named and
//! left out.

#[path = "../../benches/common/bare.rs"]
mod bare;
mod budgets;
mod calls;
mod iceoryx;
mod machine;
#[path = "../../benches/common/mailbox.rs"]
mod mailbox;
mod measure;
mod memory;
mod nixl;
mod ours;
mod pair;
mod report;
mod rounds;
mod rows;
mod sockets;
#[path = "../../benches/common/timed.rs"]
mod timed;
mod ucx;

use std::{io, path::PathBuf, time::Duration};

use clap::{Parser, Subcommand};

use crate::{
    measure::Plan,
    pair::{Pair, Requests},
    rows::Start,
};

/// Nobody here waits longer than this.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Parser)]
#[command(about = "What others take for the job of a relay, beside ours")]
struct Args {
    #[command(subcommand)]
    role: Option<Role>,
    #[command(flatten)]
    compare: Compare,
}

#[derive(Parser)]
struct Compare {
    /// How often everything has its turn.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// One round, with a tenth of the transfers: whether all of it runs.
    #[arg(long)]
    quick: bool,
    /// Leaves it to the system on which cores the two sides run.
    #[arg(long)]
    unpinned: bool,
    /// These starts alone, with commas between them.
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Start>,
    /// Where the tables and the numbers go, as `compare.md` and `compare.json`.
    #[arg(long, default_value = ".")]
    out: PathBuf,
}

#[derive(Subcommand)]
enum Role {
    #[command(hide = true)]
    Send {
        start: Start,
        #[command(flatten)]
        plan: Plan,
    },
    #[command(hide = true)]
    Receive {
        start: Start,
        mailbox: String,
        #[arg(long)]
        core: Option<usize>,
    },
}

fn main() -> io::Result<()> {
    let args = Args::parse();
    match args.role {
        None => rounds::compare(&args.compare),
        Some(Role::Send { start, plan }) => send(start, &plan),
        Some(Role::Receive { start, mailbox, core }) => {
            receive(start, &mut Requests::open(&mailbox, core)?)
        }
    }
}

/// The sender's side of one start: a line of JSON for each row and size.
fn send(start: Start, plan: &Plan) -> io::Result<()> {
    let pair = || Pair::start(start, plan);
    match start {
        Start::Memory => memory::send(plan),
        Start::SameHost
        | Start::SameHostSpin
        | Start::SameHostPark
        | Start::Tcp
        | Start::Mooncake => ours::send(start, plan, pair),
        Start::MooncakeBare => calls::send(plan, pair()?),
        Start::Iceoryx2 => iceoryx::send(plan, pair()?),
        Start::TcpSocket | Start::TcpSocketSpin | Start::UnixSocket | Start::UnixSocketSpin => {
            sockets::send(start, plan, pair()?)
        }
        Start::UcxShm | Start::UcxTcp | Start::NixlShm | Start::NixlTcp => {
            Err(io::Error::other("it has a program of its own"))
        }
    }
}

fn receive(start: Start, requests: &mut Requests) -> io::Result<()> {
    match start {
        Start::MooncakeBare => calls::receive(requests),
        Start::Iceoryx2 => iceoryx::receive(requests),
        Start::TcpSocket | Start::TcpSocketSpin | Start::UnixSocket | Start::UnixSocketSpin => {
            sockets::receive(start, requests)
        }
        _ => ours::receive(start, requests),
    }
}
