//! The deb, the rpm and the tarball: each has what `make install` lays out and, as the image for clusters,
//! the same bytes in two builds. deb and rpm are upgraded beside a container that holds a share, and go only
//! when nobody needs them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, Outcome};
use gpushare_tests::leases::leases;
use gpushare_tests::machine::{Machine, entries};
use gpushare_tests::namespace::private;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::Runtime;
use gpushare_tests::scratch::Scratch;

/// An earlier version than that of this checkout, and a later one.
const OLD: &str = "0.0.9";
const NEW: &str = "99.0.0";

/// `packaging/SCRIPT ARGS...`; xz takes no pains, and any program stands for the agent, which is built apart.
fn packaging(script: &str, args: &[&str]) -> Command {
    let mut run = Command::new(artifacts::checkout().join("packaging").join(script));
    run.args(args).env("XZ_LEVEL", "0").env("AGENT", "/usr/bin/sleep");
    run
}

/// Packs what was built into `folder`, and returns the file.
fn pack(kind: &str, version: &str, folder: &Path) -> PathBuf {
    let mut run = packaging("package.sh", &[kind, version]);
    let outcome = command::run(run.arg(folder)).expect_success(kind);
    PathBuf::from(outcome.stdout.trim_end())
}

/// The package `kind` in `version`, made once for all tests here. They lie below target, since no test is the
/// last.
fn package(kind: Kind, version: &'static str) -> &'static Path {
    static MADE: LazyLock<BTreeMap<(Kind, &str), PathBuf>> = LazyLock::new(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages");
        let all =
            [Kind::Deb, Kind::Rpm].into_iter().flat_map(|kind| [OLD, NEW].map(|version| (kind, version)));
        all.map(|(kind, version)| ((kind, version), pack(kind.name(), version, &folder))).collect()
    });
    &MADE[&(kind, version)]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Deb,
    Rpm,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Deb => "deb",
            Self::Rpm => "rpm",
        }
    }

    /// Installs a package, or another version over it. rpm's own list of packages knows none of Debian's.
    fn install(self) -> &'static [&'static str] {
        match self {
            Self::Deb => &["dpkg", "--install"],
            Self::Rpm => &["rpm", "--upgrade", "--nodeps", "--oldpackage"],
        }
    }

    fn remove(self) -> &'static [&'static str] {
        match self {
            Self::Deb => &["dpkg", "--remove", "gpushare"],
            Self::Rpm => &["rpm", "--erase", "gpushare"],
        }
    }

    /// Prints the version that is installed.
    fn query(self) -> &'static [&'static str] {
        match self {
            Self::Deb => &["dpkg-query", "--show", "--showformat=${Version} ${db:Status-Status}", "gpushare"],
            Self::Rpm => &["rpm", "--query", "--queryformat=%{VERSION} installed", "gpushare"],
        }
    }
}

/// Installs `version` on `machine`, or refuses to.
fn install(machine: &Machine, kind: Kind, version: &'static str) -> Outcome {
    let package = package(kind, version);
    let inside = machine.path("var/tmp").join(package.file_name().expect("a package has a name"));
    let _ = fs::copy(package, &inside).expect("a package can be copied");
    let path = format!("/var/tmp/{}", inside.file_name().expect("a package has a name").display());
    let outcome = machine.run(&[kind.install(), &[path.as_str()][..]].concat());
    fs::remove_file(inside).expect("the copy can be removed");
    outcome
}

/// The version that is installed on `machine`.
fn version(machine: &Machine, kind: Kind) -> String {
    machine.run(kind.query()).stdout
}

/// Of each file, by its path below a folder: its mode and its bytes.
type Files = BTreeMap<PathBuf, (u32, Vec<u8>)>;

/// The files below `folder`.
fn contents(folder: &Path) -> Files {
    let read = |path: PathBuf| {
        let file = folder.join(&path);
        let metadata = fs::symlink_metadata(&file).expect("a file that was listed is there");
        let bytes = || fs::read(&file).expect("a file of root's can be read");
        (!metadata.is_dir()).then(|| (path, (metadata.permissions().mode() & 0o7777, bytes())))
    };
    entries(folder).into_iter().filter_map(read).collect()
}

