//! The embedded engine: pure Rust, TCP that speaks Mooncake's own protocol.

/// Placeholder.
#[derive(Debug)]
pub struct EmbeddedEngine;
/// Placeholder.
#[derive(Debug)]
pub struct EmbeddedBuilder;
