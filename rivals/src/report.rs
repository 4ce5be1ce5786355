//! The table and the numbers.

use std::{fmt::Write, io};

use serde_json::json;

use crate::{
    budgets,
    machine::Machine,
    measure::{Measured, SIZES},
    rows::{ROWS, Row, size_name},
};

pub(crate) struct Report {
    pub(crate) machine: Machine,
    pub(crate) pinned: bool,
    pub(crate) rounds: usize,
    /// With the round in which it was.
    pub(crate) measured: Vec<(usize, Measured)>,
    /// Which start did not work, and why.
    pub(crate) failed: Vec<(String, String)>,
}

/// One row at one size, over all rounds. In microseconds; medians of the rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    pub(crate) count: usize,
    pub(crate) p50: f64,
    /// The rounds' lowest median, and their highest.
    pub(crate) range: [f64; 2],
    pub(crate) p99: f64,
    pub(crate) whole: f64,
}

impl Report {
    pub(crate) fn line(&self, row: &str, size: usize) -> Option<Line> {
        let of = || {
            let all = self.measured.iter().map(|(_, one)| one);
            all.filter(|one| one.row == row && one.size == size)
        };
        let column = |what: fn(&Measured) -> f64| {
            let mut column: Vec<_> = of().map(what).collect();
            column.sort_by(f64::total_cmp);
            column
        };
        let p50 = column(|one| one.p50);
        let middle = |column: &[f64]| column.get(column.len() / 2).copied();
        Some(Line {
            count: of().map(|one| one.count).sum(),
            p50: middle(&p50)?,
            range: [*p50.first()?, *p50.last()?],
            p99: middle(&column(|one| one.p99))?,
            whole: middle(&column(|one| one.whole))?,
        })
    }

    pub(crate) fn markdown(&self) -> String {
        let mut out = String::new();
        self.write(&mut out).expect("a string takes all");
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let (rounds, pinned) =
            (self.rounds, if self.pinned { "each on a core" } else { "unpinned" });
        writeln!(out, "{}\n", self.machine.sentence())?;
        writeln!(out, "Rounds: {rounds}, {pinned}; one transfer at a time; times in µs.\n")?;
        for (start, why) in &self.failed {
            writeln!(out, "- `{start}` is SKIPPED: {why}")?;
        }
        writeln!(
            out,
            "\n| what | budget | measured | against | ratio | |\n|---|---|---|---|---|---|"
        )?;
        for budget in budgets::judge(self) {
            writeln!(out, "{budget}")?;
        }
        writeln!(
            out,
            "\n| bytes | what | transfers | p50 | lowest–highest | p99 | whole, p50 | ours / it | ours / it, whole |\n\
             |---|---|--:|--:|--:|--:|--:|--:|--:|"
        )?;
        for (size, _) in SIZES {
            for row in ROWS {
                if let Some(line) = self.line(row.name, size) {
                    self.write_line(out, size, row, line)?;
                }
            }
        }
        writeln!(out, "\n| what | does | beside it |\n|---|---|---|")?;
        for row in ROWS {
            let beside = row.beside.unwrap_or("–");
            writeln!(out, "| {} | {} | {beside} |", row.name, row.does)?;
        }
        Ok(())
    }

    fn write_line(&self, out: &mut String, size: usize, row: &Row, line: Line) -> std::fmt::Result {
        let ours = row.beside.and_then(|beside| self.line(beside, size));
        let ratio = |what: fn(&Line) -> f64| {
            ours.map_or_else(|| "–".to_owned(), |ours| format!("{:.2}", what(&ours) / what(&line)))
        };
        writeln!(
            out,
            "| {} | {} | {} | {} | {}–{} | {} | {} | {} | {} |",
            size_name(size),
            row.name,
            line.count,
            micros(line.p50),
            micros(line.range[0]),
            micros(line.range[1]),
            micros(line.p99),
            micros(line.whole),
            ratio(|line| line.p50),
            ratio(|line| line.whole),
        )
    }

    pub(crate) fn json(&self) -> io::Result<String> {
        let measured: Vec<_> = self
            .measured
            .iter()
            .map(|(round, one)| {
                json!({"round": round, "row": one.row, "size": one.size, "count": one.count,
                    "p50": one.p50, "p99": one.p99, "whole": one.whole})
            })
            .collect();
        let all = json!({"machine": self.machine, "pinned": self.pinned, "rounds": self.rounds,
            "unit": "µs", "measured": measured, "skipped": self.failed});
        Ok(serde_json::to_string_pretty(&all)? + "\n")
    }
}

/// Three digits that say something.
pub(crate) fn micros(time: f64) -> String {
    match time {
        ..100.0 => format!("{time:.2}"),
        _ => format!("{time:.0}"),
    }
}
