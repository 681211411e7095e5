//! Who may call the extender from other machines: those whose certificate the administrator's has signed.

use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use gpushare_tests::cluster::OPENSSL;
use gpushare_tests::command::eventually;
use gpushare_tests::scratch::Scratch;

use crate::{PROGRAM, cluster};

const SOON: Duration = Duration::from_secs(20);

/// A program that is killed when it is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn openssl(folder: &Path, arguments: &[&str]) {
    let mut command = Command::new(OPENSSL);
    let done = command.args(arguments).current_dir(folder).stderr(Stdio::null()).status();
    assert!(done.expect("openssl is there").success(), "{arguments:?}");
}

/// An authority `name`, and a key and certificate that it has signed.
fn certificate(folder: &Path, name: &str) -> (PathBuf, PathBuf, PathBuf) {
    let [ca, ca_key, key, asked, own] =
        ["-ca.crt", "-ca.key", ".key", ".csr", ".crt"].map(|end| format!("{name}{end}"));
    let subject = format!("/CN={name}");
    let new = ["-newkey", "rsa:2048", "-nodes", "-subj", &subject];
    openssl(folder, &[&["req", "-x509", "-days", "1", "-keyout", &ca_key, "-out", &ca], &new[..]].concat());
    openssl(folder, &[&["req", "-keyout", &key, "-out", &asked], &new[..]].concat());
    let extensions = format!("{name}.ext");
    std::fs::write(folder.join(&extensions), "subjectAltName=IP:127.0.0.1\n").expect("it can be written");
    let sign =
        ["x509", "-req", "-days", "1", "-in", &asked, "-CA", &ca, "-CAkey", &ca_key, "-CAcreateserial"];
    openssl(folder, &[&sign[..], &["-extfile", &extensions, "-out", &own]].concat());
    (folder.join(ca), folder.join(key), folder.join(own))
}

#[test]
fn calls_from_other_machines_need_a_certificate_that_is_known() {
    if !Path::new(OPENSSL).exists() {
        assert!(std::env::var_os("CI").is_none(), "openssl is missing");
        println!("skipped: openssl is missing");
        return;
    }
    let api = cluster(&[("a", 1)]);
    let scratch = Scratch::new("tls");
    let (ca, key, own) = certificate(scratch.path(), "extender");
    let (known_ca, known_key, known) = certificate(scratch.path(), "scheduler");
    let (_, other_key, other) = certificate(scratch.path(), "other");
    let address =
        TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port");
    let start = |address: &str, more: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.args(["scheduler", "--address", address]).args(more);
        command.env_clear().env("KUBECONFIG", api.kubeconfig()).stdin(Stdio::null());
        command
    };
    let [ca, own, key, known_ca] = [ca, own, key, known_ca].map(|path| path.display().to_string());
    let tls = ["--tls-certificate", &own, "--tls-key", &key];
    let outside = format!("0.0.0.0:{}", address.port());
    for (more, want) in [(&[][..], "give --tls-certificate"), (&tls, "give --client-ca")] {
        let told = start(&outside, more).output().expect("it runs");
        let told = String::from_utf8_lossy(&told.stderr).into_owned();
        assert!(told.contains(want), "{told}");
    }
    let all = [&tls[..], &["--client-ca", &known_ca]].concat();
    let _extender = Running(start(&outside, &all).spawn().expect("it starts"));
    let asked = |certificate: Option<(&Path, &Path)>| {
        let mut command = Command::new(OPENSSL);
        command.args([
            "s_client",
            "-quiet",
            "-verify_return_error",
            "-connect",
            &address.to_string(),
            "-CAfile",
            &ca,
        ]);
        if let Some((certificate, key)) = certificate {
            command.arg("-cert").arg(certificate).arg("-key").arg(key);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let child = child.as_mut().expect("openssl is there");
        let mut asks = child.stdin.take().expect("it is piped");
        let _ = asks.write_all(b"GET /healthz HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n");
        let mut told = String::new();
        let _ = std::io::Read::read_to_string(child.stdout.as_mut().expect("it is piped"), &mut told);
        let _ = child.wait();
        told.starts_with("HTTP/1.1 200")
    };
    assert!(eventually(SOON, || asked(Some((&known, &known_key)))), "the known one is answered");
    assert!(!asked(Some((&other, &other_key))), "another one is not");
    assert!(!asked(None), "nor is one without a certificate");
}
