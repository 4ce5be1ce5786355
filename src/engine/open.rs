//! Engines by name, for configuration files and the environment.

use std::{env, sync::Arc};

use super::Engine;
use crate::error::{Error, Result};

/// What [`open_engine`] needs to know; each engine takes what concerns it.
///
/// ```
/// use mooncake_relay::EngineOptions;
/// let options = EngineOptions { advertise: Some("node7".into()), ..EngineOptions::default() };
/// assert_eq!((options.listen.as_str(), options.allow_writes), ("127.0.0.1:0", false));
/// ```
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Where to listen: `host:port`, port 0 for any. Embedded: the control port; the data port is
    /// the system's choice. Default `127.0.0.1:0`, so that nobody but this machine reaches it.
    pub listen: String,
    /// How peers reach it, if not by that: `host[:control port[:data port]]`.
    pub advertise: Option<String>,
    /// Whether peers may write into slots that are published. Default no.
    pub allow_writes: bool,
    /// Whether shared memory is used between processes of this host, where it can be. Default yes.
    pub local: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        let listen = "127.0.0.1:0".to_owned();
        Self { listen, advertise: None, allow_writes: false, local: true }
    }
}

impl EngineOptions {
    /// The default, with `MOONCAKE_RELAY_LISTEN` and `MOONCAKE_RELAY_ADVERTISE` where they are set,
    /// and without shared memory where `MOONCAKE_RELAY_LOCAL` is `false`.
    /// Whether they are addresses is found when the engine is opened; see [`open_engine`] for an
    /// example.
    pub fn from_env() -> Self {
        let mut options = Self::default();
        if let Ok(listen) = env::var("MOONCAKE_RELAY_LISTEN") {
            options.listen = listen;
        }
        options.advertise = env::var("MOONCAKE_RELAY_ADVERTISE").ok();
        options.local = env::var("MOONCAKE_RELAY_LOCAL").map_or(true, |local| local != "false");
        options
    }
}

/// Opens the engine called `name`: for configuration, and for `MOONCAKE_RELAY_ENGINE`, which this
/// library does not read by itself.
///
/// ```
/// use mooncake_relay::{EngineOptions, open_engine};
/// let name = std::env::var("MOONCAKE_RELAY_ENGINE").unwrap_or("embedded".into());
/// let engine = open_engine(&name, &EngineOptions::from_env())?;
/// println!("peers reach us at {}", engine.session_id());
/// # Ok::<(), mooncake_relay::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Config`] for an unknown name, which says which there are; the engine's own errors.
#[cfg_attr(not(feature = "embedded"), expect(unused_variables, reason = "no engine to open"))]
pub fn open_engine(name: &str, options: &EngineOptions) -> Result<Arc<dyn Engine>> {
    match name {
        #[cfg(feature = "embedded")]
        "embedded" => {
            let mut builder = super::EmbeddedEngine::builder(&options.listen);
            if let Some(advertise) = &options.advertise {
                builder = builder.advertise(advertise);
            }
            let builder = builder.allow_writes(options.allow_writes).local(options.local);
            Ok(Arc::new(builder.bind()?))
        }
        "mooncake" => Err(Error::config(
            "engine",
            "the mooncake engine is not part of this version: use \"embedded\", which real Mooncake \
             engines can read from and be read by",
        )),
        other => Err(Error::config(
            "engine",
            format!("there is no engine {other:?}: there are {}", KNOWN.join(" and ")),
        )),
    }
}

/// The engines that this build has.
const KNOWN: &[&str] = if cfg!(feature = "embedded") {
    &["\"embedded\"", "\"mooncake\" (not in this version)"]
} else {
    &["\"mooncake\" (not in this version)"]
};
