//! A35: a hook that is started in a way in which no runtime starts it.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gpushare_tests::artifacts;
use gpushare_tests::command;
use gpushare_tests::leases::leases;
use gpushare_tests::needs::met;
use gpushare_tests::scratch::Scratch;

use crate::{NEEDS, on_both, share, tree};

/// How long a runtime waits for our hooks.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The hook, started by `shell`, a prefix of a shell's command line that ends in `exec`.
fn hook(shell: &str, stage: &str, state: &Path) -> Command {
    let mut call = Command::new("/bin/bash");
    // `env -i` drops the shell's own variables, which the hook would refuse first.
    let environment = "env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin GPUSHARE_HOOK=1";
    call.arg("-c").arg(format!("{shell} /bin/busybox {environment} \"$@\"")).arg("sh").arg(artifacts::hook());
    call.args([stage, "--state"]).arg(state).args(["--lease", "1", "--root", "/r", "--id", "nobody"]);
    call.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    call
}

#[test]
#[ignore = "needs root, runc and crun: runs the hook"]
fn a35_a_hook_survives_whatever_it_is_handed() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, runtime, low_level| {
        let bundle = share();
        let container = runtime.run(&bundle);
        let held = leases(runtime.config());
        let scratch = Scratch::new("cwd");
        for (what, shell) in [
            ("closed descriptors", "exec 0<&- 1>&- 2>&-; exec"),
            (
                "1,000 descriptors",
                "ulimit -n 1100; i=3; while [ $i -lt 1000 ]; do eval \"exec $i</dev/null\" 2>/dev/null || break; i=$((i+1)); done; exec",
            ),
            ("no umask", "umask 0; exec"),
            ("a deleted folder", "mkdir gone && cd gone && rmdir ../gone; exec"),
            ("two descriptors", "ulimit -n 3; exec"),
            ("no file size", "ulimit -f 0; exec"),
            ("little memory", "ulimit -v 20000; exec"),
            ("a small stack", "ulimit -s 64; exec"),
            ("no processes", "ulimit -u 1 2>/dev/null; exec"),
            ("no core dumps allowed to fail", "ulimit -c unlimited; exec"),
        ] {
            for stage in ["prestart", "poststop"] {
                let start = Instant::now();
                let outcome = command::run(hook(shell, stage, &node.state()).current_dir(scratch.path()));
                // There is no lease of this name, so poststop succeeds and prestart refuses. What is missing
                // here may make either of them fail.
                assert!(stage == "poststop" || !outcome.success(), "{low_level:?}: {what}: {outcome:?}");
                assert!(start.elapsed() < TIMEOUT, "{low_level:?}: {what}: {stage}");
                assert!(
                    outcome.stdout.is_empty() && outcome.stderr.lines().count() <= 1,
                    "{what}: {outcome:?}"
                );
                assert_eq!(leases(runtime.config()), held, "{low_level:?}: {what}");
            }
        }
        assert_eq!(tree(scratch.path()).len(), 1, "nothing is written into the working folder");
        drop(container);
    });
}

#[test]
#[ignore = "needs root, runc and crun: runs the hook"]
fn a35_a_hook_ends_in_time_whatever_stands_on_its_standard_input() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, _, low_level| {
        fs::create_dir_all(node.state()).expect("the state folder can be made");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(node.state(), mode).expect("a mode can be set");
        for (what, feed) in [
            ("nothing", "printf ''"),
            ("no JSON", "printf '{'"),
            ("no UTF-8", "printf '\\377\\376'"),
            (
                "another container's state",
                "printf '{\"ociVersion\":\"1\",\"id\":\"x\",\"status\":\"creating\",\"pid\":1,\"bundle\":\"/\"}'",
            ),
            ("1 GiB", "busybox dd if=/dev/zero bs=1M count=1024 2>/dev/null"),
            ("no end", "busybox yes"),
        ] {
            for stage in ["prestart", "poststop"] {
                let mut feeder = Command::new("/bin/sh");
                let mut feeder = feeder
                    .args(["-c", feed])
                    .stdout(Stdio::piped())
                    .stderr(Stdio::null())
                    .spawn()
                    .expect("it starts");
                let pipe = feeder.stdout.take().expect("a pipe");
                let mut call = hook("ulimit -v 200000; exec", stage, &node.state());
                let mut child =
                    call.stdin(pipe).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
                drop(call);
                let start = Instant::now();
                let status = command::wait(&mut child, TIMEOUT);
                let _ = child.kill();
                let _ = child.wait();
                let _ = feeder.kill();
                let _ = feeder.wait();
                let status = status.unwrap_or_else(|| panic!("{low_level:?}: {what}: {stage} hangs"));
                assert_eq!(status.success(), stage == "poststop", "{low_level:?}: {what}: {stage}");
                assert!(start.elapsed() < TIMEOUT);
            }
        }
    });
}
