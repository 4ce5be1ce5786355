//! The memory of a relay.

use std::sync::Arc;

use crate::{
    config::Checked,
    error::{Error, Result},
    memory::{HugePages, Memory, Purpose, check_huge},
    pool::Pool,
};

/// The slots for puts and those for gets: in huge pages all of them, or none.
pub(super) fn pools<M: Memory>(memory: &M::Options, config: &Checked) -> Result<[Arc<Pool<M>>; 2]> {
    let Checked { credits, receive_credits, slot_size, .. } = *config;
    let make = |huge| {
        let slots = Pool::new(memory, credits, slot_size, Purpose::Published, huge)?;
        Ok([slots, Pool::new(memory, receive_credits, slot_size, Purpose::Receive, huge)?])
    };
    let sizes = [credits, receive_credits].map(|count| count as usize * slot_size);
    match config.huge_pages {
        HugePages::Off => make(false),
        HugePages::Prefer if !M::HOST => make(false),
        HugePages::Require if !M::HOST => {
            Err(Error::config("huge_pages", "a device's pages are its driver's: leave it off"))
        }
        HugePages::Require => check_huge(&sizes).and_then(|()| make(true)),
        HugePages::Prefer => check_huge(&sizes).and_then(|()| make(true)).or_else(|error| {
            tracing::warn!(%error, "the slots are made of pages of 4 KiB");
            make(false)
        }),
    }
}
