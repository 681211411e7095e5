//! Writes whole files of settings, the engines' and ours. It writes a temporary file beside the old
//! one and renames it, so that the old text stands until the new one does.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use gpushare_config::{DEFAULT_PATH, ENVIRONMENT};
use nix::libc::{O_NONBLOCK, makedev};
use nix::unistd::{Gid, Uid};
use xattr::FileExt;

/// The number of /dev/null (the kernel's devices.txt).
const NULL: u64 = makedev(1, 3);
/// The longest file that is read, in bytes; no engine's settings are longer.
const LONGEST: u64 = 4 << 20;

/// A file's text before and after an edit; `None` is no file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileChange {
    /// Path of the file, which is no link.
    pub path: PathBuf,
    /// The text that the file has now.
    pub before: Option<String>,
    /// The text that it shall have.
    pub after: Option<String>,
}

impl FileChange {
    /// Whether there is anything to write.
    pub fn changes(&self) -> bool {
        self.before != self.after
    }

    fn reversed(&self) -> Self {
        Self { path: self.path.clone(), before: self.after.clone(), after: self.before.clone() }
    }
}

/// The file that `path` names. A link is followed to its end, since a rename would replace the link.
///
/// # Errors
/// When the link leads nowhere or the path is no regular file.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    let Ok(metadata) = path.symlink_metadata() else { return absolute(path) };
    let resolved = if metadata.is_symlink() {
        path.canonicalize().with_context(|| format!("{} is a link that leads nowhere", path.display()))?
    } else {
        absolute(path)?
    };
    ensure!(resolved.is_file(), "{} is not a regular file", path.display());
    Ok(resolved)
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("cannot tell where {} is", path.display()))
}

/// The text of a file; `None` where there is none.
///
/// # Errors
/// When it cannot be read, is no regular file, is longer than 4 MiB or is not UTF-8.
pub fn read(path: &Path) -> Result<Option<String>> {
    let named = || format!("cannot read {}", path.display());
    // What waits for a writer is not waited for.
    let file = match File::options().read(true).custom_flags(O_NONBLOCK).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.with_context(named)?,
    };
    let metadata = file.metadata().with_context(named)?;
    // Who masks a file puts this in its place.
    if metadata.file_type().is_char_device() && metadata.rdev() == NULL {
        return Ok(Some(String::new()));
    }
    ensure!(metadata.is_file(), "{} is not a regular file", path.display());
    let mut bytes = Vec::new();
    file.take(LONGEST + 1).read_to_end(&mut bytes).with_context(named)?;
    ensure!(bytes.len() as u64 <= LONGEST, "{} is longer than 4 MiB", path.display());
    match String::from_utf8(bytes) {
        Ok(text) => Ok(Some(text)),
        Err(error) => {
            let valid = error.utf8_error().valid_up_to();
            let line = error.as_bytes()[..valid].iter().filter(|byte| **byte == b'\n').count() + 1;
            bail!("{}, line {line}: not UTF-8: save the file as UTF-8", path.display())
        }
    }
}

/// Writes all of `changes`, in their order, or none: if one fails, those before it are taken back.
///
/// # Errors
/// When a file cannot be written, or was changed by others since it was read.
pub fn apply(changes: &[FileChange]) -> Result<()> {
    for (number, change) in changes.iter().enumerate() {
        if let Err(error) = replace(change) {
            revert(&changes[..number]).context("and what was written before could not be taken back")?;
            return Err(error);
        }
    }
    Ok(())
}

/// Takes `changes` back, the last one first.
///
/// # Errors
/// When a file cannot be written, or was changed by others since.
pub fn revert(changes: &[FileChange]) -> Result<()> {
    changes.iter().rev().try_for_each(|change| replace(&change.reversed()))
}

/// The node's own settings file: the one that the environment names, else the usual one.
pub fn settings() -> PathBuf {
    let named = std::env::var_os(ENVIRONMENT).filter(|path| !path.is_empty());
    named.map_or_else(|| PathBuf::from(DEFAULT_PATH), PathBuf::from)
}

/// The file `name` among those that are read after [`settings`].
pub fn drop_in(name: &str) -> PathBuf {
    let mut folder = settings().into_os_string();
    folder.push(".d");
    PathBuf::from(folder).join(name)
}

/// How long a command waits for another one that changes settings.
const PATIENCE: Duration = Duration::from_secs(5);

/// Waits until no other command changes settings, an engine's or ours, and keeps others waiting until the turn is
/// dropped. Anybody may lock a folder, so nobody is waited for long: [`apply`] still finds what others changed
/// before it.
pub fn turn() -> Option<File> {
    let folder = File::open(settings().ancestors().skip(1).find(|folder| folder.is_dir())?).ok()?;
    let begin = Instant::now();
    while matches!(folder.try_lock(), Err(TryLockError::WouldBlock)) && begin.elapsed() < PATIENCE {
        sleep(Duration::from_millis(10));
    }
    Some(folder)
}

