//! Rows of several runs as one picture: latency and throughput, on logarithmic axes.

use std::{fmt::Write, fs, path::PathBuf};

use clap::Args;

use crate::{
    Result,
    case::{Axis, Mode},
    machine::Usage,
    row::Row,
};

/// Flags of `plot`.
#[derive(Args, Debug)]
pub(crate) struct Plot {
    /// The picture: an SVG file.
    #[arg(long)]
    out: PathBuf,
    /// What stands above it.
    #[arg(long, default_value = "mooncake-relay perftest")]
    title: String,
    /// Draw puts a second in place of GB/s, as it is anyway where x is no size.
    #[arg(long)]
    puts: bool,
    /// What `perftest --json` printed.
    #[arg(required = true)]
    runs: Vec<PathBuf>,
}

/// The rows of one run and label.
struct Series {
    label: String,
    rows: Vec<Row>,
}

pub(crate) fn draw(plot: &Plot) -> Result<()> {
    let series = read(&plot.runs)?;
    let axis = series[0].rows[0].x;
    if let Some(other) = series.iter().flat_map(|one| &one.rows).find(|row| row.x != axis) {
        let other = other.x;
        return Err(format!(
            "one run goes by {axis} and another by {other}: draw one plot of each"
        )
        .into());
    }
    let by_puts = plot.puts || axis != Axis::Size;
    let svg = picture(&plot.title, axis, &series, by_puts);
    fs::write(&plot.out, svg).map_err(|error| format!("{}: {error}", plot.out.display()))?;
    println!("{}: {} runs", plot.out.display(), series.len());
    if axis != Axis::Size {
        series.iter().for_each(|one| println!("{}", growth(axis, one)));
    }
    Ok(())
}

/// What becomes of throughput and of p99 as the load grows.
fn growth(axis: Axis, series: &Series) -> String {
    let rows = &series.rows;
    let rate = |row: &Row| row.result.puts_per_s;
    let best = rows.iter().max_by(|one, other| rate(one).total_cmp(&rate(other)));
    let Some(best) = best else { return String::new() };
    let load = |row: &Row| axis.of(&row.case);
    let beyond = rows.iter().filter(|row| load(row) > load(best)).map(rate);
    let kept = beyond.fold(rate(best), f64::min) / rate(best);
    let (first, last) = (&rows[0], &rows[rows.len() - 1]);
    let p99 = |row: &Row| row.result.latency.p99.max(1) as f64;
    format!(
        "{}: most at {axis} {}, {:.0} puts/s, and {:.0} % of that at least beyond; from the first row to \
         the last {axis} × {}, p99 × {:.1}, puts/s × {:.1}",
        series.label,
        load(best),
        rate(best),
        kept * 100.0,
        load(last) / load(first).max(1),
        p99(last) / p99(first),
        rate(last) / rate(first).max(1e-9)
    )
}

fn read(files: &[PathBuf]) -> Result<Vec<Series>> {
    let mut all: Vec<Series> = Vec::new();
    for path in files {
        let name = path.display();
        let text = fs::read_to_string(path).map_err(|error| format!("{name}: {error}"))?;
        let first = all.len();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let row: Row = serde_json::from_str(line).map_err(|error| {
                let number = number + 1;
                format!("{name}, line {number}: {error}: it is no line of `perftest --json`")
            })?;
            match all[first..].iter_mut().find(|one| one.label == row.label) {
                Some(one) => one.rows.push(row),
                None => all.push(Series { label: row.label.clone(), rows: vec![row] }),
            }
        }
    }
    for one in &mut all {
        one.rows.retain(|row| row.x.of(&row.case) > 0); // a logarithm has no place for 0
        one.rows.sort_by_key(|row| row.x.of(&row.case));
    }
    all.retain(|one| !one.rows.is_empty());
    if all.is_empty() {
        return Err("there is no row to draw: make some with `perftest --json`".into());
    }
    Ok(all)
}

