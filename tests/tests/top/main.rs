//! `gpushare top` as people see it: in a terminal, on a node with shares of every kind.

mod golden;
mod node;

use std::fs;
use std::path::Path;

use gpushare_tests::artifacts;
use gpushare_tests::leases::leases_of;
use gpushare_tests::meter;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::terminal::{Screen, Terminal};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox, Need::Tmux];
const SMALL: (u16, u16) = (80, 24);
const LARGE: (u16, u16) = (200, 50);

/// `top` in a terminal, between two looks at the terminal's settings.
fn top(size: (u16, u16), config: &Path, more: &[(&str, &Path)]) -> Terminal {
    let script = format!(
        "cd $SCRATCH; stty -g >before; echo before; {} top --interval 300ms; echo ended $?; stty -g >after; exec cat",
        artifacts::cli().display()
    );
    Terminal::open(size, &script, &[&[("GPUSHARE_CONFIG", config)], more].concat())
}

#[test]
#[ignore = "needs root, runc and tmux: runs containers and a terminal"]
fn top_shows_a_node_of_every_kind_of_share_and_its_keys_do_what_the_footer_says() {
    if !met(NEEDS) {
        return;
    }
    let node = node::simulated();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let config = runtime.config();
    let _meter = meter::start(config);
    let bundles = node::bundles();
    let mut containers = node::run(&runtime, &bundles);
    let terminal = top(SMALL, config, &[]);
    golden::shown(&terminal, "80x24");
    assert_eq!(terminal.screen().marks_of("!7.7G/8.0G"), "rrrrrrrrrr", "it strikes the eye");
    terminal.resize(LARGE);
    golden::shown(&terminal, "200x50");
    terminal.resize(SMALL);
    golden::shown(&terminal, "80x24");

    sorts(&terminal);
    filters(&terminal);
    groups(&terminal);
    lists_processes(&terminal);
    // A frozen screen shows what is gone.
    terminal.press(&["f"]);
    let frozen = terminal.shows("that it is frozen", |screen| footer(screen).contains("f go on (FROZEN)"));
    let gone = containers.pop().expect("it runs");
    let id = gone.id().to_owned();
    drop(gone);
    assert_eq!(leases_of(config, &id), []);
    terminal.press(&["Down"]);
    let moved = terminal.shows("the next line selected", |screen| *screen != frozen);
    assert_eq!(moved.lines(), frozen.lines());
    terminal.press(&["f"]);
    let _ = terminal.shows("that one has gone", |screen| {
        screen.text().contains("11 shares") && names(screen).iter().all(|name| name != "whole")
    });
    terminal.press(&["q"]);
    is_given_back(&terminal);
    drop(terminal);

    let terminal = top(SMALL, config, &[("NO_COLOR", Path::new("1"))]);
    let screen = terminal.shows("one that cheats", |screen| screen.text().contains("CHEATING miner"));
    assert_eq!(screen.marks_of("!7.7G/8.0G"), "bbbbbbbbbb", "it strikes the eye");
    let marks: String = screen.marks().split_whitespace().collect();
    assert!(marks.chars().all(|mark| "bV".contains(mark)), "a colour:\n{}", screen.marks());
    // Ctrl-C is a key like others there.
    terminal.press(&["C-c"]);
    is_given_back(&terminal);
}

/// Asserts that the terminal is as it was before `top`.
fn is_given_back(terminal: &Terminal) {
    let screen = terminal.shows("that it has ended", |screen| screen.text().contains("ended"));
    assert_eq!(screen.lines()[..2], ["before", "ended 0"]);
    assert!(!terminal.is_taken(), "cursor or screen are not given back");
    let settings = |name| fs::read_to_string(terminal.folder().join(name)).unwrap_or_default();
    let are_same = || !settings("after").is_empty() && settings("before") == settings("after");
    let _ = terminal.shows("the terminal's settings as they were", |_| are_same());
}

fn footer(screen: &Screen) -> String {
    screen.lines().last().cloned().unwrap_or_default()
}

