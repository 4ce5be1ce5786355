//! NIXL from its Python wheel, by `nixl.py`, which says what the other senders say.

use std::{env, io, path::Path, process::Command};

use crate::{measure::Plan, rounds::join, rows::Start};

/// Set by `make compare`: the folder of the wheel, and the Python that can load it.
const WHEEL: &str = "RIVALS_NIXL";
const PYTHON: &str = "RIVALS_PYTHON";

pub(crate) fn command(start: Start, plan: &Plan) -> io::Result<Command> {
    let named = |name| env::var_os(name).filter(|value| !value.is_empty());
    let (Some(wheel), Some(python)) = (named(WHEEL), named(PYTHON)) else {
        let why =
            format!("no NIXL: `make compare` installs its wheel and sets {WHEEL} and {PYTHON}");
        return Err(io::Error::other(why));
    };
    let (way, row) = match start {
        Start::NixlShm => ("shm", "NIXL, shm"),
        _ => ("tcp", "NIXL, TCP"),
    };
    let cores = match plan.cores[..] {
        [] => "none".to_owned(),
        _ => join(&plan.cores),
    };
    let mut command = Command::new(python);
    command.env("PYTHONPATH", wheel).env("PYTHONDONTWRITEBYTECODE", "1");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("nixl.py")).args([row, way, &cores]);
    command.args(plan.sizes().map(|(size, count)| format!("{size}:{count}")));
    Ok(command)
}
