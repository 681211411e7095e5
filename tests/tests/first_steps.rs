//! README's commands as the page has them, on a machine with the distribution's smallest set of packages and
//! docker.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use gpushare_tests::artifacts;
use gpushare_tests::command::{self, Outcome};
use gpushare_tests::namespace::private;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::pages::Page;
use gpushare_tests::workplace::Workplace;

/// README's blocks of commands that are run as they stand: the first container, and what follows it. The page
/// begins with what comes of it, which is typed last.
fn blocks() -> Vec<String> {
    let readme = Page::read(artifacts::checkout().join("README.md"));
    let mut blocks: Vec<String> =
        readme.blocks().into_iter().filter(|block| block.kind == "sh").map(|block| block.text).collect();
    blocks.rotate_left(1);
    blocks
}

/// Types a line, and tells how long it took.
fn typed(place: &Workplace, line: &str) -> Outcome {
    let start = Instant::now();
    let outcome = place.type_in(line).expect_success(line);
    println!("{:5.1} s  {line}", start.elapsed().as_secs_f64());
    outcome
}

/// The packages whose libraries our programs and libraries load, by name.
fn packages_of_libraries(place: &Workplace) -> Vec<String> {
    let told = place.type_in(LIBRARIES).expect_success("dpkg -S");
    let packages: BTreeSet<String> = told.stdout.lines().map(str::to_owned).collect();
    packages.into_iter().collect()
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
        let place = Workplace::bare();
        make_deb(&place.machine().path("root/dist"));
        let blocks = blocks();
        let [first, next, last] = &blocks[..] else { panic!("not three blocks: {blocks:?}") };
        let lines: Vec<&str> = first.lines().collect();
        let [install, configure, run] = lines[..] else { panic!("not three commands: {first}") };
        let _ = typed(&place, install);
        assert_eq!(packages_of_libraries(&place), ["libc6", "libgcc-s1"], "the package names these");
        place.plug_in_gpus(Path::new("gpushare-simulator"), &[]);
        let _ = typed(&place, configure);
        let told = typed(&place, run).stdout;
        assert!(told.contains("4096MiB"), "{told}");
        let without_size =
            "docker run --rm --runtime=gpushare -e NVIDIA_VISIBLE_DEVICES=all ubuntu nvidia-smi";
        let told = typed(&place, without_size).stdout;
        assert!(told.contains("20480MiB"), "the default share is a quarter of 80 GiB: {told}");
        let lines = next.lines().chain(last.lines());
        for line in lines.collect::<Vec<_>>() {
            let _ = typed(&place, line);
        }
    });
}
