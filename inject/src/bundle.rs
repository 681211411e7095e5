//! A bundle on disk. Its config.json is not trusted when read, and is written whole or not at all.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use serde_json::Value;

use crate::edit::{self, EditError};
use crate::json;
use crate::plan::Plan;

/// Bytes; more than any engine writes. It keeps a hostile file from filling the host's memory.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// A bundle with its config.json as the engine wrote it.
#[derive(Debug)]
pub struct Bundle {
    path: PathBuf,
    /// config.json, or what crun's `--config` names instead.
    config: PathBuf,
    text: Vec<u8>,
    mode: u32,
}

/// Why a bundle cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// There is no config.json, it is a link, or it cannot be opened.
    #[error("{path} is no bundle: its config.json cannot be opened; see --bundle")]
    NoConfig {
        /// The bundle's folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// config.json is no regular file, has several names, or is too large.
    #[error("config.json of bundle {path} must be a regular file with one name and at most 16 MiB")]
    OddConfig {
        /// The bundle's folder.
        path: PathBuf,
    },
    /// Not JSON, or not of the form that the runtime specification demands.
    #[error("config.json of bundle {path} is not a valid OCI configuration")]
    Malformed {
        /// The bundle's folder.
        path: PathBuf,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// A part that must be changed has a form that nobody writes.
    #[error("config.json of bundle {path} cannot be changed")]
    Edit {
        /// The bundle's folder.
        path: PathBuf,
        /// The part, and what is wrong with it.
        source: EditError,
    },
    /// The new file could not be written; the old one is untouched.
    #[error("cannot write config.json into bundle {path}")]
    Write {
        /// The bundle's folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl Bundle {
    /// Reads the configuration of the bundle at `path`: config.json, or the file `config`, which is relative
    /// to `path`.
    ///
    /// # Errors
    /// When there is none, or it is no regular file of a sane size.
    pub fn open(path: &Path, config: Option<&Path>) -> Result<Self, BundleError> {
        let config = path.join(config.unwrap_or(Path::new("config.json")));
        let no_config = |source| BundleError::NoConfig { path: path.into(), source };
        // O_NONBLOCK: a FIFO in place of the file must not hang the engine.
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(&config);
        let mut file = file.map_err(no_config)?;
        let metadata = file.metadata().map_err(no_config)?;
        if !metadata.is_file() || metadata.nlink() != 1 || metadata.len() > MAX_CONFIG_BYTES {
            return Err(BundleError::OddConfig { path: path.into() });
        }
        let mut text = Vec::with_capacity(usize::try_from(metadata.len() + 1).unwrap_or_default());
        Read::by_ref(&mut file).take(MAX_CONFIG_BYTES).read_to_end(&mut text).map_err(no_config)?;
        Ok(Self { path: path.into(), config, text, mode: metadata.mode() & 0o7777 })
    }

    /// Parses the whole file. Every field and number stays as it is written.
    ///
    /// # Errors
    /// When the file is not JSON, or runtimes could read it in different ways.
    pub fn json(&self) -> Result<Value, BundleError> {
        json::read(&self.text).map_err(|source| self.malformed(source))
    }

    /// The bundle's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The container's root folder on the host.
    pub fn root(&self, json: &Value) -> PathBuf {
        let root = json.pointer("/root/path").and_then(Value::as_str).unwrap_or("rootfs");
        self.path.join(root)
    }

    /// Puts `plan` into `json`, this bundle's configuration, and writes it beside the old one.
    ///
    /// # Errors
    /// When a part that must be changed has an unknown form, or the folder cannot be written.
    pub fn edit(&self, plan: &Plan, mut json: Value) -> Result<Edited<'_>, BundleError> {
        edit::apply(&mut json, plan)
            .map_err(|source| BundleError::Edit { path: self.path.clone(), source })?;
        let text = serde_json::to_vec(&json).map_err(|source| self.malformed(source))?;
        let edited = Edited {
            bundle: self,
            file: self.path.join(format!(".config.json.gpushare.{}", std::process::id())),
        };
        let _ = fs::remove_file(&edited.file); // of a killed process that had our pid
        self.write(&edited.file, &text).map_err(|source| self.unwritten(source))?;
        Ok(edited)
    }

    fn write(&self, path: &Path, text: &[u8]) -> std::io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(text)?;
        let owner = fs::metadata(&self.config)?;
        std::os::unix::fs::fchown(&file, Some(owner.uid()), Some(owner.gid()))?;
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(self.mode))
    }

    fn unwritten(&self, source: std::io::Error) -> BundleError {
        BundleError::Write { path: self.path.clone(), source }
    }

    fn malformed(&self, source: serde_json::Error) -> BundleError {
        BundleError::Malformed { path: self.path.clone(), source }
    }
}

/// A bundle's new configuration, which stands beside the old one until it is put in its place, and goes with
/// this value otherwise.
#[derive(Debug)]
pub struct Edited<'b> {
    bundle: &'b Bundle,
    file: PathBuf,
}

impl Edited<'_> {
    /// Puts it in the place of the old one. No reader sees half of it.
    ///
    /// # Errors
    /// When the folder cannot be written; the old one stays.
    pub fn put_in_place(self) -> Result<(), BundleError> {
        fs::rename(&self.file, &self.bundle.config).map_err(|source| self.bundle.unwritten(source))
    }
}

impl Drop for Edited<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.file); // it is not there once it has been put in place
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_a_regular_file_with_one_name_is_a_config() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("config.json");
        assert!(matches!(Bundle::open(folder.path(), None), Err(BundleError::NoConfig { .. })));
        fs::write(folder.path().join("other"), "{}").unwrap();
        symlink("other", &config).unwrap();
        assert!(matches!(Bundle::open(folder.path(), None), Err(BundleError::NoConfig { .. })));
        fs::remove_file(&config).unwrap();
        fs::hard_link(folder.path().join("other"), &config).unwrap();
        assert!(matches!(Bundle::open(folder.path(), None), Err(BundleError::OddConfig { .. })));
        fs::remove_file(&config).unwrap();
        nix::unistd::mkfifo(&config, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(matches!(Bundle::open(folder.path(), None), Err(BundleError::OddConfig { .. })));
        fs::remove_file(&config).unwrap();
        fs::create_dir(&config).unwrap();
        assert!(matches!(Bundle::open(folder.path(), None), Err(BundleError::OddConfig { .. })));
    }

    #[test]
    fn what_is_no_configuration_is_refused_with_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
        for text in ["", "not json", "{", r#"{"a": 1,}"#, &deep] {
            fs::write(folder.path().join("config.json"), text).unwrap();
            let bundle = Bundle::open(folder.path(), None).unwrap();
            assert!(matches!(bundle.json(), Err(BundleError::Malformed { .. })), "{text:.20}");
        }
    }
}
