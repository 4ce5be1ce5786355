//! Which test holds which fault of the field, by the tests' names: `tests/FAULTS.md`.
//!
//! `sh tests/fault_table.sh` writes it anew. A test holds a fault by a name that begins with it:
//! `a5_…` here, and as any test of another program.

use std::{
    env,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use libtest_mimic::Failed;

use crate::{
    on::{Case, ENGINES, Needs, On},
    pairs,
};

/// Every fault that is known, with its priority.
#[rustfmt::skip]
const KNOWN: &[(&str, u8)] = &[("a1", 1), ("a3", 1), ("a5", 1), ("a6", 1), ("a8", 2), ("a9", 2), ("a10", 1), ("a11", 1), ("b1", 1), ("b2", 1), ("b3", 2), ("b5", 2), ("b6", 2), ("b8", 2), ("b10", 2), ("b11", 1), ("b13", 1), ("c1", 1), ("c3", 1), ("c4", 1), ("c6", 1), ("c8", 2), ("c9", 2), ("d1", 1), ("d2", 1), ("d4", 1), ("d6", 2), ("d7", 2), ("d9", 1), ("d11", 1), ("e1", 1), ("e3", 2), ("e5", 1), ("e6", 2), ("e7", 2), ("f1", 1), ("f2", 1), ("g1", 1), ("g3", 1), ("g5", 2), ("g6", 2), ("r1", 1), ("r2", 2), ("r4", 1), ("r6", 3), ("i1", 1), ("i2", 1), ("i4", 1), ("i6", 2), ("i7", 2), ("i9", 2), ("j1", 1), ("j3", 1), ("j4", 1), ("j6", 2), ("j7", 2), ("j8", 2), ("t1", 1), ("t2", 1), ("t4", 1), ("t6", 2), ("t7", 2), ("l1", 1), ("l2", 2), ("l4", 2), ("l6", 2), ("m1", 1), ("m2", 1), ("m4", 2), ("m6", 1), ("m8", 2), ("m9", 2), ("m10", 2), ("n1", 2), ("n2", 1), ("n4", 2), ("n6", 2), ("o1", 1), ("o2", 2), ("o4", 3), ("p1", 2), ("p2", 3), ("q1", 1), ("q2", 1), ("q3", 1), ("q4", 1), ("q5", 1), ("q6", 1), ("q7", 1), ("q8", 1), ("q9", 1), ("q10", 1), ("q11", 1), ("q12", 1), ("q13", 1), ("q14", 1), ("q15", 1), ("q16", 1), ("q17", 1), ("q18", 1), ("q19", 1), ("q20", 1), ("q21", 1), ("q22", 1), ("q23", 1), ("q24", 1), ("q25", 1), ("q26", 1)];

/// Of those, what no test holds, each with the reason.
const WITHOUT: &[(&str, &str)] = &[];

/// Set where the table is to be printed instead of any test.
const PRINT: &str = "MOONCAKE_RELAY_TEST_TABLE";

pub(crate) fn asked() -> bool {
    env::var_os(PRINT).is_some()
}

/// One test.
struct Row {
    name: String,
    /// On which engines, or in which file.
    place: String,
}

pub(crate) fn every_fault_has_a_test() -> Result<(), Failed> {
    let rows = rows();
    let is_held = |fault: &str| rows.iter().any(|row| fault_of(&row.name) == Some(fault));
    let is_without = |fault: &str| WITHOUT.iter().any(|(without, _)| *without == fault);
    let mut faults: Vec<_> = KNOWN
        .iter()
        .filter(|(fault, _)| !is_held(fault) && !is_without(fault))
        .map(|(fault, _)| format!("no test holds {fault}"))
        .collect();
    let held = WITHOUT.iter().filter(|(fault, _)| is_held(fault));
    faults.extend(held.map(|(fault, _)| format!("{fault} is held: it is no exception any more")));
    let unknown = WITHOUT.iter().filter(|(fault, _)| priority(fault).is_none());
    faults.extend(unknown.map(|(fault, _)| format!("{fault} is no fault that is known")));
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n").into()) }
}

/// With all features, of which each brings tests.
pub(crate) fn is_up_to_date() -> Result<(), Failed> {
    let all = cfg!(feature = "embedded") && cfg!(feature = "mooncake");
    let written = fs::read_to_string(root().join("tests/FAULTS.md")).unwrap_or_default();
    if !all || written == text() {
        return Ok(());
    }
    Err("tests/FAULTS.md is not what the tests are: run `sh tests/fault_table.sh`".into())
}

/// The table, as Markdown.
pub(crate) fn text() -> String {
    let mut text = String::from(
        "# The faults of the field, and the tests that hold them\n\n\
         Written by `sh tests/fault_table.sh` from the names of the tests; a test fails where it is\n\
         not up to date. A case of `tests/faults/` runs on the engines that are named (all of them:\n\
         \"every engine\"), any other test in its own file.\n\n\
         | fault | priority | test | where |\n|---|---|---|---|\n",
    );
    let rows = rows();
    for (fault, priority) in KNOWN {
        let shown = fault.to_uppercase();
        for row in rows.iter().filter(|row| fault_of(&row.name) == Some(fault)) {
            let Row { name, place } = row;
            writeln!(text, "| {shown} | P{priority} | `{name}` | {place} |").expect("a String");
        }
        for (_, reason) in WITHOUT.iter().filter(|(without, _)| without == fault) {
            writeln!(text, "| {shown} | P{priority} | none | {reason} |").expect("a String");
        }
    }
    text
}

/// All tests that hold a fault, by name.
fn rows() -> Vec<Row> {
    let mut names: Vec<_> = pairs().map(|(_, case)| case.name).collect();
    names.sort_unstable();
    names.dedup();
    let mut rows: Vec<_> = names
        .into_iter()
        .map(|name| Row { name: name.to_owned(), place: engines_of(name) })
        .collect();
    for folder in ["src", "tests", "mooncake-sys"] {
        others(&root().join(folder), &mut rows);
    }
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    rows
}

/// On which engines a case runs, and on which not and why.
fn engines_of(name: &str) -> String {
    let on: Vec<_> = pairs().filter(|(_, case)| case.name == name).collect();
    if on.iter().any(|(_, case)| case.needs == Needs::Nothing) {
        return "once".to_owned();
    }
    let runs = |(on, case): &&(&On, &Case)| on.excepts(case).is_none();
    let engines: Vec<_> = on.iter().filter(runs).map(|(on, _)| on.name).collect();
    let mut place =
        if engines.len() == ENGINES.len() { "every engine".to_owned() } else { engines.join(", ") };
    for (on, case) in &on {
        if let Some(reason) = on.excepts(case) {
            write!(place, "; not {}: {reason}", on.name).expect("a String");
        }
    }
    place
}

/// What holds a fault in the files of `folder`, the cases of this program left out.
fn others(folder: &Path, rows: &mut Vec<Row>) {
    let mut entries: Vec<_> = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            if !path.ends_with("tests/faults") {
                others(&path, rows);
            }
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let place = format!("`{}`", path.strip_prefix(root()).unwrap().display());
            for start in ["fn ", "(\""] {
                let names = text.split(start).skip(1).map(|rest| {
                    rest.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).next().unwrap()
                });
                let holding = names.filter(|name| fault_of(name).is_some());
                rows.extend(
                    holding.map(|name| Row { name: name.to_owned(), place: place.clone() }),
                );
            }
        }
    }
}

/// `a5_such_a_fault` → `a5`, if that is known.
fn fault_of(name: &str) -> Option<&str> {
    let (fault, _) = name.split_once('_')?;
    priority(fault).map(|_| fault)
}

fn priority(fault: &str) -> Option<u8> {
    KNOWN.iter().find(|(known, _)| *known == fault).map(|(_, priority)| *priority)
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}
