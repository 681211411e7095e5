//! A machine of its own on which a reader types what a page says: docker runs, other engines can be started,
//! and programs that no test machine has are stood in for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::command::{self, Outcome, eventually};
use crate::machine::Machine;
use crate::scratch::Scratch;
use crate::{artifacts, image, node};

/// The settings of the simulated GPUs; a file of a reader's counts before it.
const SETTINGS: &str = "etc/gpushare/gpushare.toml.d/0-simulated.toml";
/// Where engines keep what a machine of its own begins without.
const OF_ENGINES: [&str; 4] = ["run", "var/lib/containerd", "var/lib/containers", "var/lib/docker"];
/// The images of engines, below the machine's root.
const IMAGES: &str = "root/image.tar";
/// podman without a network, systemd and layers.
const PODMAN: [(&str, &str); 2] = [
    (
        "containers.conf",
        "[containers]\nnetns = \"none\"\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=1000:1000\"]\n\
         [engine]\ncgroup_manager = \"cgroupfs\"\nruntime = \"runc\"\nevents_logger = \"file\"\n",
    ),
    (
        "storage.conf",
        "[storage]\ndriver = \"vfs\"\nrunroot = \"/run/containers/storage\"\n\
         graphroot = \"/var/lib/containers/storage\"\n",
    ),
];

/// A machine with docker, which knows the images `ubuntu` and [`Workplace::STAYS`]. What runs there is ended on
/// drop.
#[derive(Debug)]
pub struct Workplace {
    machine: Machine,
    folder: PathBuf,
}

impl Workplace {
    /// An image whose containers stay, where those of `ubuntu` end at once.
    pub const STAYS: &'static str = image::PAUSE;

    /// The reader's folder is that of the checkout, as a copy to which everything may be written.
    ///
    /// # Panics
    /// As all of this: when a part of it cannot be made. For a mount namespace of its own, whose network it
    /// takes away from the calling thread.
    #[must_use]
    pub fn with_checkout() -> Self {
        let machine = Machine::new();
        machine.copy(artifacts::checkout());
        let cache = artifacts::checkout().join(".cache").canonicalize().expect("the set-up has made it");
        machine.bind(&cache);
        for (name, text) in PODMAN {
            fs::create_dir_all(machine.path("etc/containers")).expect("a folder can be made in an overlay");
            fs::write(machine.path("etc/containers").join(name), text).expect("and a file");
        }
        let place = Self::start(machine, artifacts::checkout());
        place.load_images("podman");
        place
    }

    /// The distribution's smallest set of packages and docker; the reader's folder is /root.
    ///
    /// # Panics
    /// As [`Workplace::with_checkout`].
    #[must_use]
    pub fn bare() -> Self {
        Self::start(Machine::bare(), Path::new("/root"))
    }

    fn start(machine: Machine, folder: &Path) -> Self {
        for folder in OF_ENGINES {
            machine.empty(folder);
        }
        let stand_ins = artifacts::checkout().join("tests/programs/stand_ins");
        let plugins = machine.path("usr/local/lib/docker/cli-plugins");
        fs::create_dir_all(&plugins).expect("a folder can be made in an overlay");
        for (name, folder) in [
            ("sudo", machine.path("usr/local/bin")),
            ("systemctl", machine.path("usr/local/bin")),
            ("docker-compose", plugins),
        ] {
            let _ = fs::copy(stand_ins.join(name), folder.join(name)).expect("a program can be copied in");
        }
        let scratch = Scratch::new("image");
        let _ = fs::copy(image::archive(&scratch), machine.path(IMAGES)).expect("a file can be copied in");
        // Ports and abstract sockets of a reader's programs are nobody else's.
        unshare(CloneFlags::CLONE_NEWNET).expect("root can make a network");
        let _ = command::run(Command::new("ip").args(["link", "set", "lo", "up"])).expect_success("ip link");
        let place = Self { machine, folder: folder.to_owned() };
        let _ = place.run(&["systemctl", "start", "docker"]).expect_success("docker starts");
        place.load_images("docker");
        place
    }

    fn load_images(&self, engine: &str) {
        let archive = format!("/{IMAGES}");
        for words in [&["load", "--input", &archive][..], &["tag", image::IMAGE, "ubuntu"]] {
            let _ = self.run(&[&[engine], words].concat()).expect_success(engine);
        }
    }

    /// The machine below it.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Puts simulated GPUs into the machine, with NVIDIA's own nvidia-smi: `simulator create` with the
    /// arguments `more`.
    ///
    /// # Panics
    /// When it fails.
    pub fn plug_in_gpus(&self, simulator: &Path, more: &[&str]) {
        let nvidia_smi = artifacts::nvidia_smi().canonicalize().expect("it was looked for before");
        // Its libraries lie beside it.
        self.machine.bind(nvidia_smi.ancestors().nth(5).expect("it lies below usr/lib of a root"));
        let (simulator, nvidia_smi) = (simulator.to_string_lossy(), nvidia_smi.to_string_lossy());
        let driver = node::driver_version();
        let create = [&simulator, "create", "/srv/node", "--driver", &driver, "--nvidia-smi", &nvidia_smi];
        let _ = self.run(&[&create[..], more].concat()).expect_success("gpushare-simulator create");
        let settings = self.machine.path(SETTINGS);
        fs::create_dir_all(settings.parent().expect("it has a folder")).expect("it can be made");
        let _ =
            fs::copy(self.machine.path("srv/node/gpushare.toml"), settings).expect("settings can be copied");
    }

    /// Runs a program in the reader's folder to its end.
    ///
    /// # Panics
    /// When it cannot be started, or does not end.
    #[must_use]
    pub fn run(&self, args: &[&str]) -> Outcome {
        command::run(&mut self.command(args))
    }

    /// Types `lines` into a shell in the reader's folder, of which each must succeed.
    ///
    /// # Panics
    /// As [`Workplace::run`].
    #[must_use]
    pub fn type_in(&self, lines: &str) -> Outcome {
        self.run(&["bash", "-ec", lines])
    }

    fn command(&self, args: &[&str]) -> Command {
        let go = ["env", "-C", &*self.folder.to_string_lossy()].map(str::to_owned);
        let go: Vec<&str> = go.iter().map(String::as_str).collect();
        let mut run = self.machine.chroot(&[&go[..], args].concat());
        run.env_clear().env("HOME", "/root").env("DEBIAN_FRONTEND", "noninteractive");
        run.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        run
    }

    /// Ends and removes all containers.
    pub fn end_containers(&self) {
        let lines = "for engine in docker podman; do
            ! command -v $engine >/dev/null || $engine ps --all --quiet | xargs -r $engine rm --force
        done";
        let _ = self.type_in(lines);
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        self.end_containers();
        let _ = eventually(command::DEADLINE, || {
            let living = of_root(&self.machine.path(""));
            for pid in &living {
                // It may end by itself.
                let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
            }
            living.is_empty()
        });
    }
}

/// The processes whose root is `root`.
fn of_root(root: &Path) -> Vec<i32> {
    let processes = procfs::process::all_processes().into_iter().flatten().flatten();
    let of_it = processes.filter(|process| process.root().is_ok_and(|found| found.starts_with(root)));
    of_it.map(|process| process.pid()).collect()
}
