//! What scripts build on: answers in JSON that fit the shipped schemas, exit codes by the kind of a failure, lists
//! that can be chosen from and read by a program, and completions that shells take.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use gpushare_tests::artifacts::{self, Installed};
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, Outcome, eventually, run};
use gpushare_tests::leases::{cli, told};
use gpushare_tests::meter;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::python;
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

fn share(memory: &str, name: &str) -> Bundle {
    Bundle::small().env("GPUSHARE_MEMORY", memory).annotation("nerdctl/name", name)
}

#[test]
#[ignore = "needs root, runc and Python packages: runs containers"]
fn every_answer_in_json_fits_its_shipped_schema() {
    if !met(NEEDS) || !met(&[Need::Python]) {
        return;
    }
    let installed = Installed::new();
    let node = SimulatedNode::with(2, MODEL, "80GiB", &[]);
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let meter = meter::start(runtime.config());
    let bundles = [share("4GiB", "web").env("GPUSHARE_CORES", "30"), share("8GiB", "trainer")];
    let [web, trainer] = bundles.each_ref().map(|bundle| runtime.run(bundle));
    drop(trainer);
    let _ = runtime.create(&share("900GiB", "large")).expect_err("no GPU has as much");
    let folder = bundles[0].path().to_string_lossy().into_owned();
    let plain = Bundle::small();
    plain.write();
    let plain_folder = plain.path().to_string_lossy().into_owned();
    let scratch = Scratch::new("cdi");
    let cdi = scratch.path().to_string_lossy().into_owned();
    let _ = cli(runtime.config(), &["cdi", "generate", "--output", &cdi]).expect_success("cdi generate");
    let daemon = scratch.path().join("daemon.json").to_string_lossy().into_owned();
    let asked: Vec<(&str, Vec<&str>)> = vec![
        ("cdi-list", vec!["cdi", "list", "--folder", &cdi, "--json"]),
        ("configure", vec!["configure", "docker", "--config", &daemon, "--dry-run", "--json"]),
        ("describe", vec!["describe", "web", "--json"]),
        ("devices", vec!["devices", "--json"]),
        ("devices-topology", vec!["devices", "--topology", "--json"]),
        ("history", vec!["history", "--json"]),
        ("history-by", vec!["history", "--by", "gpu", "--format", "json"]),
        ("logs", vec!["logs", "--json"]),
        ("plan", vec!["plan", "--bundle", &folder, "--json"]),
        ("plan", vec!["plan", "--bundle", &plain_folder, "--json"]),
        ("ps", vec!["ps", "--json"]),
        ("sweep", vec!["sweep", "--json"]),
        ("system", vec!["system", "nodes", "--dry-run", "--json"]),
        ("top", vec!["top", "--once", "--json"]),
        ("update", vec!["update", "web", "--memory", "5GiB", "--json"]),
    ];
    let mut lines = String::new();
    let mut add = |name: &str, text: &str| {
        let value: Value =
            serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}: {text}"));
        assert_eq!(value["version"], 1, "{name}: {text}");
        lines += &format!("{name} {value}\n");
    };
    for (name, args) in &asked {
        add(name, &cli(runtime.config(), args).expect_success(&args.join(" ")).stdout);
    }
    // It fails where the node does.
    add("doctor", &cli(runtime.config(), &["doctor", "--json"]).stdout);
    add("error", &cli(runtime.config(), &["describe", "nobody", "--json"]).stderr);
    drop(web);
    meter.kill();

    let schemas = installed.root().join("usr/local/share/gpushare/schemas");
    let named: Vec<&str> = lines.lines().filter_map(|line| line.split(' ').next()).collect();
    for entry in fs::read_dir(&schemas).expect("schemas are installed").flatten() {
        let name = entry.path().file_stem().expect("a name").to_string_lossy().into_owned();
        assert!(named.contains(&&*name), "no answer was tried of the schema {name}");
    }
    let answers = scratch.file("answers", &lines);
    let mut check = Command::new(python::interpreter());
    let told = run(check.arg(python::program("fits_schema.py")).arg(schemas).arg(answers))
        .expect_success("the schemas");
    assert_eq!(told.stdout.lines().collect::<Vec<_>>(), named);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_failure_has_the_exit_code_of_its_kind_and_is_json_where_the_answer_would_be() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let [large, unclear] = [share("900GiB", "large"), share("much", "unclear")].map(|bundle| {
        bundle.write();
        bundle
    });
    let [large, unclear] = [&large, &unclear].map(|bundle| bundle.path().to_string_lossy().into_owned());
    let container = share("60GiB", "web");
    let living = runtime.run(&container);
    let other = share("60GiB", "other");
    other.write();
    let other = other.path().to_string_lossy().into_owned();
    let wrong = node.config_with("wrong", "[quota]\nmemory = 4\n");
    let fine = runtime.config();
    let cases: [(&Path, &[&str], i32, &str); 9] = [
        (fine, &["ps", "--colour"], 2, "usage"),
        (fine, &["describe", "nobody"], 3, "not-found"),
        (fine, &["cordon", "7"], 3, "not-found"),
        (fine, &["release", container.id()], 4, "refused"),
        (fine, &["plan", "--bundle", &other], 4, "refused"),
        (fine, &["update", "web", "--memory", "79GiB", "--device", "9"], 3, "not-found"),
        (&wrong, &["ps"], 6, "settings"),
        (fine, &["plan", "--bundle", &large], 7, "request"),
        (fine, &["plan", "--bundle", &unclear], 7, "request"),
    ];
    for (config, args, code, kind) in cases {
        let plain = cli(config, args);
        assert_eq!(plain.status.code(), Some(code), "{args:?}: {plain:?}");
        assert!(plain.stdout.is_empty() && !plain.stderr.contains('{'), "{plain:?}");
        if ["cordon", "release"].contains(&args[0]) {
            continue;
        }
        let failed = cli(config, &[args, &["--json"]].concat());
        assert_eq!((failed.status.code(), &*failed.stdout), (Some(code), ""), "{args:?}: {failed:?}");
        let error: Value = serde_json::from_str(&failed.stderr).unwrap_or_else(|_| panic!("{failed:?}"));
        assert_eq!((&error["version"], &error["error"]["kind"]), (&json!(1), &json!(kind)), "{error}");
        let message = error["error"]["message"].as_str().expect("a message");
        assert!(code == 2 || plain.stderr.contains(message), "{message:?} is not {:?}", plain.stderr);
    }
    drop(living);

    let user = |command: &mut Command| command.env("GPUSHARE_CONFIG", fine).output().expect("it runs");
    let refused = user(
        Command::new("setpriv")
            .args(["--reuid=65534", "--clear-groups", "--"])
            .arg(artifacts::cli())
            .arg("ps"),
    );
    assert_eq!(refused.status.code(), Some(5), "{refused:?}");
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn leases_are_listed_by_what_is_asked_and_read_by_programs() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::with(2, MODEL, "80GiB", &[]);
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let web = share("4GiB", "web").env("GPUSHARE_DEVICES", "0");
    let trainer = share("8GiB", "trainer-1").env("GPUSHARE_DEVICES", "1");
    let odd = share("8GiB", "odd,name").env("GPUSHARE_DEVICES", "1");
    let bundles = [&web, &trainer, &odd];
    let _containers = bundles.map(|bundle| runtime.run(bundle));
    let ids = |filters: &[&str]| -> Vec<String> {
        let flags = filters.iter().flat_map(|filter| ["--filter", *filter]);
        let args: Vec<&str> = ["ps", "--quiet"].into_iter().chain(flags).collect();
        cli(runtime.config(), &args).expect_success("ps -q").stdout.lines().map(str::to_owned).collect()
    };
    let [web_id, trainer_id, odd_id] = bundles.map(|bundle| bundle.id().to_owned());
    let (beginning, _) = web_id.rsplit_once('-').expect("ids of tests have dashes");
    assert_eq!(ids(&[]), [web_id.clone(), trainer_id.clone(), odd_id.clone()]);
    for (filters, want) in [
        (&["name=web"][..], vec![&web_id]),
        (&["name=we"], vec![]),
        (&["name=*e*", "gpu=1"], vec![&trainer_id, &odd_id]),
        (&["name=web", "name=trainer-*"], vec![&web_id, &trainer_id]),
        (&["gpu=0", "mode=share", "state=active"], vec![&web_id]),
        (&["image=*"], vec![]),
        (&[&format!("id={beginning}")], vec![&web_id, &trainer_id, &odd_id]),
    ] {
        assert_eq!(ids(filters).iter().collect::<Vec<_>>(), want, "{filters:?}");
    }
    let unknown = cli(runtime.config(), &["ps", "--filter", "owner=me"]);
    assert!(unknown.status.code() == Some(2) && unknown.stderr.contains("namespace"), "{unknown:?}");

    let csv = cli(runtime.config(), &["ps", "--format", "csv"]).expect_success("ps csv").stdout;
    let lines: Vec<&str> = csv.lines().collect();
    assert!(lines[0].starts_with("id,name,image,namespace,pod,state,mode,pid,gpu,memory_bytes,"), "{csv}");
    assert_eq!(lines.len(), 4, "{csv}");
    assert!(lines[1].starts_with(&format!("{web_id},web,,,,active,share,")), "{csv}");
    assert!(lines[3].starts_with(&format!("{odd_id},\"odd,name\",,,,active,")), "{csv}");

    let scratch = Scratch::new("watch");
    let mut watch = Command::new(artifacts::cli());
    watch.args(["ps", "--watch=200ms", "--json"]).env("GPUSHARE_CONFIG", runtime.config());
    let mut watching = command::spawn(&mut watch, scratch.path());
    let looks = || fs::read_to_string(scratch.path().join("stdout")).unwrap_or_default();
    let seen = eventually(Duration::from_secs(20), || looks().lines().count() >= 2);
    let _ = (watching.kill(), watching.wait());
    assert!(seen, "{}", looks());
    let first: Value =
        serde_json::from_str(looks().lines().next().unwrap_or_default()).expect("one object in a line");
    assert_eq!(first["shares"].as_array().map(Vec::len), Some(3));
    assert_eq!(told(runtime.config(), &["ps", "--json"])["strangers"], json!([]));
}

