//! Settings from the environment.

use std::{env, ffi::OsStr, num::ParseIntError, str::FromStr, time::Duration};

use super::{CREDITS, Config, QUEUED, THREADS};
use crate::{
    error::{Error, Result},
    memory::HUGE_PAGES,
    wait::STRATEGIES,
};

impl Config {
    /// The defaults, changed by what the environment sets.
    ///
    /// Each field has the variable of its name: `MOONCAKE_RELAY_CREDITS`, and so on. Durations are
    /// whole milliseconds and say so: `MOONCAKE_RELAY_LEASE_MS`. `MOONCAKE_RELAY_TRANSFER_CORES`
    /// has commas between the cores. Any other variable that begins with `MOONCAKE_RELAY_` gets a
    /// warning in the log, except those that choose the engine: `_ENGINE`, `_LISTEN`, `_ADVERTISE`,
    /// `_LOCAL`, `_STAGING`, `_PROTOCOL`, `_METADATA_SERVER` and `_DEVICE_NAME`.
    /// [`guide::settings`](crate::guide::settings) lists them all, by name.
    ///
    /// ```
    /// // MOONCAKE_RELAY_CREDITS=8 MOONCAKE_RELAY_WAIT=park MOONCAKE_RELAY_LEASE_MS=5000
    /// let config = mooncake_relay::Config::from_env()?;
    /// # let _ = config;
    /// # Ok::<(), mooncake_relay::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for a value that is empty or does not parse; it names the variable. Whether
    /// it can work here is checked when the relay is made.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(env::vars_os())
    }

    /// As [`from_env`](Self::from_env), from these variables instead of the process's.
    ///
    /// ```
    /// use mooncake_relay::Config;
    /// let config = Config::from_vars([("MOONCAKE_RELAY_LEASE_MS", "1500"), ("HOME", "/")])?;
    /// assert_eq!(config.lease.as_millis(), 1500);
    /// assert!(Config::from_vars([("MOONCAKE_RELAY_CREDITS", "-1")]).is_err());
    /// # Ok::<(), mooncake_relay::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`from_env`](Self::from_env).
    pub fn from_vars<N: AsRef<OsStr>, V: AsRef<OsStr>>(
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Result<Self> {
        let mut config = Self::default();
        for (name, value) in variables {
            let Some(name) = name.as_ref().to_str() else { continue };
            if let Some(short) = name.strip_prefix("MOONCAKE_RELAY_") {
                config.set(short, &Variable { name, value: value.as_ref() })?;
            }
        }
        Ok(config)
    }

    fn set(&mut self, short: &str, variable: &Variable<'_>) -> Result<()> {
        match short {
            "ENGINE_ID" => self.engine_id = variable.parse("engine_id", "some text")?,
            "CREDITS" => self.credits = variable.parse("credits", CREDITS)?,
            "RECEIVE_CREDITS" => {
                self.receive_credits = Some(variable.parse("receive_credits", CREDITS)?);
            }
            "SLOT_SIZE" => self.slot_size = variable.parse("slot_size", "a number of bytes")?,
            "TRANSFER_THREADS" => {
                self.transfer_threads = variable.parse("transfer_threads", THREADS)?;
            }
            "TRANSFER_CORES" => {
                let cores = variable.parse::<Cores>("transfer_cores", "cores, as in 0,2,3")?;
                self.transfer_cores = cores.0;
            }
            "NOTIFIER_CORE" => {
                self.notifier_core = Some(variable.parse("notifier_core", "the number of a core")?);
            }
            "WAIT" => self.wait = variable.parse("wait", STRATEGIES)?,
            "LEASE" => return Err(variable.lacks_unit("lease")),
            "QUARANTINE" => return Err(variable.lacks_unit("quarantine")),
            "READ_TIMEOUT" => return Err(variable.lacks_unit("read_timeout")),
            "VIEW_LIMIT" => return Err(variable.lacks_unit("view_limit")),
            "LEASE_MS" => self.lease = variable.milliseconds("lease")?,
            "QUARANTINE_MS" => self.quarantine = variable.milliseconds("quarantine")?,
            "READ_TIMEOUT_MS" => self.read_timeout = variable.milliseconds("read_timeout")?,
            "VIEW_LIMIT_MS" => self.view_limit = variable.milliseconds("view_limit")?,
            "QUEUED_GETS" => self.queued_gets = variable.parse("queued_gets", QUEUED)?,
            "LOCK_MEMORY" => self.lock_memory = variable.parse("lock_memory", "true or false")?,
            "HUGE_PAGES" => self.huge_pages = variable.parse("huge_pages", HUGE_PAGES)?,
            // For whoever opens the engine.
            "ENGINE" | "LISTEN" | "ADVERTISE" | "LOCAL" | "STAGING" => {}
            "PROTOCOL" | "METADATA_SERVER" | "DEVICE_NAME" => {}
            _ => tracing::warn!(variable = variable.name, "ignored: no setting has this name"),
        }
        Ok(())
    }
}

struct Variable<'a> {
    name: &'a str,
    value: &'a OsStr,
}

impl Variable<'_> {
    fn parse<T: FromStr>(&self, field: &'static str, accepted: &str) -> Result<T> {
        let Self { name, value } = self;
        // Set but empty is a slip in a script more often than a wish for the default.
        let text = value.to_str().filter(|text| !text.is_empty());
        text.and_then(|text| text.parse().ok()).ok_or_else(|| {
            Error::config(field, format!("{name} is {value:?}: give {accepted}, or unset it"))
        })
    }

    /// Somebody forgot that durations say their unit; a setting without effect would not be noticed.
    fn lacks_unit(&self, field: &'static str) -> Error {
        let name = self.name;
        Error::config(field, format!("{name} is no setting: give {name}_MS, in whole milliseconds"))
    }

    fn milliseconds(&self, field: &'static str) -> Result<Duration> {
        self.parse(field, "a whole number of milliseconds").map(Duration::from_millis)
    }
}

/// Cores with commas between them.
struct Cores(Vec<usize>);

impl FromStr for Cores {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.split(',').map(|core| core.trim().parse()).collect::<Result<_, _>>().map(Self)
    }
}
