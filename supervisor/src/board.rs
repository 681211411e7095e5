//! A GPU's board: a shared page on which each supervisor publishes how its container shares the GPU and
//! whether it works. All supervisors can then see which windows are in use. Each supervisor writes its own
//! line only, so none waits for another.
//!
//! A line counts while its writer lives, that is, while the writer holds the lock on the byte of this number.
//!
//! The meter's lines follow: how many groups of each lease work, according to the card's own record. They
//! count while they are fresh.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use gpushare_schedule::frame::Frame;
use gpushare_schedule::{Policy, Recorded, Tenant, working};
use nix::fcntl::OFlag;

use crate::plan::{Plan, SharedPlan};
use crate::{memory, sys};

/// Most containers on one GPU.
const MOST_LINES: usize = 256;

/// Version of the page's layout. Raise it with every change to the layout.
const VERSION: u64 = 1;
/// First word of a page: "gsboards" combined with the layout version.
const LAYOUT: u64 = u64::from_ne_bytes(*b"gsboards") ^ VERSION;

#[derive(Debug, Default)]
#[repr(C)]
struct Line {
    lease: AtomicI64,
    plan: SharedPlan,
    /// Channel groups that work.
    working: AtomicU32,
}

/// The meter's entry for a lease.
#[derive(Debug, Default)]
#[repr(C)]
struct RecordedLine {
    lease: AtomicI64,
    working: AtomicU32,
    /// Whether it used more than its share of a second, and has not used less since.
    over: AtomicU32,
    /// Time of the last write, in microseconds of the monotonic clock.
    at: AtomicU64,
}

/// The page. Supervisors of earlier releases map only the first part.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Page {
    layout: AtomicU64,
    lines: [Line; MOST_LINES],
    recorded: [RecordedLine; MOST_LINES],
    /// By line, whether the card's record may attribute groups of it to others. Its recorded figure does not
    /// count then.
    nameless: [AtomicU32; MOST_LINES],
    /// [`Tenant::pays`] by line.
    pays: [AtomicU32; MOST_LINES],
    /// [`Tenant::stint`] by line.
    stints: [AtomicU32; MOST_LINES],
    /// [`Tenant::started`] by line.
    started: [AtomicU64; MOST_LINES],
    /// [`Recorded::stay`] by the meter's line.
    stays: [AtomicU32; MOST_LINES],
}

/// How many microseconds the meter's lines stay valid. It writes them every 0.1 s, and occasionally takes
/// longer because it scans all processes.
const FRESH: u64 = 1_000_000;

/// A GPU's board, and the line that this supervisor owns.
#[derive(Debug)]
pub struct Board {
    page: &'static Page,
    file: OwnedFd,
    own: usize,
}

impl Board {
    /// Opens the board `path`, creating it if it is missing, and claims a line.
    ///
    /// # Errors
    /// If it cannot be opened, has another version, or has no free line.
    pub fn join(path: &Path) -> io::Result<Self> {
        let page = open(path)?;
        let file = open_file(path)?; // the mapping keeps its file open, which would keep the lock too
        let own = (0..MOST_LINES).find(|line| sys::lock_byte(&file, *line, false).is_ok());
        let own = own.ok_or_else(|| io::Error::from(io::ErrorKind::StorageFull))?;
        let board = Self { page, file, own };
        board.leave(); // clear the words of a killed predecessor
        Ok(board)
    }

    /// Publishes how the container of a lease shares, how many of its channel groups work (with 0 it counts
    /// as absent), and whether the card's record may attribute some of them to others.
    pub fn publish(&self, lease: i64, plan: &Plan, working: u32, is_nameless: bool) {
        let line = &self.page.lines[self.own];
        self.page.nameless[self.own].store(u32::from(is_nameless), Ordering::Relaxed);
        line.plan.write(Some(plan));
        line.working.store(working, Ordering::Relaxed);
        line.lease.store(lease, Ordering::Release);
    }

    /// Publishes [`Tenant::pays`] and [`Tenant::stint`].
    pub fn publish_terms(&self, pays: u32, stint: u32) {
        self.page.pays[self.own].store(pays, Ordering::Relaxed);
        self.page.stints[self.own].store(stint, Ordering::Relaxed);
    }

