//! Every way in which programs get the driver's functions: linked, opened, or looked up by name. The drivers
//! are old and new simulated ones, and NVIDIA's own libraries.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gpushare_intercept::{cuda, nvml};
use gpushare_region::path::{DRIVER_CUDA, DRIVER_NVML};

use crate::client::{Library, call, out};
use crate::place::{CONTEXT, Share, books, inside, inside_over, nvidias_own};

const SHIM: &str = "/usr/lib/gpushare/shim";
const LIBRARIES: [(&str, &str, &[&str]); 2] =
    [("libcuda.so.1", DRIVER_CUDA, cuda::HOOKED), ("libnvidia-ml.so.1", DRIVER_NVML, nvml::HOOKED)];

/// The names that a driver's library exports, and whether each is a function.
fn exports(driver: &str) -> BTreeMap<String, bool> {
    let output = Command::new("nm").args(["-D", "--defined-only", driver]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let names = text.lines().filter_map(|line| {
        let [_, kind, name] = line.split(' ').collect::<Vec<_>>()[..] else { return None };
        Some((name.to_owned(), matches!(kind, "T" | "W" | "i")))
    });
    names.collect()
}

/// Every name leads to our hook or to the driver itself. There is no name that the driver lacks.
fn every_name_leads_to_its_hook_or_to_the_driver() {
    for (soname, path, hooked) in LIBRARIES {
        let (ours, driver) = (Library::open(soname), Library::open(path));
        let names = exports(path);
        assert!(names.len() > 100, "{soname}: {}", names.len());
        for name in names.keys() {
            let (found, real) = (ours.symbol(name), driver.symbol(name));
            assert_ne!(real, 0, "{name}");
            match hooked.contains(&name.as_str()) {
                true => assert!(found != 0 && found != real, "{name} is not intercepted"),
                false => assert_eq!(found, real, "{name} is not the driver's own"),
            }
        }
        for name in hooked.iter().filter(|name| !names.contains_key(**name)) {
            assert_eq!(ours.symbol(name), 0, "{name}, which the driver lacks");
        }
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn over_nvidias_own_libraries_every_name_leads_to_its_hook_or_to_the_driver() {
    let name = "loader::over_nvidias_own_libraries_every_name_leads_to_its_hook_or_to_the_driver";
    if inside_over(name, |_| nvidias_own()) {
        every_name_leads_to_its_hook_or_to_the_driver();
    }
}

/// Cases 33 and 34: an absent name does not make others absent.
macro_rules! over_driver {
    ($($test:ident: $driver:literal lacks $($absent:literal)*;)*) => {$(
        #[test]
        #[ignore = "needs root: makes a mount namespace"]
        fn $test() {
            let share = Share { driver: $driver, ..Share::default() };
            if !inside(concat!("loader::", stringify!($test)), &share) {
                return;
            }
            every_name_leads_to_its_hook_or_to_the_driver();
            let ours = Library::open("libcuda.so.1");
            for absent in [$($absent),*] {
                assert!(cuda::HOOKED.contains(&absent), "{absent}");
                assert_eq!(ours.symbol(absent), 0, "{absent}");
            }
            let (within, beyond) = ("allocations 0 2", opened("now", &[]));
            assert!(beyond.contains(within), "{beyond}");
        }
    )*};
}

over_driver! {
    cases_33_34_over_driver_470_hooks_are_whole_and_newer_names_absent: "470.256.02"
        lacks "cuGetProcAddress_v2" "cuCtxCreate_v4" "cuGreenCtxCreate";
    cases_33_34_over_driver_535_hooks_are_whole_and_newer_names_absent: "535.309.01"
        lacks "cuCtxCreate_v4" "cuGreenCtxCreate";
    cases_33_34_over_driver_550_hooks_are_whole_and_newer_names_absent: "550.54.15"
        lacks "cuCtxCreate_v4";
    cases_33_34_over_driver_570_hooks_are_whole_and_newer_names_absent: "570.86.10"
        lacks "cuMulticastBindMem_v2";
    cases_33_34_over_driver_580_hooks_are_whole_and_newer_names_absent: "580.65.06"
        lacks "cuMulticastBindMem_v2";
}

/// The file that is mapped at `address`.
fn file_of(address: usize) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let lies_in = |line: &&str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let [start, end] = [start, end].map(|edge| usize::from_str_radix(edge, 16).unwrap());
        (start..end).contains(&address).then_some(())
    };
    let line = maps.lines().find(|line| lies_in(line).is_some()).unwrap_or_default();
    line.split(' ').next_back().unwrap_or_default().to_owned()
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn nvidias_own_entry_points_answer_as_without_us_but_for_the_hooks() {
    let name = "loader::nvidias_own_entry_points_answer_as_without_us_but_for_the_hooks";
    if !inside_over(name, |_| nvidias_own()) {
        return;
    }
    let (ours, driver) = (Library::open("libcuda.so.1"), Library::open(DRIVER_CUDA));
    let names = exports(DRIVER_CUDA);
    let real = cuda::HOOKED.iter().map(|name| driver.symbol(name));
    let hooked: BTreeSet<usize> = real.filter(|address| *address != 0).collect();
    let mut substituted = BTreeMap::new();
    for (entry, words) in [("cuGetProcAddress", 4), ("cuGetProcAddress_v2", 5)] {
        let ask = |library: &Library, name: &CString, version: usize, flags: usize| {
            let (mut found, mut status) = (0usize, 0i32);
            let arguments =
                [name.as_ptr().expose_provenance(), out(&mut found), version, flags, out(&mut status)];
            (library.call(entry, &arguments[..words]), status, found)
        };
        for name in names.keys() {
            let name = CString::new(name.as_str()).unwrap();
            for version in [2000, 3020, 4000, 7000, 9000, 10000, 11000, 11020, 11030, 12000, 12020, 13000] {
                for flags in [0, 1, 2, 4] {
                    let (mine, real) =
                        (ask(&ours, &name, version, flags), ask(&driver, &name, version, flags));
                    assert_eq!((mine.0, mine.1), (real.0, real.1), "{entry} {name:?} {version} {flags}");
                    if hooked.contains(&real.2) {
                        let ours = *substituted.entry(real.2).or_insert(mine.2);
                        assert_eq!(
                            mine.2, ours,
                            "{entry} {name:?} {version} {flags}: one hook for one function"
                        );
                    } else {
                        assert_eq!(mine.2, real.2, "{entry} {name:?} {version} {flags}");
                    }
                }
            }
        }
    }
    assert!(substituted.len() > 60, "{}", substituted.len());
    for hook in substituted.values() {
        assert_eq!(file_of(*hook), format!("{SHIM}/libcuda.so.1"));
    }
}

/// Compiles a C program of `intercept/tests/programs`, or one generated as text, into its own folder.
struct Program {
    folder: tempfile::TempDir,
    source: PathBuf,
}

impl Program {
    fn named(name: &str) -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name);
        Self { folder: tempfile::tempdir().unwrap(), source }
    }

    fn of(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("program.c");
        std::fs::write(&source, text).unwrap();
        Self { folder, source }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("program")
    }

    fn compile(&self, options: &[String]) -> Output {
        let mut compiler = Command::new("cc");
        compiler.arg("-o").arg(self.path()).arg(&self.source);
        compiler.args([&format!("-L{SHIM}"), "-ldl"]).args(options).output().unwrap()
    }

    fn compiled(self, options: &[String]) -> Self {
        let output = self.compile(options);
        assert!(output.status.success(), "{options:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{options:?}: {}", String::from_utf8_lossy(&output.stderr));
        self
    }

    fn run(&self, arguments: &[&str]) -> String {
        let output = Command::new(self.path()).args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
        text
    }
}

