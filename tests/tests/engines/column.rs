//! Fills one column of the table: runs each scenario alone, keeps its failure, and clears the engine after
//! it.

use std::collections::BTreeMap;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use gpushare_tests::view::View;

use crate::engine::{self, With};
use crate::place::Place;
use crate::scenarios::{SCENARIOS, Scene, restricted};
use crate::table::{self, Cell, Column, Engine, ROWS, Row};

/// The columns that this process has finished.
static COLUMNS: Mutex<BTreeMap<Engine, Column>> = Mutex::new(BTreeMap::new());

/// A column that is being filled.
pub struct Filling {
    /// How often [`Row::Restart`] restarts.
    pub restarts: usize,
    engine: Engine,
    view: View,
    cells: Column,
}

impl Filling {
    /// The empty column of `engine`, which works in `view`.
    pub fn new(engine: Engine, view: View) -> Self {
        Self { restarts: 10, engine, view, cells: Column::new() }
    }

    /// Every scenario that is the same for all engines.
    pub fn general(&mut self, engine: &mut dyn engine::Engine, place: &Place) {
        for (row, scenario) in SCENARIOS {
            self.check(*row, engine, place, scenario);
        }
    }

    /// The one scenario for which some engines are set up anew.
    pub fn user_namespace(&mut self, engine: &mut dyn engine::Engine, place: &Place) {
        self.check(Row::UserNamespace, engine, place, |scene| restricted(scene, With::UserNamespace));
    }

    /// Fills the cell of `row` by `scenario`, unless the engine has no such thing or this machine cannot show
    /// it.
    pub fn check(
        &mut self,
        row: Row,
        engine: &mut dyn engine::Engine,
        place: &Place,
        scenario: impl FnOnce(&mut Scene<'_>),
    ) {
        let mut scene = Scene { engine, place, restarts: self.restarts, names: Vec::new() };
        self.check_alone(row, || {
            let held = catch_unwind(AssertUnwindSafe(|| scenario(&mut scene)));
            let cleared = catch_unwind(AssertUnwindSafe(|| scene.clear()));
            for outcome in [held, cleared] {
                outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
        });
    }

    /// As [`Filling::check`], for a scenario that has no [`Scene`].
    pub fn check_alone(&mut self, row: Row, scenario: impl FnOnce()) {
        if table::absent(self.engine, row).is_some() {
            return;
        }
        let start = Instant::now();
        let cell = match lacking(self.engine, row, self.view) {
            Some(reason) => Cell::Absent(reason),
            None => match catch_unwind(AssertUnwindSafe(scenario)) {
                Ok(()) => Cell::Passed,
                Err(panic) => Cell::Failed(message(&*panic)),
            },
        };
        say(&format!(
            "{}, {row:?}: {cell:?}, {:.1} s",
            table::name(self.engine),
            start.elapsed().as_secs_f32()
        ));
        self.cells.insert(row, cell);
    }

    /// Closes the column and prints the table as far as it is known.
    ///
    /// # Panics
    /// When a cell failed, or a scenario that the table promises was not tried.
    pub fn finish(mut self) {
        for (row, text) in ROWS {
            let untried = || match table::absent(self.engine, *row) {
                Some(reason) => Cell::Absent(reason.to_owned()),
                None => Cell::Failed(format!("not tried: {text}")),
            };
            self.cells.entry(*row).or_insert_with(untried);
        }
        let failed: Vec<_> = self.cells.iter().filter(|(_, cell)| matches!(cell, Cell::Failed(_))).collect();
        let failed = format!("{failed:#?}");
        let mut columns = COLUMNS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        columns.insert(self.engine, self.cells);
        let table = table::print(&columns);
        std::fs::write(Path::new(env!("CARGO_TARGET_TMPDIR")).join("engines.md"), &table)
            .expect("the table can be written");
        drop(columns);
        assert_eq!(failed, "[]", "{}", table::name(self.engine));
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned())).unwrap_or_default()
}

fn say(line: &str) {
    // If stderr is closed, the lost line does not matter.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Why this machine's root cannot run a scenario: the kernel feature or right that it lacks.
fn lacking(engine: Engine, row: Row, view: View) -> Option<String> {
    let raises_limits = may(24);
    let reason = if engine == Engine::CrunV2 && !raises_limits {
        "this root may not raise its limits (CAP_SYS_RESOURCE), as crun does on cgroup v2"
    } else if row == Row::Privileged && !raises_limits && !is_a_low_level_runtime(engine) {
        "this root has not all capabilities (CAP_SYS_RESOURCE), so it cannot give them"
    } else if row == Row::KilledForMemory && !view.has_controller("memory") {
        "this machine's cgroup v2 has no memory controller"
    } else if row == Row::EngineUpdate && !view.has_controller("cpu") {
        "this machine's cgroup v2 has no cpu controller, and no other that could be updated"
    } else {
        return None;
    };
    Some(reason.to_owned())
}

fn is_a_low_level_runtime(engine: Engine) -> bool {
    matches!(engine, Engine::Runc | Engine::RuncV2 | Engine::Crun | Engine::CrunV2 | Engine::Youki)
}

/// Whether this process has the capability with the kernel's number `capability`.
fn may(capability: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> capability & 1 == 1
}
