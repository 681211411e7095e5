//! The plan's mounts. They are cloned and restricted in the host's namespace, and a child process attaches
//! them in the container's.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::sys::stat::{Mode, SFlag, fstat};
use oci_spec::runtime::Mount;

use super::process::identity;
use super::root::Root;
use super::{LiveError, child};
use crate::image::kind;
use crate::sys;

/// A mount that is ready to be attached.
#[derive(Debug)]
pub(super) struct Tree {
    fd: OwnedFd,
    /// Device and inode of the source.
    identity: (u64, u64),
    is_folder: bool,
    destination: PathBuf,
}

impl Tree {
    /// Clones the source of a mount of the plan; it is attached nowhere yet.
    pub fn of(mount: &Mount) -> Result<Self, LiveError> {
        let destination = mount.destination().clone();
        let source = mount.source().as_deref().unwrap_or(Path::new(""));
        let at = |errno| LiveError::at("open", source, errno);
        let file = open(source, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).map_err(at)?;
        let stat = fstat(&file).map_err(at)?;
        let is_folder = kind(&stat) == SFlag::S_IFDIR;
        let fd = sys::clone_tree(file.as_fd()).map_err(|errno| LiveError::kernel("clone a mount", errno))?;
        let options = mount.options().as_deref().unwrap_or_default();
        sys::set_attributes(fd.as_fd(), attributes(options, is_folder))
            .map_err(|errno| LiveError::kernel("restrict a mount", errno))?;
        Ok(Self { fd, identity: identity(&stat), is_folder, destination })
    }

    /// Opens the target in the container; makes it if it is missing.
    pub fn target(&self, root: &mut Root) -> Result<OwnedFd, LiveError> {
        if self.is_folder { root.folder_target(&self.destination) } else { root.file(&self.destination) }
    }

    /// Checks that the container sees the source at its target now.
    pub fn check(&self, root: &Root) -> Result<(), LiveError> {
        if identity(&root.look_up(&self.destination)?) == self.identity {
            return Ok(());
        }
        Err(LiveError::BadTarget { target: self.destination.clone(), what: "a place that is being changed" })
    }
}

/// The options of a plan as mount attributes. Links below a folder belong to the administrator and are
/// followed.
fn attributes(options: &[String], is_folder: bool) -> u64 {
    let named = options.iter().map(|option| match option.as_str() {
        "ro" => libc::MOUNT_ATTR_RDONLY,
        "nosuid" => libc::MOUNT_ATTR_NOSUID,
        "nodev" => libc::MOUNT_ATTR_NODEV,
        "noexec" => libc::MOUNT_ATTR_NOEXEC,
        _ => 0,
    });
    let links = if is_folder { 0 } else { libc::MOUNT_ATTR_NOSYMFOLLOW };
    named.fold(links, |all, one| all | one)
}

/// Attaches each tree at its target, in the container's mount namespace.
pub(super) fn attach(namespace: &OwnedFd, trees: &[Tree], targets: &[OwnedFd]) -> Result<(), LiveError> {
    let pairs = trees.iter().zip(targets).flat_map(|(tree, target)| [&tree.fd, target]);
    match run(child::ATTACH, namespace, pairs)? {
        0 => Ok(()),
        status => Err(LiveError::kernel("attach the mounts", Errno::from_raw(status))),
    }
}

/// Detaches those of the trees that were attached, newest first.
pub(super) fn detach(namespace: &OwnedFd, trees: &[Tree]) -> Result<(), LiveError> {
    run(child::DETACH, namespace, trees.iter().rev().map(|tree| &tree.fd)).map(drop)
}

/// Runs the child with these descriptors, and returns its exit status: 0 or an errno.
fn run<'a>(
    verb: &str,
    namespace: &'a OwnedFd,
    descriptors: impl Iterator<Item = &'a OwnedFd>,
) -> Result<i32, LiveError> {
    let failed = |source| LiveError::io("run", "the child that enters the container", source);
    let program = own_program().map_err(|errno| LiveError::kernel("bind this program read-only", errno))?;
    let mut words = vec![OsString::from(verb)];
    for fd in [namespace].into_iter().chain(descriptors) {
        sys::inherit(fd).map_err(|errno| failed(errno.into()))?;
        words.push(fd.as_raw_fd().to_string().into());
    }
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
    command.arg0("gpushare-hook").args(words).env_clear().current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let status = command.status().map_err(failed)?;
    // No exit status: a signal killed the child, the seccomp filter's or somebody's.
    Ok(status.code().unwrap_or(libc::EINTR))
}

/// This program on a read-only mount of its own. A process of the container that reaches the child's
/// /proc/PID/exe cannot write to the file on the host through it (CVE-2019-5736).
fn own_program() -> Result<OwnedFd, Errno> {
    let file = open("/proc/self/exe", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let program = sys::clone_tree(file.as_fd())?;
    sys::set_attributes(program.as_fd(), libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID)?;
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plans_options_become_attributes_and_others_none() {
        let options = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        let (ro, nosuid) = (libc::MOUNT_ATTR_RDONLY, libc::MOUNT_ATTR_NOSUID);
        let (nodev, noexec) = (libc::MOUNT_ATTR_NODEV, libc::MOUNT_ATTR_NOEXEC);
        let links = libc::MOUNT_ATTR_NOSYMFOLLOW;
        for (text, is_folder, want) in [
            ("ro,nosuid,nodev,rbind,rprivate", false, ro | nosuid | nodev | links),
            ("rw,nosuid,nodev,noexec,rbind,rprivate", false, nosuid | nodev | noexec | links),
            ("ro,nosuid,nodev,noexec,rbind,rprivate", true, ro | nosuid | nodev | noexec),
        ] {
            assert_eq!(attributes(&options(text), is_folder), want, "{text}");
        }
    }
}
