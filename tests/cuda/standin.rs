//! The driver that stands in for a real one: built by the test, found on the loader's path, and told
//! what to do.
#![allow(dead_code, reason = "each test uses a part")]

use std::{
    env,
    ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_ulong, c_void},
    fs,
    path::{Path, PathBuf},
    process::{self, Command},
    sync::atomic::{AtomicU64, Ordering},
};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// A folder with a `libcuda.so`, removed when it is dropped.
pub(crate) struct Built(PathBuf);

impl Built {
    /// From `tests/cuda/standin.c`.
    pub(crate) fn new() -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/standin.c");
        Self::of(&source, "standin")
    }

    /// From a file of C.
    pub(crate) fn of(source: &Path, name: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let own = format!("{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = env::temp_dir().join(format!("mooncake-relay-{name}-{own}"));
        fs::create_dir_all(&folder).unwrap();
        let built = Self(folder);
        let status = Command::new("cc")
            .args(["-std=gnu11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"])
            .arg(source)
            .arg("-o")
            .arg(built.0.join("libcuda.so"))
            .status()
            .expect("cc, which rustc links with");
        assert!(status.success(), "{source:?} is not built");
        built
    }

    /// Has `command` find it.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Built {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The stand-in that this process has found on its loader's path.
pub(crate) struct Standin(Library);

/// A code that no call gives by itself.
pub(crate) const UNKNOWN: u32 = 999;

impl Standin {
    pub(crate) fn found() -> Self {
        // SAFETY: the stand-in, which any test may load.
        Self(unsafe { Library::open(Some("libcuda.so"), RTLD_NOW | RTLD_LOCAL) }.unwrap())
    }

    /// The n-th call of `function` from now on fails with `code`; every one if `nth` is 0.
    pub(crate) fn fail(&self, function: &str, nth: u32, code: u32) {
        self.set_failure(function, nth, code, 0);
    }

    /// As [`Self::fail`], after the call was done.
    pub(crate) fn fail_late(&self, function: &str, nth: u32, code: u32) {
        self.set_failure(function, nth, code, 1);
    }

    fn set_failure(&self, function: &str, nth: u32, code: u32, after: c_int) {
        let name = CString::new(function).unwrap();
        type Fail = unsafe extern "C" fn(*const c_char, c_uint, c_uint, c_int);
        // SAFETY: the stand-in's function of that type, and a text.
        unsafe { self.get::<Fail>("standin_fail")(name.as_ptr(), nth, code, after) }
    }

    /// How often `function` was called.
    pub(crate) fn calls(&self, function: &str) -> u64 {
        let name = CString::new(function).unwrap();
        type Calls = unsafe extern "C" fn(*const c_char) -> c_ulong;
        // SAFETY: the stand-in's function of that type, and a text.
        unsafe { self.get::<Calls>("standin_calls")(name.as_ptr()) }
    }

    /// The functions that were called, or are to fail.
    pub(crate) fn called(&self) -> Vec<String> {
        type Called = unsafe extern "C" fn(c_uint) -> *const c_char;
        // SAFETY: the stand-in's function of that type.
        let name = |n| unsafe { self.get::<Called>("standin_called")(n) };
        let names = (0..).map(name).take_while(|name| !name.is_null());
        // SAFETY: texts that are never freed.
        names.map(|name| unsafe { CStr::from_ptr(name) }.to_str().unwrap().to_owned()).collect()
    }

    /// While it is on, no stream copies anything.
    pub(crate) fn hold(&self, on: bool) {
        // SAFETY: the stand-in's function of that type.
        unsafe { self.get::<unsafe extern "C" fn(c_int)>("standin_hold")(c_int::from(on)) }
    }

    /// While it is on, that stream copies nothing.
    pub(crate) fn hold_stream(&self, stream: &cudarc::driver::CudaStream, on: bool) {
        type Hold = unsafe extern "C" fn(*mut c_void, c_int);
        // SAFETY: the stand-in's function of that type, and one of its streams.
        unsafe {
            self.get::<Hold>("standin_hold_stream")(stream.cu_stream().cast(), c_int::from(on));
        }
    }

    /// Copies of pageable memory return before they are over.
    pub(crate) fn strict(&self, on: bool) {
        // SAFETY: the stand-in's function of that type.
        unsafe { self.get::<unsafe extern "C" fn(c_int)>("standin_strict")(c_int::from(on)) }
    }

    /// How long each copy takes at least.
    pub(crate) fn delay(&self, micros: u32) {
        // SAFETY: the stand-in's function of that type.
        unsafe { self.get::<unsafe extern "C" fn(c_uint)>("standin_delay")(micros) }
    }

    /// How many bytes each device has.
    pub(crate) fn memory(&self, bytes: usize) {
        // SAFETY: the stand-in's function of that type.
        unsafe { self.get::<unsafe extern "C" fn(usize)>("standin_memory")(bytes) }
    }

    /// How many of that kind there are: `device`, `pinned`, `ipc`, `stream`, `event`, `context`,
    /// `violation`.
    pub(crate) fn live(&self, kind: &str) -> i64 {
        let kind = CString::new(kind).unwrap();
        type Live = unsafe extern "C" fn(*const c_char) -> c_long;
        // SAFETY: the stand-in's function of that type, and a text.
        unsafe { self.get::<Live>("standin_live")(kind.as_ptr()) }
    }

    /// All of them, by kind.
    pub(crate) fn all_live(&self) -> Vec<(&'static str, i64)> {
        let kinds = ["device", "pinned", "ipc", "stream", "event", "context", "violation"];
        kinds.map(|kind| (kind, self.live(kind))).into_iter().filter(|(_, n)| *n != 0).collect()
    }

    fn get<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the type is what `standin.c` says, by each caller.
        *unsafe { self.0.get::<F>(name.as_bytes()) }.unwrap()
    }
}
