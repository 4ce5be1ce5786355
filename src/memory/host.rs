//! Host memory: a memfd, allocated in full and populated when it is made.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::Arc,
    time::Instant,
};

use rustix::{
    fs::{
        FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
    },
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap},
};

use super::{
    Device, Memory, PAGE, Purpose, Span,
    huge::{self, HUGE_PAGE},
    limits,
};
use crate::{
    error::{Error, Result},
    process,
};

/// Page-aligned host memory: a memfd, populated when it is made, and not there in a forked child.
///
/// What peers read is sealed: no other process can map it to write.
#[derive(Debug)]
pub struct Host {
    span: Span,
    fd: OwnedFd,
    huge: bool,
}

impl Memory for Host {
    type Options = ();
    type Fence = ();

    const HOST: bool = true;

    fn device(&self) -> String {
        "cpu".to_owned()
    }

    fn device_id(&self) -> i64 {
        0
    }

    fn allocate((): &(), len: usize, purpose: Purpose, huge: bool) -> Result<Self> {
        let field = match purpose {
            Purpose::Receive => "receive_credits",
            Purpose::Published | Purpose::Stamps => "slot_size",
        };
        let len = len.max(1).next_multiple_of(if huge { HUGE_PAGE } else { PAGE });
        limits::check(len, field, huge)?;
        let kind = match huge {
            false => MemfdFlags::empty(),
            true => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        };
        let refused = |call, errno| refused(call, len, errno, huge);
        let name = match purpose {
            Purpose::Published => "mooncake-relay-slots",
            Purpose::Stamps => "mooncake-relay-stamps",
            Purpose::Receive => "mooncake-relay-receive",
        };
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | kind)
            .map_err(|errno| refused("memfd_create", errno))?;
        ftruncate(&fd, len as u64).map_err(|errno| refused("ftruncate", errno))?;
        // A file that is sized but not backed is SIGBUS at the first touch.
        fallocate(&fd, FallocateFlags::empty(), 0, len as u64)
            .map_err(|errno| refused("fallocate", errno))?;
        let span = map(fd.as_fd(), len).map_err(|errno| refused("mmap", errno))?;
        let host = Self { span, fd, huge };
        host.populate()?;
        if purpose != Purpose::Receive {
            // After our own mapping, which stays writable; nobody can make another such one.
            let seals =
                SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
            fcntl_add_seals(&host.fd, seals)
                .map_err(|errno| refused("sealing with F_SEAL_FUTURE_WRITE", errno))?;
        }
        Ok(host)
    }

    fn huge(&self) -> bool {
        self.huge
    }

    fn span(&self) -> Span {
        self.span
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }

    fn device_access(&self) -> Option<Arc<dyn Device>> {
        None
    }

    fn settle(&self, (): &(), _until: Instant) -> Result<()> {
        Ok(())
    }

    fn keep(&self) {}
}

impl Host {
    /// Touches every page now, so that no put pays for it later.
    fn populate(&self) -> Result<()> {
        let Span { ptr, len } = self.span;
        // SAFETY: the range is our own mapping, and populating changes no byte of it.
        match unsafe { madvise(ptr.as_ptr().cast(), len, Advice::LinuxPopulateWrite) } {
            Ok(()) => {}
            // Kernels before 5.14 do not know it.
            Err(Errno::INVAL) => self.touch(),
            Err(errno) => return Err(refused("populating", len, errno, self.huge)),
        }
        // A forked child would write through a mapping that it inherits.
        // SAFETY: the range is our own mapping, and only a child's view of it changes.
        unsafe { madvise(ptr.as_ptr().cast(), len, Advice::LinuxDontFork) }
            .map_err(|errno| refused("MADV_DONTFORK", len, errno, self.huge))
    }

    fn touch(&self) {
        for offset in (0..self.span.len).step_by(PAGE) {
            // SAFETY: `offset` is inside the mapping.
            let page = unsafe { self.span.ptr.add(offset) };
            // SAFETY: the page is mapped writable, and nobody else knows of it yet.
            unsafe { page.write_volatile(0) };
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if !process::is_here() {
            // It is not there in a forked child: something else may be.
            return;
        }
        // SAFETY: the mapping is ours, whole, and nothing outlives `self`.
        let unmapped = unsafe { munmap(self.span.ptr.as_ptr().cast(), self.span.len) };
        debug_assert!(unmapped.is_ok(), "a mapping of one's own can be unmapped");
    }
}

impl AsFd for Host {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn map(fd: BorrowedFd<'_>, len: usize) -> Result<Span, Errno> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
    let mapped = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, fd, 0) }?;
    let ptr = NonNull::new(mapped.cast()).ok_or(Errno::NOMEM)?;
    Ok(Span { ptr, len })
}

fn refused(call: &str, len: usize, errno: Errno, huge: bool) -> Error {
    let os = std::io::Error::from(errno);
    if huge {
        return huge::refused(call, len, &os);
    }
    Error::Io(std::io::Error::new(os.kind(), format!("{call} of {len} bytes of memory: {os}")))
}
