//! Slots in device memory: what goes in and out, and in which order.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, sys::CUdeviceptr};

use super::Slot;
use crate::{
    error::{Error, Result},
    memory::Cuda,
};

/// A slot in device memory has no bytes that the processor can touch. What goes in and out is copied,
/// or is done by kernels at its [`span`](Slot::span).
///
/// Whatever is enqueued on a stream by these methods goes on after they return. The slot remembers
/// it: a [`put`](crate::Relay::put) waits for it before anybody can read the slot, and so does
/// whoever gets the slot next after it was dropped, before it is written again.
///
/// ```no_run
/// use std::sync::Arc;
/// use cudarc::driver::CudaContext;
/// use mooncake_relay::{Config, Cuda, DType, InProcessEngine, Relay, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let engine = Arc::new(InProcessEngine::new("doc-cuda-slot")?);
/// let relay = Relay::<Cuda>::with_memory(0, engine, &Config::default())?;
///
/// let stream = CudaContext::new(0)?.new_stream()?;
/// let tensor = stream.clone_htod(&[1.5_f32; 1024])?; // or what a kernel on that stream is writing
/// let mut slot = relay.try_acquire(4096)?;
/// slot.copy_from_device(&tensor, Some(&stream))?; // on the device, behind what is on the stream
/// let (metadata, put) = relay.put(slot, Tensor::new(DType::Float32, [1024]))?;
/// # drop((metadata, put));
/// # Ok(())
/// # }
/// ```
impl Slot<Cuda> {
    /// Copies `src` to the slot, and waits until it is there. Fastest from pinned memory.
    ///
    /// ```no_run
    /// # fn f(relay: mooncake_relay::Relay<mooncake_relay::Cuda>) -> mooncake_relay::Result<()> {
    /// let mut slot = relay.try_acquire(5)?; // bytes
    /// slot.copy_from_host(b"hello")?;
    /// # Ok(()) }
    /// # let _ = f;
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Config`] unless `src` is as long as the slot; [`Error::Device`]: then the slot's
    /// bytes are unspecified.
    pub fn copy_from_host(&mut self, src: &[u8]) -> Result<()> {
        self.same_length("src", src.len())?;
        self.memory().fill(self.fence(), src, self.span())
    }

    /// Copies the slot to the front of `dest`, and waits until it is there. Fastest to pinned memory.
    ///
    /// ```no_run
    /// # fn f(slot: mooncake_relay::Slot<mooncake_relay::Cuda>) -> mooncake_relay::Result<()> {
    /// let mut bytes = vec![0; slot.len()];
    /// slot.copy_to_host(&mut bytes)?;
    /// # Ok(()) }
    /// # let _ = f;
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`] if `dest` is too short; [`Error::Device`]: then `dest` is unspecified.
    pub fn copy_to_host(&self, dest: &mut [u8]) -> Result<()> {
        let (len, slot_size) = (self.len(), dest.len());
        let dest = dest.get_mut(..len).ok_or(Error::TooLarge { len, slot_size })?;
        self.memory().fetch(self.fence(), self.span(), dest)
    }

    /// Copies `src`, on the same device, to the slot: on `stream`, or on the one that `src` has.
    /// Does not wait for it.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] unless `src` is as long as the slot, and it and the stream are in the
    /// device's primary context; [`Error::Device`]: then the slot's bytes are unspecified.
    pub fn copy_from_device<T, S: DevicePtr<T> + ?Sized>(
        &mut self,
        src: &S,
        stream: Option<&Arc<CudaStream>>,
    ) -> Result<()> {
        let own = src.stream();
        let stream = stream.unwrap_or(own);
        self.same_length("src", src.num_bytes())?;
        self.memory().check_stream("src", own)?;
        self.memory().check_stream("stream", stream)?;
        let _inside = self.memory().enter()?;
        let (from, recorded) = src.device_ptr(stream);
        self.memory().check_kept(stream)?;
        let to = self.span().addr();
        // SAFETY: `src` is so many bytes; `cudarc` has had the stream wait for who writes them, and
        // whoever writes or frees them next waits for what it records below.
        let copied = unsafe {
            self.memory().copy(self.fence(), from, to, self.len(), Some(stream.cu_stream()))
        };
        drop(recorded);
        copied.and_then(|()| self.memory().check_kept(stream))
    }

    /// Copies the slot to the front of `dest`, on the same device: on `stream`, or on the one that
    /// `dest` has. Does not wait for it; the slot may be dropped at once.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # fn f(slot: mooncake_relay::Slot<mooncake_relay::Cuda>, stream: Arc<cudarc::driver::CudaStream>)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// let mut tensor = stream.alloc_zeros::<f32>(slot.len() / 4)?;
    /// slot.copy_to_device(&mut tensor, Some(&stream))?;
    /// drop(slot); // what is on `stream` from here on finds the bytes in `tensor`
    /// # Ok(()) }
    /// # let _ = f;
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`] if `dest` is too short; [`Error::Config`] unless it and the stream are in
    /// the device's primary context; [`Error::Device`]: then `dest` is unspecified.
    pub fn copy_to_device<T, D: DevicePtrMut<T> + ?Sized>(
        &self,
        dest: &mut D,
        stream: Option<&Arc<CudaStream>>,
    ) -> Result<()> {
        let own = Arc::clone(dest.stream());
        let stream = stream.unwrap_or(&own);
        let (len, slot_size) = (self.len(), dest.num_bytes());
        if len > slot_size {
            return Err(Error::TooLarge { len, slot_size });
        }
        self.memory().check_stream("dest", &own)?;
        self.memory().check_stream("stream", stream)?;
        let _inside = self.memory().enter()?;
        let (to, recorded) = dest.device_ptr_mut(stream);
        self.memory().check_kept(stream)?;
        let from = self.span().addr();
        // SAFETY: `dest` is so many bytes at least; `cudarc` has had the stream wait for who uses them, and
        // whoever uses or frees them next waits for what it records below.
        let copied = unsafe {
            self.memory().copy(self.fence(), from, to, self.len(), Some(stream.cu_stream()))
        };
        drop(recorded);
        copied.and_then(|()| self.memory().check_kept(stream))
    }

    /// Copies the device's memory at `src`, as much as the slot has, to the slot: on `stream`, and
    /// then does not wait for it; without one it waits. For memory that `cudarc` did not allocate.
    ///
    /// ```no_run
    /// # fn f(slot: &mut mooncake_relay::Slot<mooncake_relay::Cuda>, tensor: u64)
    /// # -> mooncake_relay::Result<()> {
    /// // SAFETY: `tensor` is as many bytes as the slot, of the slot's device, and computed.
    /// unsafe { slot.copy_from_device_ptr(tensor, None) }?;
    /// # Ok(()) }
    /// # let _ = f;
    /// ```
    ///
    /// # Safety
    ///
    /// So many bytes at `src` are the device's, and they are neither written nor freed but in the
    /// order of `stream`; without one, until this returns.
    ///
    /// # Errors
    ///
    /// As [`copy_from_device`](Self::copy_from_device).
    pub unsafe fn copy_from_device_ptr(
        &mut self,
        src: CUdeviceptr,
        stream: Option<&Arc<CudaStream>>,
    ) -> Result<()> {
        let (raw, to) = (self.raw(stream)?, self.span().addr());
        // SAFETY: by this function's contract.
        unsafe { self.memory().copy(self.fence(), src, to, self.len(), raw) }
    }

    /// Copies the slot to the device's memory at `dest`: on `stream`, and then does not wait for it;
    /// without one it waits. For memory that `cudarc` did not allocate.
    ///
    /// ```no_run
    /// # fn f(slot: mooncake_relay::Slot<mooncake_relay::Cuda>, tensor: u64)
    /// # -> mooncake_relay::Result<()> {
    /// // SAFETY: `tensor` is as many bytes as the slot, of the slot's device, and nobody's else now.
    /// unsafe { slot.copy_to_device_ptr(tensor, None) }?;
    /// # Ok(()) }
    /// # let _ = f;
    /// ```
    ///
    /// # Safety
    ///
    /// As many bytes as the slot has at `dest` are the device's, and they are not used or freed but
    /// in the order of `stream`; without one, until this returns.
    ///
    /// # Errors
    ///
    /// As [`copy_to_device`](Self::copy_to_device).
    pub unsafe fn copy_to_device_ptr(
        &self,
        dest: CUdeviceptr,
        stream: Option<&Arc<CudaStream>>,
    ) -> Result<()> {
        let (raw, from) = (self.raw(stream)?, self.span().addr());
        // SAFETY: by this function's contract.
        unsafe { self.memory().copy(self.fence(), from, dest, self.len(), raw) }
    }

    /// Has `stream` wait for whatever is under way in the slot: before a kernel of yours uses the
    /// slot in place.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for a stream of another context; [`Error::Device`].
    pub fn begin_on(&self, stream: &CudaStream) -> Result<()> {
        self.memory().check_stream("stream", stream)?;
        self.memory().wait_on(self.fence(), stream.cu_stream())
    }

    /// What is on `stream` now uses the slot: a put of it waits for that, and so does its next owner.
    ///
    /// ```no_run
    /// # fn f(slot: &mut mooncake_relay::Slot<mooncake_relay::Cuda>, stream: &cudarc::driver::CudaStream)
    /// # -> mooncake_relay::Result<()> {
    /// slot.begin_on(stream)?;
    /// let address = slot.span().addr(); // launch what writes there, on that stream
    /// # let _ = address;
    /// slot.end_on(stream)?;
    /// # Ok(()) }
    /// # let _ = f;
    /// ```
    ///
    /// # Errors
    ///
    /// As [`begin_on`](Self::begin_on).
    pub fn end_on(&self, stream: &CudaStream) -> Result<()> {
        self.memory().check_stream("stream", stream)?;
        self.memory().record(self.fence(), stream.cu_stream())
    }

    fn raw(
        &self,
        stream: Option<&Arc<CudaStream>>,
    ) -> Result<Option<cudarc::driver::sys::CUstream>> {
        let Some(stream) = stream else { return Ok(None) };
        self.memory().check_stream("stream", stream)?;
        Ok(Some(stream.cu_stream()))
    }

    fn same_length(&self, field: &'static str, len: usize) -> Result<()> {
        if len == self.len() {
            return Ok(());
        }
        let reason = format!("it has {len} bytes, and the slot {}", self.len());
        Err(Error::config(field, reason))
    }
}
