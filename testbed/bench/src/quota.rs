//! The quota store: the cost of one reservation alone, among 64 processes at once, and among many leases.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write, pipe};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gpushare_inventory::{DeviceMemory, DeviceNode, Gpu, GpuUuid};
use gpushare_quota::{Admission, Holder, LeaseKey, Member, ReleaseReason, ReserveError, StateFolder, Store};
use gpushare_request::{Container, Policy, Request};
use gpushare_tests::scratch::Scratch;

use crate::measure::{Sample, nanoseconds};
use crate::table::{Row, Table};

/// The hidden argument that makes this program one of the reserving processes.
pub const CHILD: &str = "--child-reserve";

const GIB: u64 = 1 << 30;
/// Shares that fit on the node of a round; 64 processes request one each.
const ROOM: u64 = 56;
const PROCESSES: usize = 64;
const ROUNDS: usize = 30;
const SINGLE_RUNS: usize = 1000;
const RATIO_RUNS: usize = 1500;
/// Longer than any child waits for its turn. A child that outlives its parent ends by itself after this time.
const CHILD_LIVES: Duration = Duration::from_secs(120);

/// Measures the section.
///
/// # Errors
/// On any failure other than a refusal.
pub fn section() -> Result<Table> {
    let mut table = Table::default();
    let [alone, beside_many] = [single(10)?, single(1000)?];
    table.push(
        Row::duration("open+reserve+close, one process", &alone)
            .target("<= 0.15 ms", alone.median() <= 150_000),
    );
    table.push(Row::slowest_of_hundred("  the same, p99", &alone));
    table.push(Row::duration("  the same beside 1,000 leases", &beside_many));
    let crowd = crowd()?;
    table.push(
        Row::slowest_of_hundred("open+reserve+close, 64 processes at once, p99", &crowd.times)
            .target("<= 10 ms", crowd.times.percentile(99) <= 10_000_000),
    );
    table.push(Row::duration("  the same, median", &crowd.times));
    let exact = crowd.outcomes.iter().filter(|outcome| **outcome == (56, 8)).count();
    table.push(
        Row::plain("rounds with exactly 56 leases and 8 refusals", format!("{exact} of {ROUNDS}"))
            .runs(ROUNDS)
            .target("every round", exact == ROUNDS),
    );
    let (few, many) = few_and_many()?;
    let ratio = fraction(many.median(), few.median());
    table.push(Row::duration("reserve in an open store, 10 leases", &few));
    table.push(Row::duration("reserve in an open store, 1,000 leases", &many));
    table.push(
        Row::plain("cost ratio of the two", format!("{ratio:.2}"))
            .runs(many.runs())
            .target("<= 1.2", ratio <= 1.2),
    );
    Ok(table)
}

/// A state directory that is removed on drop.
#[derive(Debug)]
pub struct State {
    folder: StateFolder,
    _scratch: Scratch,
}