#[test]
#[ignore = "needs the release build: copies its files"]
fn manual_pages_and_completions_are_installed_and_taken_by_their_readers() {
    let installed = Installed::new();
    let share = installed.root().join("usr/local/share");
    let bash = share.join("bash-completion/completions/gpushare");
    let complete = format!(
        "source {}; COMP_WORDS=(gpushare hist); COMP_CWORD=1; _gpushare gpushare hist gpushare; echo \"${{COMPREPLY[*]}}\"",
        bash.display()
    );
    let shown = |outcome: Outcome| outcome.expect_success("a shell").stdout;
    assert_eq!(shown(run(Command::new("bash").args(["-c", &complete]))).trim(), "history");
    for (file, word) in [
        ("zsh/site-functions/_gpushare", "#compdef gpushare"),
        ("fish/vendor_completions.d/gpushare.fish", "complete -c gpushare"),
    ] {
        let text = fs::read_to_string(share.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(!text.contains("pages"), "{file} offers what help does not name");
        assert!(text.contains(word) && text.contains("history"), "{file}");
    }
    assert!(!fs::read_to_string(&bash).expect("it is installed").contains("pages"));
    let printed = shown(run(Command::new(artifacts::cli()).args(["completion", "bash"])));
    assert_eq!(printed, fs::read_to_string(&bash).expect("it is installed"));
    // One page for each command that help names.
    let help = shown(run(Command::new(artifacts::cli()).arg("--help")));
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands =
        commands.take_while(|line| !line.is_empty()).filter_map(|line| line.split_whitespace().next());
    let mut pages = 0;
    for command in commands.filter(|command| *command != "help") {
        let page = share.join(format!("man/man1/gpushare-{command}.1"));
        let text = fs::read_to_string(&page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        assert!(text.contains(".TH"), "{text}");
        pages += usize::from(text.contains("SYNOPSIS"));
    }
    assert!(pages > 15, "{pages}");
}

#[test]
#[ignore = "needs root and Python: opens a terminal"]
fn top_ends_with_its_terminal() {
    if !met(&[Need::Root, Need::Python]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let mut leave = Command::new(python::interpreter());
    leave.arg(python::program("leave_terminal.py")).arg(artifacts::cli()).arg("top");
    let told = run(leave.env("GPUSHARE_CONFIG", node.config())).expect_success("a terminal").stdout;
    // By SIGHUP (129), or by what it sees or writes first; a negative number is a signal that it did not handle.
    assert!(["ended 129\n", "ended 0\n", "ended 1\n"].contains(&&*told), "{told}");
}

#[test]
#[ignore = "needs the release build: runs the program"]
fn a_command_line_that_is_no_text_is_told_as_one() {
    let name = std::os::unix::ffi::OsStrExt::from_bytes(b"name=\xff");
    let name: &std::ffi::OsStr = name;
    let outcome = run(Command::new(artifacts::cli()).args(["ps", "--json", "--filter"]).arg(name));
    assert_eq!(outcome.status.code(), Some(2), "{outcome:?}");
    let error: Value = serde_json::from_str(&outcome.stderr).unwrap_or_else(|_| panic!("{outcome:?}"));
    assert_eq!(error["error"]["kind"], "usage");
    let missing = run(Command::new(artifacts::cli()).args(["update", "web", "--json"]));
    assert!(missing.stderr.contains("--memory") && missing.stderr.lines().count() == 1, "{missing:?}");
}