/// The lines of the list, from the heading to an empty line.
fn list(screen: &Screen) -> Vec<String> {
    let lines = screen.lines();
    let list = lines.iter().skip_while(|line| !line.starts_with("CONTAINER")).skip(1);
    list.take_while(|line| !line.is_empty()).cloned().collect()
}

/// The names in the list, without those of groups.
fn names(screen: &Screen) -> Vec<String> {
    let shares = list(screen).into_iter().filter(|line| line.contains('%'));
    shares.map(|line| line.split("  ").next().unwrap_or_default().to_owned()).collect()
}

/// What stands in the column of a share's memory, without what it may use, in GiB.
fn memory(line: &str) -> f64 {
    let used = line.split_whitespace().find_map(|word| word.split_once("G/"));
    let used = used.map(|(used, _)| used.trim_start_matches('!').parse());
    used.unwrap_or_else(|| panic!("no memory in {line}")).expect("a number")
}

fn sorts(terminal: &Terminal) {
    let by = |word: &str| {
        let wanted = format!("s sort: {word} ");
        terminal.shows(&wanted, |screen| footer(screen).contains(&wanted))
    };
    let age = names(&by("age"));
    terminal.press(&["s"]);
    let screen = by("memory");
    let used: Vec<f64> = list(&screen).iter().map(|line| memory(line)).collect();
    assert!(used.len() == 13 && used.is_sorted_by(|a, b| a >= b), "{used:?}");
    terminal.press(&["s"]);
    let _ = by("compute");
    let _ = terminal.shows("those that compute before all others", |screen| {
        let mut first: Vec<String> = names(screen).into_iter().take(2).collect();
        first.sort();
        first == ["render", "team/trainer-0/main"]
    });
    terminal.press(&["s"]);
    let by_name: Vec<String> = names(&by("name")).iter().map(|name| name.replace("CHEATING ", "")).collect();
    assert!(by_name.is_sorted() && by_name.len() == age.len(), "{by_name:?}");
    terminal.press(&["s"]);
    assert_eq!(names(&by("age")), age);
}

fn filters(terminal: &Terminal) {
    terminal.press(&["/", "T", "E", "A", "M"]);
    let typed = terminal.shows("what is typed", |screen| footer(screen).starts_with("filter: TEAM_"));
    let team = ["team/trainer-0/main", "team/trainer-1/main"];
    assert_eq!(names(&typed), team);
    // A key is a letter here.
    terminal.press(&["q", "BSpace", "Enter"]);
    let kept = terminal.shows("that it is kept", |screen| footer(screen).contains("/ filter: TEAM "));
    assert_eq!(names(&kept), team);
    terminal.press(&["/", "x", "Enter"]);
    let _ = terminal.shows("that none fits", |screen| screen.text().contains("no share fits the filter"));
    terminal.press(&["Escape"]);
    let _ = terminal.shows("all of them", |screen| names(screen).len() == 13);
}

fn groups(terminal: &Terminal) {
    terminal.press(&["t"]);
    let tree = terminal.shows("groups", |screen| footer(screen).contains("t list"));
    let heads: Vec<String> = list(&tree).into_iter().filter(|line| !line.contains('%')).collect();
    let heads: Vec<&str> = heads.iter().filter_map(|line| line.split("  ").next()).collect();
    assert_eq!(heads, ["pod team/trainer-0", "pod team/trainer-1", "compose shop", "others"]);
    terminal.press(&["t"]);
    let _ = terminal.shows("a list", |screen| names(screen).len() == 13 && list(screen).len() == 13);
}

fn lists_processes(terminal: &Terminal) {
    terminal.press(&["Home", "p"]);
    let screen = terminal.shows("processes", |screen| screen.text().contains("PID  PROCESS"));
    let lines = screen.lines();
    let process = lines.iter().skip_while(|line| !line.contains("PID  PROCESS")).nth(1).expect("a line");
    let [pid, name] = process.split_whitespace().collect::<Vec<_>>()[..] else { panic!("{process}") };
    // The kernel keeps 15 letters of a name.
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/comm")).expect("it lives").trim_end(), name);
    assert!(name.starts_with("gpushare-tests"), "{name}");
    terminal.press(&["p"]);
    let _ = terminal.shows("shares alone", |screen| !screen.text().contains("PID  PROCESS"));
}
