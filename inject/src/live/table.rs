//! A mount table as /proc shows it, and which mount a descriptor lies on.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};

use super::LiveError;

/// The fields of a mountinfo line that are needed here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    pub id: u64,
    /// `major:minor` of its file system.
    device: String,
    /// Whether what is mounted on it also appears in other namespaces.
    pub shared: bool,
    kind: String,
}

/// The mounts of one namespace.
#[derive(Debug)]
pub(super) struct Table(Vec<Mount>);

impl Table {
    /// Reads a mountinfo file as bytes, because a path may be no UTF-8. A line of another form is left out,
    /// so that what lies on it counts as unknown.
    pub fn parse(text: &[u8]) -> Self {
        Self(text.split(|byte| *byte == b'\n').filter_map(mount).collect())
    }

    /// The mount that `fd` lies on.
    pub fn find(&self, fd: impl AsFd) -> Result<Option<&Mount>, LiveError> {
        let id = mount_id(fd)?;
        Ok(self.0.iter().find(|mount| mount.id == id))
    }
}

impl Mount {
    /// Whether this is a memory file system that nobody in the namespace `others` sees, such as the /dev that
    /// the runtime made for the container.
    pub fn is_private_tmpfs(&self, others: &Table) -> bool {
        self.kind == "tmpfs" && others.0.iter().all(|other| other.device != self.device)
    }
}

/// Reads a line `ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [TAG...] - KIND SOURCE SUPER`.
fn mount(line: &[u8]) -> Option<Mount> {
    let text = String::from_utf8_lossy(line);
    let mut fields = text.split(' ');
    let id = fields.next()?.parse().ok()?;
    let device = fields.nth(1)?.to_owned();
    let rest: Vec<&str> = fields.skip(3).collect();
    let end = rest.iter().position(|field| *field == "-")?;
    let shared = rest.get(..end)?.iter().any(|tag| tag.starts_with("shared:"));
    let kind = (*rest.get(end + 1)?).to_owned();
    Some(Mount { id, device, shared, kind })
}

fn mount_id(fd: impl AsFd) -> Result<u64, LiveError> {
    let path = format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd());
    let text = fs::read_to_string(&path).map_err(|source| LiveError::io("read", &path, source))?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| LiveError::io("understand", &path, std::io::Error::other("no mnt_id")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &[u8] = b"25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
        26 25 0:22 / /dev rw - tmpfs tmpfs rw\nodd line\n27 25 0:40 /x\\040y /v\xff rw shared:3 master:1 - tmpfs none rw\n";

    #[test]
    fn a_mount_is_known_by_its_id_whatever_its_path() {
        let table = Table::parse(HOST);
        assert_eq!(table.0.iter().map(|mount| mount.id).collect::<Vec<_>>(), [25, 26, 27]);
        assert_eq!(table.0.iter().map(|mount| mount.shared).collect::<Vec<_>>(), [true, false, true]);
        assert_eq!((table.0[2].device.as_str(), table.0[2].kind.as_str()), ("0:40", "tmpfs"));
    }

    #[test]
    fn only_a_memory_file_system_that_the_host_has_not_is_the_containers_own() {
        let host = Table::parse(HOST);
        for (line, want) in [
            ("90 80 0:77 / /root/dev rw - tmpfs tmpfs rw", true),
            ("90 80 0:40 / /root/v rw - tmpfs tmpfs rw", false),
            ("90 80 0:77 / /root/proc rw - proc proc rw", false),
            ("90 80 8:1 /v /root/v rw - ext4 /dev/sda1 rw", false),
        ] {
            let table = Table::parse(line.as_bytes());
            assert_eq!(table.0[0].is_private_tmpfs(&host), want, "{line}");
        }
    }

    #[test]
    fn a_descriptor_names_its_mount() {
        let table = Table::parse(&fs::read("/proc/self/mountinfo").unwrap());
        let proc = fs::File::open("/proc/self").unwrap();
        assert_eq!(table.find(&proc).unwrap().unwrap().kind, "proc");
    }
}
