//! A machine as a node of a cluster, on which the installer of the image runs, and is killed.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

use gpushare_tests::artifacts;
use gpushare_tests::command::{self, Outcome};
use gpushare_tests::machine::{Machine, entries};
use gpushare_tests::scratch::Scratch;
use nix::mount::{MsFlags, mount};

use super::{ENGINE_FILE, build, image};

/// A machine as a node: its engine is containerd, which systemd restarts.
pub struct Node {
    pub machine: Machine,
    pub scratch: Scratch,
}

impl Node {
    pub fn new() -> Self {
        let node = Self { machine: Machine::new(), scratch: Scratch::new("steps") };
        // The machine's own devices are no business of a test.
        let dev = node.machine.path("dev");
        mount(Some("tmpfs"), &dev, Some("tmpfs"), MsFlags::empty(), None::<&str>)
            .expect("a tmpfs can be mounted");
        let _ = command::run(Command::new("mknod").arg(dev.join("null")).args(["c", "1", "3"]))
            .expect_success("mknod");
        for folder in ["etc/containerd", "etc/cdi", "opt/gpushare"] {
            // It may not be there.
            let _ = fs::remove_dir_all(node.machine.path(folder));
        }
        // Notes what the engine reads when it is restarted.
        node.script(
            "usr/bin/systemctl",
            "#!/bin/sh\ncp /etc/containerd/config.toml /run/engine-reads 2>/dev/null || \
            : >/run/engine-reads\necho \"$@\" >>/run/restarts\n",
        );
        node
    }

    pub fn script(&self, path: &str, text: &str) {
        let path = self.machine.path(path);
        // The machine's own file may be a link.
        let _ = fs::remove_file(&path);
        fs::write(&path, text).expect("a file can be written in an overlay");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("and made a program");
    }

    /// `node.sh VERB` of the image `version`, on this machine's own tools.
    pub fn installer(&self, version: &'static str, verb: &str) -> Command {
        let mut run = Command::new("sh");
        run.arg(image(version).join("usr/lib/gpushare/node.sh")).arg(verb).env_clear();
        run.env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
            .env("ENGINE", "containerd")
            .env("FOLDER", "/opt/gpushare");
        run.env("HOST", self.host()).env("TREE", image(version).join("opt/gpushare"));
        run
    }

    pub fn host(&self) -> String {
        self.machine.path("").to_str().expect("its name is text").trim_end_matches('/').to_owned()
    }

    pub fn run(&self, version: &'static str, verb: &str) -> Outcome {
        command::run(&mut self.installer(version, verb))
    }

    pub fn install(&self, version: &'static str) {
        let _ = self.run(version, "install").expect_success("node.sh install");
    }

    pub fn read(&self, path: &str) -> String {
        fs::read_to_string(self.machine.path(path)).unwrap_or_default()
    }

    pub fn restarts(&self) -> usize {
        self.read("run/restarts").lines().count()
    }

    /// The build that new containers get.
    pub fn current(&self) -> Option<String> {
        let link = fs::read_link(self.machine.path("opt/gpushare/current")).ok()?;
        Some(link.to_string_lossy().into_owned())
    }

    pub fn has(&self, version: &'static str) -> bool {
        self.machine.path("opt/gpushare").join(build(version)).exists()
    }

    /// Asserts that the engine's file names no runtime, or one that is there as a whole.
    pub fn assert_engine_finds_its_runtime(&self, when: &str) {
        let text = self.read(ENGINE_FILE);
        let Some((_, rest)) = text.split_once("BinaryName = \"/") else { return };
        let (path, _) = rest.split_once('"').expect("the value has an end");
        let path = self.machine.path(path);
        let found = fs::metadata(&path).unwrap_or_else(|error| panic!("{when}: {}: {error}", path.display()));
        let whole = fs::metadata(artifacts::wrapper()).expect("it is built");
        assert_eq!((found.len(), found.mode() & 0o111), (whole.len(), 0o111), "{when}");
    }

    /// All that an installation or a removal leaves: names below /opt and /etc, the link, the engine's file, and
    /// what the engine has read.
    pub fn state(&self) -> (Vec<String>, Option<String>, String, String) {
        let mut left = self.machine.left();
        left.extend(
            entries(&self.machine.path("etc/containerd")).iter().map(|path| format!("{}", path.display())),
        );
        left.retain(|path| !path.starts_with("run/") && !path.starts_with("var/"));
        (left, self.current(), self.read(ENGINE_FILE), self.read("run/engine-reads"))
    }

    /// Runs `node.sh VERB` until it has taken the step `at`, and kills all of it then: after that step, or within it
    /// if it copies a file. Returns the steps, by the names of their programs.
    pub fn killed(&self, version: &'static str, verb: &str, at: usize, within: bool) -> Vec<String> {
        let steps = self.scratch.folder("programs");
        for name in ["chroot", "cp", "ln", "mkdir", "mv", "rm", "rmdir", "sync"] {
            let path = steps.join(name);
            fs::write(&path, format!("#!/bin/sh\nname={name}\n{STEP}")).expect("a file can be written");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("and made a program");
        }
        let count = self.scratch.path().join("count");
        // It is not there at first.
        let _ = fs::remove_file(&count);
        let mut run = self.installer(version, verb);
        run.env("PATH", format!("{}:/usr/bin:/bin:/usr/sbin:/sbin", steps.display())).process_group(0);
        run.env("COUNT", &count).env("AT", at.to_string()).env("WITHIN", if within { "yes" } else { "" });
        let outcome = command::run(&mut run);
        assert_eq!(outcome.success(), at == 0, "step {at}: {outcome:?}");
        fs::read_to_string(count).expect("there are steps").lines().map(str::to_owned).collect()
    }
}

/// A program that counts its calls, and at the one that it is told ends its whole process group, as an end of the
/// container does.
const STEP: &str = r#"
echo "$name" >>"$COUNT"
PATH=/usr/bin:/bin:/usr/sbin:/sbin
number=$(wc -l <"$COUNT")
if [ "$number" = "$AT" ] && [ -n "$WITHIN" ] && [ "$name" = cp ]; then
    for last; do :; done
    head -c 1000 "$2" >"$last"
    kill -9 0
fi
"$name" "$@"
status=$?
[ "$number" != "$AT" ] || kill -9 0
exit $status
"#;
