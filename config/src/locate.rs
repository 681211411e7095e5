//! Which files hold the settings, and where the program was installed.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::ConfigError;

/// The settings file when the environment names none.
pub const DEFAULT_PATH: &str = "/etc/gpushare/gpushare.toml";
/// The variable that names another settings file.
pub const ENVIRONMENT: &str = "GPUSHARE_CONFIG";

pub(crate) fn files() -> Result<Vec<PathBuf>, ConfigError> {
    named(env::var_os(ENVIRONMENT))
}

/// By the variable's value. One that is set to nothing is a mistake, as of a command that failed: the settings of the
/// real node are not what was meant.
fn named(variable: Option<OsString>) -> Result<Vec<PathBuf>, ConfigError> {
    match variable {
        Some(path) if path.is_empty() => Err(ConfigError::NoName),
        Some(path) => files_of(Path::new(&path)),
        None => with_drop_ins(Path::new(DEFAULT_PATH)),
    }
}

pub(crate) fn files_of(path: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    if !path.is_file() {
        return Err(ConfigError::NoSuchFile { path: path.into() });
    }
    with_drop_ins(path)
}

/// A folder of drop-ins that is there and cannot be read may hold what the administrator relies on.
fn with_drop_ins(path: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let mut folder = path.as_os_str().to_owned();
    folder.push(".d");
    let folder = PathBuf::from(folder);
    let unread = |source| ConfigError::Read { path: folder.clone(), source };
    let mut drop_ins = Vec::new();
    match fs::read_dir(&folder) {
        Ok(entries) => {
            for entry in entries {
                drop_ins.push(entry.map_err(unread)?.path());
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(unread(error)),
    }
    drop_ins.retain(|path| path.extension().is_some_and(|end| end == "toml"));
    drop_ins.sort();
    Ok(path.exists().then(|| path.to_path_buf()).into_iter().chain(drop_ins).collect())
}

/// The folder of the running program: its companions are found from there, in the build tree as after installation.
pub(crate) fn program_folder() -> Result<PathBuf, ConfigError> {
    let program = env::current_exe().map_err(|source| ConfigError::Program { source })?;
    Ok(program.parent().unwrap_or(Path::new("/")).to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_names_nothing_is_a_mistake() {
        assert!(matches!(named(Some(OsString::new())), Err(ConfigError::NoName)));
        assert!(matches!(named(Some("/no/such".into())), Err(ConfigError::NoSuchFile { .. })));
        assert!(!matches!(named(None), Err(ConfigError::NoName)));
    }

    #[test]
    fn drop_ins_are_read_in_order_or_not_being_able_to_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.toml");
        assert_eq!(with_drop_ins(&file).unwrap(), Vec::<PathBuf>::new());
        fs::write(&file, "").unwrap();
        let drop_ins = folder.path().join("a.toml.d");
        fs::write(&drop_ins, "").unwrap();
        assert!(matches!(with_drop_ins(&file), Err(ConfigError::Read { path, .. }) if path == drop_ins));
        fs::remove_file(&drop_ins).unwrap();
        fs::create_dir(&drop_ins).unwrap();
        for name in ["2.toml", "1.toml", "3.txt"] {
            fs::write(drop_ins.join(name), "").unwrap();
        }
        assert_eq!(with_drop_ins(&file).unwrap(), [file, drop_ins.join("1.toml"), drop_ins.join("2.toml")]);
    }
}
