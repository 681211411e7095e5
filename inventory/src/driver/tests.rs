//! Tests of the search for the driver, in folders with the layouts of known systems.

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

const VERSION: &str = "535.309.01";

fn tree(files: &[&str]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for file in files {
        let path = root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, elf_header(2)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    }
    for folder in
        root.path().ancestors().take(1).chain(files.iter().flat_map(|file| Path::new(file).ancestors()))
    {
        let folder = root.path().join(folder);
        if folder.is_dir() {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
        }
    }
    root
}

/// The first bytes of a library for this processor, or, with class 1, of a 32-bit library.
fn elf_header(class: u8) -> [u8; 20] {
    let machine = match (class, cfg!(target_arch = "aarch64")) {
        (1, _) => 3,
        (_, true) => 183,
        (_, false) => 62,
    };
    let mut header = [0; 20];
    header[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, 1, 1]);
    header[18] = machine;
    header
}

fn named(files: &[String]) -> tempfile::TempDir {
    tree(&files.iter().map(String::as_str).collect::<Vec<_>>())
}

fn sonames(driver: &Driver, capabilities: &str, extent: Extent) -> Vec<String> {
    let libraries = driver.companions(&capabilities.parse().unwrap(), extent, LeftOut::default()).unwrap();
    libraries.into_iter().flat_map(|library| library.names).collect()
}

fn inner_paths(driver: &Driver, capabilities: &str, extent: Extent) -> Vec<String> {
    let files = driver.files(&capabilities.parse().unwrap(), extent, LeftOut::default()).unwrap();
    files.iter().map(|file| file.container_path.display().to_string()).collect()
}

fn locate(root: &Path) -> Result<Driver, DriverError> {
    Driver::locate(&Roots { driver: root.into(), ..Roots::default() }, VERSION)
}

/// System, folder of its libraries, path of its nvidia-smi.
const LAYOUTS: [(&str, &str, &str); 9] = [
    ("Debian", "usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/nvidia/current/nvidia-smi"),
    (
        "Debian, older cards",
        "usr/lib/x86_64-linux-gnu/nvidia/tesla-470",
        "usr/lib/nvidia/tesla-470/nvidia-smi",
    ),
    ("Ubuntu", "usr/lib/x86_64-linux-gnu", "usr/bin/nvidia-smi"),
    ("Ubuntu before the merged /usr", "lib/x86_64-linux-gnu", "usr/bin/nvidia-smi"),
    ("Red Hat", "usr/lib64", "usr/bin/nvidia-smi"),
    ("cloud images", "usr/local/nvidia/lib64", "usr/local/nvidia/bin/nvidia-smi"),
    ("cloud images, read-only", "var/lib/nvidia/lib64", "var/lib/nvidia/bin/nvidia-smi"),
    ("Talos", "usr/local/glibc/usr/lib", "usr/local/bin/nvidia-smi"),
    ("a folder with lib64 and bin", "lib64", "bin/nvidia-smi"),
];

#[test]
#[cfg(target_arch = "x86_64")]
fn every_known_layout_is_found_without_a_cache() {
    for (system, folder, program) in LAYOUTS {
        let library = |stem: &str| format!("{folder}/{stem}.so.{VERSION}");
        let stems = ["libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"];
        let root = named(&[stems.map(library).as_slice(), &[program.to_owned()]].concat());
        let driver = locate(root.path()).unwrap_or_else(|error| panic!("{system}: {error}"));
        assert!(driver.libcuda().unwrap().ends_with(library("libcuda")), "{system}");
        assert!(driver.libnvidia_ml().unwrap().ends_with(library("libnvidia-ml")), "{system}");
        assert_eq!(sonames(&driver, "compute", Extent::Share), ["libnvidia-ptxjitcompiler.so.1"], "{system}");
        assert_eq!(inner_paths(&driver, "utility", Extent::Share), ["/usr/bin/nvidia-smi"], "{system}");
    }
}

