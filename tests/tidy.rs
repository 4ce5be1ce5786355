//! The rules of the house that no lint knows.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The layers, lowest first: a file may use its own layer and the ones below it.
const LAYERS: &[&[&str]] = &[
    &["error", "sync", "identity", "ids", "affinity", "process", "doorbell", "wait", "words"],
    &["memory"],
    &["engine"],
    &["backlog", "pool", "puts", "token"],
    &["core", "counters", "gets", "notifier", "peers", "receiver", "sender", "several"],
    &["config", "cuda", "health", "metadata", "relay", "shutdown", "tensor", "view", "guide"],
];

/// Files whose atomics loom must be able to replace.
const LOCK_FREE: &[&str] = &["doorbell.rs", "pool/credits.rs", "puts.rs", "token.rs", "words.rs"];

/// Where `unsafe` may live.
const ROOMS: &[&str] = &[
    "conformance/locals.rs",
    "conformance/registration.rs",
    "conformance/side.rs",
    "engine/buffer.rs",
    "engine/embedded/client/tests/mod.rs",
    "engine/embedded/local/device.rs",
    "engine/embedded/local/fuzzing.rs",
    "engine/embedded/local/page.rs",
    "engine/embedded/local/socket.rs",
    "engine/embedded/local/source.rs",
    "engine/embedded/mod.rs",
    "engine/embedded/server/pinned.rs",
    "engine/embedded/staging/chunks.rs",
    "engine/embedded/staging/landing.rs",
    "engine/embedded/staging/stager.rs",
    "engine/ends.rs",
    "engine/exports.rs",
    "engine/inprocess.rs",
    "engine/mod.rs",
    "engine/mooncake/connection.rs",
    "engine/mooncake/flight.rs",
    "engine/mooncake/mod.rs",
    "engine/mooncake/native.rs",
    "engine/mooncake/shared.rs",
    "engine/mooncake/spans.rs",
    "memory/copy.rs",
    "memory/cuda/access.rs",
    "memory/cuda/api.rs",
    "memory/cuda/gpu.rs",
    "memory/cuda/mod.rs",
    "memory/cuda/staging.rs",
    "memory/cuda/within.rs",
    "memory/device.rs",
    "memory/host.rs",
    "memory/lock.rs",
    "memory/mod.rs",
    "memory/stream.rs",
    "pool/device.rs",
    "pool/slot.rs",
    "pool/stamps.rs",
    "process.rs",
    "puts.rs",
    "shutdown.rs",
    "token.rs",
    "view.rs",
];

const MOST_LINES: usize = 600;

#[test]
fn every_deliberate_fault_can_be_made_and_its_test_is_there() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mutants.sh");
    let run = Command::new("sh").arg(script).arg("check").output().unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "the source has changed under `tests/mutants.sh`:\n{said}");
}

#[test]
fn no_layer_uses_a_higher_one() {
    let mut faults = Vec::new();
    // The conformance suite stands outside: it uses what a user's engine would.
    for file in sources().iter().filter(|file| module_of(&file.name) != "conformance") {
        let Some(own) = layer(module_of(&file.name)) else {
            // The crate root is the floor plan itself.
            if file.name != "lib.rs" {
                faults.push(format!("src/{} is in no layer: add it to LAYERS", file.name));
            }
            continue;
        };
        for module in used_modules(&file.code) {
            match layer(&module) {
                Some(other) if other <= own => {}
                Some(_) => faults.push(format!("src/{} looks up to {module}", file.name)),
                None => faults.push(format!(
                    "src/{} uses crate::{module}, which is no module in LAYERS: name the module",
                    file.name
                )),
            }
        }
    }
    none(&faults);
}

#[test]
fn lock_free_code_takes_its_atomics_from_sync() {
    let mut faults = Vec::new();
    for file in sources().iter().filter(|file| LOCK_FREE.contains(&file.name.as_str())) {
        for statement in file.code.split(';') {
            let statement: String = statement.split_whitespace().collect();
            let imported = ["usestd::", "usecore::"].iter().any(|start| {
                statement.rfind(start).is_some_and(|at| statement[at..].contains("atomic"))
            });
            let spelled = ["std::sync::atomic", "core::sync::atomic"]
                .iter()
                .any(|path| statement.contains(path));
            if imported || spelled {
                faults.push(format!("src/{} imports atomics past crate::sync", file.name));
            }
        }
    }
    none(&faults);
}