/// Told apart also by those who do not see all colours.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31"];
const PANEL: f64 = 460.0;
const HEIGHT: f64 = 380.0;
const TOP: f64 = 84.0;
/// Where the panels begin.
const LEFTS: [f64; 3] = [82.0, 664.0, 1246.0];
const LEGEND_LINE: f64 = 20.0;

fn picture(title: &str, axis: Axis, series: &[Series], by_puts: bool) -> String {
    // What a load takes of the machine is of no interest by size.
    let panels = if axis == Axis::Size { 2 } else { 3 };
    let width = LEFTS[panels - 1] + PANEL + 36.0;
    let rows = series.len().div_ceil(2) as f64;
    let whole = TOP + HEIGHT + 76.0 + rows * LEGEND_LINE + 26.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {whole}\" width=\"{width}\" \
         height=\"{whole}\" font-family=\"sans-serif\" font-size=\"13\" fill=\"#222\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    label(&mut svg, width / 2.0, 30.0, "middle", "font-size=\"19\"", title);
    let x = |row: &Row| row.x.of(&row.case) as f64;
    let micros = |nanos: u64| nanos as f64 / 1e3;
    let p50 = |row: &Row| micros(row.result.latency.p50);
    let p99 = |row: &Row| micros(row.result.latency.p99);
    let rate = |row: &Row| {
        if by_puts { row.result.puts_per_s } else { row.result.bytes_per_s / 1e9 }
    };
    let open = series.iter().flat_map(|one| &one.rows).any(|row| row.case.mode == Mode::Rate);
    let from = if open { "from when it was due" } else { "put to token" };
    panel(
        &mut svg,
        LEFTS[0],
        &format!("latency, µs ({from}): p50 solid, p99 dashed"),
        axis,
        series,
        &[(&|row| (x(row), p50(row)), false), (&|row| (x(row), p99(row)), true)],
    );
    let what = if by_puts { "throughput, puts a second" } else { "throughput, GB/s" };
    panel(&mut svg, LEFTS[1], what, axis, series, &[(&|row| (x(row), rate(row)), false)]);
    let both = |row: &Row, one: fn(&Usage) -> u64| {
        (one(&row.result.client_usage) + one(&row.result.server_usage)) as f64
    };
    let memory = |row: &Row| (x(row), both(row, |one| one.resident_kib) / 1024.0);
    let threads = |row: &Row| (x(row), both(row, |one| one.relay_threads));
    if panels == 3 {
        let title = "both sides: MiB resident solid, threads of relays dashed";
        panel(&mut svg, LEFTS[2], title, axis, series, &[(&memory, false), (&threads, true)]);
    }
    legend(&mut svg, series, TOP + HEIGHT + 76.0);
    svg.push_str("</svg>\n");
    svg
}

/// A point of a row, and whether its line is dashed.
type Line<'l> = (&'l dyn Fn(&Row) -> (f64, f64), bool);

fn panel(
    svg: &mut String,
    left: f64,
    title: &str,
    axis: Axis,
    series: &[Series],
    lines: &[Line<'_>],
) {
    let points = |line: &Line<'_>| -> Vec<(f64, f64)> {
        series.iter().flat_map(|one| &one.rows).map(line.0).collect()
    };
    let all: Vec<_> = lines.iter().flat_map(points).filter(|(_, y)| *y > 0.0).collect();
    let across = Scale::over(all.iter().map(|point| point.0), left, left + PANEL);
    let up = Scale::over(all.iter().map(|point| point.1), TOP + HEIGHT, TOP);
    label(svg, left, TOP - 14.0, "start", "font-weight=\"bold\"", title);
    let bottom = TOP + HEIGHT;
    for (value, text) in ticks_across(axis, &all, &across) {
        let x = across.at(value);
        rule(svg, (x, TOP), (x, bottom), "#e4e4e4");
        label(svg, x, bottom + 20.0, "middle", "", &text);
    }
    for (value, text) in ticks_up(&up) {
        let y = up.at(value);
        rule(
            svg,
            (left, y),
            (left + PANEL, y),
            if text.is_empty() { "#f1f1f1" } else { "#d6d6d6" },
        );
        label(svg, left - 8.0, y + 4.5, "end", "", &text);
    }
    let _ = writeln!(
        svg,
        "<rect x=\"{left}\" y=\"{TOP}\" width=\"{PANEL}\" height=\"{HEIGHT}\" fill=\"none\" \
         stroke=\"#555\"/>"
    );
    label(svg, left + PANEL / 2.0, bottom + 44.0, "middle", "", axis.title());
    for (number, one) in series.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        for (of, dashed) in lines {
            let drawn: Vec<_> = one
                .rows
                .iter()
                .map(of)
                .filter(|(_, y)| *y > 0.0)
                .map(|(x, y)| (across.at(x), up.at(y)))
                .collect();
            let path: Vec<_> = drawn.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let (width, dash) = if *dashed { (1.3, "5 4") } else { (2.2, "none") };
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" \
                 stroke-width=\"{width}\" stroke-dasharray=\"{dash}\"/>",
                path.join(" ")
            );
            for (x, y) in drawn {
                let radius = if *dashed { 1.8 } else { 3.2 };
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{colour}\"/>"
                );
            }
        }
    }
}

