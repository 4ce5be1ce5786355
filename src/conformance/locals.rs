//! The buffers that a side lends to its engine, as a relay's receive slots are.
#![allow(unsafe_code)] // lends memory

use std::{ptr, sync::Arc};

use parking_lot::{Condvar, Mutex};

use super::side::{PATIENCE, part};
use crate::{
    LocalBuffer,
    engine::Lender,
    memory::{Host, Memory, PAGE, Purpose},
};

/// The buffers that a side lends, and where each of them is.
pub(super) struct Locals {
    pub(super) memory: Host,
    size: usize,
    loans: Mutex<Loans>,
    came_back: Condvar,
}

struct Loans {
    free: Vec<u32>,
    count: u32,
    /// Came back more than once.
    doubled: Vec<u32>,
}

impl Locals {
    pub(super) fn new(count: u32, size: usize) -> Self {
        let size = (size + GUARD).next_multiple_of(PAGE);
        let memory = Host::allocate(&(), size * count as usize, Purpose::Receive, false)
            .expect("a test gets memory");
        let loans = Loans { free: (0..count).collect(), count, doubled: Vec::new() };
        Self { memory, size, loans: Mutex::new(loans), came_back: Condvar::new() }
    }

    pub(super) fn lend(self: &Arc<Self>, len: usize) -> (u32, LocalBuffer) {
        assert!(len + GUARD <= self.size, "a case asks for no more than a slot");
        let mut loans = self.loans.lock();
        let index = loop {
            if let Some(index) = loans.free.pop() {
                break index;
            }
            let waited = self.came_back.wait_for(&mut loans, PATIENCE);
            assert!(!waited.timed_out(), "a buffer did not come back");
        };
        let span = part(self.memory.span(), index as usize * self.size, len);
        // SAFETY: the buffer and its guard are mapped, and nobody else has this index.
        unsafe { ptr::write_bytes(span.ptr.as_ptr(), CANARY, len + GUARD) };
        let lender: Arc<dyn Lender> = Arc::clone(self) as Arc<dyn Lender>;
        // SAFETY: the bytes were written above, are mapped while `self` lives, and are lent to
        // nobody else until the index is in `free` again.
        (index, unsafe { LocalBuffer::new(lender, index, span) })
    }

    /// Panics unless `buffer` is the one of `index`, with nothing written behind it.
    pub(super) fn check(self: &Arc<Self>, index: u32, buffer: &LocalBuffer) {
        let lender: Arc<dyn Lender> = Arc::clone(self) as Arc<dyn Lender>;
        assert!(buffer.is_of(&lender, index), "another buffer came back than was lent");
        let mut guard = [0; GUARD];
        // SAFETY: the guard lies behind the buffer, inside our mapping.
        let behind = unsafe { buffer.span().ptr.add(buffer.span().len) };
        // SAFETY: mapped, initialised by `lend`, and ours while the buffer is.
        unsafe { ptr::copy_nonoverlapping(behind.as_ptr(), guard.as_mut_ptr(), GUARD) };
        assert_eq!(guard, [CANARY; GUARD], "the engine wrote behind the buffer");
    }

    pub(super) fn check_all_back(&self) {
        let mut loans = self.loans.lock();
        while loans.free.len() < loans.count as usize {
            let waited = self.came_back.wait_for(&mut loans, PATIENCE);
            assert!(!waited.timed_out(), "a buffer did not come back");
        }
        assert!(loans.doubled.is_empty(), "a buffer came back twice: {:?}", loans.doubled);
    }
}

impl Lender for Locals {
    fn give_back(&self, index: u32) {
        let mut loans = self.loans.lock();
        if loans.free.contains(&index) {
            loans.doubled.push(index);
        } else {
            loans.free.push(index);
        }
        self.came_back.notify_all();
    }

    fn is_host(&self) -> bool {
        true
    }
}

const GUARD: usize = 64;
const CANARY: u8 = 0xa5;
