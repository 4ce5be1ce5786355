//! What the tests share.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::{
    env, fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::{self, Command},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

/// The folder of the real wheel. `None`, said aloud: it cannot be set up here.
pub(crate) fn wheel() -> Option<PathBuf> {
    static WHEEL: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    match WHEEL.get_or_init(set_up) {
        Ok(site) => Some(site.clone()),
        Err(reason) if env::var_os("CI").is_some() => panic!("{reason}"),
        Err(reason) => {
            // Past the test harness, which would swallow it: a skipped test says so.
            let _ = writeln!(io::stderr(), "SKIPPED, no real engine to test with: {reason}");
            None
        }
    }
}

fn set_up() -> Result<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let script = root.join("tests/setup.sh");
    let output = Command::new("sh").arg(&script).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(root.join("target/mooncake-0.3.13.post1"))
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

/// A folder of this test's own, gone when it is dropped.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("mooncake-sys-{}-{number}", process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
