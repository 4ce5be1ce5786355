//! What a relay in device memory does beyond the others.

use std::{sync::Arc, time::Duration};

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use crate::{
    error::{Error, Result},
    memory::Cuda,
    metadata::Metadata,
    pool::Slot,
    relay::Relay,
    tensor::Tensor,
    token::Token,
};

/// In the memory of an NVIDIA device. Its tensors go to and come from host memory, the same device,
/// or another.
impl Relay<Cuda> {
    /// Copies `bytes`, in host memory, into a slot and publishes it. Waits for a free slot at most
    /// [`Config::read_timeout`](crate::Config::read_timeout).
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// use mooncake_relay::{Config, Cuda, DType, InProcessEngine, Relay, Tensor};
    /// # let engine = Arc::new(InProcessEngine::new("doc-put-host")?);
    /// let relay = Relay::<Cuda>::with_memory(0, engine, &Config::default())?;
    /// let (metadata, put) = relay.put_host(&[1, 2, 3, 4], Tensor::new(DType::Int16, [2]))?;
    /// # drop((metadata, put));
    /// # Ok::<(), mooncake_relay::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire), of [`Slot::copy_from_host`] and of [`put`](Self::put).
    pub fn put_host(&self, bytes: &[u8], tensor: Tensor) -> Result<(Metadata, Token<Slot<Cuda>>)> {
        tensor.fits(bytes.len())?;
        let mut slot = self.acquire(bytes.len(), self.read_timeout())?;
        slot.copy_from_host(bytes)?;
        self.put(slot, tensor)
    }

    /// Copies `src`, on the relay's device, into a slot and publishes it, once the copy is over. The
    /// copy goes on `stream`, or on the one that `src` has.
    ///
    /// ```no_run
    /// # use mooncake_relay::{Cuda, DType, Relay, Tensor};
    /// # fn f(relay: Relay<Cuda>) -> Result<(), Box<dyn std::error::Error>> {
    /// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let tensor = stream.clone_htod(&[0.5_f32; 12])?;
    /// let described = Tensor::new(DType::Float32, [3, 4]); // 48 bytes, as many as `tensor` has
    /// let (metadata, put) = relay.put_device(&tensor, Some(&stream), described)?;
    /// # drop((metadata, put));
    /// # Ok(()) }
    /// # let _ = f;
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire), of [`Slot::copy_from_device`] and of [`put`](Self::put).
    pub fn put_device<T, S: DevicePtr<T> + ?Sized>(
        &self,
        src: &S,
        stream: Option<&Arc<CudaStream>>,
        tensor: Tensor,
    ) -> Result<(Metadata, Token<Slot<Cuda>>)> {
        tensor.fits(src.num_bytes())?;
        let mut slot = self.acquire(src.num_bytes(), self.read_timeout())?;
        slot.copy_from_device(src, stream)?;
        self.put(slot, tensor)
    }

    /// Fetches what `metadata` describes, and copies it to the front of `dest`, on the relay's device;
    /// returns how many bytes that are. Does not wait for that last copy, which is behind what is on
    /// `stream` (or on the stream that `dest` has), and before what comes after it there.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use mooncake_relay::{Cuda, Metadata, Relay};
    /// # fn f(relay: Relay<Cuda>, metadata: Metadata) -> Result<(), Box<dyn std::error::Error>> {
    /// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let mut tensor = stream.alloc_zeros::<u8>(metadata.size())?;
    /// relay.get_into(&metadata, &mut tensor, Some(&stream), Duration::from_secs(5))?;
    /// # Ok(()) }
    /// # let _ = f;
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`] if `dest` is too short: nothing was read then, and the sender still holds
    /// its slot. Otherwise those of [`get_timeout`](Self::get_timeout) and of its token, after which
    /// `dest` is untouched, and of [`Slot::copy_to_device`].
    pub fn get_into<T, D: DevicePtrMut<T> + ?Sized>(
        &self,
        metadata: &Metadata,
        dest: &mut D,
        stream: Option<&Arc<CudaStream>>,
        timeout: Duration,
    ) -> Result<usize> {
        let (len, slot_size) = (metadata.size(), dest.num_bytes());
        if len > slot_size {
            return Err(Error::TooLarge { len, slot_size });
        }
        let slot = self.get_timeout(metadata, timeout)?.wait()?;
        slot.copy_to_device(dest, stream)?;
        Ok(len)
    }
}
