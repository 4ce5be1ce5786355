//! Settings and libraries that cannot be used: an error that names them, and nothing worse.

use std::{env, process::Command};

use mooncake_relay::{Config, EngineOptions, Error, MooncakeConfig, MooncakeEngine, open_engine};

use crate::{Ended, WATCHDOG, cases};

cases! {
    m8_a_bad_value_of_any_variable_is_an_error_and_never_an_exit = 300,
    m9_an_engine_whose_library_is_missing_or_broken_is_an_error_that_says_what_was_tried,
}

const VARIABLES: [&str; 28] = [
    "ENGINE_ID",
    "CREDITS",
    "RECEIVE_CREDITS",
    "SLOT_SIZE",
    "TRANSFER_THREADS",
    "TRANSFER_CORES",
    "NOTIFIER_CORE",
    "WAIT",
    "LEASE_MS",
    "QUARANTINE_MS",
    "READ_TIMEOUT_MS",
    "VIEW_LIMIT_MS",
    "QUEUED_GETS",
    "HUGE_PAGES",
    "LOCK_MEMORY",
    "ENGINE",
    "LISTEN",
    "ADVERTISE",
    "LOCAL",
    "STAGING",
    "PROTOCOL",
    "METADATA_SERVER",
    "DEVICE_NAME",
    "ALLOW_WRITES",
    "LEASE",
    "NO_SUCH_SETTING",
    "",
    "_",
];
const VALUES: [&str; 9] =
    ["abc", "-1", "", " ", "1e30", "18446744073709551616", "0x10", "NaN", "1,,2"];
/// What a process does whose values are asked for.
pub(crate) const PART: &str = "reads the environment";
const ASKED: &str = "MOONCAKE_RELAY_TEST_VALUES";

fn m8_a_bad_value_of_any_variable_is_an_error_and_never_an_exit() {
    // A process a value, with all variables of that value one after the other: what one of them
    // exits from is told by its status.
    for value in VALUES {
        let mut command = Command::new(env::current_exe().unwrap());
        command.env(crate::CASE, PART).env(ASKED, value);
        let ended = Ended::of(PART, &mut command, WATCHDOG).unwrap();
        if let Err(failed) = ended.is_well(crate::exited(0)) {
            panic!("{value:?}: {}", failed.message().unwrap_or_default());
        }
    }
}

pub(crate) fn reads_the_environment() {
    let value = env::var(ASKED).expect("whoever starts this process has set it");
    for name in VARIABLES {
        let name = format!("MOONCAKE_RELAY_{name}");
        // SAFETY: this process has one thread yet.
        unsafe { env::set_var(&name, &value) };
        match Config::from_env() {
            Ok(config) => println!("{name}={value:?}: {config:?}"),
            Err(Error::Config { field, reason }) => println!("{name}={value:?}: {field}: {reason}"),
            Err(error) => panic!("{name}={value:?}: {error:?}"),
        }
        let options = EngineOptions::from_env();
        match open_engine("embedded", &options).map(drop) {
            Ok(()) | Err(Error::Config { .. } | Error::Io(_)) => {}
            Err(error) => panic!("{name}={value:?}: {error:?}"),
        }
        // SAFETY: as above: what was opened has no thread any more.
        unsafe { env::remove_var(&name) };
    }
}

fn m9_an_engine_whose_library_is_missing_or_broken_is_an_error_that_says_what_was_tried() {
    let not_a_library = env::temp_dir().join(format!("ends-{}.so", std::process::id()));
    std::fs::write(&not_a_library, b"no library").unwrap();
    for library in ["/no/such/libtransfer_engine.so".into(), not_a_library.clone(), "/".into()] {
        let config = MooncakeConfig { library: Some(library.clone()), ..MooncakeConfig::default() };
        match MooncakeEngine::open(&config).map(drop) {
            Err(Error::Engine { engine: "mooncake", reason }) => {
                let named = library.display().to_string();
                assert!(reason.contains(&named), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
    std::fs::remove_file(not_a_library).unwrap();
    // The embedded engine needs none of it.
    drop(open_engine("embedded", &EngineOptions::default()).unwrap());
}