#[test]
fn a_driver_that_is_links_into_a_store_is_found_with_its_neighbours() {
    let store = "nix/store/abc-nvidia-x11-535/lib";
    let root = named(
        &["libcuda", "libnvidia-ml", "libnvidia-nvvm"].map(|stem| format!("{store}/{stem}.so.{VERSION}")),
    );
    let folder = root.path().join("run/opengl-driver/lib");
    fs::create_dir_all(&folder).unwrap();
    for stem in ["libcuda", "libnvidia-ml"] {
        let name = format!("{stem}.so.{VERSION}");
        symlink(format!("/{store}/{name}"), folder.join(&name)).unwrap();
        symlink(&name, folder.join(format!("{stem}.so.1"))).unwrap();
    }
    let driver = locate(root.path()).unwrap();
    assert_eq!(driver.libcuda().unwrap(), root.path().join(store).join(format!("libcuda.so.{VERSION}")));
    assert_eq!(sonames(&driver, "compute", Extent::Share), ["libnvidia-nvvm.so.4"]);
}

#[test]
fn folders_of_the_settings_come_first() {
    let root = named(&["opt/driver", "usr/lib64"].map(|folder| format!("{folder}/libcuda.so.{VERSION}")));
    for configured in ["/opt/driver", "opt/driver"] {
        let roots = Roots {
            driver: root.path().into(),
            library_folders: vec![configured.into()],
            ..Roots::default()
        };
        let driver = Driver::locate(&roots, VERSION).unwrap();
        assert!(
            driver.libcuda().unwrap().ends_with(format!("opt/driver/libcuda.so.{VERSION}")),
            "{configured}"
        );
    }
}

#[test]
fn builds_of_32_bits_are_passed_over() {
    let file = format!("libcuda.so.{VERSION}");
    let root = named(&[format!("usr/lib64/{file}"), format!("usr/lib/{file}")]);
    fs::write(root.path().join("usr/lib64").join(&file), elf_header(1)).unwrap();
    assert!(locate(root.path()).unwrap().libcuda().unwrap().ends_with(format!("usr/lib/{file}")));
    fs::write(root.path().join("usr/lib").join(&file), "no library at all").unwrap();
    assert!(matches!(locate(root.path()), Err(DriverError::NotFound { .. })));
}

#[test]
fn debians_split_set_is_found_around_the_folder() {
    let current = "usr/lib/x86_64-linux-gnu/nvidia/current";
    let root = tree(&[
        &format!("{current}/libcuda.so.{VERSION}"),
        &format!("usr/lib/x86_64-linux-gnu/libnvidia-pkcs11-openssl3.so.{VERSION}"),
        &format!("{current}/libnvidia-nvvm.so.{VERSION}"),
        &format!("{current}/libvdpau_nvidia.so.{VERSION}"),
        &format!("usr/lib/x86_64-linux-gnu/libnvidia-glcore.so.{VERSION}"),
        "usr/lib/x86_64-linux-gnu/gbm/nvidia-drm_gbm.so",
        &format!("{current}/nvoptix.bin"),
    ]);
    let driver = locate(root.path()).unwrap();
    let full = |stem: &str| format!("{stem}.so.{VERSION}");
    assert_eq!(
        sonames(&driver, "compute", Extent::Share),
        ["libnvidia-nvvm.so.4".to_owned(), full("libnvidia-pkcs11-openssl3")]
    );
    assert_eq!(sonames(&driver, "video", Extent::Share), ["libvdpau_nvidia.so.1"]);
    assert_eq!(
        sonames(&driver, "graphics", Extent::Share),
        [full("libnvidia-glcore"), "gbm/nvidia-drm_gbm.so".to_owned()]
    );
    assert_eq!(inner_paths(&driver, "graphics", Extent::Share), ["/usr/share/nvidia/nvoptix.bin"]);
}

