//! The driver's functions, found when somebody wants them.
//!
//! `cudarc` has them too; but it panics where one is missing, and takes every code that the driver
//! answers with for one that it knows. So what we call we look up ourselves, all of it at once, and
//! codes are numbers. Types and the library's names are `cudarc`'s.

use std::{
    env,
    ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void},
    fmt,
};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUipcMemHandle, CUstream, CUuuid,
};
use libloading::Library;
use parking_lot::Mutex;

use crate::error::{Error, Result};

/// A call that the driver did not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) call: &'static str,
    pub(super) code: u32,
}

pub(super) const INVALID_VALUE: u32 = 1;
pub(super) const OUT_OF_MEMORY: u32 = 2;
pub(super) const NO_DEVICE: u32 = 100;
pub(super) const NOT_READY: u32 = 600;

macro_rules! functions {
    ($($function:ident($($arg:ident: $In:ty),*);)*) => {
        /// The functions that are used here, by the driver's own names.
        #[allow(non_snake_case, reason = "the driver's names")]
        pub(super) struct Api {
            $($function: unsafe extern "C" fn($($In),*) -> u32,)*
        }

        impl Api {
            /// Fails with the name of what is missing.
            fn find(library: &Library) -> Result<Self, &'static str> {
                Ok(Self { $($function: symbol(library, stringify!($function))?,)* })
            }

            $(
                /// # Safety
                ///
                /// As the driver's documentation says of the function.
                #[allow(non_snake_case, reason = "the driver's names")]
                pub(super) unsafe fn $function(&self, $($arg: $In),*) -> Result<(), Fault> {
                    // SAFETY: by this function's contract.
                    match unsafe { (self.$function)($($arg),*) } {
                        0 => Ok(()),
                        code => Err(Fault { call: stringify!($function), code }),
                    }
                }
            )*
        }
    };
}

functions! {
    cuInit(flags: c_uint);
    cuGetErrorName(code: u32, name: *mut *const c_char);
    cuGetErrorString(code: u32, text: *mut *const c_char);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuCtxPushCurrent_v2(context: CUcontext);
    cuCtxPopCurrent_v2(context: *mut CUcontext);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemAlloc_v2(ptr: *mut CUdeviceptr, len: usize);
    cuMemFree_v2(ptr: CUdeviceptr);
    cuMemGetAddressRange_v2(base: *mut CUdeviceptr, len: *mut usize, ptr: CUdeviceptr);
    cuMemHostAlloc(ptr: *mut *mut c_void, len: usize, flags: c_uint);
    cuMemFreeHost(ptr: *mut c_void);
    cuMemsetD8Async(ptr: CUdeviceptr, value: c_uchar, len: usize, stream: CUstream);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, len: usize, stream: CUstream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, len: usize, stream: CUstream);
    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream);
    cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    cuStreamDestroy_v2(stream: CUstream);
    cuStreamSynchronize(stream: CUstream);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventQuery(event: CUevent);
    cuEventSynchronize(event: CUevent);
    cuIpcGetMemHandle(handle: *mut CUipcMemHandle, ptr: CUdeviceptr);
    cuIpcOpenMemHandle_v2(ptr: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
    cuIpcCloseMemHandle(ptr: CUdeviceptr);
}

impl Api {
    /// Loads the driver, unless it is loaded, and has it start. It is never unloaded.
    pub(super) fn load() -> Result<&'static Self> {
        // After a failure it is tried again: what was missing may be there by then.
        static LOADED: Mutex<Option<&'static Api>> = Mutex::new(None);
        let mut loaded = LOADED.lock();
        if let Some(api) = *loaded {
            return Ok(api);
        }
        let library = open()?;
        let api = Self::find(&library).map_err(|missing| {
            Error::config(
                "memory",
                format!(
                    "the NVIDIA driver here is too old, or {LIBRARY} is something else: it has no \
                     {missing}. A driver of 470 or later is needed (CUDA 11.4)"
                ),
            )
        })?;
        // SAFETY: the flags must be 0.
        unsafe { api.cuInit(0) }.map_err(|fault| match fault.code {
            NO_DEVICE => Error::config(
                "memory",
                format!(
                    "the NVIDIA driver finds no device (CUDA_VISIBLE_DEVICES is {})",
                    env::var("CUDA_VISIBLE_DEVICES")
                        .map_or_else(|_| "not set".to_owned(), |set| format!("{set:?}"))
                ),
            ),
            _ => api.error("cuda", fault),
        })?;
        std::mem::forget(library);
        let api: &'static Self = Box::leak(Box::new(api));
        *loaded = Some(api);
        Ok(api)
    }

    /// What the driver says of a fault, as an error of that device's.
    pub(super) fn error(&self, device: &str, fault: Fault) -> Error {
        Error::Device {
            device: device.to_owned(),
            call: fault.call,
            reason: self.meaning(fault.code),
        }
    }

    /// The driver's name of a code, and what it says of it.
    fn meaning(&self, code: u32) -> String {
        let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
        // SAFETY: a code, known or not, and a place for the answer.
        let named = unsafe { self.cuGetErrorName(code, &raw mut name) };
        // SAFETY: as above.
        let told = unsafe { self.cuGetErrorString(code, &raw mut text) };
        // SAFETY: what the driver answers with is NULL, or a text of its own that lasts.
        let name = named.ok().and_then(|()| unsafe { read(name) });
        // SAFETY: as above.
        let text = told.ok().and_then(|()| unsafe { read(text) });
        match (name, text) {
            (Some(name), Some(text)) => format!("{name} ({text})"),
            (Some(name), None) => name.to_owned(),
            (None, _) => format!("CUDA error {code}"),
        }
    }
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

/// What the driver's library is called, first of all.
const LIBRARY: &str = "libcuda.so";

fn open() -> Result<Library> {
    let names = cudarc::get_lib_name_candidates("cuda");
    let mut last = None;
    for name in &names {
        // SAFETY: the driver's library may be loaded at any time; it runs nothing that needs more.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => last = Some(error),
        }
    }
    let said = last.map_or_else(String::new, |error| format!(" ({error})"));
    Err(Error::config(
        "memory",
        format!(
            "no NVIDIA driver is installed here, or it is not on the loader's path: looked for {}{said}. \
             Install the driver, have the container see it, or add its folder to LD_LIBRARY_PATH",
            names.join(", ")
        ),
    ))
}

fn symbol<F: Copy>(library: &Library, name: &'static str) -> Result<F, &'static str> {
    // SAFETY: the driver's function of that name has the type that is written above.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|function| *function).map_err(|_| name)
}

/// # Safety
///
/// NULL, or a NUL-terminated text that is never freed.
unsafe fn read(text: *const c_char) -> Option<&'static str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: by this function's contract.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}
