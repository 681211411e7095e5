//! Finds the settings files and the folder of the running program, and checks who could change them.

use std::env;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::ConfigError;

/// The settings file unless the environment names another.
pub const DEFAULT_PATH: &str = "/etc/gpushare/gpushare.toml";
/// The environment variable that names another settings file.
pub use gpushare_inject::SETTINGS_VARIABLE as ENVIRONMENT;

pub(crate) fn files() -> Result<Vec<PathBuf>, ConfigError> {
    named(env::var_os(ENVIRONMENT))
}

/// The files for this value of the variable. An empty value is an error: it may come from a command that
/// failed, and falling back to the settings of the real node would be wrong.
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

/// The file and its drop-ins, in order. A drop-in folder that exists but cannot be read is an error, because
/// the administrator may rely on its contents.
fn with_drop_ins(path: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let mut folder = path.as_os_str().to_owned();
    folder.push(".d");
    let folder = PathBuf::from(folder);
    let unread = |source| ConfigError::Read { path: folder.clone(), source };
    let mut drop_ins = Vec::new();
    // A user who may write to the parent folder could replace the file. In a sticky folder such as /tmp only
    // the owner can.
    check_folder(path.parent().unwrap_or(Path::new("/")), true)?;
    match fs::read_dir(&folder) {
        Ok(entries) => {
            // The owner of a link there chooses which files are read.
            let link = fs::symlink_metadata(&folder).and_then(|found| is_ours(&found)).map_err(unread)?;
            if !link {
                return Err(ConfigError::UnsafeFolder { path: folder });
            }
            check_folder(&folder, false)?;
            for entry in entries {
                drop_ins.push(entry.map_err(unread)?.path());
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(unread(error)),
    }
    drop_ins.retain(|path| path.extension().is_some_and(|end| end == "toml"));
    drop_ins.sort();
    // A dangling link is refused like any other.
    let is_there = fs::symlink_metadata(path).is_ok();
    Ok(is_there.then(|| path.to_path_buf()).into_iter().chain(drop_ins).collect())
}

/// Refuses a folder into which users other than root and the running user can put files. Accepts a missing
/// folder.
fn check_folder(path: &Path, may_be_sticky: bool) -> Result<(), ConfigError> {
    let read = |source| ConfigError::Read { path: path.into(), source };
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        other => other.map_err(read)?,
    };
    let sticky = may_be_sticky && metadata.mode() & 0o1000 != 0;
    match is_ours(&metadata).map_err(read)? && (metadata.mode() & 0o022 == 0 || sticky) {
        true => Ok(()),
        false => Err(ConfigError::UnsafeFolder { path: path.into() }),
    }
}

/// The owner that the kernel shows for a file whose owner does not exist in the user namespace. The number
/// differs if /proc/sys/kernel/overflowuid was changed.
const OVERFLOW_UID: u32 = 65534;

/// Whether a file or folder belongs to root or to the running user. Under a rootless engine root's files show
/// the overflow owner. Accepting it there is safe: the process can do no more than the engine's user.
pub(crate) fn is_ours(metadata: &Metadata) -> io::Result<bool> {
    let this_user = fs::metadata("/proc/self")?.uid();
    let owner = metadata.uid();
    Ok(owner == 0 || owner == this_user || owner == OVERFLOW_UID && gpushare_quota::is_rootless())
}

/// The folder of the running program. gpushare's other programs are found relative to it, in the build tree
/// and after installation.
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