fn legend(svg: &mut String, series: &[Series], top: f64) {
    for (number, one) in series.iter().enumerate() {
        let left = LEFTS[number % 2];
        let y = top + (number / 2) as f64 * LEGEND_LINE;
        let colour = COLOURS[number % COLOURS.len()];
        let _ = writeln!(
            svg,
            "<line x1=\"{left}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"{colour}\" \
             stroke-width=\"3\"/>",
            left + 26.0
        );
        label(svg, left + 34.0, y + 4.5, "start", "", &one.label);
    }
    let first = &series[0].rows[0];
    let y = top + series.len().div_ceil(2) as f64 * LEGEND_LINE + 4.0;
    label(svg, LEFTS[0], y, "start", "font-size=\"11\" fill=\"#666\"", &first.client.describe());
}

/// A logarithm onto a stretch of the picture.
struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Scale {
    fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (low, high) =
            values.fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(v), high.max(v)));
        // Something to see of a single value, and none on the frame itself.
        let room = 1.12;
        let (low, high) = if high > low * 1.01 { (low, high) } else { (low / 2.0, high * 2.0) };
        Self { low: low / room, high: high * room, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let part = (value / self.low).ln() / (self.high / self.low).ln();
        self.from + part * (self.to - self.from)
    }

    fn holds(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }
}

/// The values that were measured, as many as have room for their names.
fn ticks_across(axis: Axis, points: &[(f64, f64)], scale: &Scale) -> Vec<(f64, String)> {
    let mut values: Vec<_> = points.iter().map(|point| point.0).collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    let mut last = f64::MIN;
    let mut ticks = Vec::new();
    for value in values {
        let at = scale.at(value);
        if at - last >= 48.0 {
            last = at;
            ticks.push((value, axis.show(value as usize)));
        }
    }
    ticks
}

/// 1, 2 and 5 of each power of ten; named all of them, or only the powers where those are many.
fn ticks_up(scale: &Scale) -> Vec<(f64, String)> {
    let decades = (scale.high / scale.low).log10();
    let first = scale.low.log10().floor() as i32;
    let mut ticks = Vec::new();
    for power in first..=first + decades as i32 + 2 {
        for digit in [1.0, 2.0, 5.0] {
            let value = digit * 10_f64.powi(power);
            if scale.holds(value) {
                let named = digit == 1.0 || decades < 2.6;
                ticks.push((value, if named { number(value) } else { String::new() }));
            }
        }
    }
    ticks
}

/// "0.05", "20", "5k", "2M".
fn number(value: f64) -> String {
    match value {
        v if v >= 0.95e6 => format!("{}M", v.round() / 1e6),
        v if v >= 0.95e3 => format!("{}k", v.round() / 1e3),
        v if v >= 0.95 => format!("{}", v.round()),
        v => format!("{}", (v * 1e6).round() / 1e6),
    }
}

fn rule(svg: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn label(svg: &mut String, x: f64, y: f64, anchor: &str, style: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {style}>{text}</text>"
    );
}
