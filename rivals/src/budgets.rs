//! What each transfer may take, and whether it does.

use crate::{
    report::{Line, Report, micros},
    rows::size_name,
};

/// What is allowed.
enum Limit {
    /// So many microseconds.
    Micros(f64),
    /// So many times what the rival takes.
    Times(f64),
    /// So many microseconds more than the rival takes.
    More(f64),
}

struct Budget {
    size: usize,
    ours: &'static str,
    limit: Limit,
    /// The quickest of these.
    rivals: &'static [&'static str],
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const BARE: &[&str] = &["Mooncake, bare calls"];
const SAME_HOST: &[&str] = &[
    "UCX tag, shm",
    "UCX get, shm",
    "NIXL, shm",
    "iceoryx2, with both copies",
    "socket, Unix",
    "socket, Unix, spinning",
    "Mooncake, bare calls",
];
const SOCKETS: &[&str] = &["socket, TCP", "socket, TCP, spinning"];
const OVER_MOONCAKE: &str = "ours, Mooncake, from slot to slot, less the stamp's read";

const fn budget(
    size: usize,
    ours: &'static str,
    limit: Limit,
    rivals: &'static [&'static str],
) -> Budget {
    Budget { size, ours, limit, rivals }
}

const BUDGETS: &[Budget] = &[
    budget(4 * KIB, "ours, same host", Limit::Micros(3.0), SAME_HOST),
    budget(4 * KIB, "ours, same host, Spin", Limit::Micros(3.0), SAME_HOST),
    budget(4 * KIB, "ours, same host, after a pause", Limit::Micros(25.0), BARE),
    budget(4 * KIB, "ours, same host, Park, after a pause", Limit::Micros(25.0), BARE),
    budget(64 * KIB, "ours, same host", Limit::Micros(9.0), SAME_HOST),
    budget(MIB, "ours, same host", Limit::Micros(120.0), SAME_HOST),
    budget(64 * MIB, "ours, same host", Limit::Times(1.0 / 1.5), &["memcpy twice"]),
    budget(64, "ours, same host, view", Limit::Micros(3.0), &["iceoryx2, in place"]),
    budget(64 * MIB, "ours, same host, view", Limit::Micros(3.0), &["iceoryx2, in place"]),
    budget(4 * KIB, "ours, TCP", Limit::Times(0.5), BARE),
    budget(64 * MIB, "ours, TCP", Limit::Times(1.0 / 0.9), SOCKETS),
    budget(4 * KIB, OVER_MOONCAKE, Limit::More(5.0), BARE),
    budget(64 * KIB, OVER_MOONCAKE, Limit::Times(1.05), BARE),
    budget(MIB, OVER_MOONCAKE, Limit::Times(1.05), BARE),
    budget(64 * MIB, OVER_MOONCAKE, Limit::Times(1.05), BARE),
];

/// A row of the table for each budget of which both sides were measured.
pub(crate) fn judge(report: &Report) -> impl Iterator<Item = String> {
    BUDGETS.iter().filter_map(|budget| {
        let ours = report.line(budget.ours, budget.size)?;
        let rivals =
            budget.rivals.iter().filter_map(|name| Some((*name, report.line(name, budget.size)?)));
        let rival = rivals.min_by(|(_, a), (_, b)| a.p50.total_cmp(&b.p50));
        let (allowed, text) = match (&budget.limit, &rival) {
            (Limit::Micros(limit), _) => (*limit, format!("≤ {limit} µs")),
            (Limit::Times(times), Some((_, it))) => (times * it.p50, format!("≤ {times:.2} ×")),
            (Limit::More(more), Some((_, it))) => (more + it.p50, format!("≤ + {more} µs")),
            (_, None) => return None,
        };
        let over = (ours.p50 / allowed - 1.0) * 100.0;
        let verdict = if over > 0.0 { format!("missed by {over:.0} %") } else { "met".to_owned() };
        let (against, ratio) = rival.map_or_else(
            || ("–".to_owned(), "–".to_owned()),
            |(name, it)| (format!("{name} {}", shown(it)), format!("{:.2}", ours.p50 / it.p50)),
        );
        let (size, measured) = (size_name(budget.size), shown(ours));
        Some(format!(
            "| {}, {size} | {text} | {measured} | {against} | {ratio} | {verdict} |",
            budget.ours
        ))
    })
}

/// The median, and the rounds' lowest and highest.
fn shown(line: Line) -> String {
    let [lowest, highest] = line.range;
    format!("{} µs ({}–{})", micros(line.p50), micros(lowest), micros(highest))
}