    /// Publishes when the container's channels were started, in microseconds of the monotonic clock.
    pub fn publish_start(&self, now: u64) {
        self.page.started[self.own].store(now, Ordering::Relaxed);
    }

    /// Clears the line.
    pub fn leave(&self) {
        self.publish_terms(0, 0);
        self.publish_start(0);
        let line = &self.page.lines[self.own];
        line.lease.store(0, Ordering::Release);
        line.plan.write(None);
    }

    /// Lists the tenants of the GPU at `now`, in microseconds of the monotonic clock: each lease once. Also
    /// returns the longest frame in use.
    pub fn read(&self, now: u64) -> (Frame, Vec<Tenant>) {
        let mut frame = Frame::SHORT;
        let mut tenants: Vec<Tenant> = Vec::new();
        let mut nameless: Vec<i64> = Vec::new();
        for (at, line) in self.page.lines.iter().enumerate() {
            let lease = line.lease.load(Ordering::Acquire);
            if lease == 0 || !(at == self.own || sys::is_locked(&self.file, at).unwrap_or(true)) {
                continue;
            }
            let working = line.working.load(Ordering::Relaxed);
            if self.page.nameless[at].load(Ordering::Relaxed) != 0 {
                nameless.push(lease);
            }
            let plan = line.plan.read();
            if plan.as_ref().is_some_and(|plan| plan.frame == Frame::LONG) {
                frame = Frame::LONG;
            }
            let pays = if at == self.own { 0 } else { self.page.pays[at].load(Ordering::Relaxed) };
            let stint = self.page.stints[at].load(Ordering::Relaxed);
            let started = self.page.started[at].load(Ordering::Relaxed);
            // Containers of one lease share one plan.
            if let Some(known) = tenants.iter_mut().find(|tenant| tenant.lease == lease) {
                known.working = known.working.saturating_add(working);
                known.is_present |= working > 0;
                // All containers of a lease pay its largest debt.
                known.pays = known.pays.max(pays);
                known.started = known.started.max(started);
                known.stint = known.stint.min(stint);
            } else {
                let policy = plan.map_or(Policy::Unlimited, |plan| plan.policy);
                tenants.push(Tenant { pays, started, stint, ..Tenant::new(lease, policy, working) });
            }
        }
        let recorded = |tenant: Tenant| {
            let recorded = self.page.recorded(tenant.lease, now);
            let recorded = recorded.filter(|_| !nameless.contains(&tenant.lease));
            let (working, policy) = (working(tenant.working, recorded), tenant.policy.in_force(recorded));
            let rests = recorded.is_some_and(|recorded| recorded.working == 0);
            let stay = recorded.map_or(0, |recorded| recorded.stay);
            Tenant { working, policy, rests, stay, ..tenant }
        };
        (frame, tenants.into_iter().map(recorded).collect())
    }
}

impl Page {
    /// Returns the lease's figures from the card's own record.
    fn recorded(&self, lease: i64, now: u64) -> Option<Recorded> {
        let is_its = |line: &&RecordedLine| line.lease.load(Ordering::Acquire) == lease;
        let (line, stay) = self.recorded.iter().zip(&self.stays).find(|(line, _)| is_its(line))?;
        let stay = stay.load(Ordering::Relaxed);
        let at = line.at.load(Ordering::Acquire);
        let working = line.working.load(Ordering::Relaxed);
        let is_over = line.over.load(Ordering::Relaxed) != 0;
        // The line may belong to another lease by now.
        let is_its_still = line.lease.load(Ordering::Acquire) == lease;
        (is_its_still && now.saturating_sub(at) <= FRESH).then_some(Recorded { working, is_over, stay })
    }
}

fn open_file(path: &Path) -> io::Result<OwnedFd> {
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(flags).open(path).map(OwnedFd::from)
}

