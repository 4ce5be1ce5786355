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
    /// Mooncake listens on every address, whatever stands here: the host is the one that peers are
    /// told, and the port does not count.
    pub listen: String,
    /// How peers reach it, if not by that: `host[:control port[:data port]]`. Mooncake takes the
    /// host alone.
    pub advertise: Option<String>,
    /// Whether peers may write into slots that are published. Default no.
    pub allow_writes: bool,
    /// Whether shared memory is used between processes of this host, where it can be. Default yes.
    pub local: bool,
    /// Embedded: whether a relay in device memory may be made, whose bytes go through pinned host
    /// memory: [`Staging`](crate::Staging) with its defaults. Default no.
    pub staging: bool,
    /// Mooncake: `tcp` (the default), `rdma` or `nvlink`. Embedded takes none but `tcp`.
    pub protocol: String,
    /// Mooncake: `P2PHANDSHAKE` (the default), or a metadata server's address.
    pub metadata_server: String,
    /// Mooncake: RDMA devices with commas between them; empty (the default) for all.
    pub device_name: String,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:0".to_owned(),
            advertise: None,
            allow_writes: false,
            local: true,
            staging: false,
            protocol: "tcp".to_owned(),
            metadata_server: "P2PHANDSHAKE".to_owned(),
            device_name: String::new(),
        }
    }
}

impl EngineOptions {
    /// The default, with `MOONCAKE_RELAY_LISTEN`, `_ADVERTISE`, `_PROTOCOL`, `_METADATA_SERVER` and
    /// `_DEVICE_NAME` where they are set, without shared memory where `_LOCAL` is `false`, and with
    /// staging where `_STAGING` is `true`. Whether the first five can be used is found when the engine
    /// is opened; those two are left as they are, with a warning, where they are neither `true` nor
    /// `false`. See [`open_engine`] for an example.
    pub fn from_env() -> Self {
        let mut options = Self::default();
        for (name, field) in [
            ("MOONCAKE_RELAY_LISTEN", &mut options.listen),
            ("MOONCAKE_RELAY_PROTOCOL", &mut options.protocol),
            ("MOONCAKE_RELAY_METADATA_SERVER", &mut options.metadata_server),
            ("MOONCAKE_RELAY_DEVICE_NAME", &mut options.device_name),
        ] {
            if let Ok(value) = env::var(name) {
                *field = value;
            }
        }
        options.advertise = env::var("MOONCAKE_RELAY_ADVERTISE").ok();
        for (name, field) in [
            ("MOONCAKE_RELAY_LOCAL", &mut options.local),
            ("MOONCAKE_RELAY_STAGING", &mut options.staging),
        ] {
            let Some(value) = env::var_os(name) else { continue };
            match value.to_str().map(str::parse) {
                Some(Ok(value)) => *field = value,
                _ => {
                    tracing::warn!(variable = name, ?value, "ignored: it is neither true nor false")
                }
            }
        }
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
pub fn open_engine(name: &str, options: &EngineOptions) -> Result<Arc<dyn Engine>> {
    match name {
        #[cfg(feature = "embedded")]
        "embedded" => {
            if options.protocol != "tcp" {
                let reason = format!("the embedded engine has no {:?}: use tcp", options.protocol);
                return Err(Error::config("protocol", reason));
            }
            let mut builder = super::EmbeddedEngine::builder(&options.listen);
            if let Some(advertise) = &options.advertise {
                builder = builder.advertise(advertise);
            }
            let mut builder = builder.allow_writes(options.allow_writes).local(options.local);
            if options.staging {
                builder = builder.staging(super::Staging::default());
            }
            Ok(Arc::new(builder.bind()?))
        }
        #[cfg(feature = "mooncake")]
        "mooncake" => Ok(Arc::new(super::MooncakeEngine::open(&mooncake(options)?)?)),
        other => {
            let _ = options; // needed by none, where there are none
            let known = if KNOWN.is_empty() { "none".to_owned() } else { KNOWN.join(" and ") };
            Err(Error::config("engine", format!("there is no engine {other:?}: there are {known}")))
        }
    }
}

/// The engines that this build has.
const KNOWN: &[&str] = match (cfg!(feature = "embedded"), cfg!(feature = "mooncake")) {
    (true, true) => &["\"embedded\"", "\"mooncake\""],
    (true, false) => &["\"embedded\""],
    (false, true) => &["\"mooncake\""],
    (false, false) => &[],
};

#[cfg(feature = "mooncake")]
fn mooncake(options: &EngineOptions) -> Result<super::MooncakeConfig> {
    let (field, address) = match &options.advertise {
        Some(address) => ("advertise", address),
        None => ("listen", &options.listen),
    };
    let host = host_alone(address);
    if matches!(host, "" | "0.0.0.0" | "[::]" | "::") {
        let reason = "it names no one address: advertise the one by which peers reach this host";
        return Err(Error::config(field, reason));
    }
    Ok(super::MooncakeConfig {
        hostname: host.to_owned(),
        metadata_server: options.metadata_server.clone(),
        protocol: options.protocol.clone(),
        device_name: options.device_name.clone(),
        library: None,
    })
}

/// What stands before the ports; of an IPv6 address with its brackets.
#[cfg(feature = "mooncake")]
fn host_alone(address: &str) -> &str {
    match address.find(']') {
        Some(end) => &address[..=end],
        None if address.matches(':').count() > 2 => address,
        None => address.split(':').next().unwrap_or(address),
    }
}

#[cfg(all(test, feature = "mooncake"))]
mod tests {
    use super::host_alone;

    #[test]
    fn of_an_address_the_host_is_left() {
        for (address, host) in [
            ("127.0.0.1:0", "127.0.0.1"),
            ("node7", "node7"),
            ("node7:1:2", "node7"),
            ("[::1]:7000", "[::1]"),
            ("[::1]", "[::1]"),
            ("fe80::1:2", "fe80::1:2"),
            (":7", ""),
        ] {
            assert_eq!(host_alone(address), host, "{address}");
        }
    }
}
