//! The client's side: a peer that answers whatever it likes, on both ports.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener},
    sync::{Arc, Mutex, OnceLock},
    thread,
    time::{Duration, Instant},
};

use mooncake_relay::{
    EmbeddedEngine, Engine, Error, Identity, Instance, Notification, RemoteBuffer, TransferId,
};

const DONE: &[u8] = b"\0\0\0\0VTCM";

/// `what, descriptor, length of the control port's answer (2), that, the data port's answer`.
pub(crate) fn client(input: &[u8]) {
    let Some((&[what, descriptor, low, high], rest)) = input.split_first_chunk::<4>() else {
        return;
    };
    let (control, data) = rest.split_at(rest.len().min(u16::from_le_bytes([low, high]).into()));
    let peer = peer();
    let control = match descriptor & 3 {
        0 => control.to_vec(),
        n => whole(1, &peer.descriptor(n, descriptor & 4 != 0)),
    };
    *peer.says.lock().unwrap() = (control, data.to_vec());
    let builder = EmbeddedEngine::builder("127.0.0.1:0").local(false);
    let engine = builder.stall_timeout(Duration::from_secs(2)).bind().unwrap();
    engine.start(&Instance::from_bytes([9; 16])).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let session = peer.control.to_string();
    let outcome = if what & 1 == 0 {
        let mut remote = RemoteBuffer::new(&session, 0x7000, usize::from(what >> 2));
        if what & 2 != 0 {
            let id = TransferId { random: 7, slot: 0, generation: 1 };
            let identity = Identity { instance: Instance::from_bytes(*b"an instance here"), id };
            remote = remote.with_identity(identity);
        }
        let mut dest = vec![0xee; remote.len];
        let outcome = engine.read_into(&remote, &mut dest, deadline);
        if outcome.as_ref().is_none_or(Result::is_err) && !data.starts_with(DONE) && what & 2 != 0 {
            assert!(dest.iter().all(|byte| *byte == 0xee), "it was written before the status");
        }
        outcome.unwrap_or(Ok(()))
    } else {
        let text = "x".repeat(usize::from(what));
        engine.notify(&session, &Notification::new(&text, "transfer_complete"), deadline)
    };
    if let Err(error) = outcome {
        assert!(!matches!(error, Error::TimedOut | Error::Closed), "{error:?}");
        let _ = error.to_string();
    }
    engine.stop(Instant::now());
}

/// A frame of that type.
fn whole(kind: u8, json: &str) -> Vec<u8> {
    [&(json.len() as u64 + 1).to_le_bytes()[..], &[kind], json.as_bytes()].concat()
}

struct Peer {
    control: SocketAddr,
    data: SocketAddr,
    /// What either port says next, and every time.
    says: Arc<Mutex<(Vec<u8>, Vec<u8>)>>,
}

impl Peer {
    fn descriptor(&self, version: u8, is_relay: bool) -> String {
        let relay = r#","relay":{"version":1,"instance":"616e20696e7374616e63652068657265"}"#;
        format!(
            r#"{{"name":"{}","protocol":"tcp","tcp_data_port":{},"tcp_proto_version":{version}{}}}"#,
            self.control,
            self.data.port(),
            if is_relay { relay } else { "" },
        )
    }
}

fn peer() -> &'static Peer {
    static PEER: OnceLock<Peer> = OnceLock::new();
    PEER.get_or_init(|| {
        let says = Arc::new(Mutex::<(Vec<u8>, Vec<u8>)>::default());
        let [control, data] = [0, 1].map(|port| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let (addr, says) = (listener.local_addr().unwrap(), Arc::clone(&says));
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let Ok(mut stream) = stream else { continue };
                    let answer = {
                        let says = says.lock().unwrap();
                        if port == 0 { says.0.clone() } else { says.1.clone() }
                    };
                    let _ = stream.set_read_timeout(Some(Duration::from_secs(20)));
                    let _ = stream.write_all(&answer);
                    let _ = stream.shutdown(Shutdown::Write);
                    // Until it goes, so that no reset overtakes the answer.
                    let _ = stream.read_to_end(&mut Vec::new());
                }
            });
            addr
        });
        Peer { control, data, says }
    })
}
