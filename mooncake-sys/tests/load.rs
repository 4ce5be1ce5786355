//! What is found, and what is said of what is not. Each load is in a process of its own, with an
//! environment of its own.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    env,
    ffi::OsStr,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
};

use mooncake_sys::{Options, REQUIRED, WHEELS, load};

use crate::common::{Folder, wheel};

#[test]
fn with_nothing_installed_every_place_is_named_and_what_to_install() {
    let empty = Folder::new();
    let said = refused(&[("PATH", empty.path()), ("HOME", empty.path())]);
    for named in [
        "MOONCAKE_LIBRARY",
        "libtransfer_engine.so on the loader's path",
        "MOONCAKE_WHEEL",
        "VIRTUAL_ENV",
        "python3 did not run",
        "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1",
        "apt-get install g++ libpython3.11 libibverbs1 libnuma1 libcurl4",
    ] {
        assert!(said.contains(named), "{named} is not in:\n{said}");
    }
}

#[test]
fn a_named_library_that_fails_is_not_replaced_by_another() {
    let folder = Folder::new();
    let broken = folder.file("broken.so", "no library at all");
    let absent = folder.path().join("absent.so");
    for library in [&*broken, &absent, folder.path()] {
        let mut env = vec![("MOONCAKE_LIBRARY", library), ("PATH", Path::new("/usr/bin:/bin"))];
        let site = wheel();
        env.extend(site.as_deref().map(|site| ("MOONCAKE_WHEEL", site)));
        let said = refused(&env);
        assert!(said.contains(library.to_str().unwrap()), "{said}");
        assert!(!said.contains("wheel in"), "it looked further:\n{said}");
    }
}

#[test]
fn a_library_without_the_c_interface_is_told_what_it_lacks() {
    let folder = Folder::new();
    let Some(library) = stub(&folder, "void *createTransferEngine(void) { return 0; }") else {
        return;
    };
    let said = refused(&[("MOONCAKE_LIBRARY", &library)]);
    assert!(!said.contains("createTransferEngine"), "that one it has: {said}");
    for missing in REQUIRED.iter().filter(|name| **name != "createTransferEngine") {
        assert!(said.contains(missing), "{missing} is not in:\n{said}");
    }
}

#[test]
fn a_library_that_does_not_do_what_its_names_say_is_refused() {
    let folder = Folder::new();
    let functions: String =
        REQUIRED.iter().map(|name| format!("void *{name}(void) {{ return 0; }}\n")).collect();
    let Some(library) = stub(&folder, &functions) else { return };
    let said = refused(&[("MOONCAKE_LIBRARY", &library)]);
    assert!(said.contains("its self-check failed: it made no engine"), "{said}");
}

#[test]
fn a_library_on_the_loaders_path_comes_before_the_wheel() {
    let folder = Folder::new();
    let Some(_) = stub(&folder, "int unrelated;") else { return };
    fs::rename(folder.path().join("stub.so"), folder.path().join("libtransfer_engine.so")).unwrap();
    let said = refused(&[("LD_LIBRARY_PATH", folder.path()), ("MOONCAKE_WHEEL", folder.path())]);
    let (lacks, none) = (said.find("it lacks createTransferEngine"), said.find("engine.so in it"));
    assert!(lacks.unwrap() < none.unwrap(), "{said}");
}

#[test]
fn a_wheel_of_another_version_is_refused_with_the_list() {
    let folder = Folder::new();
    folder.file("mooncake/engine.so", "");
    let info = "mooncake_transfer_engine-0.3.7.post2.dist-info";
    folder.file(&format!("{info}/METADATA"), "Metadata-Version: 2.4\nVersion: 0.3.7.post2\n");
    let said = refused(&[("MOONCAKE_WHEEL", folder.path())]);
    assert!(said.contains("version \"0.3.7.post2\", which is not supported"), "{said}");
    assert!(said.contains(&WHEELS.join(" or ")), "{said}");
    assert!(said.contains("pip install mooncake-transfer-engine-non-cuda=="), "{said}");
}

