//! What the tests of faults are made with does what it says.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{Config, EmbeddedEngine, Relay, Tensor};
use serde_json::json;

use crate::common::{
    eventually,
    peer::Peer,
    proxy::{Ending, NOTE_ON_CONTROL, NOTE_ON_DATA, Proxy, STATUS},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(120);
const READ: u8 = 0x80;

/// Answers reads and notifications of the data protocol: a status, and for a read its body.
struct Server {
    addr: SocketAddr,
    written: Arc<AtomicU64>,
}

impl Server {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (addr, written) = (listener.local_addr().unwrap(), Arc::default());
        let counter = Arc::clone(&written);
        thread::spawn(move || {
            for client in listener.incoming() {
                let counter = Arc::clone(&counter);
                thread::spawn(move || serve(client.unwrap(), &counter));
            }
        });
        Self { addr, written }
    }
}

/// Until the connection ends.
fn serve(mut client: TcpStream, written: &AtomicU64) -> io::Result<()> {
    loop {
        let mut header = [0; 24];
        client.read_exact(&mut header)?;
        let size = u64::from_le_bytes(header[..8].try_into().unwrap());
        let mut body = if header[16] == READ { size } else { 0 };
        io::copy(&mut (&client).take(size - body), &mut io::sink())?;
        client.write_all(&[1; STATUS as usize])?;
        while body > 0 {
            let len = client.write(&[7; 4096][..body.min(4096) as usize])? as u64;
            body -= len;
            written.fetch_add(len, Ordering::Relaxed);
        }
    }
}

/// A proxy before a server; both ports lead to it.
fn proxied() -> (Proxy, Server) {
    let (proxy, server) = (Proxy::new(), Server::new());
    proxy.forward_to(server.addr, server.addr);
    (proxy, server)
}

fn client(proxy: &Proxy) -> TcpStream {
    let client = TcpStream::connect(proxy.data_addr()).unwrap();
    client.set_read_timeout(Some(WATCHDOG)).unwrap();
    client
}

fn request(kind: u8, size: u64) -> Vec<u8> {
    [&size.to_le_bytes()[..], &[0; 8], &[kind], &[0; 7]].concat()
}

fn ask(mut client: &TcpStream, size: u64) {
    client.write_all(&request(READ, size)).unwrap();
}

fn note(mut client: &TcpStream) {
    client.write_all(&[request(NOTE_ON_DATA, 5), b"hello".to_vec()].concat()).unwrap();
}

fn take(mut client: &TcpStream, len: u64) {
    client.read_exact(&mut vec![0; len as usize]).unwrap();
}

/// How many bytes come before the end, and what that is.
fn rest(mut client: &TcpStream) -> (usize, Option<ErrorKind>) {
    let mut bytes = Vec::new();
    let end = client.read_to_end(&mut bytes);
    (bytes.len(), end.err().map(|error| error.kind()))
}

/// The same for a new connection, whose reset may be faster than `connect` returns.
fn rest_of_new(proxy: &Proxy) -> (usize, Option<ErrorKind>) {
    match TcpStream::connect(proxy.data_addr()) {
        Ok(client) => rest(&client),
        Err(error) => (0, Some(error.kind())),
    }
}

