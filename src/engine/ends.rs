//! The two ends of a copy within this process, each in host memory or in a device's.
#![allow(unsafe_code)] // copies by address

use std::{ops::Range, ptr, sync::Arc};

use super::LocalBuffer;
use crate::{
    error::{Error, Result},
    memory::{Device, Span},
};

/// Our end: nobody else touches it.
pub(super) enum Own<'a> {
    Host(&'a mut [u8]),
    Device(Arc<dyn Device>, Span),
}

/// The peer's end: an address, and whose memory it is.
pub(super) struct Other {
    pub(super) span: Span,
    pub(super) device: Option<Arc<dyn Device>>,
}

impl<'a> Own<'a> {
    pub(super) fn of(local: &'a mut LocalBuffer) -> Result<Self> {
        if let Some(device) = local.device() {
            return Ok(Self::Device(device, local.span()));
        }
        let unknown = || Error::config("memory", "it is neither the host's nor that of a device");
        local.bytes_mut().map(Self::Host).ok_or_else(unknown)
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(_, span) => span.len,
        }
    }

    /// Copies `bytes`, as many as there are here.
    pub(super) fn set(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Host(own) => own.copy_from_slice(bytes),
            // SAFETY: the span is ours alone.
            Self::Device(device, own) => unsafe { device.copy_from_host(bytes, *own) }?,
        }
        Ok(())
    }

    /// Copies a part of `other` to the same part of this.
    ///
    /// # Safety
    ///
    /// `other` is mapped, as long as this, elsewhere, and nobody writes it meanwhile.
    pub(super) unsafe fn fill_from(&mut self, other: &Other, range: Range<usize>) -> Result<()> {
        let from = part(other.span, &range);
        match (self, &other.device) {
            (Self::Host(own), None) => {
                let own = &mut own[range];
                // SAFETY: by this function's contract; what is borrowed mutably overlaps nothing.
                unsafe { ptr::copy_nonoverlapping(from.ptr.as_ptr(), own.as_mut_ptr(), own.len()) };
                Ok(())
            }
            // SAFETY: by this function's contract.
            (Self::Host(own), Some(device)) => unsafe {
                device.copy_to_host(from, &mut own[range])
            },
            (Self::Device(device, own), None) => {
                // SAFETY: it is mapped and nobody writes it, by this function's contract.
                let from = unsafe { std::slice::from_raw_parts(from.ptr.as_ptr(), from.len) };
                // SAFETY: the span is ours alone.
                unsafe { device.copy_from_host(from, part(*own, &range)) }
            }
            // SAFETY: the span is ours alone, and the rest by this function's contract.
            (Self::Device(device, own), Some(_)) => unsafe {
                device.copy_within(from, part(*own, &range))
            },
        }
    }

    /// Copies a part of this to the same part of `other`.
    ///
    /// # Safety
    ///
    /// `other` is mapped, as long as this, elsewhere, and nobody else touches it meanwhile.
    pub(super) unsafe fn write_to(&self, other: &Other, range: Range<usize>) -> Result<()> {
        let to = part(other.span, &range);
        match (self, &other.device) {
            (Self::Host(own), None) => {
                let own = &own[range];
                // SAFETY: by this function's contract.
                unsafe { ptr::copy_nonoverlapping(own.as_ptr(), to.ptr.as_ptr(), own.len()) };
                Ok(())
            }
            // SAFETY: by this function's contract.
            (Self::Host(own), Some(device)) => unsafe { device.copy_from_host(&own[range], to) },
            (Self::Device(device, own), None) => {
                // SAFETY: it is mapped and nobody else touches it, by this function's contract.
                let to = unsafe { std::slice::from_raw_parts_mut(to.ptr.as_ptr(), to.len) };
                // SAFETY: the span is ours alone.
                unsafe { device.copy_to_host(part(*own, &range), to) }
            }
            // SAFETY: the span is ours alone, and the rest by this function's contract.
            (Self::Device(_, own), Some(device)) => unsafe {
                device.copy_within(part(*own, &range), to)
            },
        }
    }
}

fn part(span: Span, range: &Range<usize>) -> Span {
    assert!(range.start <= range.end && range.end <= span.len, "a part of it");
    // SAFETY: inside the span.
    let ptr = unsafe { span.ptr.add(range.start) };
    Span { ptr, len: range.len() }
}