#[test]
fn a_folder_that_is_no_wheel_is_told_what_is_missing() {
    let folder = Folder::new();
    assert!(refused(&[("MOONCAKE_WHEEL", folder.path())]).contains("no mooncake/engine.so"));
    folder.file("mooncake/engine.so", "");
    assert!(refused(&[("MOONCAKE_WHEEL", folder.path())]).contains("dist-info"));
    folder.file("mooncake_transfer_engine-1.dist-info/METADATA", "nothing");
    assert!(refused(&[("MOONCAKE_WHEEL", folder.path())]).contains("Version"));
    folder.file("mooncake_transfer_engine_cuda13-1.dist-info/METADATA", "Version: 1");
    assert!(refused(&[("MOONCAKE_WHEEL", folder.path())]).contains("uninstall all but one"));
}

#[test]
fn the_active_virtual_environment_is_looked_at() {
    let folder = Folder::new();
    let said = refused(&[("VIRTUAL_ENV", folder.path())]);
    assert!(said.contains("no lib/python3.*/site-packages"), "{said}");
    folder.file("lib/python3.11/site-packages/mooncake/engine.so", "");
    let said = refused(&[("VIRTUAL_ENV", folder.path())]);
    assert!(said.contains("virtual environment's"), "{said}");
    assert!(said.contains("dist-info"), "{said}");
}

#[test]
fn a_wheel_without_a_compiler_names_the_package() {
    let Some(site) = wheel() else { return };
    let empty = Folder::new();
    let said = refused(&[
        ("MOONCAKE_WHEEL", &site),
        ("PATH", empty.path()),
        ("XDG_CACHE_HOME", empty.path()),
    ]);
    assert!(said.contains("apt-get install g++"), "{said}");
    assert!(said.contains("the compiler \"g++\" did not run"), "{said}");
}

#[test]
fn a_cache_that_others_may_write_is_refused() {
    let Some(site) = wheel() else { return };
    let folder = Folder::new();
    let cache = folder.path().join("mooncake-relay");
    fs::create_dir(&cache).unwrap();
    fs::set_permissions(&cache, fs::Permissions::from_mode(0o777)).unwrap();
    let said = refused(&[
        ("MOONCAKE_WHEEL", &site),
        ("PATH", Path::new("/usr/bin:/bin")),
        ("XDG_CACHE_HOME", folder.path()),
    ]);
    assert!(said.contains("others may write it"), "{said}");
}

#[test]
fn an_adapter_that_crashes_crashes_in_a_process_of_its_own() {
    let Some(site) = wheel() else { return };
    let folder = Folder::new();
    let trap = "__attribute__((constructor)) static void trap(void) { __builtin_trap(); }\n";
    let header = folder.file("trap.h", trap);
    let compiler = format!("g++ -include {}", header.display());
    let said = refused(&[
        ("MOONCAKE_WHEEL", &site),
        ("PATH", Path::new("/usr/bin:/bin")),
        ("XDG_CACHE_HOME", folder.path()),
        ("CXX", Path::new(&compiler)),
    ]);
    assert!(said.contains("its self-check failed") && said.contains("signal"), "{said}");
    assert_eq!(adapters(&folder), 0, "what failed is not kept");
}

#[test]
fn an_adapter_that_does_not_compile_says_why() {
    let Some(site) = wheel() else { return };
    let folder = Folder::new();
    let header = folder.file("broken.h", "#error \"not on this machine\"\n");
    let compiler = format!("g++ -include {}", header.display());
    let said = refused(&[
        ("MOONCAKE_WHEEL", &site),
        ("PATH", Path::new("/usr/bin:/bin")),
        ("XDG_CACHE_HOME", folder.path()),
        ("CXX", Path::new(&compiler)),
    ]);
    assert!(said.contains("could not be built") && said.contains("not on this machine"), "{said}");
}

