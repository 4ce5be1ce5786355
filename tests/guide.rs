//! The guide names all that there is: what is added without a line there fails here.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::{fs, path::Path, sync::Arc};

use mooncake_relay::{Config, InProcessEngine, Relay};

#[test]
fn every_field_and_counter_of_health_is_in_the_guide() {
    let engine = Arc::new(InProcessEngine::new("guide").unwrap());
    let relay = Relay::new(engine, &Config::default().with_slot_size(1)).unwrap();
    let health = serde_json::to_value(relay.health()).unwrap();
    let mut names: Vec<String> = health.as_object().unwrap().keys().cloned().collect();
    names.extend(health["counters"].as_object().unwrap().keys().cloned());
    #[cfg(feature = "embedded")]
    {
        let engine = mooncake_relay::EmbeddedEngine::bind("127.0.0.1:0").unwrap();
        mooncake_relay::Engine::counters(&engine, &mut |name, _| names.push(name.to_owned()));
    }
    assert_named(&names, "troubleshooting.md");
}

#[test]
#[cfg(feature = "mooncake")]
fn every_counter_of_the_mooncake_engine_is_in_the_guide() {
    // From its source: to make one takes the real engine.
    let source = read("src/engine/mooncake/mod.rs");
    let calls = source.lines().filter_map(|line| line.trim().strip_prefix("each(\""));
    let names: Vec<_> = calls.filter_map(|call| Some(call.split_once('"')?.0.to_owned())).collect();
    assert!(names.len() >= 6, "{names:?}");
    assert_named(&names, "troubleshooting.md");
}

#[test]
fn every_log_line_of_info_and_above_is_in_the_guide() {
    let page = read("src/guide/troubleshooting.md");
    let sources = sources(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").as_path());
    let calls = sources.iter().flat_map(|source| {
        ["error!(", "warn!(", "info!("].into_iter().flat_map(|call| source.split(call).skip(1))
    });
    // The line is the call's last text; what one calls that is not `tracing`'s has none.
    let lines: Vec<_> = calls
        .filter_map(|call| {
            let call = &call[..call.find(");").or_else(|| call.find("),")).unwrap_or(call.len())];
            let line = call.split('"').skip(1).step_by(2).last()?;
            (!line.contains('{')).then(|| line.replace("\\\n", "").trim().to_owned())
        })
        .filter(|line| line.contains(' ') && !line.starts_with("mooncake-relay runs on"))
        .collect();
    assert!(lines.len() >= 25, "{lines:?}");
    // Without what follows a colon or a semicolon, if the page leaves that out.
    let start = |line: &str| line.split([':', ';']).next().unwrap().to_owned();
    let missing: Vec<_> = lines.iter().filter(|line| !page.contains(&start(line))).collect();
    assert!(missing.is_empty(), "not in the guide: {missing:#?}");
}

#[test]
fn every_error_is_in_the_guide() {
    let source = read("src/error.rs");
    let kinds = source.lines().filter_map(|line| line.split("=> \"").nth(1)?.strip_suffix("\","));
    let kinds: Vec<_> = kinds.map(str::to_owned).collect();
    assert!(kinds.len() >= 12, "{kinds:?}");
    assert_named(&kinds, "troubleshooting.md");
}

#[test]
fn every_environment_variable_is_in_the_guide() {
    let source = read("src/config/env.rs");
    let body = source.split("match short {").nth(1).unwrap().split("_ =>").next().unwrap();
    let arms = body.lines().filter(|line| line.trim_start().starts_with('"'));
    // Those are refused: a duration without its unit.
    let arms = arms.filter(|arm| !arm.contains("lacks_unit"));
    let names = arms.flat_map(|arm| arm.split("=>").next().unwrap().split('|'));
    let names = names.map(|name| format!("MOONCAKE_RELAY_{}", name.trim().trim_matches('"')));
    let names: Vec<_> = names.collect();
    assert!(names.len() >= 15, "{names:?}");
    assert_named(&names, "settings.md");
}

#[track_caller]
fn assert_named(names: &[String], page: &str) {
    let text = read(&format!("src/guide/{page}"));
    let missing: Vec<_> =
        names.iter().filter(|name| !text.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "{page} does not name {missing:?}");
}

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

#[test]
fn every_test_that_the_threat_model_names_is_there() {
    let page = read("src/guide/threats.md");
    let rows = page
        .lines()
        .filter(|line| line.starts_with("| "))
        .filter_map(|line| Some(line.trim_end_matches('|').rsplit_once('|')?.1));
    let names: Vec<_> =
        rows.flat_map(|cell| cell.split('`')).filter(|word| word.contains('_')).collect();
    assert!(names.len() >= 40, "{names:?}");
    let sources = sources(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").as_path());
    let is_there = |name: &str| {
        let (function, case) = (format!("fn {name}("), format!("{name} ="));
        sources.iter().any(|source| source.contains(&function) || source.contains(&case))
    };
    let missing: Vec<_> = names.iter().filter(|name| !is_there(name)).collect();
    assert!(missing.is_empty(), "the page names tests that are not there: {missing:?}");
}

/// Every Rust file below `folder`.
fn sources(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let each = entries.flat_map(|path| match path.is_dir() {
        true => sources(&path),
        false => vec![fs::read_to_string(&path).unwrap_or_default()],
    });
    each.collect()
}
