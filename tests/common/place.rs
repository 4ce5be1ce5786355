//! Other places to run a process in: a network namespace of its own, or under limits.
//!
//! They are made of util-linux and iproute2. Where those or the permission for them is missing,
//! the test that asked is skipped, and says so; where `CI` is set it fails.

use std::{
    env,
    ffi::OsStr,
    io::{self, BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    ops::Deref,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
};

use rustix::{net::listen, process::geteuid};

use super::{
    SKIPPED, eventually,
    sockets::{Socket, State, sockets_around},
};

/// Set in a process that [`elsewhere`] has started, to the test that it is for.
const ELSEWHERE: &str = "MOONCAKE_RELAY_TEST_ELSEWHERE";

/// Where a process is to run: what its command line begins with.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    words: Vec<String>,
    /// Keeps the namespace.
    keeper: Option<Arc<Keeper>>,
}

impl Place {
    /// No other place.
    pub(crate) fn here() -> Self {
        Self::default()
    }

    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let Some((first, rest)) = self.words.split_first() else {
            return Command::new(program);
        };
        let mut command = Command::new(first);
        command.args(rest).arg(program);
        command
    }

    /// With that variable in the environment.
    pub(crate) fn with_variable(mut self, name: &str, value: &str) -> Self {
        self.words.extend(["env".to_owned(), format!("{name}={value}")]);
        self
    }

    /// With so many descriptors at most, a limit that the process may raise again.
    pub(crate) fn with_descriptors(self, count: u64) -> Option<Self> {
        self.with("prlimit", &[&format!("--nofile={count}:")])
    }

    /// With so many bytes of locked memory at most, and without the right to pass that by.
    pub(crate) fn with_locked_memory(self, bytes: u64) -> Option<Self> {
        let limited = self.with("prlimit", &[&format!("--memlock={bytes}:{bytes}")])?;
        if !geteuid().is_root() {
            return Some(limited);
        }
        limited.with("setpriv", &["--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"])
    }

    /// As another user, which only root can be.
    pub(crate) fn with_user(self, user: u32) -> Option<Self> {
        let (user, group) = (format!("--reuid={user}"), format!("--regid={user}"));
        self.with("setpriv", &[&user, &group, "--clear-groups"])
    }

    /// In a mount namespace whose /dev/shm is empty and has so many bytes.
    pub(crate) fn with_dev_shm(bytes: usize) -> Option<Self> {
        let script = format!("mount -t tmpfs -o size={bytes} tmpfs /dev/shm && exec \"$@\"");
        let own_user = if geteuid().is_root() { &[][..] } else { &["--map-root-user"] };
        let words = [&["unshare"], own_user, &["--mount", "sh", "-c", &script, "sh"]].concat();
        let words = words.into_iter().map(str::to_owned).collect();
        let place = Self { words, keeper: None };
        run(&mut place.command("true")).map(|_| place)
    }

    fn with(mut self, tool: &str, flags: &[&str]) -> Option<Self> {
        self.words.push(tool.to_owned());
        self.words.extend(flags.iter().map(|&flag| flag.to_owned()));
        // All these tools take it; a program's name would end the flags as well.
        self.words.push("--".to_owned());
        run(&mut self.command("true")).map(|_| self)
    }
}

/// A network namespace with nothing but `lo`. It goes with the last place in it.
#[derive(Clone, Debug)]
pub(crate) struct Net {
    place: Place,
    pid: u32,
}

impl Net {
    pub(crate) fn new() -> Option<Self> {
        Self::within(&Place::here(), !geteuid().is_root())
    }

    /// Two that reach each other, and nobody else: `10.77.0.1` and `10.77.0.2`.
    pub(crate) fn pair() -> Option<(Self, Self)> {
        let a = Self::new()?;
        // Started from the first, so that both belong to one user namespace.
        let b = Self::within(&a.place, false)?;
        let other = b.pid.to_string();
        a.ip(&["link", "add", "veth", "type", "veth", "peer", "name", "veth", "netns", &other])?;
        for (net, own) in [(&a, "10.77.0.1/24"), (&b, "10.77.0.2/24")] {
            net.ip(&["address", "add", own, "dev", "veth"])?;
            net.ip(&["link", "set", "veth", "up"])?;
        }
        Some((a, b))
    }

    /// `own_user`: without root, a user namespace gives the rights over a network namespace.
    fn within(place: &Place, own_user: bool) -> Option<Self> {
        // Ends when its input does, so also when this process is killed.
        let script = "ip link set lo up && echo up && exec cat";
        let mut command = place.command("unshare");
        command.args(own_user.then_some("--map-root-user"));
        command.args(["--net", "sh", "-c", script]);
        let keeper = Keeper::start(&mut command)?;
        let pid = keeper.child.id();
        let mut words: Vec<_> =
            ["nsenter", "--net", "--target", &pid.to_string()].map(str::to_owned).into();
        if own_user || place.words.iter().any(|word| word == "--user") {
            words.extend(["--user", "--preserve-credentials"].map(str::to_owned));
        }
        words.push("--".to_owned());
        let keeper = Some(Arc::new(keeper));
        Some(Self { place: Place { words, keeper }, pid })
    }

