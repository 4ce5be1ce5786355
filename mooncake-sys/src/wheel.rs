//! The pip wheel: where it may be, and which it is.

use std::{
    env,
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::{child, error::Looked};

/// The versions whose C++ classes the adapter knows. Others are refused: older ones differ in the
/// layout of a request, and newer ones may.
pub const WHEELS: &[&str] = &["0.3.13.post1"];

/// A wheel whose version is in [`WHEELS`].
#[derive(Clone, Debug)]
pub(crate) struct Wheel {
    /// The folder that holds `engine.so`.
    pub(crate) folder: PathBuf,
    pub(crate) version: String,
    /// `3.11`
    pub(crate) python: String,
}

impl Wheel {
    /// The wheel that is installed in `site`, the folder that holds `mooncake/`.
    pub(crate) fn in_site(site: &Path) -> Result<Self, String> {
        let folder = site.join("mooncake");
        if !folder.join("engine.so").is_file() {
            return Err("no mooncake/engine.so in it".to_owned());
        }
        let folder = fs::canonicalize(&folder).map_err(|error| error.to_string())?;
        let mut infos = dist_infos(site).map_err(|error| error.to_string())?;
        let info = match (infos.pop(), infos.is_empty()) {
            (Some(info), true) => info,
            (Some(_), false) => {
                return Err("several mooncake_transfer_engine wheels: uninstall all but one \
                            (`pip uninstall`)"
                    .to_owned());
            }
            (None, _) => {
                return Err("mooncake/engine.so, but no mooncake_transfer_engine*.dist-info that \
                            says which version it is"
                    .to_owned());
            }
        };
        let version =
            field(&info.join("METADATA"), "Version").map_err(|error| error.to_string())?;
        if !WHEELS.contains(&version.as_str()) {
            return Err(format!(
                "version {version:?}, which is not supported: install {} (`pip install \
                 mooncake-transfer-engine-non-cuda=={}`)",
                WHEELS.join(" or "),
                WHEELS[0]
            ));
        }
        let tag = field(&info.join("WHEEL"), "Tag").map_err(|error| error.to_string())?;
        let python =
            python_of(&tag).ok_or_else(|| format!("it is for {tag:?}, not for CPython"))?;
        Ok(Self { folder, version, python })
    }

    /// The extension has undefined symbols of this library. Python itself is never started.
    pub(crate) fn libpython(&self) -> String {
        format!("libpython{}.so.1.0", self.python)
    }
}

/// `cp311-cp311-manylinux_2_28_x86_64` → `3.11`
fn python_of(tag: &str) -> Option<String> {
    let digits = tag.split('-').next()?.strip_prefix("cp3")?;
    let minor: u8 = digits.parse().ok()?;
    Some(format!("3.{minor}"))
}

fn dist_infos(site: &Path) -> io::Result<Vec<PathBuf>> {
    let is_info = |name: &OsStr| {
        name.to_str().is_some_and(|name| {
            name.starts_with("mooncake_transfer_engine") && name.ends_with(".dist-info")
        })
    };
    let mut infos = Vec::new();
    for entry in fs::read_dir(site)? {
        let entry = entry?;
        if is_info(&entry.file_name()) {
            infos.push(entry.path());
        }
    }
    Ok(infos)
}

/// The value of the first line `name: value`.
fn field(path: &Path, name: &str) -> io::Result<String> {
    let mut text = Vec::new();
    File::open(path)?.take(64 * 1024).read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let value = value.ok_or_else(|| io::Error::other(format!("{path:?} has no {name:?}")))?;
    Ok(value.trim().to_owned())
}

/// Every folder that may hold `mooncake/`, with where it came from; and what could not be asked.
pub(crate) fn sites(looked: &mut Vec<Looked>) -> Vec<(String, PathBuf)> {
    let mut sites = Vec::new();
    match env::var_os("VIRTUAL_ENV").filter(|path| !path.is_empty()) {
        None => looked.push(Looked::new("the active virtual environment", "none (VIRTUAL_ENV)")),
        Some(path) => {
            let found = venv_sites(Path::new(&path));
            if found.is_empty() {
                let place = format!("the virtual environment {}", path.display());
                looked.push(Looked::new(place, "no lib/python3.*/site-packages in it"));
            }
            sites.extend(found.into_iter().map(|site| ("the virtual environment", site)));
        }
    }
    match python_sites() {
        Err(reason) => looked.push(Looked::new("the site-packages of python3", reason)),
        Ok(found) => sites.extend(found.into_iter().map(|site| ("python3", site))),
    }
    let mut named = Vec::<(String, PathBuf)>::new();
    for (whose, site) in sites {
        if !named.iter().any(|(_, known)| *known == site) {
            named.push((format!("{whose}'s {}", site.display()), site));
        }
    }
    named
}

fn venv_sites(venv: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(venv.join("lib")) else { return Vec::new() };
    let mut sites: Vec<_> = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with("python3.")))
        .map(|entry| entry.path().join("site-packages"))
        .filter(|site| site.is_dir())
        .collect();
    sites.sort();
    sites
}

/// Asks `python3` where it imports from: its folders, in its order, its working folder left out.
fn python_sites() -> Result<Vec<PathBuf>, String> {
    let code = "import sys\nfor path in sys.path:\n    if path: print(path)";
    let asked = child::run(Command::new("python3").args(["-c", code]), Duration::from_secs(20));
    let answer = asked.map_err(|error| format!("python3 did not run ({error})"))?;
    if !answer.status.success() {
        return Err(format!("python3 ended with {}: {}", answer.status, answer.stderr));
    }
    Ok(answer.stdout.lines().map(PathBuf::from).filter(|site| site.is_dir()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_names_the_python() {
        assert_eq!(python_of("cp311-cp311-manylinux_2_28_x86_64").as_deref(), Some("3.11"));
        assert_eq!(python_of("cp39-cp39-linux").as_deref(), Some("3.9"));
        assert_eq!(python_of("py3-none-any"), None);
        assert_eq!(python_of("cp3x-"), None);
        assert_eq!(python_of(""), None);
    }
}
