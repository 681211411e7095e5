//! A mount table as /proc shows it, and which mount a descriptor lies on.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// The fields of a mountinfo line that are needed here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub id: u64,
    /// `major:minor` of its file system.
    device: String,
    /// Whether what is mounted on it also appears in other namespaces.
    pub shared: bool,
    kind: String,
    /// The folder of an overlay that takes what is written; `None` where there is none, or where only a part
    /// of the overlay is mounted.
    pub upper: Option<PathBuf>,
}

/// The mounts of one namespace.
#[derive(Debug)]
pub(crate) struct Table(Vec<Mount>);

impl Table {
    /// Reads a mountinfo file as bytes, because a path may be no UTF-8. A line of another form is left out,
    /// so that what lies on it counts as unknown.
    pub fn parse(text: &[u8]) -> Self {
        Self(text.split(|byte| *byte == b'\n').filter_map(mount).collect())
    }

    /// The mount that `fd` lies on.
    ///
    /// # Errors
    /// When the descriptor's mount cannot be read from /proc.
    pub fn find(&self, fd: impl AsFd) -> io::Result<Option<&Mount>> {
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
    let is_whole = fields.next()? == "/";
    let rest: Vec<&str> = fields.skip(2).collect();
    let end = rest.iter().position(|field| *field == "-")?;
    let shared = rest.get(..end)?.iter().any(|tag| tag.starts_with("shared:"));
    let kind = (*rest.get(end + 1)?).to_owned();
    let options = line.rsplit(|byte| *byte == b' ').next().filter(|_| is_whole && kind == "overlay");
    let mut options = options.unwrap_or_default().split(|byte| *byte == b',');
    let upper = options.find_map(|option| option.strip_prefix(b"upperdir="));
    Some(Mount { id, device, shared, kind, upper: upper.map(unescaped) })
}

/// The path that mountinfo writes with `\040` for a blank.
fn unescaped(text: &[u8]) -> PathBuf {
    let (mut path, mut rest) = (Vec::with_capacity(text.len()), text);
    while let Some((first, behind)) = rest.split_first() {
        let digits =
            behind.get(..3).filter(|_| *first == b'\\').and_then(|digits| str::from_utf8(digits).ok());
        let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        path.push(escaped.unwrap_or(*first));
        rest = behind.get(if escaped.is_some() { 3 } else { 0 }..).unwrap_or_default();
    }
    OsString::from_vec(path).into()
}

fn mount_id(fd: impl AsFd) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd()))?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::Error::other("no mnt_id"))
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
    fn an_overlay_names_the_folder_that_takes_what_is_written() {
        let overlay = |root: &str, kind: &str, options: &str| {
            let line = format!("90 80 0:77 {root} /x/merged rw shared:9 - {kind} overlay {options}");
            Table::parse(line.as_bytes()).0[0].upper.clone()
        };
        let all = "rw,lowerdir=l/A:l/B,upperdir=/a\\040b/diff,workdir=/a\\040b/work";
        assert_eq!(overlay("/", "overlay", all), Some("/a b/diff".into()));
        assert_eq!(overlay("/", "overlay", "ro,lowerdir=/a:/b"), None);
        assert_eq!(overlay("/", "ext4", all), None);
        assert_eq!(overlay("/etc", "overlay", all), None, "a part of one");
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