/// Whether nothing comes, looked at for a moment that only widens the window.
fn is_silent(mut client: &TcpStream) -> bool {
    client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let read = client.read(&mut [0; 1]);
    client.set_read_timeout(Some(WATCHDOG)).unwrap();
    read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

#[test]
fn passing_forwards_and_counts_all() {
    within(WATCHDOG, || {
        let (proxy, _server) = proxied();
        let client = client(&proxy);
        for size in [0, 1, 3_000_000] {
            ask(&client, size);
            take(&client, STATUS + size);
        }
        note(&client);
        client.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(rest(&client), (STATUS as usize, None));
        let seen = proxy.data().until(|seen| seen.open == 0);
        assert_eq!((seen.accepted, seen.ended), (1, 0));
        assert_eq!((seen.bytes_up, seen.bytes_down), (4 * 24 + 5, 4 * STATUS + 3_000_001));
    });
}

#[test]
fn relays_meet_through_a_proxy() {
    within(WATCHDOG, || {
        let proxy = Proxy::new();
        let engine = EmbeddedEngine::builder("127.0.0.1:0").advertise(&proxy.advertise());
        let engine = Arc::new(engine.local(false).bind().unwrap());
        proxy.forward_to(engine.control_addr(), engine.data_addr());
        let relay = |engine| Relay::new(engine, &Config::default().with_slot_size(4096)).unwrap();
        let getter = relay(Arc::new(EmbeddedEngine::bind("127.0.0.1:0").unwrap()));
        let putter = relay(engine);
        let (metadata, token) = putter.put_bytes(b"hello", Tensor::bytes(5)).unwrap();
        assert_eq!(metadata.session_id(), proxy.control_addr().to_string());
        assert_eq!(*getter.get(&metadata).unwrap().wait().unwrap(), *b"hello");
        token.wait().unwrap();
        assert!(proxy.data().seen().bytes_down >= 5);
        assert!(proxy.control().seen().bytes_down > 0);
    });
}

#[test]
fn peers_meet_through_a_proxy() {
    within(WATCHDOG, || {
        let proxy = Proxy::new();
        let flags = ["--slot-size", "4096", "--no-local", "--advertise", &proxy.advertise()];
        let (putter, getter) = (Peer::start(&flags), Peer::start(&flags[..3]));
        proxy.forward_to_peer(&putter);
        let sent = putter.put(json!({"text": "hello"}));
        assert_eq!(getter.get(&sent.metadata)["sha256"], sent.sha256);
        assert_eq!(putter.wait(sent.tag)["ok"], true);
        assert!(proxy.data().seen().bytes_down >= 5);
    });
}

#[test]
fn a_throttled_way_takes_its_time() {
    within(WATCHDOG, || {
        let (proxy, _server) = proxied();
        let client = client(&proxy);
        proxy.data().down().throttle(200_000);
        let start = Instant::now();
        ask(&client, 100_000);
        take(&client, STATUS + 100_000);
        assert!(start.elapsed() >= Duration::from_millis(400));

        proxy.data().pass();
        proxy.data().up().throttle(100);
        let start = Instant::now();
        ask(&client, 0);
        ask(&client, 0);
        take(&client, 2 * STATUS);
        assert!(start.elapsed() >= Duration::from_millis(400));
    });
}

#[test]
fn a_throttled_way_holds_up_who_sends() {
    within(WATCHDOG, || {
        const SIZE: u64 = 256 << 20;
        let (proxy, server) = proxied();
        let client = client(&proxy);
        proxy.data().down().throttle(1 << 20);
        ask(&client, SIZE);
        let reader = thread::spawn(move || take(&client, STATUS + SIZE));
        // A second, in which a proxy without bounds would have taken most of it.
        proxy.data().until(|seen| seen.bytes_down >= 1 << 20);
        let written = server.written.load(Ordering::Relaxed);
        assert!(written < 32 << 20, "{written} bytes");
        proxy.data().pass();
        reader.join().unwrap();
    });
}

#[test]
fn a_stalled_port_sends_the_rest_later() {
    within(WATCHDOG, || {
        let (proxy, _server) = proxied();
        let client = client(&proxy);
        proxy.data().stall();
        ask(&client, 10);
        assert!(is_silent(&client));
        assert_eq!(proxy.data().seen().bytes_up, 0);
        proxy.data().up().resume();
        assert!(is_silent(&client));
        assert_eq!(proxy.data().until(|seen| seen.bytes_up > 0).bytes_down, 0);
        proxy.data().resume();
        take(&client, STATUS + 10);
    });
}

#[test]
fn a_limit_stalls_one_connection_after_so_many_bytes() {
    within(WATCHDOG, || {
        let (proxy, _server) = proxied();
        let (stalled, other) = (client(&proxy), client(&proxy));
        proxy.data().down().stall_after(STATUS + 1000);
        ask(&stalled, 1_000_000);
        take(&stalled, STATUS + 1000);
        assert!(is_silent(&stalled));
        ask(&other, 500);
        take(&other, STATUS + 500);
        proxy.data().down().resume();
        take(&stalled, 999_000);
        // A limit that was taken and not reached is over with the rest.
        proxy.data().down().stall_after(STATUS + 1000);
        ask(&stalled, 10);
        take(&stalled, STATUS + 10);
        proxy.data().pass();
        ask(&stalled, 2000);
        take(&stalled, STATUS + 2000);
    });
}

#[test]
fn a_limit_ends_connections_after_so_many_bytes() {
    within(WATCHDOG, || {
        let (proxy, _server) = proxied();
        let down = proxy.data().down();
        let cut = |ending| {
            let client = client(&proxy);
            down.end_after(STATUS + 1000, ending);
            ask(&client, 1_000_000);
            let end = rest(&client);
            (client, end)
        };
        let whole = STATUS as usize + 1000;
        assert_eq!(cut(Ending::Close).1, (whole, None));
        let (mut half, end) = cut(Ending::HalfClose);
        assert_eq!(end, (whole, None));
        for _ in 0..100 {
            half.write_all(&[0; 10_000]).unwrap();
        }
        let (len, end) = cut(Ending::Reset).1;
        assert!(len <= whole && end == Some(ErrorKind::ConnectionReset), "{len}, {end:?}");
        // The last byte of an answer may be the one.
        let last = client(&proxy);
        down.end_after(STATUS + 10, Ending::Close);
        ask(&last, 10);
        assert_eq!(rest(&last), (STATUS as usize + 10, None));
        assert_eq!(proxy.data().seen().ended, 4);
    });
}

#[test]
fn limits_in_a_row_are_for_one_connection_each() {
    within(WATCHDOG, || {
        let (proxy, _server) = proxied();
        proxy.data().down().end_after(0, Ending::Close);
        proxy.data().up().end_after(1, Ending::Close);
        proxy.data().down().end_after(5, Ending::Close);
        let ends = [(); 3].map(|()| {
            let client = client(&proxy);
            let _ = (&client).write_all(&request(READ, 10)); // the connection may have ended
            rest(&client).0
        });
        // The first to send is the first cut upwards.
        assert_eq!(ends, [0, 0, 5]);
    });
}

#[test]
fn messages_are_swallowed_whole_and_by_kind() {
    within(WATCHDOG, || {
        let (proxy, _server) = proxied();
        let mut client = client(&proxy);
        proxy.data().swallow_kind(NOTE_ON_DATA, 1);
        ask(&client, 10);
        take(&client, STATUS + 10);
        // In pieces: nothing of its header may go before it is known.
        let first = [request(NOTE_ON_DATA, 100_000), vec![b'x'; 100_000]].concat();
        for piece in [&first[..7], &first[7..20], &first[20..50_000], &first[50_000..]] {
            client.write_all(piece).unwrap();
            assert!(is_silent(&client));
        }
        proxy.data().until(|seen| seen.swallowed == 1);
        assert!(is_silent(&client));
        assert_eq!(proxy.data().seen().bytes_up, 24);
        note(&client);
        take(&client, STATUS);

        proxy.data().swallow(2);
        ask(&client, 10);
        note(&client);
        note(&client);
        take(&client, STATUS);
        assert_eq!(proxy.data().until(|seen| seen.swallowed == 3).bytes_up, 24 + 2 * (24 + 5));
        assert!(is_silent(&client));
    });
}

#[test]
fn a_frame_on_the_control_port_is_swallowed() {
    within(WATCHDOG, || {
        let engine = EmbeddedEngine::bind("127.0.0.1:0").unwrap();
        let _relay = Relay::new(Arc::new(engine), &Config::default().with_slot_size(4096)).unwrap();
        let proxy = Proxy::new();
        let control = _relay.health().session_id.parse().unwrap();
        proxy.forward_to(control, control);
        proxy.control().swallow_kind(NOTE_ON_CONTROL, 1);
        let send = |kind: u8| {
            let mut client = TcpStream::connect(proxy.control_addr()).unwrap();
            client.set_read_timeout(Some(WATCHDOG)).unwrap();
            client.write_all(&[&3_u64.to_le_bytes()[..], &[kind], b"{}"].concat()).unwrap();
            client
        };
        let (swallowed, other) = (send(NOTE_ON_CONTROL), send(3));
        take(&other, 9);
        proxy.control().until(|seen| seen.swallowed == 1);
        assert!(is_silent(&swallowed));
    });
}

#[test]
fn the_first_connections_end_as_they_are_made() {
    within(WATCHDOG, || {
        let (proxy, _server) = proxied();
        proxy.data().end_next(2, Ending::Reset);
        proxy.data().end_next(1, Ending::Close);
        let ends = [(); 3].map(|()| rest_of_new(&proxy));
        let reset = (0, Some(ErrorKind::ConnectionReset));
        assert_eq!(ends, [reset, reset, (0, None)]);
        let fourth = client(&proxy);
        ask(&fourth, 10);
        take(&fourth, STATUS + 10);
        assert_eq!((proxy.data().seen().accepted, proxy.data().seen().ended), (4, 3));
    });
}

#[test]
fn a_port_that_refuses_keeps_its_open_connections() {
    within(WATCHDOG, || {
        let (proxy, _server) = proxied();
        let open = client(&proxy);
        proxy.data().until(|seen| seen.open == 1);
        proxy.data().refuse();
        let refused = TcpStream::connect(proxy.data_addr()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        ask(&open, 10);
        take(&open, STATUS + 10);
        let _other_port = TcpStream::connect(proxy.control_addr()).unwrap();
        proxy.data().accept();
        let again = client(&proxy);
        ask(&again, 10);
        take(&again, STATUS + 10);
    });
}

#[test]
fn idle_connections_end_in_every_way() {
    within(WATCHDOG, || {
        let (proxy, _server) = proxied();
        let endings = [
            (Ending::Close, None),
            (Ending::HalfClose, None),
            (Ending::Reset, Some(ErrorKind::ConnectionReset)),
        ];
        for (ending, end) in endings {
            let client = client(&proxy);
            ask(&client, 10);
            take(&client, STATUS + 10);
            proxy.data().end_idle(Duration::from_millis(20), ending);
            assert_eq!(rest(&client), (0, end), "{ending:?}");
            proxy.data().pass();
        }
        let (a, b) = (client(&proxy), client(&proxy));
        proxy.data().until(|seen| seen.accepted == 5);
        proxy.data().up().stall();
        ask(&a, 10); // what nobody has read makes no reset of it
        proxy.data().end_all(Ending::Close);
        assert_eq!((rest(&a), rest(&b)), ((0, None), (0, None)));
        assert_eq!(proxy.data().until(|seen| seen.open == 0).ended, 5);
    });
}

#[test]
fn a_proxy_ends_with_all_it_has() {
    within(WATCHDOG, || {
        let (proxy, _server) = proxied();
        let (addr, stalled, open) = (proxy.data_addr(), client(&proxy), client(&proxy));
        proxy.data().down().stall_after(3);
        ask(&stalled, 10_000_000);
        take(&stalled, 3);
        proxy.data().until(|seen| seen.open == 2);
        drop(proxy);
        rest(&stalled);
        rest(&open);
        assert!(TcpStream::connect(addr).is_err());
        // Nobody holds the port.
        eventually(true, || TcpListener::bind((Ipv4Addr::LOCALHOST, addr.port())).is_ok());
    });
}

#[test]
fn a_server_that_is_not_there_is_a_reset() {
    within(WATCHDOG, || {
        let proxy = Proxy::new();
        assert_eq!(rest_of_new(&proxy), (0, Some(ErrorKind::ConnectionReset)));
        let gone = Proxy::new();
        gone.data().refuse();
        proxy.forward_to(gone.data_addr(), gone.data_addr());
        assert_eq!(rest_of_new(&proxy), (0, Some(ErrorKind::ConnectionReset)));
    });
}
