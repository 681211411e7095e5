//! Measures the cost of a node's shares to its other containers: plain runc while there are many regions.
//! Each region is a mount, and a new container copies all mounts of the host.

use anyhow::Result;
use gpushare_inject::Region;
use gpushare_inventory::DeviceMemory;
use gpushare_quota::{Grant, Holder, Lease, LeaseKey, Member, StateFolder};
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;

use super::cycle::{Contender, Program};
use crate::measure::Sample;
use crate::quota;
use crate::table::{Row, Table};

/// Laps with each number of shares, in blocks, because a thousand mounts take a while to make.
const BLOCKS: usize = 5;
const LAPS: usize = 20;
const SHARES: [i64; 3] = [0, 100, 1000];

/// Adds the rows of plain runc while there are shares.
///
/// # Errors
/// If a region cannot be created, or runc fails.
pub fn rows(table: &mut Table) -> Result<()> {
    let scratch = Scratch::new("regions");
    let state = StateFolder::open(&scratch.path().join("run"))?;
    let plain = Contender::new(Program::Ours(Runtime::bare(LowLevel::Runc)), None);
    plain.lap()?;
    let mut times = [const { Vec::new() }; SHARES.len()];
    for _ in 0..BLOCKS {
        for (count, times) in SHARES.iter().zip(&mut times) {
            let _regions = Regions::make(&state, *count)?;
            for _ in 0..LAPS {
                times.push(plain.lap()?.cpu);
            }
        }
    }
    let samples = times.map(Sample::new);
    let [none, some, many] = samples;
    let (none, some, many) = (none?, some?, many?);
    table.push(Row::duration("plain runc, processor time, node without shares", &none));
    for (what, sample) in [("  beside 100 shares", &some), ("  beside 1,000 shares", &many)] {
        let percent = (sample.median() - none.median()) * 100 / none.median();
        table.push(Row::duration(what, sample).target(&format!("<= +3 % (+{percent} %)"), percent <= 3));
    }
    Ok(())
}

/// Regions that are removed on drop.
struct Regions(Vec<Region>);

impl Regions {
    fn make(state: &StateFolder, count: i64) -> Result<Self> {
        let (request, gpus) = (quota::request()?, quota::gpus(1, 1));
        let mut made = Self(Vec::new());
        for id in 1..=count {
            let key = LeaseKey { root: String::new(), container: format!("c{id}") };
            let member = Member::reserved(key.clone(), Holder::this_process()?);
            let grant = Grant {
                gpu: gpus[0].uuid,
                card: None,
                memory: DeviceMemory::from_bytes(1 << 30),
                cores: None,
            };
            let region = Region::of(state.path(), id);
            made.0.push(region.clone());
            region.make(&Lease { id, ..Lease::new(member, &request, vec![grant]) })?;
            // The hook leaves a region in the same state once the container has the files.
            region.leave(&key.container);
        }
        Ok(made)
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        self.0.iter().for_each(Region::remove);
    }
}