#[test]
fn each_capability_brings_its_own_files_and_a_share_the_least() {
    let library = |name: &str| format!("usr/lib64/{name}");
    let versioned = [
        "libcuda",
        "libnvidia-ptxjitcompiler",
        "libnvidia-opencl",
        "libcudadebugger",
        "libnvidia-cfg",
        "libnvcuvid",
        "libnvidia-encode",
        "libEGL_nvidia",
        "libnvidia-ngx",
        "libnvidia-allocator",
    ];
    let mut files: Vec<String> =
        versioned.map(|stem| library(&format!("{stem}.so.{VERSION}"))).into_iter().collect();
    files.extend(["libnvidia-api.so.1", "libnvidia-egl-gbm.so.1"].map(library));
    files.extend(
        [
            "usr/bin/nvidia-smi",
            "usr/bin/nvidia-debugdump",
            "usr/bin/nvidia-cuda-mps-control",
            "usr/bin/nvidia-xconfig",
            "etc/OpenCL/vendors/nvidia.icd",
            "etc/vulkan/icd.d/nvidia_icd.json",
            "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
            "usr/share/X11/xorg.conf.d/10-nvidia.conf",
        ]
        .map(str::to_owned),
    );
    let root = named(&files);
    let driver = locate(root.path()).unwrap();
    let icd = "/etc/vulkan/icd.d/nvidia_icd.json";
    let egl = "/usr/share/glvnd/egl_vendor.d/10_nvidia.json";
    for (capabilities, extent, libraries, others) in [
        ("compute", Extent::Share, &["libnvidia-ptxjitcompiler.so.1"][..], &[][..]),
        (
            "compute",
            Extent::Whole,
            &[
                "libnvidia-ptxjitcompiler.so.1",
                "libcudadebugger.so.1",
                "libnvidia-opencl.so.1",
                "libnvidia-allocator.so.1",
            ],
            &["/etc/OpenCL/vendors/nvidia.icd", "/usr/bin/nvidia-cuda-mps-control"],
        ),
        ("utility", Extent::Share, &["libnvidia-cfg.so.1"], &["/usr/bin/nvidia-smi"]),
        (
            "utility",
            Extent::Whole,
            &["libnvidia-cfg.so.1", "libnvidia-api.so.1"],
            &["/usr/bin/nvidia-debugdump", "/usr/bin/nvidia-smi"],
        ),
        (
            "video",
            Extent::Share,
            &["libnvcuvid.so.1", "libnvcuvid.so", "libnvidia-encode.so.1", "libnvidia-encode.so"],
            &[],
        ),
        (
            "graphics",
            Extent::Share,
            &["libEGL_nvidia.so.0", "libnvidia-allocator.so.1", "libnvidia-egl-gbm.so.1"],
            &[icd, egl],
        ),
        (
            "display",
            Extent::Share,
            &["libEGL_nvidia.so.0", "libnvidia-allocator.so.1", "libnvidia-egl-gbm.so.1"],
            &[icd, "/usr/bin/nvidia-xconfig", "/usr/share/X11/xorg.conf.d/10-nvidia.conf", egl],
        ),
        ("ngx", Extent::Share, &["libnvidia-ngx.so.1"], &[]),
    ] {
        assert_eq!(sonames(&driver, capabilities, extent), libraries, "{capabilities}, {extent:?}");
        assert_eq!(inner_paths(&driver, capabilities, extent), others, "{capabilities}, {extent:?}");
    }
    let all = sonames(&driver, "all", Extent::Share);
    assert!(
        all.contains(&"libnvcuvid.so.1".to_owned()) && !all.contains(&"libnvidia-opencl.so.1".to_owned())
    );
}

#[test]
fn a_folder_of_ld_so_conf_is_searched() {
    let root = tree(&[&format!("opt/nv/libcuda.so.{VERSION}"), "etc/ld.so.conf", "etc/ld.so.conf.d/nv.conf"]);
    fs::write(root.path().join("etc/ld.so.conf"), "include /etc/ld.so.conf.d/*.conf\n").unwrap();
    fs::write(root.path().join("etc/ld.so.conf.d/nv.conf"), "# ours\n/opt/nv\n").unwrap();
    assert!(locate(root.path()).is_ok());
}

