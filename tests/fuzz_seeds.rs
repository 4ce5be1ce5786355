//! The fuzz targets' seeds, through the same functions. What needs the inside of the library is
//! replayed by its unit tests.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
mod fuzz;

use std::{fs, path::Path, time::Duration};

use self::common::within;

#[track_caller]
fn each_seed(target: &str, run: fn(&[u8])) {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    if !fuzz.exists() {
        return; // a package has none
    }
    let folder = fuzz.join("seeds").join(target);
    let seeds =
        fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let seeds: Vec<_> = seeds.map(|seed| fs::read(seed.unwrap().path()).unwrap()).collect();
    assert!(!seeds.is_empty(), "{} is empty", folder.display());
    within(Duration::from_secs(60), move || seeds.iter().for_each(|seed| run(seed)));
}

#[test]
fn metadata() {
    each_seed("metadata", fuzz::metadata);
}

#[test]
fn what_peers_send_to_a_server() {
    each_seed("server", fuzz::server);
}

#[test]
fn what_peers_answer_to_a_client() {
    each_seed("client", fuzz::client);
}
