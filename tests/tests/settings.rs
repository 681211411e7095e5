//! The settings file as an administrator changes it by command, and what a bug report tells of a node.

use std::fs;
use std::path::Path;
use std::thread;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::leases::cli;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};

fn read(path: &Path) -> String {
    fs::read_to_string(path).expect("the settings can be read")
}

#[test]
#[ignore = "needs root: settings are root's"]
fn a_setting_is_changed_in_place_or_not_at_all() {
    if !met(&[Need::Root]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let ours = "\n[quota]\n# not for ever\nreserve = \"1GiB\" # for the display\n";
    let config = node.config_with("set", ours);
    let said = |args: &[&str]| cli(&config, args).expect_success(&args.join(" ")).stdout;
    assert_eq!(said(&["config", "get", "quota.reserve"]), "1GiB\n");
    let before = read(&config);
    let told = said(&["config", "set", "quota.reserve", "2GiB"]);
    assert!(told.starts_with("quota.reserve is now \"2GiB\" ("), "{told}");
    assert_eq!(read(&config), before.replace("1GiB\" # for", "2GiB\" # for"));
    assert_eq!(said(&["config", "get", "quota.reserve"]), "2GiB\n");
    assert!(said(&["config", "set", "quota.reserve", "2GiB"]).contains("is already"));
    let _ = said(&["config", "set", "rules.idle", "30m"]);
    assert!(read(&config).contains("\n[rules]\nidle = \"30m\"\n"), "{}", read(&config));
    let _ = said(&["config", "unset", "rules.idle"]);
    assert_eq!(said(&["config", "get", "rules.idle"]), "\n");

    // A setting that no supervisor can follow here says so at once.
    for (program, want) in [
        (
            Path::new("/nowhere"),
            "its program /nowhere is not there (paths.supervisor); every share is refused",
        ),
        (&artifacts::supervisor(), ""),
    ] {
        let _ = said(&["config", "set", "paths.supervisor", &program.display().to_string()]);
        let told = cli(&config, &["config", "set", "supervisor.mode", "required"]);
        assert!(told.success() && told.stderr.contains(want), "{told:?}");
        assert_eq!(told.stderr.is_empty(), want.is_empty(), "{told:?}");
    }
    let _ = said(&["config", "unset", "supervisor.mode"]);

    let whole = read(&config);
    for (args, code, word) in [
        (&["set", "quota.reserve", "much"][..], 6, "set.toml:"),
        (&["set", "quota.replicas", "many"], 2, "is a number"),
        (&["set", "quota.reserv", "1GiB"], 3, "did you mean quota.reserve"),
        (&["set", "quota", "1GiB"], 3, "is a section"),
        (&["get", "nothing.at.all"], 3, "there is no setting"),
    ] {
        let told = cli(&config, &[&["config"], args].concat());
        assert_eq!(told.status.code(), Some(code), "{args:?}: {told:?}");
        assert!(told.stderr.contains(word) && told.stderr.lines().count() == 1, "{args:?}: {told:?}");
    }
    // What another file says counts, so a change would do nothing.
    let folder = format!("{}.d", config.display());
    fs::create_dir(&folder).expect("a folder can be made");
    fs::write(Path::new(&folder).join("50.toml"), "[quota]\nreserve = \"3GiB\"\n")
        .expect("a file can be written");
    let told = cli(&config, &["config", "set", "quota.reserve", "4GiB"]);
    assert_eq!(told.status.code(), Some(4), "{told:?}");
    assert!(told.stderr.contains("50.toml:2 sets quota.reserve and wins"), "{told:?}");
    assert_eq!(read(&config), whole);
}

#[test]
#[ignore = "needs root: settings are root's"]
fn of_settings_that_are_changed_at_once_none_is_lost() {
    if !met(&[Need::Root]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let config = node.config_with("race", "\n[quota]\nreserve = \"1GiB\"\n");
    for round in 2..12 {
        let set = |key: &'static str, value: String| {
            let config = &config;
            move || cli(config, &["config", "set", key, &value]).expect_success(key)
        };
        thread::scope(|scope| {
            let all = [
                scope.spawn(set("quota.reserve", format!("{round}GiB"))),
                scope.spawn(set("rules.idle", format!("{round}m"))),
                scope.spawn(set("rules.hold", format!("{round}h"))),
            ];
            let _ = all.map(|one| one.join().expect("it is set"));
        });
        let text = read(&config);
        for want in [
            format!("reserve = \"{round}GiB\""),
            format!("idle = \"{round}m\""),
            format!("hold = \"{round}h\""),
        ] {
            assert!(text.contains(&want), "{want}: {text}");
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn a_report_tells_of_the_node_and_not_of_its_users() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let config =
        node.config_with("report", &format!("{}\n[quota]\nreplicas = 3\n", LowLevel::Runc.settings()));
    let runtime = Runtime::with_config(LowLevel::Runc, &config);
    let secret = |name: &str| {
        let bundle = Bundle::small().env("GPUSHARE_MEMORY", "60GiB").env("PASSWORD", "hunter2");
        bundle.annotation("nerdctl/name", name)
    };
    let (first, second) = (secret("merger-with-acme"), secret("other"));
    let _container = runtime.run(&first);
    assert!(runtime.create(&second).is_err());
    let report = cli(&config, &["doctor", "--report"]).expect_success("doctor --report").stdout;
    for word in [
        "## Machine",
        "runc: runc version",
        "quota.replicas = 3 (",
        "driver: version",
        "active share",
        "60 GiB requested",
        "NAME0",
    ] {
        assert!(report.contains(word), "{word}: {report}");
    }
    for word in ["acme", "hunter2", "PASSWORD", first.id()] {
        assert!(!report.contains(word), "{word}: {report}");
    }
}
