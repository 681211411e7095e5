//! What a scenario needs from the machine. A missing need skips the test and says so; with `CI=true` it fails
//! instead, unless few machines have it.

use std::io::Write;
use std::path::Path;

/// One thing that a test cannot do without.
#[derive(Clone, Copy, Debug)]
pub enum Need {
    /// Effective user 0.
    Root,
    /// runc at its Debian path.
    Runc,
    /// crun at its Debian path.
    Crun,
    /// youki in PATH; no machine has to have it.
    Youki,
    /// containerd, dockerd and the docker client, by absolute path: the one in PATH may be foreign.
    Docker,
    /// containerd and its command line, by absolute path.
    Containerd,
    /// docker-compose at its Debian path.
    Compose,
    /// podman and conmon at their Debian paths.
    Podman,
    /// Slurm's two daemons, its clients and munge.
    Slurm,
    /// The programs that map an ordinary user's subordinate ids.
    SubordinateIds,
    /// A busybox without shared libraries.
    Busybox,
    /// strace at its Debian path.
    Strace,
    /// curl, as a program that has nothing to do with a GPU.
    Curl,
    /// dropbear, an SSH server, and its client, at their Debian paths.
    Ssh,
    /// Prometheus and its promtool at their Debian paths.
    Prometheus,
    /// tmux at its Debian path.
    Tmux,
    /// Chromium or its like.
    Chromium,
    /// Debian's own tools for packages; no machine of another distribution has them.
    Dpkg,
    /// rpmbuild, and what packs and unpacks beside it.
    Rpmbuild,
    /// The distributions' checkers of packages, lintian and rpmlint.
    Lintian,
    /// The virtual environment of `tests/setup/python.sh`.
    Python,
    /// The driver files of `tests/setup/driver-libraries.sh`.
    DriverLibraries,
    /// NVIDIA's MPS control daemon of `tests/setup/driver-libraries.sh`.
    MpsControl,
    /// The packages of `tests/setup/images.sh`.
    Images,
    /// The root of `tests/setup/bare-machine.sh`.
    BareMachine,
    /// kubectl of `tests/setup/kubectl.sh`.
    Kubectl,
    /// helm of the same.
    Helm,
    /// Kubernetes' own programs in the folder that `KUBE_BIN` names, etcd and openssl; no machine has to have
    /// them.
    Kubernetes,
    /// The same with kubelet and containerd 2 in that folder; no machine has to have them.
    Kubelet,
}

impl Need {
    /// Whether no machine has to have it.
    fn is_rare(self) -> bool {
        matches!(self, Self::Youki | Self::Kubernetes | Self::Kubelet)
    }

    /// Why this need is not met, or `None`.
    fn missing(self) -> Option<String> {
        let absent = |paths: &[&str], cure: &str| {
            (!paths.iter().any(|path| Path::new(path).exists()))
                .then(|| format!("{} is missing: {cure}", paths[0]))
        };
        let packages = "run tests/setup/packages.sh";
        match self {
            Self::Root => (!nix::unistd::geteuid().is_root()).then(|| "not root".to_owned()),
            Self::Runc => absent(&[crate::runtime::RUNC], packages),
            Self::Crun => absent(&[crate::runtime::CRUN], packages),
            Self::Youki => absent(&[&crate::runtime::YOUKI], "cargo install youki"),
            Self::Busybox => absent(&[crate::image::BUSYBOX], packages),
            Self::Docker => absent(&["/usr/bin/docker"], packages)
                .or_else(|| Self::Containerd.missing())
                .or_else(|| absent(crate::docker::DOCKERD, packages)),
            Self::Containerd => {
                absent(&["/usr/bin/containerd"], packages).or_else(|| absent(&["/usr/bin/ctr"], packages))
            }
            Self::Compose => absent(&["/usr/bin/docker-compose"], packages),
            Self::Podman => {
                absent(&["/usr/bin/podman"], packages).or_else(|| absent(&["/usr/bin/conmon"], packages))
            }
            Self::Slurm => crate::slurm::PROGRAMS.iter().find_map(|program| absent(&[*program], packages)),
            Self::SubordinateIds => absent(&["/usr/bin/newuidmap"], packages),
            Self::Strace => absent(&["/usr/bin/strace"], packages),
            Self::Curl => absent(&["/usr/bin/curl"], packages),
            Self::Ssh => {
                absent(&["/usr/sbin/dropbear"], packages).or_else(|| absent(&["/usr/bin/dbclient"], packages))
            }
            Self::Prometheus => absent(&["/usr/bin/prometheus"], packages),
            Self::Tmux => absent(&[crate::terminal::TMUX], packages),
            Self::Chromium => absent(BROWSERS, packages),
            Self::Dpkg => absent(&["/usr/bin/dpkg-deb"], "this machine is not of Debian's kind"),
            Self::Rpmbuild => ["/usr/bin/rpmbuild", "/usr/bin/cpio", "/usr/bin/python3"]
                .into_iter()
                .find_map(|program| absent(&[program], packages)),
            Self::Lintian => {
                absent(&["/usr/bin/lintian"], packages).or_else(|| absent(&["/usr/bin/rpmlint"], packages))
            }
            Self::Python => (!crate::python::interpreter().exists())
                .then(|| "no Python environment: run tests/setup/python.sh".to_owned()),
            Self::DriverLibraries => (!crate::artifacts::nvidia_smi().exists())
                .then(|| "no nvidia-smi: run tests/setup/driver-libraries.sh".to_owned()),
            Self::MpsControl => (!crate::artifacts::mps_control().exists())
                .then(|| "no nvidia-cuda-mps-control: run tests/setup/driver-libraries.sh".to_owned()),
            // The set-up makes this file last.
            Self::Images => (!crate::distribution::packages().join("musl.made-from").exists())
                .then(|| "no packages for images: run tests/setup/images.sh".to_owned()),
            // As above.
            Self::BareMachine => (!crate::artifacts::bare_machine().with_extension("made-from").exists())
                .then(|| "no bare machine: run tests/setup/bare-machine.sh".to_owned()),
            Self::Kubectl => (!crate::artifacts::kubectl().exists())
                .then(|| "no kubectl: run tests/setup/kubectl.sh".to_owned()),
            Self::Helm => {
                (!crate::artifacts::helm().exists()).then(|| "no helm: run tests/setup/kubectl.sh".to_owned())
            }
            Self::Kubernetes => crate::cluster::missing_programs(false),
            Self::Kubelet => crate::cluster::missing_programs(true),
        }
    }
}

/// Whether the machine has all of `needs`; if not, says on the real stderr what is missing (the test harness
/// would hold back a line that is merely printed).
///
/// # Panics
/// When something is missing and `CI` is `true`: there nothing may be skipped but what few machines have.
#[must_use]
pub fn met(needs: &[Need]) -> bool {
    let missing = needs.iter().find_map(|need| Some((need, need.missing()?)));
    let Some((need, reason)) = missing else { return true };
    let in_ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
    assert!(!in_ci || need.is_rare(), "nothing may be skipped in CI: {reason}");
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    // Nothing is lost when stderr is closed.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
    false
}

/// Where browsers of Chromium's kind are, of Debian and of Google.
const BROWSERS: &[&str] = &["/usr/bin/chromium", "/usr/bin/google-chrome"];

/// The browser of this machine.
#[must_use]
pub fn chromium() -> Option<&'static str> {
    BROWSERS.iter().copied().find(|path| Path::new(path).exists())
}
