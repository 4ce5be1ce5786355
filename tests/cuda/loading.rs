//! Without a driver, with a wrong one, and without a device: errors that say what is missing.

use std::{env, fs, panic, process::Command};

use mooncake_relay::{Cuda, Error, Relay};

use crate::{
    Rig, cases,
    common::SKIPPED,
    standin::Built,
    ways::{SOON, Side, config, engine, on_host},
};

cases! {
    Nothing []:
        o1_without_a_driver_it_is_an_error_that_names_what_was_looked_for,
        a_driver_that_lacks_a_function_is_an_error_that_names_it;
    Untouched []:
        o1_a_relay_in_host_memory_never_loads_the_driver;
    Standin []:
        an_ordinal_that_is_not_there_is_an_error_that_says_how_many_are;
    Standin [("STANDIN_DEVICES", "0")]:
        without_a_device_it_is_an_error;
    Standin [("STANDIN_DEVICES", "1")]:
        one_device_is_told_as_one;
    Standin [("STANDIN_FAIL", "cuInit:1:999")]:
        a_driver_that_does_not_start_is_an_error_and_is_tried_again;
}

fn make(ordinal: usize) -> Result<Relay<Cuda>, Error> {
    Relay::<Cuda>::with_memory(ordinal, engine(), &config())
}

/// As in a build where a panic aborts.
fn abort_on_panic() {
    panic::set_hook(Box::new(|info| {
        eprintln!("{info}");
        std::process::abort();
    }));
}

#[track_caller]
fn is_refused(ordinal: usize, parts: &[&str]) {
    match make(ordinal) {
        Err(Error::Config { field: "memory", reason }) => {
            for part in parts {
                assert!(reason.contains(part), "{reason}");
            }
        }
        other => panic!("{other:?}"),
    }
}

/// Whether a file of that name is mapped here.
fn is_mapped(name: &str) -> bool {
    fs::read_to_string("/proc/self/maps").unwrap().contains(name)
}

fn o1_without_a_driver_it_is_an_error_that_names_what_was_looked_for(_: &Rig) {
    // SAFETY: a driver's library may be loaded by anybody.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_ok() {
        eprintln!("{SKIPPED}: there is a driver, and the loader knows it by itself");
        return;
    }
    abort_on_panic();
    for _ in 0..2 {
        is_refused(0, &["no NVIDIA driver", "libcuda.so, ", "libcuda.so.1", "LD_LIBRARY_PATH"]);
    }
}

/// In a process of its own, which finds a library of that name with one function.
fn a_driver_that_lacks_a_function_is_an_error_that_names_it(_: &Rig) {
    const FOUND: &str = "MOONCAKE_RELAY_TEST_OLD_DRIVER";
    if env::var_os(FOUND).is_some() {
        abort_on_panic();
        return is_refused(0, &["too old", "it has no cuGetErrorName"]);
    }
    let source = env::temp_dir().join(format!("old-driver-{}.c", std::process::id()));
    let text = "__attribute__((visibility(\"default\"))) int cuInit(unsigned f) { return f; }\n";
    fs::write(&source, text).unwrap();
    let built = Built::of(&source, "old");
    fs::remove_file(&source).unwrap();
    let mut command = Command::new(env::current_exe().unwrap());
    command.env(FOUND, "1").env("LD_LIBRARY_PATH", built.path());
    crate::ends_well("a part of it", command, SOON).unwrap();
}

/// Whatever its sender says of devices.
fn o1_a_relay_in_host_memory_never_loads_the_driver(_: &Rig) {
    let (from, to) = (on_host(), on_host());
    for number in ["0", "7", "-1", "2147483648"] {
        let (metadata, put) = from.send(b"hello");
        let text = metadata.to_string();
        let told = text.replace("\"device_id\":0", &format!("\"device_id\":{number}"));
        assert!(told != text || number == "0");
        assert_eq!(to.fetch(&told.parse().unwrap()).unwrap(), b"hello");
        put.wait().unwrap();
    }
    assert!(!is_mapped("libcuda"));
    drop(make(0).unwrap());
    assert!(is_mapped("libcuda"), "so it could have");
}

fn an_ordinal_that_is_not_there_is_an_error_that_says_how_many_are(rig: &Rig) {
    abort_on_panic();
    for ordinal in [2, 7, usize::MAX] {
        is_refused(ordinal, &[&format!("cuda:{ordinal}"), "2, cuda:0 to cuda:1"]);
    }
    assert_eq!(rig.standin().calls("cuDevicePrimaryCtxRetain"), 0);
    drop(make(1).unwrap());
}

fn without_a_device_it_is_an_error(_: &Rig) {
    abort_on_panic();
    is_refused(0, &["finds no device", "CUDA_VISIBLE_DEVICES"]);
}

fn one_device_is_told_as_one(_: &Rig) {
    is_refused(1, &["there is one, cuda:0"]);
}

fn a_driver_that_does_not_start_is_an_error_and_is_tried_again(_: &Rig) {
    abort_on_panic();
    match make(0) {
        Err(Error::Device { device, call, reason }) => {
            assert_eq!((&*device, call), ("cuda", "cuInit"));
            assert_eq!(reason, "CUDA_ERROR_UNKNOWN (unknown error)");
        }
        other => panic!("{other:?}"),
    }
    let relay = make(0).unwrap();
    let (metadata, _put) = relay.send(b"hello");
    assert_eq!(on_host().fetch(&metadata).unwrap(), b"hello");
}