#[test]
fn a_folder_of_ld_so_cache_is_searched_whatever_the_caches_format() {
    let root = tree(&[&format!("opt/nv/libcuda.so.{VERSION}"), "etc/ld.so.cache"]);
    let cache = root.path().join("etc/ld.so.cache");
    for (bytes, want) in [
        (&b"\0\xff\0libcuda.so.1\0/opt/nv/libcuda.so.1\0"[..], true),
        (b"glibc-ld.so.cache1.1/opt/nv/libcuda.so.1", false),
        (b"\0opt/nv/libcuda.so.1\0", false),
        (b"\0/opt/nv/libnvidia-ml.so.1\0", true),
        (b"", false),
    ] {
        fs::write(&cache, bytes).unwrap();
        assert_eq!(locate(root.path()).is_ok(), want, "{}", bytes.escape_ascii());
    }
}

#[test]
fn each_required_library_that_is_missing_is_named_with_its_folder() {
    for (there, missing) in [("libcuda", "libnvidia-ml"), ("libnvidia-ml", "libcuda")] {
        let root = named(&[format!("usr/lib64/{there}.so.{VERSION}")]);
        let driver = locate(root.path()).unwrap();
        let result = if missing == "libcuda" { driver.libcuda() } else { driver.libnvidia_ml() };
        let text = result.unwrap_err().to_string();
        let folder = root.path().join("usr/lib64").display().to_string();
        assert!(text.contains(&format!("{missing}.so.{VERSION}")) && text.contains(&folder), "{text}");
    }
}

#[test]
fn a_half_upgraded_driver_is_refused_unless_a_whole_one_lies_elsewhere() {
    let file = |folder: &str| format!("{folder}/libcuda.so.{VERSION}");
    let root = named(&[file("usr/lib64"), "usr/lib64/libcuda.so.550.54.15".to_owned()]);
    symlink("libcuda.so.550.54.15", root.path().join("usr/lib64/libcuda.so.1")).unwrap();
    let text = locate(root.path()).unwrap_err().to_string();
    assert!(
        text.contains("usr/lib64/libcuda.so.1") && text.contains("550.54.15") && text.contains(VERSION),
        "{text}"
    );
    let whole = root.path().join(file("usr/local/nvidia/lib64"));
    fs::create_dir_all(whole.parent().unwrap()).unwrap();
    fs::write(&whole, elf_header(2)).unwrap();
    assert_eq!(locate(root.path()).unwrap().libcuda().unwrap(), whole);
}

#[test]
fn another_version_is_a_mismatch_that_names_both() {
    let root = tree(&["usr/lib64/libcuda.so.550.54.15"]);
    let text = locate(root.path()).unwrap_err().to_string();
    assert!(text.contains(VERSION) && text.contains("550.54.15"), "{text}");
}

#[test]
fn a_link_that_leads_outside_the_driver_root_is_not_followed() {
    let outside = tree(&[&format!("libcuda.so.{VERSION}")]);
    let root = tree(&["usr/lib64/keep"]);
    let link = root.path().join(format!("usr/lib64/libcuda.so.{VERSION}"));
    symlink(outside.path().join(format!("libcuda.so.{VERSION}")), &link).unwrap();
    assert!(matches!(locate(root.path()), Err(DriverError::NotFound { .. })));
    fs::remove_file(&link).unwrap();
    symlink("../../../../../../lib/real", &link).unwrap();
    let inner = root.path().join("lib/real");
    fs::create_dir(inner.parent().unwrap()).unwrap();
    fs::write(&inner, elf_header(2)).unwrap();
    assert!(Root::open(root.path()).file(&link).unwrap().ends_with("lib/real"));
}