fn opened(way: &str, names: &[&str]) -> String {
    let arguments: Vec<&str> = [way].iter().chain(names).copied().collect();
    Program::named("opened.c").compiled(&[]).run(&arguments)
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn however_the_library_is_opened_hooks_are_ours_and_all_else_is_the_drivers() {
    let name = "loader::however_the_library_is_opened_hooks_are_ours_and_all_else_is_the_drivers";
    if !inside(name, &Share::default()) {
        return;
    }
    let program = Program::named("opened.c").compiled(&[]);
    for way in ["now", "lazy", "global", "deepbind", "development", "again", "namespace"] {
        let names = ["cuMemAlloc_v2", "cuDriverGetVersion", "cudbgApiInit", "cuMulticastBindMem_v2"];
        let arguments: Vec<&str> = [way].iter().chain(&names).copied().collect();
        let want = format!(
            "cuMemAlloc_v2 {SHIM}/libcuda.so.1\ncuDriverGetVersion {DRIVER_CUDA}\n\
             cudbgApiInit {DRIVER_CUDA}\ncuMulticastBindMem_v2 absent\nallocations 0 2\n"
        );
        let development = want.replace(&format!("{SHIM}/libcuda.so.1"), &format!("{SHIM}/libcuda.so"));
        let want = if way == "development" { development } else { want };
        assert_eq!(program.run(&arguments), want, "{way}");
    }
    // No driver has symbol versions. The driver decides the result of a versioned look-up, but it is never
    // the driver's allocation.
    let asked = program.run(&["version", "cuMemAlloc_v2"]);
    assert!(asked.starts_with(&format!("cuMemAlloc_v2 {SHIM}/libcuda.so.1\n")), "{asked}");
}

/// Compiler options that select each linker of this machine: the compiler's two, and the toolchain's lld.
fn linkers() -> Vec<Vec<String>> {
    let sysroot = Command::new("rustc").args(["--print", "sysroot"]).output().map(|output| output.stdout);
    let sysroot = String::from_utf8(sysroot.unwrap_or_default()).unwrap_or_default();
    let lld = format!("-B{}/lib/rustlib/x86_64-unknown-linux-gnu/bin/gcc-ld", sysroot.trim());
    let choices =
        [vec!["-fuse-ld=bfd"], vec!["-fuse-ld=gold"], vec!["-fuse-ld=lld", &lld], vec!["-fuse-ld=mold"]];
    let choices = choices.map(|choice| choice.into_iter().map(str::to_owned).collect::<Vec<_>>());
    let works = |choice: &Vec<String>| {
        let works = Program::of("int main(void) { return 0; }").compile(choice).status.success();
        if !works {
            println!("left out: a linker that is not on this machine ({})", choice[0]);
        }
        works
    };
    choices.into_iter().filter(works).collect()
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn however_a_program_is_linked_hooks_are_ours_and_all_else_is_the_drivers() {
    let name = "loader::however_a_program_is_linked_hooks_are_ours_and_all_else_is_the_drivers";
    if !inside(name, &Share::default()) {
        return;
    }
    let want = format!(
        "allocations 0 0 2\nversion 0 13000\ncuMemAlloc_v2 {SHIM}/libcuda.so.1\n\
         cuDriverGetVersion {DRIVER_CUDA}\nnvmlInit_v2 {DRIVER_NVML}\n"
    );
    let linkers = linkers();
    assert!(!linkers.is_empty());
    for linker in linkers {
        for kind in ["-pie", "-no-pie"] {
            for binding in ["-Wl,-z,lazy", "-Wl,-z,now"] {
                let more = [kind, binding, "-lcuda", "-lnvidia-ml"].map(str::to_owned);
                let options: Vec<String> = linker.iter().cloned().chain(more).collect();
                let program = Program::named("linked.c").compiled(&options);
                assert_eq!(program.run(&[]), want, "{options:?}");
            }
        }
    }
}

/// A C program that holds the address of every function in `names`, and counts those that are not null.
fn table_of<'a>(names: impl Iterator<Item = &'a str> + Clone) -> String {
    let declared: String = names.clone().map(|name| format!("void {name}(void);\n")).collect();
    let listed: String = names.map(|name| format!("    (void *){name},\n")).collect();
    format!(
        "#include <stdio.h>\n{declared}void *volatile all[] = {{\n{listed}}};\n\
         int main(void) {{\n    unsigned found = 0;\n    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) found += all[i] != 0;\n    \
         printf(\"%u\\n\", found);\n    return 0;\n}}\n"
    )
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_program_links_every_function_of_nvidias_own_libraries_and_no_other() {
    let name = "loader::a_program_links_every_function_of_nvidias_own_libraries_and_no_other";
    if !inside_over(name, |_| nvidias_own()) {
        return;
    }
    let mut names: BTreeSet<String> = BTreeSet::new();
    for (_, driver, _) in LIBRARIES {
        names.extend(exports(driver).into_iter().filter(|(_, function)| *function).map(|(name, _)| name));
    }
    let libraries = ["-lcuda", "-lnvidia-ml"].map(str::to_owned);
    for linker in linkers() {
        for kind in ["-pie", "-no-pie"] {
            let options: Vec<String> =
                linker.iter().cloned().chain([kind.to_owned()]).chain(libraries.clone()).collect();
            let program = Program::of(&table_of(names.iter().map(String::as_str))).compiled(&options);
            assert_eq!(program.run(&[]).trim(), names.len().to_string(), "{options:?}");
        }
        for absent in ["cuCtxCreate_v4", "cuNoSuchThing"] {
            let options: Vec<String> = linker.iter().cloned().chain(libraries.clone()).collect();
            let output = Program::of(&table_of([absent].into_iter())).compile(&options);
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && text.contains(absent), "{options:?} {absent}: {text}");
        }
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_function_that_allocates_and_is_on_no_list_is_counted() {
    let name = "loader::a_function_that_allocates_and_is_on_no_list_is_counted";
    let driver = |folder: &Path| {
        let (cuda, nvml) = (folder.join("newer.so"), folder.join("nvml.so"));
        for (path, source) in [(&cuda, "newer_driver.c"), (&nvml, "linked.c")] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
            let mut compiler = Command::new("cc");
            compiler.args(["-shared", "-fPIC", "-Wl,-Bsymbolic", "-o"]).arg(path).arg(source);
            assert!(compiler.status().unwrap().success());
        }
        Some([cuda, nvml])
    };
    if !inside_over(name, driver) {
        return;
    }
    let cuda = Library::open("libcuda.so.1");
    assert_eq!(cuda.call("cuInit", &[0]), 0);
    let ask = |name: &str| {
        let (text, mut found) = (CString::new(name).unwrap(), 0usize);
        let arguments = [text.as_ptr().expose_provenance(), out(&mut found), 14000, 0, 0];
        assert_eq!(cuda.call("cuGetProcAddress_v2", &arguments), 0, "{name}");
        found
    };
    assert_ne!(ask("cuMemAllocHost"), 0);
    assert_eq!((ask("cuNoSuchThing"), books().unhooked), (0, 0), "neither allocates device memory");
    let mut pointer = 0u64;
    assert_eq!(call(ask("cuMemAllocOnTheMoon"), &[out(&mut pointer)]), 0, "it is passed on");
    assert_eq!((pointer, books().unhooked), (1, 1));
}

/// A copy of the library in another linker namespace has its own slot. The first copy's byte lock cannot be
/// tested from within its own process. This must not look like a dying process, for which a refusal waits.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn two_copies_in_one_process_share_the_limit_and_refuse_at_once() {
    let name = "loader::two_copies_in_one_process_share_the_limit_and_refuse_at_once";
    if !inside(name, &Share { limits: &[2 * CONTEXT + 704], ..Share::default() }) {
        return;
    }
    let told = Program::named("two_copies.c").compiled(&[]).run(&[]);
    let (answers, took) = told.split_once("refused in ").unwrap();
    assert_eq!(answers, "first 0\nsecond 0 2\n", "two contexts, and 512 and 128 MiB of 704");
    assert!(took.trim().parse::<u32>().unwrap() < 5000, "{took} microseconds");
}
