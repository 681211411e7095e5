//! Runs a trial once: handles all events in chronological order.

use gpushare_simulator::virtual_gpu::{Discipline, VirtualGpu};

use crate::books::Books;
use crate::chance::Chance;
use crate::container::Container;
use crate::figures::Figures;
use crate::program::{Estimates, Program, Sleep};
use crate::time::{MILLISECOND, SECOND};

/// Parameters of a run.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The containers that share the GPU.
    pub containers: Vec<Container>,
    /// How the device chooses the next work to run.
    pub device: Discipline,
    /// Whether the limiter learns.
    pub estimates: Estimates,
    /// Processes start within this many nanoseconds of each other.
    pub stagger: u64,
    /// Length in seconds, at least 3.
    pub seconds: u64,
    /// Seed of the pseudo-random numbers.
    pub seed: u64,
}

impl Trial {
    /// Creates a run of 11 s in which `containers` share `device`.
    #[must_use]
    pub fn new(containers: Vec<Container>, device: Discipline, seed: u64) -> Self {
        let estimates = Estimates::Learned;
        Self { containers, device, estimates, stagger: 20 * MILLISECOND, seconds: 11, seed }
    }

    /// Runs the trial. Returns the figures of each container.
    #[must_use]
    pub fn run(&self) -> Vec<Figures> {
        let mut chance = Chance::new(self.seed);
        let owners: Vec<usize> = self
            .containers
            .iter()
            .enumerate()
            .flat_map(|(index, container)| std::iter::repeat_n(index, container.processes))
            .collect();
        let starts: Vec<u64> = owners.iter().map(|_| chance.below(self.stagger.max(1))).collect();
        let programs = owners.iter().zip(&starts).enumerate().map(|(process, (owner, start))| {
            let chance = Chance::new(self.seed.wrapping_mul(1_000) + process as u64);
            let load = self.containers[*owner].load.clone();
            Program::new(process, *owner, load, *start, chance, self.estimates)
        });
        let mut programs: Vec<Program> = programs.collect();
        let books: Vec<Books> = self.containers.iter().map(Books::new).collect();
        let mut gpu = VirtualGpu::new(self.device, owners.len());
        self.drive(&mut gpu, &mut programs, &books);
        self.figures(&gpu, &owners, &starts)
    }

    fn drive(&self, gpu: &mut VirtualGpu, programs: &mut [Program], books: &[Books]) {
        let end = self.seconds * SECOND;
        loop {
            let wakes = programs.iter().filter_map(Program::wakes).min();
            let waits = programs.iter().any(|program| matches!(program.sleep, Sleep::Ended(..)));
            let change = if waits { gpu.next_change() } else { None };
            let times = [wakes, change];
            let Some(now) = times.into_iter().flatten().min().filter(|now| *now < end) else { break };
            gpu.advance(now);
            for program in &mut *programs {
                program.notice(gpu, now);
                if program.wakes().is_some_and(|time| time <= now) {
                    program.step(gpu, &books[program.container], now);
                }
            }
        }
        gpu.advance(end);
    }

    fn figures(&self, gpu: &VirtualGpu, owners: &[usize], starts: &[u64]) -> Vec<Figures> {
        let end = self.seconds * SECOND;
        let figures = |(index, container): (usize, &Container)| {
            let own = || {
                owners.iter().enumerate().filter(|(_, owner)| **owner == index).map(|(process, _)| process)
            };
            let bins = |at: usize| own().map(|process| gpu.bins(process).get(at).copied().unwrap_or(0)).sum();
            let bins: Vec<u64> = (0..usize::try_from(end / MILLISECOND).unwrap_or(0)).map(bins).collect();
            let begin = own().map(|process| starts[process]).min().unwrap_or(0);
            Figures::new(&bins, begin, end, container.cores)
        };
        self.containers.iter().enumerate().map(figures).collect()
    }
}
