//! docs/attacks.md and the tests agree: every row is there once, and every test that it names exists.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use gpushare_tests::artifacts::checkout;

/// How many rows the table has.
const ROWS: usize = 99;

struct Row {
    name: String,
    outcome: String,
    tests: Vec<String>,
}

/// The rows: name, attack, required outcome, rule, tests in backticks, how they were seen to fail.
fn rows() -> Vec<Row> {
    let text = fs::read_to_string(checkout().join("docs/attacks.md")).expect("docs/attacks.md can be read");
    let lines = text.lines().filter(|line| line.starts_with("| A"));
    lines
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
            assert_eq!(cells.len(), 6, "{line}");
            assert!(cells.iter().all(|cell| !cell.is_empty()), "an empty cell: {line}");
            let tests = cells[4].split('`').skip(1).step_by(2).map(str::to_owned).collect();
            Row { name: cells[0].to_owned(), outcome: cells[2].to_owned(), tests }
        })
        .collect()
}

/// The names of all tests of the checkout.
pub fn tests() -> BTreeSet<String> {
    let folders =
        fs::read_dir(checkout()).expect("the checkout can be read").flatten().map(|entry| entry.path());
    let ours = folders.filter(|path| path.join("Cargo.toml").exists() || path.ends_with("testbed"));
    let mut found = BTreeSet::new();
    for path in ours.flat_map(|folder| sources(&folder)) {
        let text = fs::read_to_string(&path).unwrap_or_default();
        for (at, line) in text.lines().enumerate() {
            let Some(name) = line.trim().strip_prefix("fn ").and_then(|rest| rest.strip_suffix("() {"))
            else {
                continue;
            };
            let attributes = text.lines().take(at).collect::<Vec<_>>();
            if attributes
                .iter()
                .rev()
                .take_while(|line| line.trim().starts_with("#["))
                .any(|line| line.contains("#[test]"))
            {
                found.insert(name.to_owned());
            }
        }
    }
    found
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let wanted = entries.filter(|path| path.file_name().is_some_and(|name| name != "target"));
    let sources = wanted.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    sources.filter(|path| path.extension().is_some_and(|end| end == "rs")).collect()
}

#[test]
fn the_table_has_every_row_once_and_names_tests_that_exist() {
    let (rows, tests) = (rows(), tests());
    let names: Vec<String> = rows.iter().map(|row| row.name.clone()).collect();
    let want: Vec<String> = (1..=ROWS).map(|number| format!("A{number}")).collect();
    assert_eq!(names, want);
    for row in &rows {
        let missing: Vec<_> = row.tests.iter().filter(|test| !tests.contains(*test)).collect();
        assert!(missing.is_empty(), "{}: no such tests: {missing:?}", row.name);
        let state = if row.tests.is_empty() { "NOT TESTED HERE" } else { "held" };
        println!("{:4} {state:16} {} ({} tests)", row.name, row.outcome, row.tests.len());
    }
}

#[test]
fn every_test_of_an_attack_stands_in_the_tables_row() {
    let rows = rows();
    for test in tests() {
        let number =
            test.strip_prefix('a').and_then(|rest| rest.get(..3)).and_then(|part| part.strip_suffix('_'));
        let Some(number) = number.and_then(|digits| digits.parse::<usize>().ok()) else { continue };
        let row = rows.iter().find(|row| row.name == format!("A{number}"));
        assert!(row.is_some_and(|row| row.tests.contains(&test)), "{test} is in no row A{number}");
    }
}
