use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

const VERSION: &str = "535.309.01";

fn tree(files: &[&str]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for file in files {
        let path = root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    }
    root
}

fn locate(root: &Path) -> Result<Driver, DriverError> {
    Driver::locate(&Roots { driver: root.into(), ..Roots::default() }, VERSION)
}

#[test]
fn every_known_layout_is_found_without_a_cache() {
    for folder in [
        "usr/lib/x86_64-linux-gnu/nvidia/current",
        "usr/lib/x86_64-linux-gnu",
        "usr/lib64",
        "usr/local/nvidia/lib64",
        "usr/local/glibc/usr/lib",
    ] {
        let root = tree(&[
            &format!("{folder}/libcuda.so.{VERSION}"),
            &format!("{folder}/libnvidia-ml.so.{VERSION}"),
        ]);
        let driver = locate(root.path()).unwrap_or_else(|error| panic!("{folder}: {error}"));
        assert!(driver.libcuda().unwrap().ends_with(format!("{folder}/libcuda.so.{VERSION}")), "{folder}");
        assert!(driver.libnvidia_ml().is_ok(), "{folder}");
    }
}

#[test]
fn debians_split_set_is_found_one_folder_up() {
    let root = tree(&[
        &format!("usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.{VERSION}"),
        &format!("usr/lib/x86_64-linux-gnu/libnvidia-pkcs11-openssl3.so.{VERSION}"),
        &format!("usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-nvvm.so.{VERSION}"),
    ]);
    let names: Vec<_> = locate(root.path())
        .unwrap()
        .companions(&Capabilities::default())
        .unwrap()
        .into_iter()
        .map(|library| library.soname)
        .collect();
    assert_eq!(names, ["libnvidia-nvvm.so.4".to_owned(), format!("libnvidia-pkcs11-openssl3.so.{VERSION}")]);
}

#[test]
fn a_folder_of_ld_so_conf_is_searched() {
    let root = tree(&[&format!("opt/nv/libcuda.so.{VERSION}"), "etc/ld.so.conf", "etc/ld.so.conf.d/nv.conf"]);
    fs::write(root.path().join("etc/ld.so.conf"), "include /etc/ld.so.conf.d/*.conf\n").unwrap();
    fs::write(root.path().join("etc/ld.so.conf.d/nv.conf"), "# ours\n/opt/nv\n").unwrap();
    assert!(locate(root.path()).is_ok());
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
    fs::write(&inner, "").unwrap();
    assert!(Root::open(root.path()).file(&link).unwrap().ends_with("lib/real"));
}

#[test]
fn a_file_that_others_may_write_is_refused() {
    let root = tree(&[&format!("usr/lib64/libcuda.so.{VERSION}")]);
    let file = root.path().join(format!("usr/lib64/libcuda.so.{VERSION}"));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(matches!(locate(root.path()), Err(DriverError::Untrusted { .. })));
}
