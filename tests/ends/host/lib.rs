//! A relay behind C's calls, as a library that a C program loads: `host.c` beside it is that program.
#![allow(clippy::missing_safety_doc, reason = "nobody calls it but `host.c`")]
#![allow(missing_docs, reason = "as above")]

use std::{
    ffi::{CStr, c_char, c_int, c_long},
    sync::Arc,
    thread,
    time::Duration,
};

use mooncake_relay::{Config, EmbeddedEngine, Relay, Slot, Tensor, Token};

const SLOT: usize = 8 << 20;

#[derive(Debug)]
pub struct Host {
    relay: Arc<Relay>,
    tokens: Vec<Token<Slot>>,
}

/// A relay, with shared memory or without; NULL if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn host_open(local: c_int) -> *mut Host {
    // Over TCP nobody tells it that who was to read is gone.
    let lease = Duration::from_secs(1);
    let config = Config::default().with_slot_size(SLOT).with_credits(4).with_lease(lease);
    let engine = EmbeddedEngine::builder("127.0.0.1:0").local(local != 0).bind();
    let relay = engine.and_then(|engine| Relay::new(Arc::new(engine), &config));
    match relay {
        Ok(relay) => Box::into_raw(Box::new(Host { relay: Arc::new(relay), tokens: Vec::new() })),
        Err(error) => {
            eprintln!("{error}");
            std::ptr::null_mut()
        }
    }
}

/// Puts `len` bytes and writes the metadata's text to `text`, which has room for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn host_put(
    host: *mut Host,
    len: usize,
    text: *mut c_char,
    room: usize,
) -> c_int {
    // SAFETY: the program passes what `host_open` gave, from one thread at a time.
    let host = unsafe { &mut *host };
    // What has ended holds a slot until somebody asks.
    host.tokens.retain(|token| !token.is_done());
    let put = host.relay.acquire(len, Duration::from_secs(20)).and_then(|mut slot| {
        slot.fill(7);
        host.relay.put(slot, Tensor::bytes(len))
    });
    match put {
        Ok((metadata, token)) => {
            host.tokens.push(token);
            let metadata = format!("{metadata}\0");
            assert!(metadata.len() <= room, "the program has room for it");
            // SAFETY: `text` has room for that many bytes.
            unsafe { metadata.as_ptr().copy_to_nonoverlapping(text.cast(), metadata.len()) };
            0
        }
        Err(error) => {
            eprintln!("put: {error}");
            1
        }
    }
}

/// Gets what that text describes: how many bytes, or -1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn host_get(host: *mut Host, text: *const c_char) -> c_long {
    // SAFETY: as in `host_put`.
    let host = unsafe { &mut *host };
    // SAFETY: the program passes a text.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let got = text
        .parse()
        .and_then(|metadata| host.relay.get_timeout(&metadata, Duration::from_secs(20))?.wait());
    match got {
        Ok(slot) => slot.len() as c_long,
        Err(error) => {
            eprintln!("get: {error}");
            -1
        }
    }
}

/// Waits, on a thread of its own, for a put that nobody gets, and for a wait for a slot.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn host_keep_busy(host: *mut Host) {
    // SAFETY: as in `host_put`.
    let host = unsafe { &mut *host };
    if let Some(token) = host.tokens.pop() {
        thread::spawn(move || drop(token.wait()));
    }
    let relay = Arc::downgrade(&host.relay);
    thread::spawn(move || {
        let relay = relay.upgrade()?;
        let all: Vec<_> = (0..4).map(|_| relay.try_acquire(1)).collect();
        drop(all);
        Some(())
    });
}

/// Closes and drops it: 0 if nothing was left.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn host_close(host: *mut Host) -> c_int {
    // SAFETY: as in `host_put`, and the program forgets it now.
    let host = unsafe { Box::from_raw(host) };
    let closed = host.relay.close(Duration::from_secs(20));
    c_int::from(closed.threads + closed.spans_kept > 0)
}
