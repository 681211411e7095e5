//! The device rules of the container's cgroup: allows to read and write the granted nodes, and changes
//! nothing else.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use gpushare_quota::cgroup_path;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::Mode;
use nix::sys::statfs::{CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, fstatfs, statfs};
use oci_spec::runtime::LinuxDeviceCgroup;

use super::LiveError;
use super::filter::Filter;
use super::process::Process;
use super::program::Device;

const V2: &str = "/sys/fs/cgroup";
const V1: &str = "/sys/fs/cgroup/devices";

/// A change of a cgroup's rules, ready to be made.
#[derive(Debug)]
pub(super) enum Rules {
    /// cgroup v1: the cgroup, and the lines for its devices.allow.
    Lines(OwnedFd, Vec<String>),
    /// cgroup v2: the changed device program.
    Filter(Filter),
    /// Nothing to change: the container may open every device.
    None,
}

impl Rules {
    /// Prepares the change for the cgroup of `process`. `privileged` says that the bundle allows every device
    /// on purpose.
    pub fn prepare(
        process: &Process,
        rules: &[LinuxDeviceCgroup],
        privileged: bool,
    ) -> Result<Self, LiveError> {
        let devices = rules.iter().map(device).collect::<Option<Vec<_>>>();
        let devices = devices.ok_or(LiveError::Rules { reason: "the plan has a rule without numbers" })?;
        let is_v2 = statfs(V2).is_ok_and(|found| found.filesystem_type() == CGROUP2_SUPER_MAGIC);
        let groups = process.read("cgroup")?;
        let found = if is_v2 {
            let cgroup = own_cgroup(process, V2, cgroup_path(&groups, None))?;
            Filter::prepare(cgroup, &devices)?.map(Self::Filter)
        } else {
            let cgroup = own_cgroup(process, V1, cgroup_path(&groups, Some("devices")))?;
            lines(cgroup, &devices)?
        };
        match found {
            Some(rules) => Ok(rules),
            None if privileged => Ok(Self::None),
            None => Err(LiveError::Rules {
                reason: "the cgroup lets the container open every device, though its bundle does not say so",
            }),
        }
    }

    pub fn apply(&self) -> Result<(), LiveError> {
        match self {
            Self::Filter(filter) => filter.apply(),
            Self::Lines(cgroup, lines) => {
                lines.iter().try_for_each(|line| write(cgroup, "devices.allow", line))
            }
            Self::None => Ok(()),
        }
    }

    pub fn undo(&self) {
        match self {
            Self::Filter(filter) => filter.undo(),
            Self::Lines(cgroup, lines) => {
                lines.iter().for_each(|line| drop(write(cgroup, "devices.deny", line)))
            }
            Self::None => {}
        }
    }
}

fn device(rule: &LinuxDeviceCgroup) -> Option<Device> {
    let number = |number: Option<i64>| u32::try_from(number?).ok();
    Some(Device { major: number(rule.major())?, minor: number(rule.minor())? })
}

/// Opens the cgroup's folder. The process must be in it, and it must not be the root cgroup.
fn own_cgroup(process: &Process, base: &str, path: Option<&Path>) -> Result<OwnedFd, LiveError> {
    let none = || LiveError::Rules { reason: "the container has no cgroup of its own with device rules" };
    let path = path.ok_or_else(none)?.strip_prefix("/").map_err(|_| none())?;
    if path.as_os_str().is_empty() {
        return Err(none());
    }
    let whole = Path::new(base).join(path);
    let at = |errno| LiveError::at("open the cgroup", &whole, errno);
    let flags = OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let base = open(base, flags | OFlag::O_PATH, Mode::empty()).map_err(at)?;
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
    let cgroup = openat2(&base, path, OpenHow::new().flags(flags).resolve(resolve)).map_err(at)?;
    let kind = fstatfs(&cgroup).map_err(at)?.filesystem_type();
    if kind != CGROUP_SUPER_MAGIC && kind != CGROUP2_SUPER_MAGIC {
        return Err(none());
    }
    let pid = process.pid().to_string();
    if !read(&cgroup, "cgroup.procs", &whole)?.lines().any(|line| line == pid) {
        return Err(process.is_not_it("is not in the cgroup that it names"));
    }
    Ok(cgroup)
}

/// The rules that the cgroup lacks; `None` when it allows everything.
fn lines(cgroup: OwnedFd, devices: &[Device]) -> Result<Option<Rules>, LiveError> {
    let listed = read(&cgroup, "devices.list", Path::new(V1))?;
    Ok(missing(&listed, devices).map(|lines| Rules::Lines(cgroup, lines)))
}

fn missing(listed: &str, devices: &[Device]) -> Option<Vec<String>> {
    if listed.lines().any(|line| line.starts_with("a ")) {
        return None;
    }
    // A rule that is there already is somebody else's: it is left out, so that undoing leaves it.
    let wanted = devices.iter().map(|device| format!("c {}:{} rw", device.major, device.minor));
    Some(wanted.filter(|line| !listed.lines().any(|there| there.starts_with(line.as_str()))).collect())
}

fn read(cgroup: &OwnedFd, name: &str, whole: &Path) -> Result<String, LiveError> {
    let at = |errno| LiveError::at("read the cgroup", whole, errno);
    let file = openat(cgroup, name, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty()).map_err(at)?;
    let mut text = String::new();
    File::from(file).take(1 << 20).read_to_string(&mut text).map_err(|_| at(Errno::EIO))?;
    Ok(text)
}

/// Writes one rule: the kernel takes one per write.
fn write(cgroup: &OwnedFd, name: &str, line: &str) -> Result<(), LiveError> {
    let failed = |source| LiveError::io("write", Path::new(V1).join(name), source);
    let file = openat(cgroup, name, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty());
    let mut file = File::from(file.map_err(|errno| failed(errno.into()))?);
    file.write_all(line.as_bytes()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_missing_rules_are_written_and_none_where_everything_is_allowed() {
        let devices = [Device { major: 195, minor: 0 }, Device { major: 195, minor: 255 }];
        for (listed, want) in [
            ("", Some(vec!["c 195:0 rw", "c 195:255 rw"])),
            ("c 1:3 rwm\nc 195:255 rwm\n", Some(vec!["c 195:0 rw"])),
            ("c 195:2555 rw\n", Some(vec!["c 195:0 rw", "c 195:255 rw"])),
            ("a *:* rwm\n", None),
        ] {
            let found = missing(listed, &devices);
            assert_eq!(found, want.map(|lines| lines.into_iter().map(str::to_owned).collect()), "{listed:?}");
        }
    }
}
