//! `tests/cuda-device.sh`, which is for machines with a device, where there is none: what it runs, and
//! what it says of what failed or is missing.
#![cfg(all(feature = "cuda", feature = "embedded"))]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
#[path = "cuda/standin.rs"]
mod standin;

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use crate::common::{peer::example, within};

const WATCHDOG: Duration = Duration::from_secs(300);

/// What stands for a program of tests: it wants to be told that there is a device.
const PASSES: &str = "[ \"$MOONCAKE_RELAY_TEST_CUDA\" = device ] && echo 'test result: ok.'";

#[test]
fn it_runs_everything_and_sums_up() {
    let machine = Machine::new();
    // It starts what it is to watch.
    machine
        .program("path/compute-sanitizer", "while [ \"${1#/}\" = \"$1\" ]; do shift; done; \"$@\"");
    let (code, said) = machine.run();
    assert_eq!(code, Some(0), "{said}");
    for line in [
        "ok       in_process ",
        "ok       between_processes ",
        "ok       example ",
        "ok       example_tcp ",
        "ok       sanitizer_every_way_carries_every_byte ",
        "ok       sanitizer_example ",
        "ok       times ",
        "device → device by \"cuda-ipc\"",
        "device → device by \"staged\"",
        "The way was \"cuda-ipc\"",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
}

#[test]
fn what_fails_is_named_and_the_rest_is_run() {
    let machine = Machine::new();
    machine.program("built/test_cuda_ways", "echo 'bytes of something else'; exit 101");
    let (code, said) = machine.run();
    assert_eq!(code, Some(1), "{said}");
    for line in [
        "bytes of something else",
        "FAILED   between_processes ",
        "ended with 101",
        "ok       in_process ",
        "NOT RUN  sanitizer ",
        "ok       times ",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
}

#[test]
fn what_is_not_built_is_asked_for() {
    let machine = Machine::new();
    fs::remove_file(machine.folder().join("built/test_cuda")).unwrap();
    let (code, said) = machine.run();
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("built/test_cuda is missing: make cuda-device"), "{said}");
}

/// A folder that has what the script looks for, and a driver that stands in for a real one.
struct Machine(standin::Built);

impl Machine {
    fn new() -> Self {
        let machine = Self(standin::Built::new());
        for folder in ["built", "path"] {
            fs::create_dir_all(machine.folder().join(folder)).unwrap();
        }
        machine.program("built/test_cuda", PASSES);
        machine.program("built/test_cuda_ways", PASSES);
        symlink(example("cuda"), machine.folder().join("built/example_cuda")).unwrap();
        machine
    }

    fn folder(&self) -> &Path {
        self.0.path()
    }

    fn program(&self, name: &str, body: &str) {
        let path = self.folder().join(name);
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// How the script ended, and what it said.
    fn run(&self) -> (Option<i32>, String) {
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/cuda-device.sh");
        let path = format!("{}:/usr/bin:/bin", self.folder().join("path").display());
        let mut command = Command::new("sh");
        command
            .arg(script)
            .arg(self.folder().join("built"))
            .env("LD_LIBRARY_PATH", self.folder())
            .env("PATH", path)
            .env("LARGEST", "4096")
            .env("CUDA_ROOTS", "/nowhere")
            .stdin(Stdio::null());
        let output = within(WATCHDOG, move || command.output().unwrap());
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(said).unwrap())
    }
}