/// Maps the board `path`, creating it if it is missing.
fn open(path: &Path) -> io::Result<&'static Page> {
    let file = open_file(path)?;
    let size = i64::try_from(size_of::<Page>()).map_err(io::Error::other)?;
    // Zeros are an empty page, so it does not matter which of several processes extends the file.
    if nix::sys::stat::fstat(&file)?.st_size < size {
        nix::unistd::ftruncate(&file, size)?;
    }
    let page = memory::map_board(&file)?;
    let layout = page.layout.compare_exchange(0, LAYOUT, Ordering::SeqCst, Ordering::SeqCst);
    if layout.is_err_and(|layout| layout != LAYOUT) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "another version made it"));
    }
    Ok(page)
}

/// A GPU's board for the meter. Only the meter publishes figures from the card's record.
#[derive(Debug)]
pub struct Recorder(&'static Page);

impl Recorder {
    /// Opens the board of the GPU with this UUID in the directory of all boards.
    ///
    /// # Errors
    /// If it cannot be opened, or has another version.
    pub fn open(boards: &Path, uuid: &[u8; 16]) -> io::Result<Self> {
        open(&boards.join(name_of(uuid))).map(Self)
    }

    /// Publishes the recorded figures of each lease at `now`. A lease keeps its line. If there are more
    /// leases than lines, the rest get none, and all of their groups count.
    pub fn publish(&self, all: &BTreeMap<i64, Recorded>, now: u64) {
        let lines = &self.0.recorded;
        let of = |line: &RecordedLine| line.lease.load(Ordering::Relaxed);
        for line in lines.iter().filter(|line| !all.contains_key(&of(line))) {
            line.at.store(0, Ordering::Relaxed); // keeps readers from using the previous lease's figure
            line.lease.store(0, Ordering::Release);
        }
        for (lease, recorded) in all {
            let own = lines.iter().position(|line| of(line) == *lease);
            let Some(at) = own.or_else(|| lines.iter().position(|line| of(line) == 0)) else { return };
            let line = &lines[at];
            self.0.stays[at].store(recorded.stay, Ordering::Relaxed);
            line.working.store(recorded.working, Ordering::Relaxed);
            line.over.store(u32::from(recorded.is_over), Ordering::Relaxed);
            line.lease.store(*lease, Ordering::Release);
            line.at.store(now, Ordering::Release);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        memory::unmap_board(self.0);
    }
}

/// Returns the file name of a GPU's board.
pub(crate) fn name_of(uuid: &[u8; 16]) -> String {
    uuid.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Drop for Board {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn burst(share: u32) -> Plan {
        Plan { policy: Policy::Burst { share, ceiling: 100 }, frame: Frame::SHORT }
    }

    #[test]
    fn who_is_there_is_read_by_all_and_who_has_left_by_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("board");
        let [one, two, three] = [0; 3].map(|_| Board::join(&path).unwrap());
        one.publish(11, &burst(30), 1, false);
        two.publish(12, &burst(70), 2, false);
        three.publish(12, &burst(70), 3, false); // a pod's second container
        let tenant =
            |lease, share, working| Tenant::new(lease, Policy::Burst { share, ceiling: 100 }, working);
        let all = vec![tenant(11, 30, 1), tenant(12, 70, 5)];
        assert_eq!(one.read(0), (Frame::SHORT, all.clone()));
        assert_eq!(three.read(0), (Frame::SHORT, all));
        // A reader gets the largest debt of the lease, except its own.
        let terms = |of: &Board| of.read(0).1.pop().map(|one| (one.pays, one.stint, one.started));
        two.publish_terms(300, 5);
        two.publish_start(70);
        three.publish_terms(200, 9);
        assert_eq!([&one, &two, &three].map(terms), [(300, 5, 70), (200, 5, 70), (300, 5, 70)].map(Some));
        two.leave();
        two.publish(12, &burst(70), 2, false);
        assert_eq!(terms(&one), Some((200, 0, 0)));
        drop(three);
        drop(one);
        assert_eq!(two.read(0).1, [tenant(12, 70, 2)]);
        two.publish(12, &Plan { frame: Frame::LONG, ..burst(70) }, 0, false);
        assert_eq!(two.read(0), (Frame::LONG, vec![Tenant { is_present: false, ..tenant(12, 70, 0) }]));
    }

    #[test]
    fn a_line_counts_while_its_writer_lives() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("board");
        let (one, two) = (Board::join(&path).unwrap(), Board::join(&path).unwrap());
        one.publish(11, &burst(30), 1, false);
        // Simulate a killed process: the lock goes with its file, and the words stay.
        let line = one.own;
        let page = one.page;
        drop(one);
        page.lines[line].plan.write(Some(&burst(30)));
        page.lines[line].working.store(1, Ordering::Relaxed);
        page.lines[line].lease.store(11, Ordering::Relaxed);
        assert_eq!(two.read(0).1, []);
        let next = Board::join(&path).unwrap();
        assert_eq!(next.own, line, "its line is free again");
    }

    #[test]
    fn what_the_record_says_counts_while_it_is_fresh() {
        let folder = tempfile::tempdir().unwrap();
        let uuid = [7; 16];
        let board = Board::join(&folder.path().join(name_of(&uuid))).unwrap();
        let meter = Recorder::open(folder.path(), &uuid).unwrap();
        board.publish(11, &burst(30), 3, false);
        let working = |now| board.read(now).1[0].working;
        assert_eq!(working(0), 3);
        let works = |working| Recorded { working, is_over: false, stay: working * 100 };
        meter.publish(&[(10, works(2)), (11, works(1))].into(), 5_000);
        assert_eq!([working(5_000), working(1_005_000), working(1_005_001)], [1, 1, 3]);
        // Other leases come and go, and each keeps its line.
        let at = || board.page.recorded.iter().position(|line| line.lease.load(Ordering::Relaxed) == 11);
        let before = at();
        meter.publish(&[(11, works(1)), (10, works(2))].into(), 5_000);
        meter.publish(&[(11, works(2)), (12, works(5))].into(), 5_000);
        assert_eq!((at(), working(5_000)), (before, 2));
        assert_eq!([5_000, 1_005_001].map(|now| board.read(now).1[0].stay), [200, 0]);
        // No groups worked, or more than the supervisor knows, since contexts come and go.
        meter.publish(&[(11, works(0))].into(), 400_000);
        assert_eq!(working(400_000), 1);
        meter.publish(&[(11, works(9))].into(), 400_000);
        assert_eq!(working(400_000), 3);
        meter.publish(&BTreeMap::new(), 400_000);
        assert_eq!(working(400_000), 3);
        board.publish(11, &burst(30), 0, false);
        meter.publish(&[(11, works(1))].into(), 400_000);
        assert_eq!(working(400_000), 0, "it is not there");
        // A latency container keeps its precedence while the record shows that it uses no more than its
        // share.
        let latency = Plan { policy: Policy::Latency { share: 30 }, frame: Frame::SHORT };
        board.publish(11, &latency, 1, false);
        let policy = |now| board.read(now).1[0].policy.clone();
        assert_eq!((policy(400_000), policy(1_400_001)), (latency.policy, burst(30).policy));
        meter.publish(&[(11, Recorded { working: 1, is_over: true, stay: 0 })].into(), 400_000);
        assert_eq!(policy(400_000), burst(30).policy);
        // The record may attribute some of its work to another container.
        meter.publish(&[(11, works(1))].into(), 400_000);
        board.publish(11, &burst(30), 3, true);
        assert_eq!(working(400_000), 3);
    }

    #[test]
    fn a_board_of_an_earlier_release_is_made_longer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("board");
        let [first, second] = [0; 2].map(|_| Board::join(&path).unwrap());
        first.publish(10, &burst(30), 2, false);
        second.publish(11, &burst(30), 2, false);
        let short = std::mem::offset_of!(Page, recorded);
        let bytes = std::fs::read(&path).unwrap()[..short].to_vec();
        let earlier = folder.path().join("earlier");
        std::fs::write(&earlier, bytes).unwrap();
        let board = Board::join(&earlier).unwrap();
        let leases = [0, 1].map(|line: usize| board.page.lines[line].lease.load(Ordering::Relaxed));
        assert_eq!(leases, [0, 11], "the first line is its own now");
        assert_eq!(board.page.recorded(11, 0), None);
    }

    #[test]
    fn a_page_of_another_layout_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("board");
        std::fs::write(&path, [7; size_of::<Page>()]).unwrap();
        assert_eq!(Board::join(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