impl State {
    /// Creates an empty state directory.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn new() -> Result<Self> {
        let scratch = Scratch::new("state");
        Ok(Self { folder: StateFolder::open(&scratch.path().join("run"))?, _scratch: scratch })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Returns the times of one process that opens directory and store, reserves while the store has `held`
/// leases, and closes the store.
fn single(held: usize) -> Result<Sample> {
    let state = State::new()?;
    let (request, gpus) = (request()?, gpus(8, 128));
    drop(holding(state.path(), held)?);
    let key = key("single");
    let mut times = Vec::new();
    // The first runs fill the caches.
    for run in 0..SINGLE_RUNS + 20 {
        let reserved = reserve_once(state.path(), &key, &request, &gpus)?;
        times.extend((run >= 20).then_some(reserved.closed));
        release(&Store::open(state.path())?, &key)?;
    }
    Sample::new(times)
}

/// Returns a store in which this process holds `count` leases, on 8 GPUs with room for 128 each.
fn holding(state: &Path, count: usize) -> Result<Store> {
    let store = Store::open(state)?;
    let (request, gpus, holder) = (request()?, gpus(8, 128), Holder::this_process()?);
    for number in 0..count {
        let member = Member::reserved(key(&format!("held-{number}")), holder.clone());
        let held = store.reserve(&member, None, &request, &gpus, &Admission::default(), |_| ())?;
        std::mem::forget(held);
    }
    Ok(store)
}

/// Result of one process's reservation.
#[derive(Clone, Copy, Debug)]
struct Reserved {
    granted: bool,
    /// Nanoseconds until the answer, after which the wrapper would call execve.
    answered: i64,
    /// Nanoseconds until the store was closed as well.
    closed: i64,
}

/// Opens the store, reserves, and closes it. The lease stays, as it would after an execve.
fn reserve_once(state: &Path, key: &LeaseKey, request: &Request, gpus: &[Gpu]) -> Result<Reserved> {
    let start = Instant::now();
    let folder = StateFolder::open(state)?;
    let store = Store::open(folder.path())?;
    let member = Member::reserved(key.clone(), Holder::this_process()?);
    let granted = match store.reserve(&member, None, request, gpus, &Admission::default(), |_| ()) {
        Ok(reservation) => {
            std::mem::forget(reservation);
            true
        }
        Err(ReserveError::Refused(_)) => false,
        Err(error) => return Err(error.into()),
    };
    let answered = nanoseconds(start.elapsed());
    drop(store);
    Ok(Reserved { granted, answered, closed: nanoseconds(start.elapsed()) })
}

fn release(store: &Store, key: &LeaseKey) -> Result<()> {
    if let Some(lease) = store.lease(key)? {
        store.release(lease.id, key, ReleaseReason::Ended)?;
    }
    Ok(())
}

/// Runs one reserving process. It prints that it is ready, waits until its standard input ends, reserves,
/// prints the result, and stays alive: the lease of an ended process would be swept and granted again.
///
/// # Errors
/// On any failure other than a refusal.
pub fn child(state: &str, name: &str) -> Result<()> {
    let (key, request, gpus) = (key(name), request()?, gpus(1, ROOM));
    let mut output = std::io::stdout();
    writeln!(output, "ready")?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let reserved = reserve_once(Path::new(state), &key, &request, &gpus)?;
    writeln!(output, "{} {} {}", u8::from(reserved.granted), reserved.answered, reserved.closed)?;
    std::thread::sleep(CHILD_LIVES);
    Ok(())
}

/// A child of this program that is killed and reaped on drop.
struct Process {
    child: Child,
    answers: BufReader<ChildStdout>,
}

impl Process {
    /// Starts the child, which reserves once `input` has ended.
    fn start(state: &Path, name: &str, input: std::io::PipeReader) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(CHILD).arg(state).arg(name).stdin(input).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start a process that reserves")?;
        let answers = BufReader::new(child.stdout.take().context("the child has no standard output")?);
        let mut process = Self { child, answers };
        match process.line()?.as_str() {
            "ready" => Ok(process),
            other => bail!("a process that reserves said {other:?}"),
        }
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn reserved(&mut self) -> Result<Reserved> {
        let line = self.line()?;
        let numbers: Vec<i64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        match numbers[..] {
            [granted, answered, closed] => Ok(Reserved { granted: granted == 1, answered, closed }),
            _ => bail!("a process that reserves failed: {line:?}"),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the nanoseconds that a new process, like the wrapper, spends on the quota store until it has its
/// lease.
///
/// # Errors
/// If it gets no lease.
pub fn in_a_new_process(state: &Path) -> Result<i64> {
    let (input, go) = pipe()?;
    let mut process = Process::start(state, "new", input)?;
    drop(go);
    let reserved = process.reserved()?;
    release(&Store::open(state)?, &key("new"))?;
    if !reserved.granted {
        bail!("an empty node refused a share");
    }
    Ok(reserved.answered)
}

/// Results of all rounds.
struct Crowd {
    times: Sample,
    /// Leases and refusals of each round.
    outcomes: Vec<(usize, usize)>,
}

fn crowd() -> Result<Crowd> {
    let state = State::new()?;
    // Create the ledger before the first round, as on a node that has run a container.
    let names: Vec<String> = (0..PROCESSES).map(|number| format!("crowd-{number}")).collect();
    drop(Store::open(state.path())?);
    let (mut times, mut outcomes) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let reserved = round(state.path(), &names)?;
        let granted = reserved.iter().filter(|one| one.granted).count();
        let store = Store::open(state.path())?;
        let leases = store.leases()?.len();
        if leases != granted {
            bail!("{granted} processes were granted a share, the store holds {leases}");
        }
        outcomes.push((leases, reserved.len() - granted));
        times.extend(reserved.iter().map(|one| one.closed));
        names.iter().try_for_each(|name| release(&store, &key(name)))?;
    }
    Ok(Crowd { times: Sample::new(times)?, outcomes })
}

/// Runs one round. All processes wait at one pipe; closing it releases them together.
fn round(state: &Path, names: &[String]) -> Result<Vec<Reserved>> {
    let (input, go) = pipe()?;
    let started = names.iter().map(|name| Process::start(state, name, input.try_clone()?));
    let mut processes = started.collect::<Result<Vec<_>>>()?;
    drop(go);
    processes.iter_mut().map(Process::reserved).collect()
}

/// Returns the times of reservations in open stores with 10 and with 1,000 leases, measured alternately.
fn few_and_many() -> Result<(Sample, Sample)> {
    let folders = [State::new()?, State::new()?];
    let (request, gpus, holder) = (request()?, gpus(8, 128), Holder::this_process()?);
    let stores = [holding(folders[0].path(), 10)?, holding(folders[1].path(), 1000)?];
    let mut times = [Vec::new(), Vec::new()];
    for run in 0..RATIO_RUNS {
        let member = Member::reserved(key(&format!("run-{run}")), holder.clone());
        for (store, times) in stores.iter().zip(&mut times) {
            let start = Instant::now();
            let reservation = store.reserve(&member, None, &request, &gpus, &Admission::default(), |_| ())?;
            times.push(nanoseconds(start.elapsed()));
            drop(reservation);
        }
    }
    let [few, many] = times;
    Ok((Sample::new(few)?, Sample::new(many)?))
}

fn fraction(of: i64, to: i64) -> f64 {
    let seconds = |nanoseconds: i64| Duration::from_nanos(nanoseconds.unsigned_abs()).as_secs_f64();
    seconds(of) / seconds(to).max(f64::MIN_POSITIVE)
}

fn key(container: &str) -> LeaseKey {
    LeaseKey { root: "/run/runc".to_owned(), container: container.to_owned() }
}

/// Returns a request for a share of 1 GiB.
///
/// # Errors
/// Never, because the words are constant.
pub fn request() -> Result<Request> {
    let container = Container::new(BTreeMap::new(), vec!["GPUSHARE_MEMORY=1GiB".to_owned()]);
    gpushare_request::read(&container, &Policy::default(), &[])?.context("the request is none")
}

/// Creates `count` GPUs with `gib` GiB each.
pub fn gpus(count: u8, gib: u64) -> Vec<Gpu> {
    (0..count)
        .map(|index| {
            let path = PathBuf::from(format!("/dev/nvidia{index}"));
            let mut uuid = [0; 16];
            uuid[0] = index + 1;
            Gpu {
                index: index.into(),
                uuid: GpuUuid::from_bytes(uuid),
                minor: index.into(),
                model: "NVIDIA H100 80GB HBM3".to_owned(),
                memory: Some(DeviceMemory::from_bytes(gib * GIB)),
                node: DeviceNode {
                    host_path: path.clone(),
                    path,
                    major: 195,
                    minor: index.into(),
                    mode: 0o666,
                    uid: 0,
                    gid: 0,
                },
                place: gpushare_inventory::Place::default(),
                instance: None,
            }
        })
        .collect()
}