    pub(crate) fn place(&self) -> Place {
        self.place.clone()
    }

    /// One more address on `lo`: `10.8.8.1/32`.
    pub(crate) fn add_address(&self, address: &str) -> Option<()> {
        // One of IPv6 cannot be bound for a moment, while others are asked whether they have it.
        let asks_nobody: &[_] = if address.contains(':') { &["nodad"] } else { &[] };
        self.ip(&[&["address", "add", address, "dev", "lo"], asks_nobody].concat())
    }

    /// From which to which port the system chooses.
    pub(crate) fn choose_ports(&self, first: u16, last: u16) -> Option<()> {
        let range = format!("net.ipv4.ip_local_port_range={first} {last}");
        let (name, value) = range.split_once('=').unwrap();
        let file = format!("/proc/sys/{}", name.replace('.', "/"));
        run(self.command("sh").args(["-c", "echo \"$1\" > \"$2\"", "sh", value, &file])).map(drop)
    }

    /// Connecting there is an error at once.
    pub(crate) fn blackhole(&self, address: &str) -> Option<()> {
        self.ip(&["route", "add", "blackhole", address])
    }

    /// Connecting there is never answered: what is sent comes back in by `lo`, where nobody wants
    /// it.
    pub(crate) fn silence(&self, address: &str) -> Option<()> {
        self.ip(&["route", "add", address, "dev", "lo"])
    }

    pub(crate) fn ip(&self, words: &[&str]) -> Option<()> {
        run(self.command("ip").args(words)).map(drop)
    }

    /// How many sockets of the namespace are in that state.
    pub(crate) fn count(&self, state: State) -> usize {
        sockets_around(self.pid).iter().filter(|socket| socket.state == state).count()
    }
}

/// Where a place is wanted, the namespace is one.
impl Deref for Net {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.place
    }
}

/// Runs `body` in a process of its own, at the place that `make` makes: this test binary with the
/// one test that calls this, whose name is `test`. That process comes here again, and goes in.
#[track_caller]
pub(crate) fn elsewhere(test: &str, make: impl FnOnce() -> Option<Place>, body: impl FnOnce()) {
    if env::var_os(ELSEWHERE).is_some_and(|name| name == test) {
        return body();
    }
    let Some(place) = make() else { return };
    let mut command = place.command(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(ELSEWHERE, test);
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout);
    print!("{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{test} failed elsewhere: {}", output.status);
    assert!(said.contains("1 passed"), "there is no test {test}");
}

/// An address that never answers, without a namespace: a listener with as many waiting
/// connections as it may have.
#[derive(Debug)]
pub(crate) struct Blackhole {
    listener: TcpListener,
    _waiting: Vec<TcpStream>,
}

impl Blackhole {
    pub(crate) fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listen(&listener, 0).unwrap();
        let addr = listener.local_addr().unwrap();
        // One more than the backlog.
        let waiting = vec![TcpStream::connect(addr).unwrap()];
        let listens = |all: &[Socket]| {
            let ours = |s: &&Socket| s.state == State::Listening && s.local == addr;
            all.iter().find(ours).map(|socket| socket.unread)
        };
        eventually(Some(1), || listens(&sockets_around(std::process::id())));
        Self { listener, _waiting: waiting }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    pub(crate) fn session_id(&self) -> String {
        self.addr().to_string()
    }
}

/// A process that is there until it is dropped.
#[derive(Debug)]
struct Keeper {
    child: Child,
}

impl Keeper {
    /// Once it has said a line.
    fn start(command: &mut Command) -> Option<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return skip(command, &error.to_string()),
        };
        let mut keeper = Self { child };
        let mut line = String::new();
        BufReader::new(keeper.child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if !line.is_empty() {
            return Some(keeper);
        }
        let reason = io::read_to_string(keeper.child.stderr.take().unwrap()).unwrap();
        skip(command, reason.trim())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.child.kill(); // an error where it has ended
        let _ = self.child.wait();
    }
}

fn run(command: &mut Command) -> Option<String> {
    match command.output() {
        Ok(output) if output.status.success() => {
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Ok(output) => skip(command, String::from_utf8_lossy(&output.stderr).trim()),
        Err(error) => skip(command, &error.to_string()),
    }
}

fn skip<T>(command: &Command, reason: &str) -> Option<T> {
    let tool = Path::new(command.get_program()).display().to_string();
    let words: Vec<_> = command.get_args().map(OsStr::to_string_lossy).collect();
    let said = format!("{tool} {}: {reason}", words.join(" "));
    assert!(env::var_os("CI").is_none(), "{said}");
    // Past the test harness, which would swallow it: a skipped test says so.
    let _ = writeln!(io::stderr(), "{SKIPPED}, no such place to test in: {said}");
    None
}
