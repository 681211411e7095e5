//! Which files hold the settings, and where the program was installed.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::file::ConfigError;

/// The settings file when the environment names none.
pub const DEFAULT_PATH: &str = "/etc/gpushare/gpushare.toml";
/// The variable that names another settings file.
pub const ENVIRONMENT: &str = "GPUSHARE_CONFIG";

pub(crate) fn files() -> Result<Vec<PathBuf>, ConfigError> {
    match env::var_os(ENVIRONMENT).filter(|path| !path.is_empty()) {
        Some(path) => files_of(Path::new(&path)),
        None => Ok(with_drop_ins(Path::new(DEFAULT_PATH))),
    }
}

pub(crate) fn files_of(path: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    if !path.is_file() {
        return Err(ConfigError::NoSuchFile { path: path.into() });
    }
    Ok(with_drop_ins(path))
}

fn with_drop_ins(path: &Path) -> Vec<PathBuf> {
    let mut folder = path.as_os_str().to_owned();
    folder.push(".d");
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut drop_ins: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "toml"))
        .collect();
    drop_ins.sort();
    path.exists().then(|| path.to_path_buf()).into_iter().chain(drop_ins).collect()
}

/// The folder of the running program: its companions are found from there, in the build tree as after installation.
pub(crate) fn program_folder() -> Result<PathBuf, ConfigError> {
    let program = env::current_exe().map_err(|source| ConfigError::Program { source })?;
    Ok(program.parent().unwrap_or(Path::new("/")).to_path_buf())
}
