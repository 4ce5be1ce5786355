//! Whom we measure, and what each of them does.

use clap::ValueEnum;

/// Two processes that are started together; they measure one row or a few.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Start {
    Memory,
    SameHost,
    SameHostSpin,
    SameHostPark,
    Tcp,
    Mooncake,
    MooncakeBare,
    UcxShm,
    UcxTcp,
    NixlShm,
    NixlTcp,
    Iceoryx2,
    TcpSocket,
    TcpSocketSpin,
    UnixSocket,
    UnixSocketSpin,
}

impl Start {
    /// As it is called on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).expect("none is hidden")
    }
}

pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// Which row of ours does the like.
    pub(crate) beside: Option<&'static str>,
    /// What it does, and what of the job it leaves out.
    pub(crate) does: &'static str,
}

const fn row(name: &'static str, beside: Option<&'static str>, does: &'static str) -> Row {
    Row { name, beside, does }
}

/// In the order of the table.
pub(crate) const ROWS: &[Row] = &[
    row(
        "memcpy",
        Some("ours, same host, from a slot"),
        "one plain copy, in one process: nobody is told",
    ),
    row(
        "memcpy twice",
        Some("ours, same host"),
        "two plain copies, in one process: nobody is told",
    ),
    row(
        "ours, same host",
        None,
        "`put_bytes`, the metadata's text through shared memory, `get_into`, the sender's token; `WaitStrategy::Auto`",
    ),
    row("ours, same host, Spin", None, "the same with `WaitStrategy::Spin`"),
    row(
        "ours, same host, from a slot",
        None,
        "the same, of bytes that lie in a slot already: one copy",
    ),
    row(
        "ours, same host, view",
        None,
        "the same, and the receiver drops a view of the slot at once: no copy",
    ),
    row("ours, same host, after a pause", None, "`ours, same host` after 300 µs without work"),
    row("ours, same host, Park, after a pause", None, "the same with `WaitStrategy::Park`"),
    row("ours, TCP", None, "`ours, same host` without shared memory"),
    row("ours, TCP, from a slot", None, "the same, of bytes that lie in a slot already"),
    row("ours, Mooncake", None, "`ours, same host` over the real Mooncake engine, by its TCP"),
    row(
        "ours, Mooncake, from slot to slot",
        None,
        "the same, of bytes that lie in a slot already, by `get` into a slot of the receiver",
    ),
    row(
        "ours, Mooncake, from slot to slot, less the stamp's read",
        None,
        "the same, without the second read by which the relay proves the bytes: what the bare calls do, too",
    ),
    row(
        "Mooncake, bare calls",
        Some("ours, Mooncake, from slot to slot"),
        "the C calls: a batch of one read between registered buffers, its status without a pause, the \
         batch freed, a notification, which the sender polls for. No proof that the bytes are still those",
    ),
    row(
        "UCX tag, shm",
        Some("ours, same host"),
        "`ucx_perftest -t tag_lat`, which reports half a round trip: half of one with the bytes, and half of \
         one with 8 bytes back; for p99 the bytes' half at 99 % and the answer's at 50 %. From the user's \
         buffer to the user's buffer. Its sender's bytes are always the same ones",
    ),
    row(
        "UCX get, shm",
        Some("ours, same host, from a slot"),
        "`ucx_perftest -t ucp_get -O 1`: one read after the other of the peer's registered buffer, whose bytes \
         never change and so stay in the reader's cache; and half a round trip of 8 bytes for the \
         notification, in `whole` one more for the request",
    ),
    row("UCX tag, TCP", Some("ours, TCP"), "as `UCX tag, shm`, over TCP on loopback"),
    row("UCX get, TCP", Some("ours, TCP, from a slot"), "as `UCX get, shm`, over TCP on loopback"),
    row(
        "NIXL, shm",
        Some("ours, same host, from a slot"),
        "its Python wheel, whose calls are a part of it: a READ of a registered buffer with its notification, \
         by a handle that is made once. UCX backend without a progress thread, without handling of a \
         peer's failure (with it UCX has no shared memory). No proof that the bytes are still those",
    ),
    row(
        "NIXL, TCP",
        Some("ours, TCP, from a slot"),
        "as `NIXL, shm`, over TCP on loopback, with its handling of a peer's failure",
    ),
    row(
        "iceoryx2, with both copies",
        Some("ours, same host"),
        "a loaned sample that is written, sent, copied out, and answered by a word: both sides look without a pause",
    ),
    row(
        "iceoryx2, in place",
        Some("ours, same host, view"),
        "a sample that was written before: sent, dropped by the receiver, answered",
    ),
    row(
        "socket, TCP",
        Some("ours, TCP"),
        "loopback: the bytes there, one byte back; blocking calls",
    ),
    row("socket, TCP, spinning", Some("ours, TCP"), "the same, both sides looking without a pause"),
    row(
        "socket, Unix",
        Some("ours, same host"),
        "as `socket, TCP`, by a Unix socket; blocking calls",
    ),
    row(
        "socket, Unix, spinning",
        Some("ours, same host"),
        "the same, both sides looking without a pause",
    ),
];

/// "4 KiB", "64 MiB".
pub(crate) fn size_name(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}
