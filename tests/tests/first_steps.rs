//! README's first container, command by command as the page has them, on a machine with the distribution's
//! smallest set of packages and docker.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use gpushare_tests::command::{self, Outcome};
use gpushare_tests::daemon::Daemon;
use gpushare_tests::machine::Machine;
use gpushare_tests::namespace::private;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::scratch::Scratch;
use gpushare_tests::{artifacts, image, node};

/// The commands of README's first container: the first block of that section.
fn commands() -> Vec<String> {
    let readme = fs::read_to_string(artifacts::checkout().join("README.md")).expect("it is in the checkout");
    let (_, section) = readme.split_once("\n## First container").expect("README has this section");
    let (_, block) = section.split_once("```sh\n").expect("the section has commands");
    let (block, _) = block.split_once("```").expect("the block ends");
    block.lines().map(str::to_owned).collect()
}

/// Stands for sudo, which a bare machine does not have: root needs none.
const SUDO: &str = "#!/bin/sh\nexec \"$@\"\n";

/// Stands for systemd's client, where no systemd runs: it tells docker what its unit would. The page's reader
/// types the next command after docker has read its settings, so this waits for that.
const SYSTEMCTL: &str = r#"#!/bin/sh
[ "$*" = "reload docker" ] || exit 1
kill -HUP "$(cat /run/docker.pid)"
until docker info --format '{{json .Runtimes}}' | grep -q gpushare; do sleep 0.1; done
"#;

/// A bare machine on which docker runs and knows the image `ubuntu`, and on which nobody has used gpushare.
struct Place {
    // Dropped first: it stops its containers and its containerd.
    _docker: Daemon,
    machine: Machine,
    _scratch: Scratch,
}

impl Place {
    fn new() -> Self {
        let (machine, scratch) = (Machine::bare(), Scratch::new("first-steps"));
        for (name, text) in [("sudo", SUDO), ("systemctl", SYSTEMCTL)] {
            let path = machine.path("usr/local/bin").join(name);
            fs::write(&path, text).expect("a file can be written in an overlay");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("and made a program");
        }
        let flags =
            ["dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs"];
        let answers = || machine.run(&["docker", "version"]).success();
        let docker = Daemon::start(&mut machine.chroot(&flags), &scratch.folder("log"), answers);
        let archive = image::archive(&scratch);
        let _ = fs::copy(archive, machine.path("root/image.tar")).expect("a file can be copied in");
        for words in [&["load", "--input", "/root/image.tar"][..], &["tag", image::IMAGE, "ubuntu"]] {
            let _ = machine.run(&[&["docker"], words].concat()).expect_success("docker");
        }
        Self { _docker: docker, machine, _scratch: scratch }
    }

    /// Runs a line of the page in the folder in which `make deb` was called, and tells how long it took.
    fn typed(&self, line: &str) -> Outcome {
        let start = Instant::now();
        let outcome = self.machine.run(&["sh", "-ec", &format!("cd /root\n{line}")]).expect_success(line);
        println!("{:5.1} s  {line}", start.elapsed().as_secs_f64());
        outcome
    }

    /// What stands for the machine's GPU and its driver: a simulated node, by the package's own simulator.
    fn plug_in_a_gpu(&self) {
        let nvidia_smi = artifacts::nvidia_smi().canonicalize().expect("it was looked for before");
        // Its libraries lie beside it.
        self.machine.bind(nvidia_smi.ancestors().nth(5).expect("it lies below usr/lib of a root"));
        let (driver, nvidia_smi) = (node::driver_version(), nvidia_smi.to_string_lossy());
        let create = ["gpushare-simulator", "create", "/var/tmp/node", "--driver", &driver];
        let create = [&create[..], &["--nvidia-smi", &nvidia_smi]].concat();
        let _ = self.machine.run(&create).expect_success("gpushare-simulator create");
        let settings = "etc/gpushare/gpushare.toml.d/simulated.toml";
        let _ = fs::copy(self.machine.path("var/tmp/node/gpushare.toml"), self.machine.path(settings))
            .expect("settings can be copied");
    }

    /// The packages whose libraries our programs and libraries load, by name.
    fn packages_of_libraries(&self) -> Vec<String> {
        let told = self.machine.run(&["sh", "-c", LIBRARIES]).expect_success("dpkg -S");
        let packages: BTreeSet<String> = told.stdout.lines().map(str::to_owned).collect();
        packages.into_iter().collect()
    }
}

/// Prints for each library that is loaded the package that has a file of its name. The loader stands alone in
/// its line, the kernel's page has no file, and static programs load nothing.
const LIBRARIES: &str = r#"
ldd /usr/bin/gpushare* /usr/lib/gpushare*/* 2>/dev/null |
    sed -n 's/^\t\(.*\/\)\?\([^ ]*\.so[^ ]*\) .*/\2/p' | grep -v vdso | sort -u |
    while read -r name; do dpkg -S "*/$name" | cut -d : -f 1; done
"#;

/// Puts the package where `make deb` leaves it, below the machine's `dist`.
fn make_deb(dist: &Path) {
    fs::create_dir_all(dist).expect("a folder can be made in an overlay");
    let mut run = Command::new(artifacts::checkout().join("packaging/package.sh"));
    let _ =
        command::run(run.args(["deb", "0.1.0"]).arg(dist).env("XZ_LEVEL", "0")).expect_success("package.sh");
}

#[test]
#[ignore = "needs root and docker: starts a daemon on a bare machine"]
fn the_readmes_first_container_comes_by_three_commands_on_a_bare_machine() {
    if !met(&[Need::Root, Need::Busybox, Need::Dpkg, Need::BareMachine, Need::DriverLibraries]) {
        return;
    }
    private(|| {
        let place = Place::new();
        make_deb(&place.machine.path("root/dist"));
        let commands = commands();
        let [install, configure, run] = &commands[..] else { panic!("not three commands: {commands:?}") };
        let _ = place.typed(install);
        assert_eq!(place.packages_of_libraries(), ["libc6", "libgcc-s1"], "the package names these");
        place.plug_in_a_gpu();
        let _ = place.typed(configure);
        let told = place.typed(run).stdout;
        assert!(told.contains("4096MiB"), "{told}");
        let without_size =
            "docker run --rm --runtime=gpushare -e NVIDIA_VISIBLE_DEVICES=all ubuntu nvidia-smi";
        let told = place.typed(without_size).stdout;
        assert!(told.contains("20480MiB"), "the default share is a quarter of 80 GiB: {told}");
    });
}
