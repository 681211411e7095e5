//! A createRuntime hook that runs gpushare's hook and watches it. It acts at the one moment at which a
//! container exists and its program does not. It goes on when gpushare's hook fails, so that a test can look
//! at what is left.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::artifacts;
use crate::bundle::Bundle;
use crate::node::SimulatedNode;
use crate::runtime::Container;

/// Shell commands around gpushare's hook. They find `$pid` (the container's init), `$root` (its root folder
/// on the host), `$state` and `$out`, a folder of the bundle.
#[derive(Clone, Copy, Debug, Default)]
pub struct Around<'a> {
    /// Run before gpushare's hook.
    pub before: &'a str,
    /// A program and its arguments that run gpushare's hook, such as strace.
    pub by: &'a str,
    /// Run after gpushare's hook.
    pub after: &'a str,
}

/// What gpushare's hook answered.
#[derive(Debug)]
pub struct Answer {
    /// Its exit status.
    pub status: i32,
    /// Its standard error.
    pub said: String,
}

/// The bundle with a hook that runs gpushare's in between, and with gpushare's poststop hook.
///
/// # Panics
/// When a path is not UTF-8.
#[must_use]
pub fn watched(bundle: Bundle, node: &SimulatedNode, around: Around) -> Bundle {
    let text = |path: &Path| path.to_str().expect("paths of tests are UTF-8").to_owned();
    // The checkout's path may have blanks.
    let word = |path: &Path| format!("'{}'", text(path).replace('\'', "'\\''"));
    let (hook, config) = (text(&artifacts::hook()), text(node.config()));
    let (root, out) = (word(&bundle.root()), word(bundle.path()));
    let (called, settings) = (word(&artifacts::hook()), word(node.config()));
    let Around { before, by, after } = around;
    let script = format!(
        "root={root}; out={out}; state=$(cat)\n\
         pid=$(printf %s \"$state\" | sed -n 's/.*\"pid\": *\\([0-9]*\\).*/\\1/p')\n\
         inside() {{ nsenter --mount=/proc/$pid/ns/mnt \"$@\"; }}\n\
         {before}\n\
         printf %s \"$state\" | {by} {called} createRuntime --config {settings} 2>$out/said\n\
         echo $? >$out/status\n\
         {after}\n\
         exit 0\n"
    );
    bundle.hook("createRuntime", Path::new("/bin/sh"), &["-c", &script]).hook(
        "poststop",
        Path::new(&hook),
        &["poststop", "--config", &config],
    )
}

impl Answer {
    /// The one line of a hook that refused.
    ///
    /// # Panics
    /// When it did not refuse, or said more or less than one line.
    #[must_use]
    pub fn refusal(&self, when: &str) -> &str {
        assert_eq!(self.status, 1, "{when}: {self:?}");
        let mut lines = self.said.lines();
        match (lines.next(), lines.next()) {
            (Some(line), None) => line,
            _ => panic!("{when}: not one line: {self:?}"),
        }
    }
}

/// What gpushare's hook answered in the container of `bundle`.
///
/// # Panics
/// When the hook was not run.
#[must_use]
pub fn answer(bundle: &Bundle) -> Answer {
    let read = |name: &str| fs::read_to_string(bundle.path().join(name));
    let status = read("status").expect("the hook was run");
    Answer {
        status: status.trim().parse().expect("a shell's status is a number"),
        said: read("said").unwrap_or_default(),
    }
}

/// Asserts that a container whose hook failed got nothing.
///
/// # Panics
/// When it got something.
pub fn assert_untouched(container: &Container<'_>, when: &str) {
    let sh = |script: &str| container.exec(&["/bin/busybox", "sh", "-c", script]);
    let made =
        sh("ls /dev | grep nvidia; cat /proc/self/mountinfo | grep -e libcuda -e nvidia -e gpushare/limits");
    assert_eq!(made.stdout, "", "{when}");
    for node in ["195 0", "195 255"] {
        let told = sh(&format!("busybox mknod /tmp/n$$ c {node} && cat /tmp/n$$")).stderr;
        assert!(told.contains("Operation not permitted"), "{when}: {node}: {told}");
    }
}

/// A folder of the host that no container may change, with one file in it.
#[derive(Debug)]
pub struct Canary {
    scratch: crate::scratch::Scratch,
    changed: (i64, i64),
}

impl Canary {
    /// Makes the folder and its file.
    #[must_use]
    pub fn new() -> Self {
        let scratch = crate::scratch::Scratch::new("canary");
        scratch.file("file", "host");
        let changed = changed(scratch.path());
        Self { scratch, changed }
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.scratch.path()
    }

    /// The file in it.
    #[must_use]
    pub fn file(&self) -> PathBuf {
        self.path().join("file")
    }

    /// Asserts that folder and file are as they were.
    ///
    /// # Panics
    /// When they are not.
    pub fn assert_unchanged(&self, when: &str) {
        let names: Vec<_> = fs::read_dir(self.path()).expect("the folder is there").flatten().collect();
        let names: Vec<_> = names.iter().map(fs::DirEntry::file_name).collect();
        assert_eq!(names, ["file"], "{when}: something was made on the host");
        assert_eq!(fs::read(self.file()).expect("the file is there"), b"host", "{when}");
        // A file that was made and removed again has changed the folder's time.
        assert_eq!(changed(self.path()), self.changed, "{when}: the folder was changed on the host");
    }
}

/// When a file or folder was changed, in seconds and nanoseconds.
fn changed(path: &Path) -> (i64, i64) {
    let metadata = fs::symlink_metadata(path).expect("a canary can be looked at");
    (metadata.ctime(), metadata.ctime_nsec())
}

impl Default for Canary {
    fn default() -> Self {
        Self::new()
    }
}
