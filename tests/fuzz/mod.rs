//! What the targets in `fuzz/` do with bytes from outside through the public API.
#![allow(dead_code, reason = "each user of it takes its part")]
#![allow(clippy::unwrap_used, reason = "this is part of the tests")]

mod client;
mod metadata;
mod server;

pub(crate) use self::{client::client, metadata::metadata, server::server};
