//! How a relay is set up: plain values from the user, checked once, then trusted.

mod env;

use std::{sync::Arc, time::Duration};

use crate::{
    affinity,
    error::{Error, Result},
    memory::{HugePages, PAGE},
    wait::WaitStrategy,
};

/// The settings of a relay, which checks them when it is made.
///
/// How to choose them, and what each costs, is in [`guide::settings`](crate::guide::settings).
///
/// ```
/// use std::time::Duration;
/// use mooncake_relay::{Config, WaitStrategy};
///
/// let config = Config::default()
///     .with_engine_id("stage0")
///     .with_credits(8)
///     .with_wait(WaitStrategy::Park)
///     .with_lease(Duration::from_secs(5));
/// assert_eq!(config.slot_size, 64 << 20);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The relay's name, with which the ids of its transfers begin: 1 to 94 bytes. `"relay"`.
    pub engine_id: String,
    /// Slots for puts: how many can be under way, 1 to 65,536. Memory: `slot_size` each. 2.
    pub credits: u32,
    /// Slots for gets, likewise; if not given, as many as `credits`.
    pub receive_credits: Option<u32>,
    /// Bytes a slot, rounded up to a whole page of 4 KiB: the largest payload. 64 MiB.
    pub slot_size: usize,
    /// Threads that run the gets nobody waits for, 1 to 256. 1.
    pub transfer_threads: usize,
    /// The cores of those threads, taken in turn, each one that this process may use; if empty,
    /// wherever the system puts them.
    pub transfer_cores: Vec<usize>,
    /// The core of the thread that hears notifications; if not given, wherever the system puts it.
    pub notifier_core: Option<usize>,
    /// What whoever waits does with its core. `Auto`.
    pub wait: WaitStrategy,
    /// How long a put may stay unacknowledged, from `put` on; not zero. 30 s.
    pub lease: Duration,
    /// How long, after its put has ended, a slot waits for a reader that is not done; zero cuts it
    /// at once. 30 s.
    pub quarantine: Duration,
    /// How long a get may take if the call gives no time, its time in the queue included, and a
    /// `put_bytes` wait for a slot; not zero. 30 s.
    pub read_timeout: Duration,
    /// How long a [`View`](crate::View) of a sender's slot holds; not zero. 30 s.
    pub view_limit: Duration,
    /// How many gets may wait for a slot and a thread, 1 to 1,048,576. 1024.
    pub queued_gets: usize,
    /// Whether the slots are locked, so that the system never swaps them out. `false`.
    pub lock_memory: bool,
    /// Whether the slots are made of huge pages of 2 MiB. `Off`.
    pub huge_pages: HugePages,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            engine_id: "relay".to_owned(),
            credits: 2,
            receive_credits: None,
            slot_size: 64 << 20,
            transfer_threads: 1,
            transfer_cores: Vec::new(),
            notifier_core: None,
            wait: WaitStrategy::Auto,
            lease: Duration::from_secs(30),
            quarantine: Duration::from_secs(30),
            read_timeout: Duration::from_secs(30),
            view_limit: Duration::from_secs(30),
            queued_gets: 1024,
            lock_memory: false,
            huge_pages: HugePages::Off,
        }
    }
}

/// One setter a field.
macro_rules! setters {
    ($($setter:ident: $field:ident, $value:ty;)+) => {
        impl Config {
            $(
                #[doc = concat!("Sets [`", stringify!($field), "`](Self::", stringify!($field), ").")]
                #[must_use]
                pub fn $setter(mut self, value: $value) -> Self {
                    self.$field = value.into();
                    self
                }
            )+
        }
    };
}

setters! {
    with_engine_id: engine_id, impl Into<String>;
    with_credits: credits, u32;
    with_receive_credits: receive_credits, impl Into<Option<u32>>;
    with_slot_size: slot_size, usize;
    with_transfer_threads: transfer_threads, usize;
    with_transfer_cores: transfer_cores, impl Into<Vec<usize>>;
    with_notifier_core: notifier_core, impl Into<Option<usize>>;
    with_wait: wait, WaitStrategy;
    with_lease: lease, Duration;
    with_quarantine: quarantine, Duration;
    with_read_timeout: read_timeout, Duration;
    with_view_limit: view_limit, Duration;
    with_queued_gets: queued_gets, usize;
    with_lock_memory: lock_memory, bool;
    with_huge_pages: huge_pages, HugePages;
}

impl Config {
    /// Checks every field, once.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] that names the field and what would work.
    pub(crate) fn check(&self) -> Result<Checked> {
        let engine_id = self.engine_id.as_str();
        if engine_id.is_empty()
            || engine_id.len() > MAX_ENGINE_ID
            || engine_id.contains(char::is_control)
        {
            let reason =
                format!("give 1 to {MAX_ENGINE_ID} bytes, none of them a control character");
            return Err(Error::config("engine_id", reason));
        }
        let receive_credits = self.receive_credits.unwrap_or(self.credits);
        within("credits", self.credits as usize, MAX_CREDITS, CREDITS)?;
        within("receive_credits", receive_credits as usize, MAX_CREDITS, CREDITS)?;
        within("transfer_threads", self.transfer_threads, MAX_THREADS, THREADS)?;
        within("queued_gets", self.queued_gets, MAX_QUEUED, QUEUED)?;
        let times = [
            ("lease", self.lease),
            ("read_timeout", self.read_timeout),
            ("view_limit", self.view_limit),
        ];
        for (field, time) in times {
            if time.is_zero() {
                return Err(Error::config(field, "is zero: nothing could happen in it"));
            }
        }
        check_cores("transfer_cores", &self.transfer_cores)?;
        check_cores("notifier_core", self.notifier_core.as_slice())?;
        Ok(Checked {
            engine_id: engine_id.into(),
            credits: self.credits,
            receive_credits,
            slot_size: whole_pages(self.slot_size, self.credits.max(receive_credits))?,
            transfer_threads: self.transfer_threads,
            transfer_cores: self.transfer_cores.clone(),
            notifier_core: self.notifier_core,
            wait: self.wait,
            lease: self.lease,
            quarantine: self.quarantine,
            read_timeout: self.read_timeout,
            view_limit: self.view_limit,
            queued_gets: self.queued_gets,
            lock_memory: self.lock_memory,
            huge_pages: self.huge_pages,
        })
    }
}

