//! The real engine in this process.
#![cfg(feature = "mooncake")]

use mooncake_relay::{MooncakeConfig, MooncakeEngine};

use super::peer::real_engine;

/// `None`, said aloud: it cannot be set up here.
pub(crate) fn config() -> Option<MooncakeConfig> {
    let library = Some(real_engine()?.site.clone());
    Some(MooncakeConfig { library, ..MooncakeConfig::default() })
}

/// An engine on loopback. `None`, said aloud: it cannot be set up here.
pub(crate) fn engine() -> Option<MooncakeEngine> {
    Some(MooncakeEngine::open(&config()?).unwrap())
}
