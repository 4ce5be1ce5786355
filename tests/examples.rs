//! The examples, each run to its end as a newcomer would; `tests/commands.rs` and
//! `tests/perftest.rs` have the others.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
#[cfg(feature = "cuda")]
#[path = "cuda/standin.rs"]
mod standin;

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{self, Command, Output, Stdio},
    time::Duration,
};

use safetensors::{Dtype, tensor::TensorView};

use crate::common::{
    peer::{example, real_engine},
    within,
};

const WATCHDOG: Duration = Duration::from_secs(600);

#[test]
fn weights_makes_a_file_sends_it_and_removes_it() {
    let said = succeeds("weights", &[]);
    assert!(said.ends_with("Every hash is equal.\n"), "{said}");
    let made = said.lines().find_map(|line| line.strip_prefix("made ")).unwrap();
    assert!(made.ends_with(".safetensors") && !Path::new(made).exists(), "{made}");
    for shown in ["embedding.weight", "[4096, 2048]", "16777216", "float8_e4m3fn"] {
        assert!(said.contains(shown), "{shown}: {said}");
    }
}

#[test]
fn weights_sends_a_file_of_the_users_whatever_its_types() {
    let bytes = vec![7; 4 << 20];
    let tensor = |dtype, shape: &[usize], len| {
        TensorView::new(dtype, shape.to_vec(), &bytes[..len]).unwrap()
    };
    let tensors = [
        ("exactly a slot", tensor(Dtype::F64, &[1 << 19], 4 << 20)),
        ("six bits each", tensor(Dtype::F6_E2M3, &[2, 4], 6)),
        ("complex", tensor(Dtype::C64, &[3], 24)),
    ];
    let file = Scratch::new("given");
    safetensors::serialize_to_file(tensors, None, &file.0).unwrap();
    let said = succeeds("weights", &[file.0.to_str().unwrap()]);
    assert!(said.contains("F6_E2M3") && said.contains("3 tensors"), "{said}");
    assert!(file.0.exists(), "it is the user's");
}

#[test]
fn weights_refuses_what_is_no_such_file() {
    let file = Scratch::new("broken");
    let cut_off = b"\x47\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"U8\",\"shape\":[1099511627776],\
                    \"data_offsets\":[0,1099511627776]}}";
    for bytes in [&b""[..], &[0; 7], &[0xff; 64], b"\x02\0\0\0\0\0\0\0{]", cut_off] {
        fs::write(&file.0, bytes).unwrap();
        let output = run("weights", &[file.0.to_str().unwrap()]);
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{bytes:?}: {log}");
        assert!(log.starts_with("Error: "), "{bytes:?}: {log}");
    }
}

#[test]
fn spin_loop_steps_while_inputs_come_in() {
    let said = succeeds("spin_loop", &["--small"]);
    assert!(said.contains("while 8 inputs of 0.1 MB came in"), "{said}");
    assert!(said.contains("ns by `is_done`"), "{said}");
}

#[test]
fn select_gets_what_it_has_begun_and_no_more() {
    let said = succeeds("select", &["--small"]);
    assert!(said.contains("shutdown: "), "{said}");
    let received =
        said.lines().find_map(|line| line.strip_suffix(" tensors received, every byte compared"));
    assert!(received.unwrap().parse::<u64>().unwrap() > 0, "{said}");
}

#[test]
fn an_engine_of_ones_own_passes_every_case() {
    let said = succeeds("own_engine", &[]);
    let passed = said.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(passed > 0 && said.contains(&format!("{passed} of {passed} cases passed")), "{said}");
    assert!(said.contains("a relay on it moved"), "{said}");
}

#[test]
fn pipeline_brings_every_chunk_to_the_end_of_the_line() {
    let said = succeeds("pipeline", &["--small"]);
    for stage in
        ["A made    16 chunks", "B changed 16 chunks", "C checked 16 chunks", "1.0 MB went"]
    {
        assert!(said.contains(stage), "{stage}: {said}");
    }
}

#[cfg(feature = "mooncake")]
#[test]
fn mooncake_moves_tensors_both_ways_over_the_real_engine() {
    let Some(engine) = real_engine() else { return };
    let said = succeeds("mooncake", &["--library", engine.site.to_str().unwrap()]);
    assert!(said.starts_with("an engine on tcp at 127.0.0.1:"), "{said}");
    assert!(said.contains("67108864") && said.contains("Every byte was compared."), "{said}");
}

#[cfg(feature = "mooncake")]
#[test]
fn mooncake_says_what_is_missing_and_how_to_install_it() {
    for (flags, named) in [
        (&["--library", "/nowhere.so"][..], &["/nowhere.so", "pip install", "apt-get install"][..]),
        (&["--protocol", "pigeon"], &["protocol", "tcp, rdma, nvlink"]),
        (&["--device", "mlx5_0"], &["device_name"]),
        (&["--metadata-server", "ftp://host"], &["metadata_server", "P2PHANDSHAKE"]),
        (&["--hostname", "0.0.0.0"], &["hostname"]),
    ] {
        let output = run("mooncake", flags);
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{flags:?}: {log}");
        for name in named {
            assert!(log.starts_with("mooncake: ") && log.contains(name), "{name}: {log}");
        }
    }
}