/// What `install.sh` lays out below `prefix`, in a folder of its own.
fn installed(scratch: &Scratch, prefix: &str) -> Files {
    let folder = scratch.folder("installed");
    let mut run = packaging("install.sh", &[]);
    let _ = command::run(run.arg(&folder).arg(prefix)).expect_success("install.sh");
    contents(&folder)
}

/// What stands in no tree but a package's: lists and licences, and the distribution's own forms of files.
fn is_added(path: &Path) -> bool {
    let names = ["sbom.cdx.json", "third-party-licences.txt", "changelog.gz", "copyright"];
    let of_docs = names.iter().any(|name| path.ends_with(Path::new("share/doc/gpushare").join(name)));
    of_docs || path.starts_with("usr/share/lintian") || path.starts_with("usr/share/man")
}

/// Asserts that a package has the files of `want`, and nothing else but what packages add.
fn assert_same(what: &str, mut got: Files, mut want: Files) {
    assert!(want.len() > 20, "{what}: {:?}", want.keys());
    got.retain(|path, _| !is_added(path));
    want.retain(|path, _| !is_added(path));
    assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>(), "{what}");
    let differs = |path: &&PathBuf| got[*path] != want[*path];
    assert_eq!(want.keys().filter(differs).collect::<Vec<_>>(), Vec::<&PathBuf>::new(), "{what} differs");
}

#[test]
#[ignore = "needs the release build: packs its files"]
fn two_builds_of_a_package_have_the_same_bytes() {
    if !met(&[Need::Dpkg, Need::Rpmbuild, Need::Busybox]) {
        return;
    }
    let scratch = Scratch::new("same-bytes");
    for kind in ["deb", "rpm", "tar", "image"] {
        let first = pack(kind, OLD, &scratch.folder("first"));
        // Another user, elsewhere in the world, with a home of his own.
        let again =
            format!("umask 077; exec {}/packaging/package.sh \"$@\"", artifacts::checkout().display());
        let mut run = Command::new("sh");
        run.args(["-c", &again, "sh", kind, OLD]).arg(scratch.folder("second"));
        run.env("XZ_LEVEL", "0")
            .env("AGENT", "/usr/bin/sleep")
            .env("TZ", "Asia/Tokyo")
            .env("LC_ALL", "C.UTF-8");
        run.env("TMPDIR", scratch.folder("another-folder-for-temporary-files"));
        let second = PathBuf::from(command::run(&mut run).expect_success(kind).stdout.trim_end());
        let read = |path: &Path| fs::read(path).expect("a package can be read");
        assert!(read(&first) == read(&second), "two builds of {} differ", first.display());
        let sum = format!("{}.sha256", second.file_name().expect("a package has a name").display());
        let mut check = Command::new("sha256sum");
        let check = check.args(["--check", "--strict", &sum]).current_dir(scratch.path().join("second"));
        let _ = command::run(check).expect_success("sha256sum");
    }
}

#[test]
#[ignore = "needs the release build: packs its files"]
fn a_deb_and_an_rpm_have_what_is_installed_and_nothing_else() {
    if !met(&[Need::Dpkg, Need::Rpmbuild]) {
        return;
    }
    let scratch = Scratch::new("packed");
    let mut want = installed(&scratch, "/usr");
    let rpm = unpacked_rpm(&scratch);
    assert_same("the rpm", contents(&rpm), want.clone());
    let deb = scratch.folder("deb");
    let mut unpack = Command::new("dpkg-deb");
    let unpack = unpack.arg("--extract").arg(package(Kind::Deb, NEW)).arg(&deb);
    let _ = command::run(unpack).expect_success("dpkg-deb");
    // Debian has the text of this licence on every machine, and does not want it twice.
    let _ = want.remove(Path::new("usr/share/doc/gpushare/LICENSE")).expect("it is installed");
    assert_same("the deb", contents(&deb), want);
    assert_lists_what_is_inside(&deb.join("usr/share/doc/gpushare"));
}

fn unpacked_rpm(scratch: &Scratch) -> PathBuf {
    let folder = scratch.folder("rpm");
    let mut unpack = Command::new("sh");
    let unpack = unpack.args(["-ec", "rpm2cpio \"$1\" | cpio --quiet -idm", "sh"]);
    let unpack = unpack.arg(package(Kind::Rpm, NEW)).current_dir(&folder);
    let _ = command::run(unpack).expect_success("rpm2cpio");
    folder
}

