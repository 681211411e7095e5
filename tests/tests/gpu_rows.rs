//! How the tests for a machine with a GPU (`tests/gpu`) run their rows: each row has its own time and must
//! end with a verdict.

use std::process::Command;

use gpushare_tests::artifacts::checkout;
use gpushare_tests::command::{self, Outcome};

/// Runs `rows`, bash functions, in the order of `list`, lines of `NAME SECONDS`; a minute is left for all.
fn run_rows(rows: &str, list: &str) -> Outcome {
    let results = tempfile::tempdir().expect("a temporary folder can be made");
    let script = format!(
        "set -u; results=$1 work=$1/work only= row= row_pid=; . \"$2/tests/gpu/report.sh\"\n\
         end_containers() {{ :; }}\n{rows}\n\
         make_results; part_end=$((SECONDS + 60))\n\
         while read -r name seconds <&3; do run_row \"$name\" \"$seconds\"; done 3<<'LIST'\n{list}\nLIST\n\
         summary"
    );
    let mut bash = Command::new("bash");
    command::run(bash.args(["-c", &script, "rows"]).arg(results.path()).arg(checkout()))
}

fn verdicts(outcome: &Outcome) -> Vec<&str> {
    outcome.stdout.lines().take_while(|line| !line.is_empty()).collect()
}

#[test]
fn a_row_that_runs_over_is_killed_with_its_children_and_the_next_one_runs() {
    // The marker tells whether a child of the row outlived it.
    let marker = tempfile::NamedTempFile::new().expect("a temporary file can be made");
    let rows = format!(
        "row_slow() {{ (sleep 4; echo alive >{}) & sleep 100; }}\nrow_next() {{ sleep 5; pass figure=1; }}",
        marker.path().display()
    );
    let outcome = run_rows(&rows, "slow 1\nnext 30");
    assert_eq!(
        verdicts(&outcome),
        ["FAIL slow reason=ran_over_1_seconds", "PASS next figure=1"],
        "{outcome:?}"
    );
    assert!(!outcome.success());
    assert_eq!(std::fs::read_to_string(marker.path()).expect("the marker can be read"), "");
}

#[test]
fn a_row_without_a_verdict_fails_and_one_without_time_is_skipped() {
    let rows = "row_good() { verdict '[ 1 = 1 ]' a=b; }\nrow_silent() { return 0; }\nrow_late() { pass; }";
    let outcome = run_rows(rows, "good 10\nsilent 10\nlate 1000");
    let want = ["PASS good a=b", "FAIL silent reason=no_verdict", "SKIP late reason=no_time_left"];
    assert_eq!(verdicts(&outcome), want, "{outcome:?}");
    assert!(outcome.stdout.contains("1 passed, 1 failed, 1 skipped"), "{outcome:?}");
}

#[test]
fn a_containers_name_is_the_rows_and_is_used_once() {
    let rows = "client= top= python= container_environment=(); . \"$2/tests/gpu/container.sh\"\n\
                root_for() { :; }; python_mount() { :; }; end_containers() { :; }\n\
                row_first() { bundle same -- true && pass \"$(basename \"$folder\")\"; }\n\
                row_second() { bundle same -- true && bundle same -- true; pass went_on; }";
    let outcome = run_rows(rows, "first 10\nsecond 10");
    let want =
        ["PASS first first-same", "FAIL second reason=the_name_same_was_used_twice", "PASS second went_on"];
    assert_eq!(verdicts(&outcome), want, "{outcome:?}");
}
