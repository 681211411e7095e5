//! Reads the study's lists of nodes and tasks.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use gpushare_placement::{
    Demand, Gpu, Host, Ledger, Machine, Memory, Models, Needs, Part, Policy, Share, Task, WHOLE,
};

/// The nodes, and the tasks of one list.
#[derive(Clone)]
pub struct Trace {
    pub nodes: Vec<Machine>,
    pub tasks: Vec<Timed>,
}

/// A task, and its arrival and end in seconds if the list has them.
#[derive(Clone, Copy, Debug)]
pub struct Timed {
    pub task: Task,
    pub came: Option<u64>,
    pub went: Option<u64>,
}

impl Trace {
    /// Returns the thousandths of all GPUs.
    pub fn capacity(&self) -> u64 {
        capacity(&self.nodes)
    }
}

/// Returns the thousandths of these nodes' GPUs.
pub fn capacity(nodes: &[Machine]) -> u64 {
    nodes.iter().map(|node| node.gpus.len() as u64 * u64::from(WHOLE)).sum()
}

/// Creates a ledger of these nodes.
pub fn ledger<P: Policy>(nodes: impl Iterator<Item = Machine>, policy: P) -> Ledger<usize, P> {
    let mut ledger = Ledger::new(policy, Host::Decides);
    nodes.enumerate().for_each(|(number, machine)| ledger.set(number, machine));
    ledger
}

/// Returns a task's needs. A GPU of the trace has a byte for each thousandth.
pub fn needs(task: &Task) -> Needs {
    let part = Part::Of(Memory::Bytes(task.share.into()), 0);
    let shares = (task.gpus > 0).then_some(Share { gpus: task.gpus, part });
    let (cpu, memory, models) = (task.cpu, task.memory, task.models);
    Needs { cpu, memory, models, shares: shares.into_iter().collect(), first: Vec::new() }
}

/// Reads all lists in the directory, sorted by name.
pub fn lists(folder: &Path) -> Result<Vec<(String, Trace)>> {
    let mut models = BTreeMap::new();
    let nodes = rows(&folder.join("openb_node_list_gpu_node.csv.gz"))?;
    let nodes: Vec<Machine> = nodes.iter().map(|row| node(row, &mut models)).collect::<Result<_>>()?;
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let Some(name) = name.strip_prefix("openb_pod_list_").and_then(|name| name.strip_suffix(".csv.gz"))
        else {
            continue;
        };
        let tasks = rows(&path)?.iter().map(|row| task(row, &models)).collect::<Result<_>>();
        let tasks = tasks.with_context(|| format!("in {}", path.display()))?;
        found.push((name.to_owned(), Trace { nodes: nodes.clone(), tasks }));
    }
    if found.is_empty() {
        bail!("there is no list of tasks (openb_pod_list_*.csv.gz)");
    }
    found.sort_by(|one, other| one.0.cmp(&other.0));
    Ok(found)
}

/// Returns the weights of the kinds of tasks: how many of the list are of each.
pub fn popularity(tasks: &[Timed]) -> Demand {
    let mut counts: BTreeMap<Task, u32> = BTreeMap::new();
    for timed in tasks {
        *counts.entry(kind(&timed.task)).or_default() += 1;
    }
    counts.into_iter().map(|(task, count)| (task, f64::from(count))).collect()
}

/// Returns the kind of a task, which ignores its memory on the node.
pub fn kind(task: &Task) -> Task {
    Task { memory: 0, ..*task }
}

/// A row, keyed by column name.
type Columns = BTreeMap<String, String>;

fn rows(path: &Path) -> Result<Vec<Columns>> {
    let unpacked = Command::new("gzip").arg("-dc").arg(path).output().context("gzip cannot be run")?;
    if !unpacked.status.success() {
        bail!("{} cannot be unpacked: {}", path.display(), String::from_utf8_lossy(&unpacked.stderr));
    }
    let text = String::from_utf8(unpacked.stdout)?;
    let mut lines = text.lines();
    let heads: Vec<&str> = lines.next().context("the file is empty")?.split(',').collect();
    let named = |line: &str| {
        heads.iter().zip(line.split(',')).map(|(head, cell)| ((*head).to_owned(), cell.to_owned())).collect()
    };
    Ok(lines.map(named).collect())
}

fn number(row: &Columns, name: &str) -> Result<u64> {
    let text = row.get(name).with_context(|| format!("no column {name}"))?;
    text.parse::<f64>()
        .ok()
        .filter(|number| *number >= 0.0)
        .map(|number| number.round())
        .map(whole)
        .with_context(|| format!("{name}: {text:?}"))
}

/// Converts a number without a fraction, not below 0.
fn whole(number: f64) -> u64 {
    format!("{number}").parse().unwrap_or(u64::MAX)
}

fn node(row: &Columns, models: &mut BTreeMap<String, u8>) -> Result<Machine> {
    let count = u8::try_from(models.len())?;
    let model = *models.entry(row.get("model").cloned().unwrap_or_default()).or_insert(count);
    let gpus = usize::try_from(number(row, "gpu")?)?;
    let memory = u64::from(WHOLE);
    let gpu = Gpu { memory, per_share: memory, is_open: true, ..Gpu::default() };
    let (cpu, memory) = (number(row, "cpu_milli")?, number(row, "memory_mib")?);
    Ok(Machine { cpu, memory, model, gpus: vec![gpu; gpus] })
}

fn task(row: &Columns, models: &BTreeMap<String, u8>) -> Result<Timed> {
    let gpus = u8::try_from(number(row, "num_gpu")?)?;
    let share = match gpus {
        0 => 0,
        _ => u16::try_from(number(row, "gpu_milli")?)?,
    };
    let names = row.get("gpu_spec").map(String::as_str).unwrap_or_default();
    let names = names.split('|').filter(|name| !name.is_empty());
    // A model that no node has is never available.
    let allowed = names.fold(Models::ANY, |all, name| all.with(models.get(name).copied().unwrap_or(63)));
    let task = Task {
        cpu: number(row, "cpu_milli")?,
        memory: number(row, "memory_mib")?,
        gpus,
        share,
        models: allowed,
    };
    Ok(Timed { task, came: number(row, "creation_time").ok(), went: number(row, "deletion_time").ok() })
}
