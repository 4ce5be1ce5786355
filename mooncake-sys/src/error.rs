//! Why nothing was loaded.

use std::{error::Error, fmt};

/// The commands that install everything on Debian; the versions are those of [`crate::WHEELS`].
pub(crate) const INSTALL: &str = "install the engine with \
    `pip install mooncake-transfer-engine-non-cuda==0.3.13.post1`, and what it needs with \
    `apt-get install g++ libpython3.11 libibverbs1 libnuma1 libcurl4` (Debian 12), or name a \
    libtransfer_engine.so of your own in MOONCAKE_LIBRARY";

/// No library: every place that was looked at, what was found there, and what installs it.
///
/// ```
/// use mooncake_sys::{Options, load};
/// let options = Options { library: Some("/nowhere.so".into()), ..Options::default() };
/// let error = load(&options).unwrap_err();
/// assert_eq!(error.looked().len(), 1); // what is named and fails is not replaced by another
/// assert!(error.to_string().contains("/nowhere.so") && error.to_string().contains("pip install"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    looked: Vec<Looked>,
}

/// One place, and what was there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Looked {
    /// Where it was looked for.
    pub place: String,
    /// What was there instead.
    pub found: String,
}

impl LoadError {
    pub(crate) fn new(looked: Vec<Looked>) -> Self {
        Self { looked }
    }

    /// Every place, in the order in which they were looked at.
    pub fn looked(&self) -> &[Looked] {
        &self.looked
    }
}

impl Looked {
    pub(crate) fn new(place: impl Into<String>, found: impl Into<String>) -> Self {
        Self { place: place.into(), found: found.into() }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no Mooncake engine could be loaded")?;
        for Looked { place, found } in &self.looked {
            write!(f, "\n  {place}: {found}")?;
        }
        write!(f, "\n{INSTALL}")
    }
}

impl Error for LoadError {}
