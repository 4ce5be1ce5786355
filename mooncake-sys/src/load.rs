//! Where a library is looked for, and what is loaded once for the whole process.

use std::{
    env,
    ffi::{c_int, c_void},
    fs, mem,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI32, Ordering},
    },
};

use libloading::os::unix::{Library as UnixLibrary, RTLD_GLOBAL, RTLD_LAZY, RTLD_LOCAL};

use crate::{
    adapter::adapter_for,
    api::Api,
    check::self_check,
    error::{LoadError, Looked},
    wheel::{Wheel, sites},
};

/// Where to look. What is `None` here may be in the environment.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A library with the C interface, else `MOONCAKE_LIBRARY`. If it is named, nothing else is
    /// looked at.
    pub library: Option<PathBuf>,
    /// The folder that holds `mooncake/` of the pip wheel: if it is named here, nothing else is
    /// looked at. Else `MOONCAKE_WHEEL`: then no other wheel is looked at.
    pub wheel: Option<PathBuf>,
    /// Where the adapter for the wheel is kept; else `mooncake-relay` in `XDG_CACHE_HOME` or
    /// `~/.cache`. Made if it is not there, and refused if others may write it.
    pub cache: Option<PathBuf>,
}

/// A library that was loaded, and stays so until the process ends.
#[derive(Debug)]
pub struct Library {
    api: Api,
    path: PathBuf,
    wheel: Option<String>,
    handle: libloading::Library,
}

impl Library {
    /// Its functions.
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// The file with the C interface: the built library's, or the adapter's.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version of the pip wheel, if that is what was found.
    pub fn wheel_version(&self) -> Option<&str> {
        self.wheel.as_deref()
    }

    /// Makes an engine, registers memory, reads from itself, compares, notifies itself and receives
    /// it. On loopback; takes up to a second, most of it for the engine's end. [`load`] has done
    /// that for a library of its own kind, and for an adapter in the process that built it.
    ///
    /// # Errors
    ///
    /// The first step that went wrong.
    pub fn self_check(&self) -> Result<(), String> {
        self_check(&self.api)
    }

    /// Whether it was built with the store that a metadata server of this scheme needs: `etcd`,
    /// `http`, `https` or `redis`. An engine that is asked for one that is not in it ends the
    /// process. `None`: the library does not tell.
    pub fn has_metadata_store(&self, scheme: &str) -> Option<bool> {
        let class = match scheme {
            "etcd" => "_ZTVN8mooncake17EtcdStoragePluginE",
            "http" | "https" => "_ZTVN8mooncake17HTTPStoragePluginE",
            "redis" => "_ZTVN8mooncake18RedisStoragePluginE",
            _ => return Some(false),
        };
        self.symbol("_ZTIN8mooncake21MetadataStoragePluginE")?;
        Some(self.symbol(class).is_some())
    }

    /// The least severe kind of line that the engine logs to stderr: 0 information, 1 warnings, 2
    /// errors, 3 what ends the process. False: this library's log cannot be reached.
    ///
    /// [`load`] sets 3, unless `MC_LOG_LEVEL` or `GLOG_minloglevel` asks for something else.
    pub fn set_log_level(&self, level: i32) -> bool {
        let Some(flag) = self.symbol("_ZN3fLI17FLAGS_minloglevelE") else { return false };
        // SAFETY: glog's flag, an aligned `int32` for as long as the library is loaded; glog itself
        // reads it from any thread.
        unsafe { AtomicI32::from_ptr(flag.cast()) }.store(level, Ordering::Relaxed);
        true
    }

    fn symbol(&self, name: &str) -> Option<*mut c_void> {
        // SAFETY: the symbol is only looked for, in this library and in what it needs.
        let symbol = unsafe { self.handle.get::<*mut c_void>(name) }.ok()?;
        // SAFETY: the library is never unloaded.
        unsafe { symbol.try_as_raw_ptr() }
    }
}

/// Loads Mooncake's engine, or says where it was looked for in vain. The first that is found:
///
/// 1. the library named in `options` or `MOONCAKE_LIBRARY`;
/// 2. `libtransfer_engine.so` on the loader's path;
/// 3. the pip wheel in the folder named in `options` or `MOONCAKE_WHEEL`; else in the active
///    virtual environment (`VIRTUAL_ENV`), else where `python3` imports from.
///
/// What was named and does not load is an error, and replaced by nothing else. For a wheel, of the
/// versions in [`WHEELS`](crate::WHEELS), a C++ adapter is built with `g++` (or `CXX`), tried in a
/// process of its own, and kept for the next time. A built library is tried in this process.
/// Each is loaded once, and never unloaded.
///
/// # Errors
///
/// [`LoadError`] with every place and what was there.
pub fn load(options: &Options) -> Result<&'static Library, LoadError> {
    // Held while something is built: a second caller waits for the first one's adapter.
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let mut looked = Vec::new();

    let named = options.library.clone().or_else(|| path_from("MOONCAKE_LIBRARY"));
    if let Some(path) = named {
        return named_library(&mut loaded, &path).map_err(|found| {
            LoadError::new(vec![Looked::new(format!("the library {}", path.display()), found)])
        });
    }
    looked.push(Looked::new("a library named by the caller", "none (MOONCAKE_LIBRARY)"));

    let mut places = Vec::new();
    let of_wheel = |site: PathBuf| (format!("the wheel in {}", site.display()), site);
    if let Some(site) = options.wheel.clone() {
        places.push(of_wheel(site));
    } else {
        match library(&mut loaded, Path::new(ON_THE_PATH), None) {
            Ok(library) => return Ok(library),
            Err(found) => {
                looked.push(Looked::new(format!("{ON_THE_PATH} on the loader's path"), found));
            }
        }
        if let Some(site) = path_from("MOONCAKE_WHEEL") {
            places.push(of_wheel(site));
        } else {
            looked.push(Looked::new("a wheel named by the caller", "none (MOONCAKE_WHEEL)"));
            places = sites(&mut looked);
        }
    }
    let cache = options.cache.as_deref();
    for (place, site) in places {
        let found = Wheel::in_site(&site).and_then(|wheel| adapted(&mut loaded, &wheel, cache));
        match found {
            Ok(library) => return Ok(library),
            Err(found) => looked.push(Looked::new(place, found)),
        }
    }
    Err(LoadError::new(looked))
}

