//! What is known of shares that ended: over a boot, by the names of their containers, and however the files are
//! cut.

use std::fs;
use std::process::Command;
use std::time::Duration;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{eventually, run};
use gpushare_tests::leases::{cli, shares, told};
use gpushare_tests::meter;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};
use serde_json::json;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

#[test]
#[ignore = "needs root and runc: runs containers"]
fn what_a_share_cost_outlives_the_boot() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let meter = meter::start(node.config());
    // nerdctl tells the name in an annotation.
    let bundle = Bundle::with_client().env("GPUSHARE_MEMORY", "4GiB").annotation("nerdctl/name", "trainer");
    let container = runtime.run(&bundle);
    let launch = ["/bin/gpushare-tests-client", "launch", "1ms", "--every", "1", "--seconds", "2"];
    let _ = container.exec(&launch).expect_success("kernels");
    let measured = || shares(node.config())[0]["gpus"][0]["gpu_nanoseconds"].as_u64().unwrap_or(0);
    // The last of the driver's windows comes late.
    let mut last = 0;
    let settled = eventually(Duration::from_secs(20), || {
        std::thread::sleep(Duration::from_secs(2));
        let before = std::mem::replace(&mut last, measured());
        last > 0 && before == last
    });
    assert!(settled, "{last}");
    let described = cli(node.config(), &["describe", "trainer"]).expect_success("describe").stdout;
    assert!(described.contains("container  trainer") && described.contains("GPU time"), "{described}");
    let _ = cli(node.config(), &["update", "trainer", "--memory", "6GiB"]).expect_success("update");
    drop(container);
    meter.kill();
    let refused = Bundle::with_client().env("GPUSHARE_MEMORY", "900GiB");
    let _ = runtime.create(&refused).expect_err("no GPU has as much");

    let seconds = |by: &str| {
        let all = told(node.config(), &["history", "--by", by, "--format", "json"]);
        assert_eq!(all["sums"][0]["shares"], 1, "{all}");
        all["sums"][0]["gpu_seconds"].as_f64().expect("seconds")
    };
    let want = Duration::from_nanos(last).as_secs_f64();
    assert!((seconds("name") - want).abs() <= want / 100.0, "{} is not {want}", seconds("name"));
    // The boot ends: the state folder lies in memory.
    let umount = "awk -v at=\"$0/\" 'index($2, at) == 1 { print $2 }' /proc/self/mounts | tac | xargs -r -n 1 umount -l";
    let _ = run(Command::new("/bin/sh").args(["-c", umount]).arg(node.state())).expect_success("umount");
    fs::remove_dir_all(node.state()).expect("it can be emptied");
    assert!((seconds("name") - want).abs() <= want / 100.0, "{} is not {want}", seconds("name"));
    let table = cli(node.config(), &["history"]).expect_success("history").stdout;
    assert!(table.contains("trainer") && table.contains("900 GiB requested"), "{table}");
    let logs = cli(node.config(), &["logs"]).expect_success("logs").stdout;
    for words in [
        ["granted     trainer: 0 GPU-", ": 4 GiB"],
        ["resized     trainer: 0 GPU-", ": 6 GiB; before 0 GPU-"],
        ["given back  trainer: ended", "; GPU time"],
        ["refused", "900 GiB requested"],
    ] {
        let is_told = |line: &str| words.iter().all(|word| line.contains(word));
        assert!(logs.lines().any(is_told), "{words:?}: {logs}");
    }
    let filtered = |command: &str, filter: &str| {
        cli(node.config(), &[command, "--filter", filter]).expect_success(command).stdout
    };
    assert_eq!(filtered("logs", "event=re*").lines().count(), 2, "resized and refused");
    assert!(filtered("history", "name=train*").contains("6 GiB"));
    assert!(!filtered("history", "reason=room").contains("trainer"));
    let csv = cli(node.config(), &["history", "--format", "csv"]).expect_success("history").stdout;
    assert!(csv.starts_with("id,name,image,") && csv.contains(",trainer,"), "{csv}");
    assert!(told(node.config(), &["history", "--json", "--until", "1h"])["shares"] == json!([]));

    // Wherever the file is cut, what is whole is told.
    let file = node.root().join("history/ended");
    let whole = fs::read(&file).expect("the history");
    for length in [0, 1, whole.len() / 2, whole.len() - 1] {
        fs::write(&file, &whole[..length]).expect("it can be cut");
        let _ = cli(node.config(), &["history", "--by", "gpu"]).expect_success("history of a cut file");
    }
    // Without its folder containers start and end as ever.
    fs::remove_dir_all(node.root().join("history")).expect("it can be removed");
    fs::write(node.root().join("history"), "").expect("a file in its place");
    drop(runtime.run(&bundle));
    assert_eq!(told(node.config(), &["history", "--json"])["shares"][0]["name"], "trainer");
}

#[test]
#[ignore = "needs root and runc: has a container refused"]
fn a_table_says_how_many_refusals_it_leaves_out_and_a_script_gets_all() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let _ = runtime.create(&Bundle::small().env("GPUSHARE_MEMORY", "900GiB")).expect_err("too much");
    let files = ["run", "history"].map(|folder| node.root().join(folder).join("refusals"));
    let file = files.iter().find(|file| file.is_file()).expect("the refusal is noted");
    let line = fs::read_to_string(file).expect("it can be read");
    fs::write(file, line.repeat(150)).expect("it can be written");
    let table =
        |more: &[&str]| cli(node.config(), &[&["history"], more].concat()).expect_success("history").stdout;
    let refused = |table: &str| table.lines().filter(|line| line.contains("refused: ")).count();
    let cut = table(&[]);
    assert_eq!(refused(&cut), 100, "{cut}");
    assert!(cut.ends_with("50 earlier refusals are left out: --since shows them\n"), "{cut}");
    let all = table(&["--since", "1h"]);
    assert_eq!((refused(&all), all.contains("left out")), (150, false));
    for format in ["json", "csv"] {
        let told = table(&["--format", format]);
        assert_eq!(told.matches("900 GiB requested").count(), 150, "{format}");
    }
}