#[test]
fn processes_that_build_at_once_leave_one_adapter_and_the_next_builds_none() {
    let Some(site) = wheel() else { return };
    let folder = Folder::new();
    // Writes a line for each thing that it compiles.
    let log = folder.path().join("log");
    let compiler = folder.file(
        "compiler.sh",
        &format!(
            "#!/bin/sh\n[ \"$1\" = --version ] || echo >>{}\nexec g++ \"$@\"\n",
            log.display()
        ),
    );
    fs::set_permissions(&compiler, fs::Permissions::from_mode(0o755)).unwrap();
    let env = [
        ("MOONCAKE_WHEEL", &*site),
        ("PATH", Path::new("/usr/bin:/bin")),
        ("XDG_CACHE_HOME", folder.path()),
        ("CXX", &compiler),
    ];
    let first = thread::scope(|scope| {
        let loads = [scope.spawn(|| loaded(&env)), scope.spawn(|| loaded(&env))];
        loads.map(|load| load.join().unwrap())
    });
    assert_eq!(first[0], first[1], "one adapter for both");
    assert_eq!(adapters(&folder), 1);
    let compiled = fs::read_to_string(&log).unwrap();
    assert_eq!(loaded(&env), first[0]);
    assert_eq!(fs::read_to_string(&log).unwrap(), compiled, "it was built again");
    let mode = fs::metadata(folder.path().join("mooncake-relay")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn the_wheel_loads_and_says_nothing_on_stderr() {
    let Some(site) = wheel() else { return };
    let folder = Folder::new();
    let env = [
        ("MOONCAKE_WHEEL", &*site),
        ("PATH", Path::new("/usr/bin:/bin")),
        ("XDG_CACHE_HOME", folder.path()),
    ];
    let output = child(&env);
    assert!(text(&output.stdout).contains("LOADED 0.3.13.post1"), "{output:?}");
    assert!(text(&output.stdout).contains("SELF-CHECK Ok(())"), "{output:?}");
    assert_eq!(text(&output.stderr), "");
    let asked = [&env[..], &[("MC_LOG_LEVEL", Path::new("INFO"))]].concat();
    assert!(text(&child(&asked).stderr).contains("TcpTransport"), "nor does it when asked to");
}

/// Not a test: what the others run, each in an environment of its own.
#[test]
fn the_child() {
    if env::var_os("MOONCAKE_SYS_CHILD").is_none() {
        return;
    }
    match load(&Options::default()) {
        Err(error) => println!("REFUSED {error}"),
        Ok(library) => {
            let again = load(&Options::default()).unwrap();
            assert!(std::ptr::eq(library, again), "it is loaded once");
            println!("LOADED {} {}", library.wheel_version().unwrap(), library.path().display());
            println!("SELF-CHECK {:?}", library.self_check());
        }
    }
}

/// What the load says in this environment, where it is to fail.
fn refused(env: &[(&str, &Path)]) -> String {
    let output = child(env);
    let said = text(&output.stdout);
    let at = said.find("REFUSED").unwrap_or_else(|| panic!("it was not refused: {output:?}"));
    said[at..].to_owned()
}

/// Where the adapter is that was loaded in this environment.
fn loaded(env: &[(&str, &Path)]) -> String {
    let output = child(env);
    let said = text(&output.stdout);
    let line = said.lines().find(|line| line.contains("LOADED"));
    line.unwrap_or_else(|| panic!("it was not loaded: {output:?}")).to_owned()
}

fn child(env: &[(impl AsRef<OsStr>, &Path)]) -> Output {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "the_child", "--nocapture"]).env_clear();
    command.env("MOONCAKE_SYS_CHILD", "1");
    for (name, value) in env {
        command.env(name, value);
    }
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// How many adapters are in the cache; and nothing else is.
fn adapters(folder: &Folder) -> usize {
    let entries = fs::read_dir(folder.path().join("mooncake-relay")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.inspect(|name| assert!(name.starts_with("adapter-"), "{name} was left behind")).count()
}

/// A shared library of these C functions. `None`, said aloud: there is no C compiler.
fn stub(folder: &Folder, functions: &str) -> Option<PathBuf> {
    let source = folder.file("stub.c", functions);
    let library = folder.path().join("stub.so");
    let built =
        Command::new("cc").args(["-shared", "-fPIC"]).arg(&source).arg("-o").arg(&library).status();
    if built.is_err() && env::var_os("CI").is_none() {
        eprintln!("SKIPPED: no cc");
        return None;
    }
    assert!(built.unwrap().success());
    Some(library)
}
