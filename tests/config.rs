//! Settings from code and from the environment.
#![expect(clippy::unwrap_used, reason = "helpers of tests, which may")]

use std::{
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt,
    sync::{Arc, Mutex},
    time::Duration,
};

use mooncake_relay::{Config, Error, HugePages, WaitStrategy};
use proptest::prelude::*;

/// Each variable, its field, a value that is not the default, and the setter that does the same.
fn variables() -> Vec<(&'static str, &'static str, &'static str, Config)> {
    let base = Config::default;
    vec![
        ("ENGINE_ID", "engine_id", "stage0", base().with_engine_id("stage0")),
        ("CREDITS", "credits", "8", base().with_credits(8)),
        ("RECEIVE_CREDITS", "receive_credits", "3", base().with_receive_credits(3)),
        ("SLOT_SIZE", "slot_size", "4096", base().with_slot_size(4096)),
        ("TRANSFER_THREADS", "transfer_threads", "4", base().with_transfer_threads(4)),
        ("TRANSFER_CORES", "transfer_cores", "0,2, 3", base().with_transfer_cores([0, 2, 3])),
        ("NOTIFIER_CORE", "notifier_core", "1", base().with_notifier_core(1)),
        ("WAIT", "wait", "park", base().with_wait(WaitStrategy::Park)),
        ("VIEW_LIMIT_MS", "view_limit", "90", base().with_view_limit(Duration::from_millis(90))),
        ("LEASE_MS", "lease", "1500", base().with_lease(Duration::from_millis(1500))),
        ("QUARANTINE_MS", "quarantine", "0", base().with_quarantine(Duration::ZERO)),
        (
            "READ_TIMEOUT_MS",
            "read_timeout",
            "7",
            base().with_read_timeout(Duration::from_millis(7)),
        ),
        ("QUEUED_GETS", "queued_gets", "16", base().with_queued_gets(16)),
        ("LOCK_MEMORY", "lock_memory", "true", base().with_lock_memory(true)),
        ("HUGE_PAGES", "huge_pages", "require", base().with_huge_pages(HugePages::Require)),
    ]
}

fn read(short: &str, value: impl AsRef<OsStr>) -> Result<Config, Error> {
    Config::from_vars([(format!("MOONCAKE_RELAY_{short}"), value)])
}

#[test]
fn the_defaults_are_those_of_the_documentation() {
    let config = Config::default();
    assert_eq!((config.credits, config.receive_credits, config.slot_size), (2, None, 64 << 20));
    assert_eq!((config.transfer_threads, config.queued_gets), (1, 1024));
    assert_eq!((config.engine_id.as_str(), config.wait), ("relay", WaitStrategy::Auto));
    assert!(config.transfer_cores.is_empty() && config.notifier_core.is_none());
    assert!(!config.lock_memory);
    assert_eq!(config.huge_pages, HugePages::Off);
    for time in [config.lease, config.quarantine, config.read_timeout] {
        assert_eq!(time, Duration::from_secs(30));
    }
    assert_eq!(Config::from_vars([("PATH", ""), ("MOONCAKE_LIBRARY", "x")]).unwrap(), config);
}

#[test]
fn every_field_has_a_variable() {
    for (short, _, value, expected) in variables() {
        assert_eq!(read(short, value).unwrap(), expected, "{short}");
        assert_ne!(expected, Config::default(), "{short}");
    }
}

#[test]
fn a_bad_value_is_an_error_that_names_its_variable() {
    for (short, expected, ..) in variables() {
        let bad: &[&[u8]] = match short {
            "ENGINE_ID" => &[b"", b"\xff"],
            _ => &[
                b"",
                b"abc",
                b"-1",
                b"1e30",
                b"1.5",
                b"99999999999999999999",
                b" ",
                b"\0",
                b"\xff",
            ],
        };
        for value in bad {
            match read(short, OsStr::from_bytes(value)) {
                Err(Error::Config { field, reason }) => {
                    assert_eq!(field, expected);
                    assert!(reason.contains(&format!("MOONCAKE_RELAY_{short} is")), "{reason}");
                }
                other => panic!("{short}={value:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_variable_that_no_setting_has_is_reported_and_ignored() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
    let config = tracing::subscriber::with_default(subscriber, || {
        Config::from_vars([
            ("MOONCAKE_RELAY_CREDIT", "8"),
            ("MOONCAKE_RELAY_ENGINE", "embedded"),
            ("MOONCAKE_RELAY_LISTEN", "127.0.0.1:0"),
            ("MOONCAKE_RELAY_ADVERTISE", "host"),
        ])
    });
    assert_eq!(config.unwrap(), Config::default());
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("WARN") && log.contains("MOONCAKE_RELAY_CREDIT"), "{log}");
    assert_eq!(log.lines().count(), 1, "{log}");
}

#[test]
fn a_wait_strategy_reads_as_it_prints() {
    for (text, strategy) in [
        ("auto", WaitStrategy::Auto),
        ("spin", WaitStrategy::Spin),
        ("yield", WaitStrategy::Yield),
        ("park", WaitStrategy::Park),
    ] {
        assert_eq!(strategy.to_string(), text);
        assert_eq!(text.parse::<WaitStrategy>().unwrap(), strategy);
        assert_eq!(serde_json::to_string(&strategy).unwrap(), format!("\"{text}\""));
    }
    assert!(matches!("Spin".parse::<WaitStrategy>(), Err(Error::Config { field: "wait", .. })));
}

#[test]
fn a_choice_of_huge_pages_reads_as_it_prints() {
    for (text, choice) in
        [("off", HugePages::Off), ("prefer", HugePages::Prefer), ("require", HugePages::Require)]
    {
        assert_eq!(choice.to_string(), text);
        assert_eq!(text.parse::<HugePages>().unwrap(), choice);
        assert_eq!(serde_json::to_string(&choice).unwrap(), format!("\"{text}\""));
    }
    assert!(matches!("on".parse::<HugePages>(), Err(Error::Config { field: "huge_pages", .. })));
}

proptest! {
    #[test]
    fn no_environment_makes_it_panic(
        index in 0..14_usize,
        value in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let (short, ..) = variables()[index];
        let _ = read(short, OsStr::from_bytes(&value));
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_duration_without_its_unit_is_an_error_that_names_the_setting() {
    for field in ["lease", "quarantine", "read_timeout"] {
        let name = format!("MOONCAKE_RELAY_{}", field.to_uppercase());
        match Config::from_vars([(name.as_str(), "3")]) {
            Err(Error::Config { field: named, reason }) => {
                assert_eq!(named, field);
                assert!(reason.contains(&format!("{name}_MS")), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
}