#[cfg(feature = "cuda")]
#[test]
fn cuda_moves_tensors_in_device_memory_both_ways() {
    let driver = standin::Built::new();
    for (flags, way) in [
        (&["--peer-device", "1"][..], "\"cuda-ipc\": one copy"),
        (&["--tcp"], "\"staged\": by TCP"),
    ] {
        let said = on_standin(&driver, flags);
        assert!(said.starts_with("slots in the memory of cuda:0\n"), "{said}");
        assert!(said.contains("16777216") && said.contains("Every byte was compared."), "{said}");
        assert!(said.contains(way), "{way}: {said}");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn cuda_times_every_way_beside_bare_copies() {
    let driver = standin::Built::new();
    let said = on_standin(&driver, &["--times", "--largest", "65536"]);
    for way in [
        "device → device by \"cuda-ipc\"",
        "host → device by \"local-staged\"",
        "device → host by \"tcp\"",
        "host → host by \"local\"",
        "device → device by \"staged\"",
        "host → device by \"staged\"",
        "host → host by \"tcp\"",
    ] {
        assert!(said.contains(way), "{way}: {said}");
    }
    assert!(said.contains("compared byte for byte"), "{said}");
    // Bare copies, and eight ways.
    assert_eq!(said.lines().filter(|line| line.starts_with("       65536 ")).count(), 9, "{said}");
}

#[cfg(feature = "cuda")]
#[test]
fn cuda_says_what_is_missing() {
    let run = |variables: &[(&str, &str)], flags: &[&str]| {
        let mut command = Command::new(example("cuda"));
        command.args(flags).envs(variables.iter().copied()).stdin(Stdio::null());
        let output = within(WATCHDOG, move || command.output().unwrap());
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let driver = standin::Built::new();
    let folder = driver.path().to_str().unwrap();
    let mut cases =
        vec![run(&[("LD_LIBRARY_PATH", folder), ("STANDIN_DEVICES", "0")], &["--times"])];
    if !fs::exists("/dev/nvidia0").unwrap() {
        cases.push(run(&[("LD_LIBRARY_PATH", "/nowhere")], &[]));
    }
    for log in cases {
        for part in ["cuda: ", "memory", "nvidia-smi", "--gpus all"] {
            assert!(log.contains(part), "{part}: {log}");
        }
        assert!(!log.contains("panicked"), "{log}");
    }
}

/// Runs it where the driver is that stand-in, which is left as it was found.
#[cfg(feature = "cuda")]
fn on_standin(driver: &standin::Built, flags: &[&str]) -> String {
    let report = driver.path().join("report");
    let mut command = Command::new(example("cuda"));
    command.args(flags).stdin(Stdio::null());
    command.env("LD_LIBRARY_PATH", driver.path()).env("STANDIN_REPORT", &report);
    let output = within(WATCHDOG, move || command.output().unwrap());
    let said = String::from_utf8(output.stdout).unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && log.is_empty(), "{}: {log}\n{said}", output.status);
    let left = fs::read_to_string(&report).unwrap();
    assert!(left.lines().all(|line| line.ends_with(" 0")), "{left}");
    said
}

#[test]
fn every_example_is_run_by_a_test_and_listed_in_the_readme() {
    let tested = [
        "cuda",
        "doctor",
        "mooncake",
        "own_engine",
        "peer",
        "perftest",
        "pipeline",
        "quickstart",
        "select",
        "spin_loop",
        "weights",
    ];
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let there: BTreeSet<_> = fs::read_dir(root.join("examples"))
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    assert_eq!(there, tested.map(str::to_owned).into(), "examples/ and its tests differ");
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    for name in tested {
        assert!(readme.contains(&format!("`{name}`")), "{name} is not in README.md");
    }
}

/// Runs an example, which is expected to work; what it said.
fn succeeds(name: &'static str, flags: &[&str]) -> String {
    let output = run(name, flags);
    let said = String::from_utf8(output.stdout).unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {log}\n{said}", output.status);
    assert!(log.is_empty(), "{log}");
    said
}

fn run(name: &'static str, flags: &[&str]) -> Output {
    let flags: Vec<_> = flags.iter().map(|flag| (*flag).to_owned()).collect();
    within(WATCHDOG, move || {
        Command::new(example(name)).args(flags).stdin(Stdio::null()).output().unwrap()
    })
}

/// A file of this test's, removed at its end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(env::temp_dir().join(format!("relay-test-{name}-{}.safetensors", process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