/// Each library that is linked in stands in the list with a licence, and that licence's text beside it.
fn assert_lists_what_is_inside(docs: &Path) {
    let read = |name: &str| fs::read_to_string(docs.join(name)).expect("each package has it");
    let list: Value = serde_json::from_str(&read("sbom.cdx.json")).expect("the list is JSON");
    let licences = read("third-party-licences.txt");
    let components = list["components"].as_array().expect("CycloneDX' list of components");
    let name = |one: &Value| one["name"].as_str().unwrap_or_default().to_owned();
    for must in ["gpushare-runtime", "serde_json", "nvml-wrapper", "rust-std", "glibc"] {
        assert!(components.iter().any(|one| name(one) == must), "{must} is not in the list");
    }
    // Tests and what only compiles are not shipped.
    for none in ["gpushare-tests", "gpushare-kube", "cc"] {
        assert!(!components.iter().any(|one| name(one) == none), "{none} is in the list");
    }
    for one in components {
        let licence = one["licenses"][0]["expression"].as_str().unwrap_or_default();
        assert!(!licence.is_empty(), "no licence: {one}");
        let line = format!("\n{} {} ({licence})\n", name(one), one["version"].as_str().unwrap_or_default());
        assert!(name(one).starts_with("gpushare") || licences.contains(&line), "no text for {line}");
    }
}

#[test]
#[ignore = "needs the release build: packs its files"]
fn a_package_asks_for_the_libraries_of_the_host_and_offers_none() {
    if !met(&[Need::Dpkg, Need::Rpmbuild]) {
        return;
    }
    let mut field = Command::new("dpkg-deb");
    let field = field.arg("--field").arg(package(Kind::Deb, NEW)).args(["Depends", "Recommends", "Provides"]);
    let deb = command::run(field).expect_success("dpkg-deb").stdout;
    assert!(deb.contains("Depends: libc6 (>= 2."), "{deb}");
    assert!(deb.contains("Recommends: runc | crun"), "{deb}");
    let mut query = Command::new("rpm");
    let query = query.args(["--query", "--package", "--requires"]).arg(package(Kind::Rpm, NEW));
    let needs = command::run(query).expect_success("rpm").stdout;
    assert!(needs.contains("libc.so.6(GLIBC_2."), "{needs}");
    let mut query = Command::new("rpm");
    let query = query.args(["--query", "--package", "--provides"]).arg(package(Kind::Rpm, NEW));
    let offers = command::run(query).expect_success("rpm").stdout;
    // Else rpm would take the library for containers for the driver's.
    assert!(offers.contains("gpushare = ") && !offers.contains(".so"), "{offers}");
}

#[test]
#[ignore = "needs the release build: packs its files"]
fn a_package_for_arm64_is_of_that_architecture_and_says_that_it_is_untested_there() {
    if !met(&[Need::Dpkg, Need::Rpmbuild]) {
        return;
    }
    let scratch = Scratch::new("arm64");
    let packed = |kind: &str| {
        let mut run = packaging("package.sh", &[kind, NEW]);
        // What was built for this machine stands in: nothing is run.
        run.arg(scratch.path())
            .env("PACKAGE_ARCH", "arm64")
            .env("BUILT", artifacts::checkout().join("target"));
        PathBuf::from(command::run(&mut run).expect_success(kind).stdout.trim_end())
    };
    let mut field = Command::new("dpkg-deb");
    let field = field.arg("--field").arg(packed("deb"));
    let told = command::run(field.args(["Architecture", "Description"])).expect_success("dpkg-deb").stdout;
    assert!(told.contains("Architecture: arm64\n") && told.contains("untested on this arch"), "{told}");
    let mut query = Command::new("rpm");
    query.args(["--query", "--queryformat=%{ARCH} %{DESCRIPTION}", "--package"]).arg(packed("rpm"));
    let told = command::run(&mut query).expect_success("rpm").stdout;
    assert!(told.starts_with("aarch64 ") && told.contains("untested on this arch"), "{told}");
    assert_eq!(entries(scratch.path()).len(), 4, "two packages, each with its sum");
}