#[test]
fn a_folder_that_was_safe_above_one_file_need_not_be_safe_around_another() {
    let files = ["usr/lib/vdpau/libvdpau_nvidia.so.1", "usr/lib/libcuda.so.1"];
    let folder = tree(&files);
    let root = Root::open(folder.path());
    let path = |file: &str| root.real().unwrap().join(file);
    fs::set_permissions(path("usr/lib"), fs::Permissions::from_mode(0o775)).unwrap();
    let mut trust = Trust::of(&root);
    assert!(trust.check(&path(files[0])).is_ok());
    assert!(
        matches!(trust.check(&path(files[1])), Err(DriverError::Untrusted { path: at }) if at == path("usr/lib"))
    );
}

#[test]
fn a_driver_root_that_is_a_link_has_the_files_of_its_folder() {
    let folder = "usr/lib/x86_64-linux-gnu/nvidia/current";
    let library = |folder: &str, stem: &str| format!("{folder}/{stem}.so.{VERSION}");
    let root = named(&[library(folder, "libcuda"), library("usr/lib", "libnvidia-ptxjitcompiler")]);
    let link = root.path().join("link");
    symlink(root.path(), &link).unwrap();
    let driver = Driver::locate(
        &Roots { driver: link, library_folders: vec![Path::new("/").join(folder)], ..Roots::default() },
        VERSION,
    )
    .unwrap();
    assert!(driver.libcuda().unwrap().ends_with(library(folder, "libcuda")));
    assert!(driver.sources().contains(&root.path().canonicalize().unwrap().join(folder)));
}

#[test]
fn a_file_that_others_may_write_is_refused() {
    let root = tree(&[&format!("usr/lib64/libcuda.so.{VERSION}")]);
    let file = root.path().join(format!("usr/lib64/libcuda.so.{VERSION}"));
    for (path, mode) in [(&file, 0o666), (&file, 0o664)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        assert!(matches!(locate(root.path()), Err(DriverError::Untrusted { .. })), "{mode:o}");
    }
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    for (folder, mode, want) in
        [("usr/lib64", 0o775, false), ("usr", 0o777, false), ("usr", 0o775, true), ("", 0o757, false)]
    {
        let folder = root.path().join(folder);
        fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(locate(root.path()).is_ok(), want, "{} with mode {mode:o}", folder.display());
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

#[test]
fn what_is_left_out_is_neither_given_nor_looked_at() {
    let nvvm = format!("usr/lib64/libnvidia-nvvm.so.{VERSION}");
    let jit = format!("usr/lib64/libnvidia-ptxjitcompiler.so.{VERSION}");
    let cuda = format!("usr/lib64/libcuda.so.{VERSION}");
    let root = named(&[nvvm.clone(), jit, cuda, "usr/bin/nvidia-smi".to_owned()]);
    // Other users may write to them, so every container that gets them would be refused.
    for file in [&nvvm, "usr/bin/nvidia-smi"] {
        fs::set_permissions(root.path().join(file), fs::Permissions::from_mode(0o666)).unwrap();
    }
    let driver = locate(root.path()).unwrap();
    let capabilities = "compute,utility".parse().unwrap();
    let given = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let libraries = driver.companions(&capabilities, Extent::Share, LeftOut(&names)).ok()?;
        let files = driver.files(&capabilities, Extent::Share, LeftOut(&names)).ok()?;
        Some((libraries.into_iter().flat_map(|library| library.names).collect::<Vec<_>>(), files.len()))
    };
    assert_eq!(given(&[]), None);
    assert_eq!(given(&["nvidia-smi", "libnvidia-nvv"]), None);
    let want = Some((vec!["libnvidia-ptxjitcompiler.so.1".to_owned()], 0));
    assert_eq!(given(&["nvidia-smi", "libnvidia-nvvm.so.4"]), want);
    assert_eq!(given(&["nvidia*", "libnvidia-nvvm*"]), want);
}
