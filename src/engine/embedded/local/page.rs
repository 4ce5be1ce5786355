//! Pages that two processes share, or that one lends another to read.
//!
//! No slice is ever made of them: the other process may write at any moment.
#![allow(unsafe_code)] // maps memfds, copies from and to them, and makes atomics of their words

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::atomic::{AtomicU32, AtomicU64},
};

use rustix::{
    fs::{
        FallocateFlags, FileType, MemfdFlags, SealFlags, fallocate, fcntl_add_seals,
        fcntl_get_seals, fstat, fstatfs, ftruncate, memfd_create,
    },
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap},
    process::{Resource, getrlimit},
};

use crate::{
    doorbell::Word,
    memory::{Copier, PAGE, Span},
    process,
};

/// Nobody can shorten it, and so make a reader fault.
pub(super) const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// Nor can anybody but its owner ever write to it.
pub(super) const OWNED: SealFlags = FIXED.union(SealFlags::FUTURE_WRITE);

/// What `st_blocks` counts in.
const BLOCK: u64 = 512;
const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

/// A mapping; unmapped when dropped.
#[derive(Debug)]
pub(super) struct Pages {
    span: Span,
}

impl Pages {
    /// At least `len` bytes, zeroed and mapped to write, with these seals; and their memfd.
    pub(super) fn make(name: &str, len: usize, seals: SealFlags) -> io::Result<(Self, OwnedFd)> {
        let len = len.max(1).next_multiple_of(PAGE);
        // Beyond it the kernel answers with a signal.
        if getrlimit(Resource::Fsize).current.is_some_and(|most| most < len as u64) {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, len as u64)?;
        // A file that is sized but not backed is SIGBUS at the first touch.
        fallocate(&fd, FallocateFlags::empty(), 0, len as u64)?;
        let pages = Self::map(fd.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
        // After our own mapping, which stays writable.
        fcntl_add_seals(&fd, seals)?;
        Ok((pages, fd))
    }

    /// A peer's memfd, if it has these seals and exactly that length.
    pub(super) fn of_peer(
        fd: BorrowedFd<'_>,
        len: usize,
        seals: SealFlags,
        access: ProtFlags,
    ) -> io::Result<Self> {
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
        if !fcntl_get_seals(fd)?.contains(seals) {
            return Err(wrong("its memory is not sealed"));
        }
        let stat = fstat(fd)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
            || usize::try_from(stat.st_size).ok() != Some(len)
            || len == 0
        {
            return Err(wrong("its memory has another size than it says"));
        }
        // What is not there yet would be made at our cost, of whatever length, when we map it.
        if (stat.st_blocks as u64).saturating_mul(BLOCK) < len as u64 {
            return Err(wrong("its memory is not backed"));
        }
        // Where it may still punch a hole, a huge page that is missing then is SIGBUS.
        if !seals.contains(SealFlags::FUTURE_WRITE) && fstatfs(fd)?.f_type as u32 == HUGETLBFS_MAGIC
        {
            return Err(wrong("its memory is of huge pages that it can take back"));
        }
        Self::map(fd, len, access)
    }

    fn map(fd: BorrowedFd<'_>, len: usize, access: ProtFlags) -> io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let mapped = unsafe { mmap(ptr::null_mut(), len, access, flags, fd, 0) }?;
        let ptr = NonNull::new(mapped.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let pages = Self { span: Span { ptr, len } };
        // A forked child has no part in what two processes have agreed on.
        // SAFETY: the range is our own mapping, and only a child's view of it changes.
        unsafe { madvise(ptr.as_ptr().cast(), len, Advice::LinuxDontFork) }?;
        Ok(pages)
    }

    /// `len` bytes from `offset` on.
    pub(super) fn part(&self, offset: usize, len: usize) -> Span {
        // SAFETY: a mapping does not begin at null.
        Span { ptr: unsafe { NonNull::new_unchecked(self.at(offset, len)) }, len }
    }

    /// The word at `offset`. Of pages that are mapped to read it is only loaded.
    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        let ptr = self.at(offset, size_of::<u64>());
        assert!(offset.is_multiple_of(size_of::<u64>()), "words are aligned");
        // SAFETY: mapped while `self` lives, aligned, and touched by atomics only in this process;
        // whatever another process does to it, each of its values is a number.
        unsafe { AtomicU64::from_ptr(ptr.cast()) }
    }

    /// Copies from `offset` to `dest`, which has `len` bytes.
    ///
    /// # Safety
    ///
    /// `dest` is valid for writes of `len` bytes, and no part of these pages.
    pub(super) unsafe fn copy_out(&self, offset: usize, dest: *mut u8, len: usize) {
        let from = self.at(offset, len);
        // SAFETY: `at` has checked the source, and the caller answers for the rest. What another
        // process writes meanwhile makes the bytes wrong, which the caller finds out by its pin.
        unsafe { ptr::copy_nonoverlapping(from, dest, len) };
    }

    /// Fills `dest` from `offset`.
    pub(super) fn fill(&self, offset: usize, dest: &mut [u8]) {
        // SAFETY: a slice of ours is valid, and none is ever made of these pages.
        unsafe { self.copy_out(offset, dest.as_mut_ptr(), dest.len()) };
    }

    /// Fills `dest` from `offset`, as large copies are made.
    pub(super) fn fill_by(&self, copier: &Copier, offset: usize, dest: &mut [u8]) {
        let from = self.at(offset, dest.len());
        // SAFETY: `at` has checked the source, of which no slice is ever made; what another process
        // writes meanwhile makes the bytes wrong, which the caller finds out by its pin.
        unsafe { copier.copy(from, dest.as_mut_ptr(), dest.len()) };
    }

    /// Writes `bytes` at `offset`. The pages are mapped to write.
    pub(super) fn put(&self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: `at` has checked the destination, which no slice is ever made of.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.span.len);
        assert!(inside, "the caller has checked the range");
        // SAFETY: checked above.
        unsafe { self.span.ptr.add(offset) }.as_ptr()
    }
}

impl Word for Pages {
    fn word(&self) -> &AtomicU32 {
        let ptr = self.at(0, size_of::<u32>());
        // SAFETY: as in `Pages::word`; pages are aligned to more than a word.
        unsafe { AtomicU32::from_ptr(ptr.cast()) }
    }
}

impl Drop for Pages {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(flags: MemfdFlags, len: u64, is_backed: bool) -> Option<OwnedFd> {
        let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create("peer", flags).ok()?;
        ftruncate(&fd, len).ok()?;
        if is_backed {
            fallocate(&fd, FallocateFlags::empty(), 0, len).ok()?;
        }
        fcntl_add_seals(&fd, OWNED).ok()?;
        Some(fd)
    }

    #[test]
    fn a_file_that_is_sized_but_not_backed_is_not_mapped() {
        let len = 1 << 20;
        for (is_backed, taken) in [(true, true), (false, false)] {
            let fd = sealed(MemfdFlags::empty(), len as u64, is_backed).unwrap();
            let pages = Pages::of_peer(fd.as_fd(), len, OWNED, ProtFlags::READ);
            assert_eq!(pages.is_ok(), taken, "{pages:?}");
        }
    }

    #[test]
    fn huge_pages_are_mapped_to_read_only() {
        let len = 2 << 20;
        let Some(fd) = sealed(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, len as u64, true) else {
            return eprintln!("not tested: no huge page is free");
        };
        assert!(Pages::of_peer(fd.as_fd(), len, OWNED, ProtFlags::READ).is_ok());
        assert!(Pages::of_peer(fd.as_fd(), len, FIXED, ProtFlags::READ).is_err());
    }
}