#[test]
#[ignore = "needs the release build: packs its files"]
fn the_distributions_checkers_find_no_error() {
    if !met(&[Need::Dpkg, Need::Rpmbuild, Need::Lintian]) {
        return;
    }
    let scratch = Scratch::new("checkers");
    let mut lintian = Command::new("lintian");
    let lintian = lintian.args(["--fail-on", "error", "--allow-root"]).arg(package(Kind::Deb, NEW));
    // It leaves a temporary file behind.
    let _ = command::run(lintian.env("TMPDIR", scratch.path())).expect_success("lintian");
    let mut rpmlint = Command::new("rpmlint");
    let rpmlint = rpmlint.arg("--config").arg(artifacts::checkout().join("packaging/rpmlint.toml"));
    let outcome = command::run(rpmlint.arg(package(Kind::Rpm, NEW)));
    assert!(outcome.success() && outcome.stdout.contains(" 0 errors"), "{outcome:?}");
}

#[test]
#[ignore = "needs the release build: packs its files"]
fn the_tarball_installs_what_the_checkout_does_below_any_prefix() {
    let scratch = Scratch::new("tarball");
    let tarball = pack("tar", NEW, scratch.path());
    let mut unpack = Command::new("tar");
    let unpack = unpack.arg("-xzf").arg(&tarball).arg("-C").arg(scratch.path());
    let _ = command::run(unpack).expect_success("tar");
    let from = scratch.path().join(format!("gpushare-{NEW}"));
    let root = scratch.folder("root");
    let call = |script: &str| {
        let mut run = Command::new(from.join(script));
        command::run(run.arg(&root).arg("/opt/gpushare-of-mine")).expect_success(script)
    };
    let _ = call("install.sh");
    assert_same("the tarball", contents(&root), installed(&scratch, "/opt/gpushare-of-mine"));
    // Again, over settings that were changed.
    let settings = root.join("etc/gpushare/gpushare.toml");
    fs::write(&settings, "# mine\n").expect("the settings can be written");
    let _ = call("install.sh");
    assert_eq!(fs::read_to_string(&settings).expect("they are there"), "# mine\n");
    let _ = call("uninstall.sh");
    assert_eq!(contents(&root).into_keys().collect::<Vec<_>>(), [Path::new("etc/gpushare/gpushare.toml")]);
}

#[test]
fn a_package_that_cannot_be_is_refused_in_one_line() {
    let scratch = Scratch::new("refused");
    let folder = scratch.path().to_str().expect("a temporary folder's name is text");
    for (args, want) in [
        (&["deb", "0.1.0"][..], "say deb, rpm, tar or image, a version and a folder"),
        (&["zip", "0.1.0", folder][..], "no kind of package: zip"),
        (&["deb", "v0.1.0", folder][..], "a version begins with a digit"),
        (&["rpm", "0.1-0", folder][..], "a version has letters, digits and .+~ alone"),
        (&["tar", "0.1/0", folder][..], "a version has letters, digits and .+~ alone"),
    ] {
        let outcome = command::run(&mut packaging("package.sh", args));
        assert!(!outcome.success() && outcome.stderr.contains(want), "{args:?}: {outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{args:?}: {outcome:?}");
    }
    let mut run = packaging("package.sh", &["deb", "0.1.0", folder]);
    let outcome = command::run(run.env("PACKAGE_ARCH", "x86_64"));
    assert!(outcome.stderr.starts_with("package.sh: no such architecture: x86_64"), "{outcome:?}");
    assert_eq!(entries(scratch.path()), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root and runc: installs in a root of its own, and runs a container"]
fn a_deb_is_upgraded_beside_a_container_and_goes_without_a_trace() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox, Need::Dpkg, Need::Rpmbuild]) {
        return;
    }
    private(|| {
        let machine = Machine::new();
        comes_and_goes(&machine, Kind::Deb);
        let settings = fs::read_to_string(machine.path("etc/gpushare/gpushare.toml"));
        assert!(settings.expect("they stay").ends_with("# mine\n"));
        let _ = machine.run(&["dpkg", "--purge", "gpushare"]).expect_success("dpkg --purge");
        assert_eq!(machine.left(), Vec::<String>::new());
    });
}

#[test]
#[ignore = "needs root and runc: installs in a root of its own, and runs a container"]
fn an_rpm_is_upgraded_beside_a_container_and_leaves_only_data() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox, Need::Dpkg, Need::Rpmbuild]) {
        return;
    }
    private(|| {
        let machine = Machine::new();
        comes_and_goes(&machine, Kind::Rpm);
        let history = ["var/lib/gpushare", "var/lib/gpushare/history"];
        let mut left = machine.left();
        left.retain(|path| !history.contains(&path.as_str()));
        assert_eq!(left, ["etc/gpushare", "etc/gpushare/gpushare.toml.rpmsave"]);
    });
}