const ON_THE_PATH: &str = "libtransfer_engine.so";

/// Never shrinks: what is in it is never unloaded.
static LOADED: Mutex<Vec<&'static Library>> = Mutex::new(Vec::new());

fn path_from(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

fn named_library(
    loaded: &mut Vec<&'static Library>,
    path: &Path,
) -> Result<&'static Library, String> {
    // A name without a slash would be looked for on the loader's path.
    let path = fs::canonicalize(path).map_err(|error| error.to_string())?;
    let kind = fs::metadata(&path).map_err(|error| error.to_string())?.file_type();
    if kind.is_dir() {
        return Err(
            "a folder, not a library: a wheel's folder belongs in MOONCAKE_WHEEL".to_owned()
        );
    }
    if kind.is_fifo() || kind.is_char_device() || kind.is_block_device() || kind.is_socket() {
        return Err("not a file".to_owned());
    }
    library(loaded, &path, None)
}

/// The adapter of a wheel, with the libraries that it needs.
fn adapted(
    loaded: &mut Vec<&'static Library>,
    wheel: &Wheel,
    cache: Option<&Path>,
) -> Result<&'static Library, String> {
    let adapter = adapter_for(wheel, cache)?;
    if let Some(known) = known(loaded, &adapter) {
        return Ok(known);
    }
    provide_python(&wheel.libpython())?;
    library(loaded, &adapter, Some(&wheel.version))
}

/// The wheel's extension has open symbols of Python, data among them, which are bound when it is
/// loaded. Python itself is never started.
fn provide_python(name: &str) -> Result<(), String> {
    // SAFETY: the symbol is only looked for.
    if unsafe { UnixLibrary::this().get::<*mut c_void>("PyBaseObject_Type") }.is_ok() {
        return Ok(()); // this process has a Python
    }
    // SAFETY: it has no initialisers that need anything of this process.
    let python = unsafe { UnixLibrary::open(Some(name), RTLD_LAZY | RTLD_GLOBAL) };
    let python = python.map_err(|error| {
        let version = name.trim_start_matches("lib").trim_end_matches(".so.1.0");
        format!("{error}: the wheel needs {name} (`apt-get install lib{version}`)")
    })?;
    mem::forget(python);
    Ok(())
}

fn known(loaded: &[&'static Library], path: &Path) -> Option<&'static Library> {
    loaded.iter().copied().find(|library| library.path == path)
}

/// Opens the library, unless it is open; looks its functions up; tries a built one.
fn library(
    loaded: &mut Vec<&'static Library>,
    path: &Path,
    wheel: Option<&str>,
) -> Result<&'static Library, String> {
    if let Some(known) = known(loaded, path) {
        return Ok(known);
    }
    let flags: c_int = RTLD_LAZY | RTLD_LOCAL;
    // SAFETY: whoever names a library trusts its initialisers; an adapter is our own.
    let opened = unsafe { UnixLibrary::open(Some(path), flags) };
    let opened = opened.map_err(|error| error.to_string())?;
    let handle = libloading::Library::from(opened);
    // SAFETY: the names are those of `transfer_engine_c.h`; the library is leaked below.
    let api = match unsafe { Api::look_up(&handle) } {
        Ok(api) => api,
        Err(missing) => {
            mem::forget(handle);
            return Err(format!("it lacks {missing}: it is not Mooncake's C interface"));
        }
    };
    let library = Library { api, path: path.to_owned(), wheel: wheel.map(str::to_owned), handle };
    // Leaked: the engine has threads, which an unloaded library would take the ground from.
    let library: &'static Library = Box::leak(Box::new(library));
    quiet(library);
    if wheel.is_none() {
        library.self_check().map_err(|error| format!("its self-check failed: {error}"))?;
    }
    loaded.push(library);
    Ok(library)
}

/// Nothing on stderr unless it was asked for. The environment is left as it is: other threads may
/// be reading it.
fn quiet(library: &Library) {
    const FATAL: i32 = 3;
    if env::var_os("MC_LOG_LEVEL").is_some() {
        return; // the engine reads it by itself
    }
    let asked = env::var("GLOG_minloglevel").ok().and_then(|level| level.parse().ok());
    library.set_log_level(asked.unwrap_or(FATAL));
}
