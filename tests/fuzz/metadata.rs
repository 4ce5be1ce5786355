//! Metadata, as text and as JSON, and what a relay does that is handed it.

use std::{
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use mooncake_relay::{Config, Error, InProcessEngine, Metadata, Relay, Tensor, Token};

const MOST: usize = 1 << 12;

pub(crate) fn metadata(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else {
        assert!(serde_json::from_slice::<Metadata>(input).is_err());
        return;
    };
    let metadata = match text.parse::<Metadata>() {
        Ok(metadata) => metadata,
        Err(error) => {
            assert!(matches!(error, Error::Metadata { .. }), "{error:?}");
            assert!(error.to_string().len() < 1 << 10, "it says a whole text again");
            return;
        }
    };
    assert_eq!(serde_json::from_slice::<Metadata>(input).unwrap(), metadata);
    let written = metadata.to_string();
    assert_eq!(written.parse::<Metadata>().unwrap(), metadata);
    assert_eq!(serde_json::to_string(&metadata).unwrap(), written);
    let _ = (format!("{metadata:?}"), metadata.lease(), metadata.instance());

    // It names a peer that there is, or none; its range is not that peer's, or it is stale.
    let relay = relay();
    let mut dest = vec![0xee; metadata.size().min(MOST)];
    let got = relay.0.lock().unwrap().get_into(&metadata, &mut dest, Duration::from_secs(1));
    if got.is_err() {
        assert!(dest.iter().all(|byte| *byte == 0xee), "a failed get wrote");
    }
    let health = relay.0.lock().unwrap().health();
    assert_eq!((health.receive_free, health.published), (2, 1), "a credit is lost");
}

/// With one put open under the name that the seeds know.
struct Served(
    Mutex<Relay>,
    #[expect(dead_code, reason = "it keeps its put")] Mutex<Token<mooncake_relay::Slot>>,
);

fn relay() -> &'static Served {
    static RELAY: OnceLock<Served> = OnceLock::new();
    RELAY.get_or_init(|| {
        let engine = Arc::new(InProcessEngine::new("127.0.0.1:15708").unwrap());
        let config = Config::default()
            .with_engine_id("stage0")
            .with_slot_size(MOST)
            .with_lease(Duration::from_secs(1 << 30));
        let relay = Relay::new(engine, &config).unwrap();
        let (_, token) = relay.put_bytes(&[7; 12], Tensor::bytes(12)).unwrap();
        Served(Mutex::new(relay), Mutex::new(token))
    })
}
