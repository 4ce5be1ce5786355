//! The C++ adapter: built on demand, tried in a process of its own, and kept for the next time.

use std::{
    env, fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    process::{self, Command},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use crate::{child, wheel::Wheel};

const ADAPTER: &str = include_str!("../adapter/adapter.cpp");
const CHECK: &str = include_str!("../adapter/check.cpp");

/// Longer than a compiler takes on a busy machine.
const BUILD: Duration = Duration::from_secs(180);
/// The check ends by itself much earlier, with a reason.
const TRY: Duration = Duration::from_secs(30);

/// The adapter for this wheel, from the cache or built. Whatever lies in the cache has passed the
/// check: it gets its name only then.
pub(crate) fn adapter_for(wheel: &Wheel, cache: Option<&Path>) -> Result<PathBuf, String> {
    let rpath = wheel.folder.to_str().filter(|path| !path.contains([':', '$', ';']));
    let rpath = rpath.ok_or("its path has a character that the loader reads as a separator")?;
    let compiler = Compiler::find()?;
    let cache = match cache {
        Some(cache) => cache.to_owned(),
        None => default_cache()?,
    };
    private(&cache).map_err(|error| format!("the cache folder {}: {error}", cache.display()))?;

    let engine = wheel.folder.join("engine.so");
    let key = key(&[&engine_of(&engine)?, rpath, &compiler.version, ADAPTER, CHECK]);
    let path = cache.join(format!("adapter-{}-{key:016x}.so", wheel.version));
    if path.exists() {
        ours(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        return Ok(path);
    }
    let build = Build::begin(&cache)?;
    build.compile(&compiler, rpath)?;
    build.check(&wheel.libpython())?;
    // Of two processes that build at once, the second replaces the same by the same.
    fs::rename(build.adapter(), &path).map_err(|error| error.to_string())?;
    Ok(path)
}

/// A folder of this build's own, inside the cache; gone when it is dropped.
struct Build(PathBuf);

impl Build {
    fn begin(cache: &Path) -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = cache.join(format!("build-{}-{number}", process::id()));
        // What is there is of a process that had this number and died.
        let _ = fs::remove_dir_all(&folder);
        let made = fs::DirBuilder::new().mode(0o700).create(&folder);
        made.map_err(|error| format!("{}: {error}", folder.display()))?;
        let build = Self(folder);
        for (name, text) in [("adapter.cpp", ADAPTER), ("check.cpp", CHECK)] {
            fs::write(build.0.join(name), text).map_err(|error| error.to_string())?;
        }
        Ok(build)
    }

    fn adapter(&self) -> PathBuf {
        self.0.join("adapter.so")
    }

    fn compile(&self, compiler: &Compiler, wheel: &str) -> Result<(), String> {
        compiler.run(&self.0, |command| {
            command
                .args(["-O2", "-shared", "-fPIC", "adapter.cpp", "-o", "adapter.so"])
                .arg(format!("-L{wheel}"))
                .arg("-l:engine.so")
                .args(["-Xlinker", "-rpath", "-Xlinker", wheel])
                // The wheel leaves symbols of Python open; the adapter itself may leave none.
                .args(["-Wl,--allow-shlib-undefined", "-Wl,-z,defs"]);
        })?;
        compiler.run(&self.0, |command| {
            command.args(["check.cpp", "-o", "check", "-ldl"]);
        })
    }

    /// In a process of its own: what a wrong layout does there ends that process, not this one.
    fn check(&self, libpython: &str) -> Result<(), String> {
        let mut command = Command::new(self.0.join("check"));
        command.arg(libpython).arg(self.adapter()).env("MC_LOG_LEVEL", "ERROR");
        let outcome = child::run(&mut command, TRY);
        let outcome = outcome.map_err(|error| format!("its self-check did not run: {error}"))?;
        if outcome.status.success() {
            return Ok(());
        }
        let said = if outcome.stdout.is_empty() { outcome.stderr } else { outcome.stdout };
        Err(format!("its self-check failed, with {}: {said}", outcome.status))
    }
}

impl Drop for Build {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct Compiler {
    /// A program and its first arguments, such as `ccache g++`.
    words: Vec<String>,
    version: String,
}

impl Compiler {
    fn find() -> Result<Self, String> {
        let named = env::var("CXX").ok().filter(|named| !named.trim().is_empty());
        let named = named.unwrap_or_else(|| "g++".to_owned());
        let words: Vec<_> = named.split_whitespace().map(str::to_owned).collect();
        let asked = child::run(command(&words).arg("--version"), Duration::from_secs(20));
        let help = "install one (`apt-get install g++`), or name it in CXX";
        match asked {
            Err(error) => Err(format!("the compiler {named:?} did not run ({error}): {help}")),
            Ok(answer) if !answer.status.success() => {
                Err(format!("the compiler {named:?} ended with {}: {help}", answer.status))
            }
            Ok(answer) => Ok(Self { words, version: format!("{named}\n{}", answer.stdout) }),
        }
    }

    fn run(&self, folder: &Path, arguments: impl FnOnce(&mut Command)) -> Result<(), String> {
        let mut command = command(&self.words);
        command.current_dir(folder).arg("-std=c++20");
        arguments(&mut command);
        let outcome = child::run(&mut command, BUILD)
            .map_err(|error| format!("the adapter could not be built: {error}"))?;
        if outcome.status.success() {
            return Ok(());
        }
        // The first lines say most.
        let said: String = outcome.stderr.chars().take(2000).collect();
        Err(format!("the adapter could not be built, {}: {said}", outcome.status))
    }
}

fn command(words: &[String]) -> Command {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

/// `XDG_CACHE_HOME/mooncake-relay`, or `~/.cache/mooncake-relay`, or a folder of this user's own
/// under the system's temporary one.
fn default_cache() -> Result<PathBuf, String> {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .map(|cache| cache.join("mooncake-relay"));
    Ok(folder.unwrap_or_else(|| {
        let user = rustix::process::geteuid().as_raw();
        env::temp_dir().join(format!("mooncake-relay-{user}"))
    }))
}

/// Makes the folder if it is not there, and refuses one that others may write into: they could put
/// a library of their own there.
fn private(folder: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    ours(folder)
}

/// Fails unless this user owns it and nobody else may write it. Follows no link at the end.
fn ours(path: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    let refuse = |reason: &str| {
        let reason = format!("{reason}: remove it, or name another folder in XDG_CACHE_HOME");
        Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
    };
    if found.is_symlink() {
        return refuse("it is a symbolic link");
    }
    if found.uid() != rustix::process::geteuid().as_raw() {
        return refuse("it belongs to another user");
    }
    if found.mode() & 0o022 != 0 {
        return refuse("others may write it");
    }
    Ok(())
}

/// What tells this `engine.so` from another: a wheel that was changed in place is tried anew.
fn engine_of(path: &Path) -> Result<String, String> {
    let found = fs::metadata(path).map_err(|error| error.to_string())?;
    Ok(format!(
        "{} {} {} {}.{}",
        found.dev(),
        found.ino(),
        found.len(),
        found.mtime(),
        found.mtime_nsec()
    ))
}

fn key(parts: &[&str]) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish()
}
