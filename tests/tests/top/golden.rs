//! Screens that are kept beside the test, without what differs from one run to the next.

use std::path::Path;
use std::{env, fs};

use gpushare_tests::node::driver_version;
use gpushare_tests::terminal::{Screen, Terminal};

/// Between the letters of a screen and their marks.
const MARKS: &str =
    "\n===== marks: r red, y yellow, g green, d dim, b bold; V: letter and ground exchanged\n";
/// The columns of shares in which figures of time stand, and how wide they are.
const COLUMNS: [&str; 3] = ["BUSY", "HELD", "AGE"];
const WIDTH: usize = 5;

/// Waits until `terminal` shows the screen that is kept as `name`.
///
/// # Panics
/// With both screens, when that does not come.
pub fn shown(terminal: &Terminal, name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/top").join(name).with_extension("txt");
    if env::var_os("GPUSHARE_UPDATE_GOLDEN").is_some() {
        let screen = terminal.shows("figures of all shares", is_whole);
        fs::write(&path, text(&screen)).expect("a file can be written");
        return;
    }
    let kept = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let what = format!("{name} as it is kept (if it is better so: GPUSHARE_UPDATE_GOLDEN=1):\n{kept}\nbut");
    let _ = terminal.shows(&what, |screen| text(screen) == kept);
}

/// The screen as it is kept.
fn text(screen: &Screen) -> String {
    let mut columns = Vec::new();
    let mut steadied = String::new();
    for line in screen.lines() {
        steadied += &(steady(&line, &columns) + "\n");
        if line.starts_with("CONTAINER") {
            columns = COLUMNS.iter().filter_map(|name| Some(line.find(name)? + name.len())).collect();
        }
    }
    steadied + MARKS + &screen.marks()
}

/// Whether everything is told that takes the meter a moment.
fn is_whole(screen: &Screen) -> bool {
    let text = text(screen);
    let is_held = |name| text.lines().any(|line| line.starts_with(name) && line.matches("##%").count() == 2);
    is_held("team/trainer-0") && is_held("render") && text.contains("CHEATING miner")
}

/// A line with `#` for what differs from one run to the next. In the line of a share that is what stands in
/// the columns that end at `columns`. An idle GPU's figures are always the same.
fn steady(line: &str, columns: &[usize]) -> String {
    let line = line.replace(&driver_version(), "#");
    if let Some((head, ago)) = line.split_once("last refusal ") {
        let (_, rest) = ago.split_once(" ago").unwrap_or_default();
        return format!("{head}last refusal # ago{rest}");
    }
    if let Some((head, figures)) = line.split_once(" granted ") {
        let (time, rest) = figures.split_once('W').unwrap_or_default();
        let time = if time.contains("  0%") { time.to_owned() } else { time.replace(is_digit, "#") };
        return format!("{head} granted {time}W{rest}");
    }
    let mut letters: Vec<char> = line.chars().collect();
    for end in columns.iter().filter(|_| !line.starts_with("q quit")) {
        let Some(cell) = letters.get_mut(end - WIDTH..*end) else { continue };
        let figure: String = cell.iter().collect();
        let shown = match figure.trim() {
            same @ ("-" | "0%") => same,
            percent if percent.ends_with('%') => "##%",
            _ => "#",
        };
        cell.copy_from_slice(&format!("{shown:>WIDTH$}").chars().collect::<Vec<_>>());
    }
    letters.into_iter().collect()
}

fn is_digit(letter: char) -> bool {
    letter.is_ascii_digit()
}
