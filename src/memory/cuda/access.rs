//! What an engine has of a device: the way to its memory.

use std::{ptr, ptr::NonNull, sync::Arc};

use cudarc::driver::sys::{CUdeviceptr, CUipcMemHandle};

use super::{
    api::{Fault, INVALID_VALUE},
    gpu::Gpu,
    staging::Staged,
    within::CopyOnDevice,
};
use crate::{
    error::{Error, Result},
    memory::{
        Span,
        device::{CopyingWithin, Device, IpcMemory, Mapping, Pinned},
        sealed,
    },
};

/// Peers' memory on another device is reached when it is first used.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

/// A device whose memory is reached: what an engine has of it.
#[derive(Debug)]
pub(super) struct Access(pub(super) Arc<Gpu>);

impl sealed::Device for Access {}

impl Device for Access {
    fn location(&self) -> &str {
        self.0.location()
    }

    fn uuid(&self) -> [u8; 16] {
        self.0.uuid()
    }

    unsafe fn copy_to_host(&self, from: Span, to: &mut [u8]) -> Result<()> {
        same_length(from.len, to.len())?;
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: by this function's contract; `run` returns when the copy is over.
        self.0.run(|_, stream| unsafe {
            self.0.api().cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.addr(), to.len(), stream)
        })
    }

    unsafe fn copy_from_host(&self, from: &[u8], to: Span) -> Result<()> {
        same_length(from.len(), to.len)?;
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: by this function's contract; `run` returns when the copy is over.
        self.0.run(|_, stream| unsafe {
            self.0.api().cuMemcpyHtoDAsync_v2(to.addr(), from.as_ptr().cast(), from.len(), stream)
        })
    }

    unsafe fn copy_within(&self, from: Span, to: Span) -> Result<()> {
        same_length(from.len, to.len)?;
        if from.len == 0 {
            return Ok(());
        }
        // SAFETY: by this function's contract; `run` returns when the copy is over.
        self.0.run(|_, stream| unsafe {
            self.0.api().cuMemcpyDtoDAsync_v2(to.addr(), from.addr(), to.len, stream)
        })
    }

    unsafe fn begin_within(&self, from: Span, to: Span) -> CopyingWithin {
        if from.len == 0 || from.len != to.len {
            return CopyingWithin::over(same_length(from.len, to.len));
        }
        // SAFETY: by this function's contract.
        let begun = unsafe { CopyOnDevice::begin(&self.0, from, to) };
        CopyingWithin::new(begun.map(|copy| Box::new(copy) as _))
    }

    fn pinned(&self, len: usize) -> Result<Pinned> {
        Ok(Pinned::new(Box::new(Staged::new(&self.0, len)?)))
    }

    fn ipc_handle(&self, pool: Span) -> Result<[u8; 64]> {
        let _current = self.0.enter()?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: a place for the answer; the driver looks the address up.
        unsafe { self.0.api().cuIpcGetMemHandle(&raw mut handle, pool.addr()) }
            .map_err(|fault| self.0.error(fault))?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    fn open_ipc(&self, handle: &[u8; 64], len: usize) -> Result<IpcMemory> {
        let gpu = &self.0;
        let _current = gpu.enter()?;
        let handle = CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let mut at: CUdeviceptr = 0;
        // SAFETY: a place for the answer; the driver checks the handle.
        unsafe { gpu.api().cuIpcOpenMemHandle_v2(&raw mut at, handle, LAZY_ENABLE_PEER_ACCESS) }
            .map_err(|fault| gpu.error(fault))?;
        let invalid = Fault { call: "cuIpcOpenMemHandle_v2", code: INVALID_VALUE };
        let Some(ptr) = pointer(at) else { return Err(gpu.error(invalid)) };
        let opened = Opened { gpu: Arc::clone(gpu), span: Span { ptr, len } };
        let (mut base, mut all) = (0, 0);
        // SAFETY: places for the answers; the driver looks the address up.
        unsafe { gpu.api().cuMemGetAddressRange_v2(&raw mut base, &raw mut all, at) }
            .map_err(|fault| gpu.error(fault))?;
        if all.saturating_sub((at - base.min(at)) as usize) < len {
            return Err(gpu.error(invalid)); // it is closed as it is dropped
        }
        Ok(IpcMemory::new(Box::new(opened)))
    }
}

/// Another process's memory.
struct Opened {
    gpu: Arc<Gpu>,
    span: Span,
}

impl Mapping for Opened {
    fn span(&self) -> Span {
        self.span
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.enter() else { return };
        // SAFETY: opened once, and copies from it have ended: they wait for themselves.
        let done = unsafe { self.gpu.api().cuIpcCloseMemHandle(self.span.addr()) };
        self.gpu.note(done);
    }
}

/// A device's address as our spans have it. Nobody follows it here.
pub(super) fn pointer(at: CUdeviceptr) -> Option<NonNull<u8>> {
    NonNull::new(ptr::with_exposed_provenance_mut(at as usize))
}

fn same_length(from: usize, to: usize) -> Result<()> {
    if from == to {
        return Ok(());
    }
    Err(Error::config("to", format!("{to} bytes for {from} that are to be copied")))
}
