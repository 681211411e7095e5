//! The list of cases, the same for every device and seed.

use gpushare_simulator::virtual_gpu::Discipline;

use crate::container::{Container, Load, Shape};
use crate::figures::{Bounds, Figures};
use crate::run::Trial;
use crate::time::MILLISECOND;

/// A group of runs that is reported as one line.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name of the condition that it tests.
    pub name: &'static str,
    /// The containers of each of its runs.
    pub runs: Vec<Vec<Container>>,
}

/// The result of a case on one device.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Containers of all runs.
    pub containers: usize,
    /// How many of them exceeded the bounds.
    pub misses: usize,
    /// The worst figures of any of them, without the seconds.
    pub worst: Figures,
}

/// The setting for running a case.
#[derive(Clone, Debug)]
pub struct Setting {
    /// How the device chooses the next work to run.
    pub device: Discipline,
    /// The bounds on a container's distance from its share.
    pub bounds: Bounds,
}

impl Case {
    /// Runs every `step`-th run of the case with each of `seeds`.
    #[must_use]
    pub fn run(&self, setting: &Setting, seeds: std::ops::Range<u64>, step: usize) -> Summary {
        let nothing = Figures { least_first: f64::INFINITY, ..Figures::default() };
        let mut summary = Summary { worst: nothing, ..Summary::default() };
        for seed in seeds {
            for containers in self.runs.iter().step_by(step) {
                for figures in Trial::new(containers.clone(), setting.device, seed).run() {
                    summary.containers += 1;
                    summary.misses += usize::from(!figures.is_within(&setting.bounds));
                    summary.worst = summary.worst.worse(&figures);
                }
            }
        }
        summary
    }
}

const LIMITS: [u32; 4] = [25, 30, 50, 75];
const LENGTHS: [u64; 3] = [MILLISECOND / 10, MILLISECOND, 10 * MILLISECOND];
const SYNCHRONISE: [u32; 3] = [0, 1, 16];

fn loads() -> impl Iterator<Item = Load> {
    LENGTHS.into_iter().flat_map(|length| SYNCHRONISE.map(|synchronise| Load::steady(length, synchronise)))
}

/// One container at each limit with each load.
fn alone(processes: usize, change: impl Fn(Load) -> Load) -> Vec<Vec<Container>> {
    let change = &change;
    LIMITS
        .into_iter()
        .flat_map(|cores| loads().map(move |load| vec![Container::fixed(cores, processes, change(load))]))
        .collect()
}

/// Containers with the shares `cores`, each with the load of the same run.
fn together(cores: &[u32], processes: usize) -> Vec<Vec<Container>> {
    loads()
        .map(|load| cores.iter().map(|cores| Container::fixed(*cores, processes, load.clone())).collect())
        .collect()
}

/// Two containers, with every pair of kernel lengths.
fn side_by_side(cores: [u32; 2]) -> Vec<Vec<Container>> {
    let pairs = LENGTHS.into_iter().flat_map(|one| LENGTHS.map(|other| [one, other]));
    pairs
        .flat_map(|lengths| {
            // Shares that add up to 100 % need programs that always want more, so none of these waits for
            // each short kernel.
            [0, 16].map(|synchronise| {
                let container =
                    |at: usize| Container::fixed(cores[at], 1, Load::steady(lengths[at], synchronise));
                vec![container(0), container(1)]
            })
        })
        .collect()
}

/// Kinds of kernels that differ by grid, function or graph: short, five times and fifty times as long, in
/// random order.
fn mixed(load: Load) -> Load {
    Load { kernels: [1, 5, 50].map(|factor| load.kernels[0] * factor / 5).into(), ..load }
}

/// Lists all cases.
#[must_use]
pub fn cases() -> Vec<Case> {
    let case = |name, runs| Case { name, runs };
    let shaped = |shape| alone(1, move |load| Load { shape, ..load });
    vec![
        case("1 process", alone(1, |load| load)),
        case("2 processes", alone(2, |load| load)),
        case("4 processes", alone(4, |load| load)),
        case("three grids, 0.2 : 1 : 10, random order", {
            let mut runs = alone(1, mixed);
            runs.retain(|run| run[0].load.kernels[0] == MILLISECOND / 5);
            runs
        }),
        case("kernel time sine +-80 %", shaped(Shape::Sine)),
        case("kernel time steps 1, 4, 0.5", shaped(Shape::Steps)),
        case("30/70", side_by_side([30, 70])),
        case("30/60", side_by_side([30, 60])),
        case("25/25/50", together(&[25, 25, 50], 1)),
        case("30/60, 2 processes each", together(&[30, 60], 2)),
    ]
}