/// Installs, upgrades beside a container and removes; settings are changed, and there is a history.
fn comes_and_goes(machine: &Machine, kind: Kind) {
    let told = install(machine, kind, OLD).expect_success("the installation").stdout;
    assert!(told.contains("gpushare configure docker"), "{told}");
    assert!(!machine.path("etc/docker/daemon.json").exists(), "no engine is told without being asked");
    assert_eq!(version(machine, kind), format!("{OLD} installed"));
    let settings = machine.path("etc/gpushare/gpushare.toml");
    let shipped = fs::read_to_string(&settings).expect("the settings are installed");
    fs::write(&settings, shipped + "# mine\n").expect("the settings can be written");
    fs::create_dir_all(machine.path("var/lib/gpushare")).expect("a folder can be made in an overlay");
    fs::write(machine.path("var/lib/gpushare/history"), "").expect("a file can be made in an overlay");

    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::installed(&machine.path("usr/bin/gpushare-runtime"), &node);
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
    let container = runtime.run(&bundle);
    machine.bind(node.root().parent().expect("the node lies in a folder"));
    let beside_a_share =
        |args: &[&str]| command::run(machine.chroot(args).env("GPUSHARE_CONFIG", runtime.config()));

    let _ = install(machine, kind, NEW).expect_success("the upgrade");
    assert_eq!(version(machine, kind), format!("{NEW} installed"));
    let kept = fs::read_to_string(&settings).expect("the settings are there");
    assert!(kept.ends_with("# mine\n"), "{kept}");
    assert_eq!(leases(runtime.config()).len(), 1);
    let report = Report::of(&container, &["5GiB", "3GiB"]);
    report.assert_size(4 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);

    assert_refused(machine, kind, &beside_a_share(kind.remove()), "containers still hold shares");
    drop(container);
    assert_eq!(leases(runtime.config()), []);

    let configure = |more: &[&str]| machine.run(&[&["gpushare", "configure", "docker"][..], more].concat());
    let _ = configure(&[]).expect_success("gpushare configure docker");
    assert_refused(machine, kind, &beside_a_share(kind.remove()), "docker still has the runtime");
    let _ = configure(&["--remove"]).expect_success("gpushare configure docker --remove");

    let state = machine.path("run/gpushare");
    fs::create_dir_all(&state).expect("a folder can be made in an overlay");
    let newer = state.join("leases-of-a-newer-gpushare");
    fs::write(&newer, "gpushare leases, version 9999: 0000000000 bytes, crc32 00000000\n")
        .expect("a file can be made in an overlay");
    assert_refused(machine, kind, &install(machine, kind, OLD), "has version 9999, this gpushare reads");
    fs::remove_file(newer).expect("the file can be removed");

    let cdi = machine.path("etc/cdi");
    fs::create_dir_all(&cdi).expect("a folder can be made in an overlay");
    fs::write(cdi.join("gpushare-share.json"), "{}").expect("a file can be made in an overlay");
    let _ = beside_a_share(kind.remove()).expect_success("the removal");
    for gone in
        ["usr/bin/gpushare-runtime", "usr/lib/gpushare", "run/gpushare", "etc/cdi/gpushare-share.json"]
    {
        assert!(!machine.path(gone).exists(), "{gone} is left");
    }
    assert!(machine.path("var/lib/gpushare/history").exists(), "the history is data");
}

/// Asserts that `outcome` is a refusal with one line of ours, and that the newer version is there as before.
fn assert_refused(machine: &Machine, kind: Kind, outcome: &Outcome, want: &str) {
    assert!(!outcome.success(), "{want}: {outcome:?}");
    let ours = outcome.stderr.lines().filter(|line| line.starts_with("gpushare: ")).collect::<Vec<_>>();
    assert!(ours.len() == 1 && ours[0].contains(want), "{want}: {outcome:?}");
    assert_eq!(version(machine, kind), format!("{NEW} installed"), "{want}");
    assert!(machine.path("usr/bin/gpushare-runtime").exists(), "{want}");
}