/// A configuration that can work here: no later code checks any of it again.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    /// At most 94 bytes, so that a transfer's name has at most 127.
    pub(crate) engine_id: Arc<str>,
    pub(crate) credits: u32,
    pub(crate) receive_credits: u32,
    /// Whole pages; so many times the credits is not more than `isize::MAX`.
    pub(crate) slot_size: usize,
    pub(crate) transfer_threads: usize,
    /// Allowed, each.
    transfer_cores: Vec<usize>,
    /// Allowed.
    pub(crate) notifier_core: Option<usize>,
    pub(crate) wait: WaitStrategy,
    pub(crate) lease: Duration,
    pub(crate) quarantine: Duration,
    pub(crate) read_timeout: Duration,
    pub(crate) view_limit: Duration,
    pub(crate) queued_gets: usize,
    pub(crate) lock_memory: bool,
    pub(crate) huge_pages: HugePages,
}

impl Checked {
    /// The core of transfer thread `number`, if it has one.
    pub(crate) fn transfer_core(&self, number: usize) -> Option<usize> {
        self.transfer_cores.iter().cycle().nth(number).copied()
    }
}

/// `{engine_id}_{32 hex}` is then at most 127 bytes, which notifications keep without allocation.
const MAX_ENGINE_ID: usize = 94;
const MAX_CREDITS: usize = 65_536;
const MAX_THREADS: usize = 256;
const MAX_QUEUED: usize = 1 << 20;
const CREDITS: &str = "an integer from 1 to 65536";
const THREADS: &str = "an integer from 1 to 256";
const QUEUED: &str = "an integer from 1 to 1048576";

fn within(field: &'static str, value: usize, max: usize, accepted: &str) -> Result<()> {
    if (1..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::config(field, format!("{value} is not {accepted}")))
}

fn check_cores(field: &'static str, cores: &[usize]) -> Result<()> {
    if cores.is_empty() {
        return Ok(());
    }
    let allowed = affinity::allowed();
    match cores.iter().find(|core| !allowed.contains(core)) {
        None => Ok(()),
        Some(core) => {
            let reason = format!("core {core} is not one that this process may use: {allowed:?}");
            Err(Error::config(field, reason))
        }
    }
}

/// Rounds a slot up to pages, and makes sure that so many of them can be addressed.
fn whole_pages(slot_size: usize, slots: u32) -> Result<usize> {
    if slot_size == 0 {
        return Err(Error::config("slot_size", "is zero: give a number of bytes"));
    }
    slot_size
        .checked_next_multiple_of(PAGE)
        .filter(|size| {
            size.checked_mul(slots as usize).is_some_and(|all| isize::try_from(all).is_ok())
        })
        .ok_or_else(|| {
            let reason = format!("{slots} slots of {slot_size} bytes are more than any memory");
            Error::config("slot_size", reason)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        let base = Config::default;
        let page = |credits| base().with_credits(credits).with_slot_size(1);
        let absent = (0..).find(|core| !affinity::allowed().contains(core)).unwrap();
        let refused = [
            ("engine_id", base().with_engine_id("")),
            ("engine_id", base().with_engine_id("e".repeat(95))),
            ("engine_id", base().with_engine_id("a\nb")),
            ("credits", page(0)),
            ("credits", page(65_537)),
            ("receive_credits", page(1).with_receive_credits(0)),
            ("receive_credits", page(1).with_receive_credits(65_537)),
            ("slot_size", base().with_slot_size(0)),
            ("slot_size", base().with_slot_size(usize::MAX)),
            ("slot_size", base().with_slot_size(1 << 62)),
            ("slot_size", base().with_credits(1).with_receive_credits(8).with_slot_size(1 << 60)),
            ("transfer_threads", base().with_transfer_threads(0)),
            ("transfer_threads", base().with_transfer_threads(257)),
            ("transfer_cores", base().with_transfer_cores([absent])),
            ("transfer_cores", base().with_transfer_cores([usize::MAX])),
            ("notifier_core", base().with_notifier_core(absent)),
            ("lease", base().with_lease(Duration::ZERO)),
            ("read_timeout", base().with_read_timeout(Duration::ZERO)),
            ("view_limit", base().with_view_limit(Duration::ZERO)),
            ("queued_gets", base().with_queued_gets(0)),
            ("queued_gets", base().with_queued_gets((1 << 20) + 1)),
        ];
        for (expected, config) in refused {
            match config.check() {
                Err(Error::Config { field, .. }) => assert_eq!(field, expected, "{config:?}"),
                other => panic!("{config:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn what_can_work_is_rounded_and_its_cores_are_dealt_in_turn() {
        let core = affinity::allowed()[0];
        let config = Config::default()
            .with_engine_id("e".repeat(94))
            .with_slot_size(4097)
            .with_quarantine(Duration::ZERO)
            .with_lease(Duration::MAX)
            .with_transfer_threads(3)
            .with_transfer_cores([core, core]);
        let checked = config.check().unwrap();
        assert_eq!((checked.slot_size, checked.receive_credits), (8192, 2));
        assert_eq!((0..3).filter_map(|n| checked.transfer_core(n)).collect::<Vec<_>>(), [core; 3]);
    }
}