#[test]
fn unsafe_stays_in_its_rooms_and_no_room_is_empty() {
    let has_unsafe = |file: &&Source| {
        // lib.rs marks whole rooms; what it marks is held to this list file by file.
        words(&file.code).any(|word| word == "unsafe")
            || (file.name != "lib.rs" && file.code.contains("allow(unsafe_code)"))
    };
    let sources = sources();
    let found: Vec<_> = sources.iter().filter(has_unsafe).map(|file| &*file.name).collect();
    let outside = found.iter().filter(|name| !ROOMS.contains(name));
    let mut faults: Vec<_> =
        outside.map(|name| format!("src/{name} has unsafe code: it is not in ROOMS")).collect();
    let empty = ROOMS.iter().filter(|room| !found.contains(room));
    faults.extend(empty.map(|room| format!("src/{room} has no unsafe code: take it out of ROOMS")));
    none(&faults);
}

#[test]
fn no_file_outgrows_its_room() {
    let mut faults = Vec::new();
    for path in rust_files(&root()) {
        let lines = read(&path).lines().count();
        if lines > MOST_LINES {
            faults.push(format!("{} has {lines} lines", path.display()));
        }
    }
    none(&faults);
}

#[test]
fn nothing_is_left_undone() {
    // Taken apart, or this file would find itself.
    let signs = [concat!("to", "do!"), concat!("unimpl", "emented!"), concat!("#[", "ignore")];
    let mut faults = Vec::new();
    for path in rust_files(&root()) {
        let text = read(&path);
        for sign in signs.iter().filter(|sign| text.contains(**sign)) {
            faults.push(format!("{} has {sign}", path.display()));
        }
    }
    none(&faults);
}

#[test]
fn the_reader_of_paths_sees_them_all() {
    let code = without_comments(
        "// crate::not_this\nuse crate::a;\nuse crate::{\n    b::{B, c},\n    d as e,\n};\n\
         fn f() -> crate::g::G { $crate::h!() }\npub(in crate::i) struct I;",
    );
    assert_eq!(used_modules(&code), ["a", "b", "d", "g", "h", "i"]);
}

struct Source {
    /// Relative to `src/`.
    name: String,
    /// The text without its line comments.
    code: String,
}

fn sources() -> Vec<Source> {
    let src = root().join("src");
    let files = rust_files(&src);
    assert!(!files.is_empty(), "src/ has no file");
    let name = |path: &Path| path.strip_prefix(&src).unwrap().to_str().unwrap().to_owned();
    files
        .iter()
        .map(|path| Source { name: name(path), code: without_comments(&read(path)) })
        .collect()
}

/// `pool/slot.rs` → `pool`, `token.rs` → `token`.
fn module_of(name: &str) -> &str {
    name.split('/').next().unwrap_or(name).trim_end_matches(".rs")
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

/// The first name of every path that starts at the crate's root.
fn used_modules(code: &str) -> Vec<String> {
    let mut modules = Vec::new();
    for (at, start) in code.match_indices("crate::") {
        let rest = &code[at + start.len()..];
        match rest.strip_prefix('{') {
            Some(group) => modules.extend(group_heads(group)),
            None => modules.extend(words(rest).next().map(str::to_owned)),
        }
    }
    modules
}

/// The first name of each item of `a::b, c::{d, e}, …}`, up to the closing brace.
fn group_heads(group: &str) -> Vec<String> {
    let (mut depth, mut item, mut heads) = (0, String::new(), Vec::new());
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                heads.extend(words(&item).next().map(str::to_owned));
                item.clear();
                continue;
            }
            _ => {}
        }
        item.push(c);
    }
    heads.extend(words(&item).next().map(str::to_owned));
    heads
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

fn without_comments(text: &str) -> String {
    let code = |line: &str| line.split("//").next().unwrap_or_default().to_owned();
    text.lines().map(code).collect::<Vec<_>>().join("\n")
}

/// Every `.rs` file below `folder`, build outputs and hidden folders left out.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_str().unwrap();
        if entry.file_type().unwrap().is_dir() {
            if !name.starts_with('.') && !["target", "shared"].contains(&name) {
                files.extend(rust_files(&path));
            }
        } else if name.ends_with(".rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[track_caller]
fn none(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}
