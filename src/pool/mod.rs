//! Registered memory, cut into slots.

mod credits;
#[cfg(all(feature = "cuda", not(loom)))]
mod device;
#[cfg(not(loom))]
mod slot;
#[cfg(not(loom))]
mod stamps;

pub use self::credits::{Credits, Queued};
#[cfg(not(loom))]
pub use self::slot::Slot;
#[cfg(not(loom))]
pub(crate) use self::{
    slot::{Loan, Pool},
    stamps::Stamps,
};