fn replace(change: &FileChange) -> Result<()> {
    if !change.changes() {
        return Ok(());
    }
    let path = &change.path;
    match &change.after {
        Some(text) => write(path, text, change.before.as_deref())?,
        None => {
            unchanged(path, change.before.as_deref())?;
            fs::remove_file(path).with_context(|| format!("cannot delete {}", path.display()))?;
        }
    }
    let folder = path.parent().unwrap_or(Path::new("/"));
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .with_context(|| format!("cannot save {}", folder.display()))
}

/// How the name of a new file begins and ends until it takes the old one's place.
const TEMPORARY: (&str, &str) = (".gpushare-", ".tmp");
/// Longer than any command needs one.
const STALE: Duration = Duration::from_secs(60);

/// Removes what a command left in `folder` that was killed while it wrote.
fn forget_stale(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_ours =
            name.to_str().is_some_and(|name| name.starts_with(TEMPORARY.0) && name.ends_with(TEMPORARY.1));
        let age = || entry.metadata().ok().filter(fs::Metadata::is_file)?.modified().ok()?.elapsed().ok();
        if is_ours && age().is_some_and(|age| age > STALE) {
            // Nobody needs it, and nobody is hindered by it.
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn write(path: &Path, text: &str, before: Option<&str>) -> Result<()> {
    let named = || format!("cannot write {}", path.display());
    let folder = path.parent().unwrap_or(Path::new("/"));
    if before.is_none() {
        let made = fs::create_dir_all(folder);
        // The kernel says that there is something already.
        ensure!(made.is_ok() || !folder.is_symlink(), "{} is a link that leads nowhere", folder.display());
        made.with_context(named)?;
    }
    forget_stale(folder);
    // A name that no engine's pattern of drop-ins matches.
    let mut file = tempfile::Builder::new()
        .prefix(TEMPORARY.0)
        .suffix(TEMPORARY.1)
        .tempfile_in(folder)
        .with_context(named)?;
    file.write_all(text.as_bytes()).with_context(named)?;
    dress(file.as_file(), path).with_context(named)?;
    file.as_file().sync_all().with_context(named)?;
    unchanged(path, before)?;
    match before {
        Some(_) => file.persist(path).map_err(|error| error.error).with_context(named)?,
        None => file.persist_noclobber(path).map_err(|error| error.error).with_context(named)?,
    };
    Ok(())
}

/// Gives the new file the old one's mode, owner and extended attributes, among which are access lists and labels. A
/// file without an old one may be read by everybody, as engines' settings may.
fn dress(file: &File, like: &Path) -> Result<()> {
    let mode = |mode| file.set_permissions(fs::Permissions::from_mode(mode));
    let Ok(old) = File::open(like) else { return Ok(mode(0o644)?) };
    let (had, new) = (old.metadata()?, file.metadata()?);
    if (new.uid(), new.gid()) != (had.uid(), had.gid()) {
        nix::unistd::fchown(file, Some(Uid::from_raw(had.uid())), Some(Gid::from_raw(had.gid())))?;
    }
    mode(had.mode() & 0o7777)?;
    attributes(file, &old)
}

/// The access list of a file, which a new one also has from its folder.
const ACCESS_LIST: &str = "system.posix_acl_access";
/// Attributes that the kernel makes of a file's bytes.
const OF_BYTES: [&str; 2] = ["security.evm", "security.ima"];

/// Gives the new file the extended attributes of the old one, where files have any.
fn attributes(file: &File, old: &File) -> Result<()> {
    let list = |file: &File| match file.list_xattr() {
        Err(error) if error.raw_os_error() == Some(nix::libc::ENOTSUP) => Ok(vec![]),
        listed => listed.map(Iterator::collect::<Vec<OsString>>),
    };
    let kept = list(old)?;
    if list(file)?.iter().any(|name| name == ACCESS_LIST) && !kept.iter().any(|name| name == ACCESS_LIST) {
        file.remove_xattr(ACCESS_LIST)?;
    }
    for name in kept.iter().filter(|name| OF_BYTES.iter().all(|made| name != made)) {
        let Some(value) = old.get_xattr(name)? else { continue };
        if file.get_xattr(name)?.as_ref() != Some(&value) {
            file.set_xattr(name, &value)
                .with_context(|| format!("cannot keep its attribute {}", name.display()))?;
        }
    }
    Ok(())
}

fn unchanged(path: &Path, before: Option<&str>) -> Result<()> {
    ensure!(
        read(path)?.as_deref() == before,
        "{} was changed by somebody else meanwhile: run the command again",
        path.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn change(path: &Path, before: Option<&str>, after: Option<&str>) -> FileChange {
        FileChange {
            path: path.to_path_buf(),
            before: before.map(str::to_owned),
            after: after.map(str::to_owned),
        }
    }

    #[test]
    fn a_file_keeps_its_mode_and_nothing_else_appears_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        apply(&[change(&path, Some("old"), Some("new"))]).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_keeps_its_access_list_and_its_attributes_and_gets_none_of_its_folders() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "old").unwrap();
        // Version 2; then tag, rights and id of owner, user 1234, group, mask and others.
        let list = |user: u32, entries: &[(u16, u16, u32)]| {
            let entries =
                entries.iter().map(|&(tag, rights, id)| (tag, rights, if tag == 2 { user } else { id }));
            let bytes = entries.flat_map(|(tag, rights, id)| {
                [&tag.to_le_bytes()[..], &rights.to_le_bytes(), &id.to_le_bytes()].concat()
            });
            2_u32.to_le_bytes().into_iter().chain(bytes).collect::<Vec<u8>>()
        };
        let none = u32::MAX;
        let entries = [(1, 6, none), (2, 4, none), (4, 0, none), (16, 4, none), (32, 0, none)];
        if xattr::set(&path, "user.note", b"mine").is_err() {
            // A file system without attributes has none to lose.
            return;
        }
        xattr::set(&path, ACCESS_LIST, &list(1234, &entries)).unwrap();
        xattr::set(folder.path(), "system.posix_acl_default", &list(4321, &entries)).unwrap();
        apply(&[change(&path, Some("old"), Some("new"))]).unwrap();
        assert_eq!(xattr::get(&path, "user.note").unwrap().as_deref(), Some(&b"mine"[..]));
        assert_eq!(xattr::get(&path, ACCESS_LIST).unwrap(), Some(list(1234, &entries)));
        xattr::remove(&path, ACCESS_LIST).unwrap();
        apply(&[change(&path, Some("new"), Some("newer"))]).unwrap();
        assert_eq!(xattr::get(&path, ACCESS_LIST).unwrap(), None, "the folder's list is not the file's");
    }

    #[test]
    fn what_a_killed_command_left_goes_and_what_another_one_writes_stays() {
        let folder = tempfile::tempdir().unwrap();
        let [path, stale, fresh, others] =
            ["a", ".gpushare-x.tmp", ".gpushare-y.tmp", ".other-z.tmp"].map(|name| folder.path().join(name));
        for file in [&path, &stale, &fresh, &others] {
            fs::write(file, "old").unwrap();
        }
        let long_ago = std::time::SystemTime::now() - 2 * STALE;
        for file in [&stale, &others] {
            File::options().write(true).open(file).unwrap().set_modified(long_ago).unwrap();
        }
        apply(&[change(&path, Some("old"), Some("new"))]).unwrap();
        assert_eq!([&stale, &fresh, &others].map(|file| file.exists()), [false, true, true]);
    }

    #[test]
    fn a_link_stays_and_its_file_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "old").unwrap();
        symlink(&file, &link).unwrap();
        let resolved = resolve(&link).unwrap();
        apply(&[change(&resolved, Some("old"), Some("new"))]).unwrap();
        assert!(link.symlink_metadata().unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        symlink(folder.path().join("nowhere"), folder.path().join("dangling")).unwrap();
        assert!(resolve(&folder.path().join("dangling")).unwrap_err().to_string().contains("leads nowhere"));
        assert!(resolve(folder.path()).unwrap_err().to_string().contains("not a regular file"));
    }

    #[test]
    fn when_one_file_fails_those_before_it_are_as_they_were() {
        let folder = tempfile::tempdir().unwrap();
        let (first, gone, second) =
            (folder.path().join("first"), folder.path().join("gone"), folder.path().join("second"));
        fs::write(&first, "old").unwrap();
        fs::write(&gone, "there").unwrap();
        fs::write(&second, "changed by others").unwrap();
        let changes = [
            change(&first, Some("old"), Some("new")),
            change(&gone, Some("there"), None),
            change(&second, Some("as it was read"), Some("new")),
        ];
        let error = apply(&changes).unwrap_err().to_string();
        assert!(error.contains("somebody else"), "{error}");
        assert_eq!(fs::read_to_string(&first).unwrap(), "old");
        assert_eq!(fs::read_to_string(&gone).unwrap(), "there");
        assert_eq!(fs::read_to_string(&second).unwrap(), "changed by others");
    }

    #[test]
    fn a_text_that_is_not_utf_8_is_refused_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, b"a\nb \xff\n").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.ends_with("a, line 2: not UTF-8: save the file as UTF-8"), "{error}");
    }
}
