//! The program: a keeper or a worker of one container's supervisor.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::abi::Era;
use crate::books::Books;
use crate::budget::{Budget, MOST_SLOTS};
use crate::calls::Race;
use crate::devices::Devices;
use crate::handover::{at_path, receive_descriptor};
use crate::journal::Journal;
use crate::keeper::{Holdings, Role, inherited, keep};
use crate::kernel::Kernel;
use crate::memory::Mapped;
use crate::timekeeper::Ground;
use crate::worker::{Peer, Worker};
use crate::{memory, rights, sys, timekeeper};
use anyhow::{Context, Result, bail};
use gpushare_region::charged_at;
use nix::fcntl::OFlag;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::prctl::set_name;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, bind, listen, socket, socketpair};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{chdir, setsid};

/// The runtime wrapper starts a container's supervisor with this word.
pub const START: &str = "start";

/// The parsed command line. It contains descriptors if one of the two roles starts the other, and paths if
/// the wrapper starts both.
#[derive(Default)]
struct Args {
    driver: String,
    control: PathBuf,
    uvm: PathBuf,
    gpus: Vec<PathBuf>,
    boards: PathBuf,
    slot: usize,
    socket_path: PathBuf,
    budget_path: PathBuf,
    limits_path: PathBuf,
    link: Option<i32>,
    memory: Option<i32>,
    budget: Option<i32>,
    limits: Option<i32>,
    socket: Option<i32>,
    listeners: Vec<i32>,
    /// The words that both roles need.
    common: Vec<String>,
}

/// Runs the program with the command-line words after its name.
pub fn main(words: impl Iterator<Item = String>) -> ExitCode {
    match run(words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpushare-supervisor: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut words: impl Iterator<Item = String>) -> Result<()> {
    let first = words.next().unwrap_or_default();
    let role = Role::named(&first);
    if role.is_none() && first != START {
        bail!("the runtime wrapper starts this program; it does nothing by itself");
    }
    let args = Args::parse(words)?;
    let version = args.driver.parse().ok().and_then(Era::for_version);
    let era = version.with_context(|| format!("driver {} is not known", args.driver))?;
    let gpus: Vec<&Path> = args.gpus.iter().map(PathBuf::as_path).collect();
    let devices = Devices::find(&args.control, &args.uvm, &gpus).context("the driver's device files")?;
    leave_the_caller();
    if role.is_none() {
        sys::close_inherited();
    }
    // Root needs its capabilities to write to the limits file, so open it before dropping them.
    let limits = role.is_none().then(|| open(&args.limits_path)).transpose();
    let limits = limits.with_context(|| format!("limits {}", args.limits_path.display()))?;
    rights::drop_all_but_needed(role).context("capabilities")?;
    let link = args.link.map(inherited).transpose()?;
    match role {
        None => start(args, era, devices, limits.context("no limits")?),
        Some(role) => {
            let holdings = args.holdings()?;
            become_role(role, (args, holdings, link), era, devices)
        }
    }
}

/// Becomes a keeper or a worker.
fn become_role(
    role: Role,
    (args, holdings, link): (Args, Holdings, Option<OwnedFd>),
    era: &'static Era,
    devices: Devices,
) -> Result<()> {
    let _ = set_name(role.process_name()); // for people who look for it
    match role {
        Role::Keeper => keep(holdings, link).context("keeper"),
        Role::Worker => work(args, holdings, era, devices, link).context("worker"),
    }
}

/// Starts keeper and worker of a container. Both are forks of this process, which is faster than starting
/// programs. The socket exists when this returns, so connecting processes wait for them.
fn start(mut args: Args, era: &'static Era, devices: Devices, limits: OwnedFd) -> Result<()> {
    if !sys::can_listen() || !sys::notification_fits() {
        bail!("this kernel cannot report system calls as the supervisor needs it (5.19 or newer)");
    }
    let memory = memfd_create("gpushare-supervisor", MFdFlags::MFD_CLOEXEC)?;
    nix::unistd::ftruncate(&memory, i64::try_from(memory::SIZE)?)?;
    let budget = open(&args.budget_path).with_context(|| format!("budget {}", args.budget_path.display()))?;
    let page = memory::map_budget(&budget);
    if let Ok(page) = page {
        timekeeper::check(page, &args.boards).with_context(|| format!("boards {}", args.boards.display()))?;
    }
    let slot = claim_slot(&budget)
        .context("the lease's budget, which another version may have made: start the pod anew")?;
    let socket =
        listen_at(&args.socket_path).with_context(|| format!("socket {}", args.socket_path.display()))?;
    let mut words = args.common.clone();
    words.extend(["--slot".to_owned(), slot.to_string()]);
    args.slot = slot;
    let holdings = Holdings { memory, budget, limits, socket, listeners: Vec::new(), words };
    let null = File::options().read(true).write(true).open("/dev/null").context("/dev/null")?;
    let (to_worker, to_keeper) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    let begin = |role, holdings, link| {
        rights::drop_all_but_needed(Some(role)).context("capabilities")?;
        let _ = setsid(); // out of the caller's session, and out of the other one's
        become_role(role, (args, holdings, Some(link)), era, devices)
    };
    let Some(keeper) = sys::fork().context("the keeper")? else {
        drop(to_keeper);
        leave_standard_files(&null)?;
        let _ = receive_descriptor(&to_worker); // the worker's first word; a worker that has ended is replaced
        return begin(Role::Keeper, holdings, to_worker);
    };
    match sys::fork() {
        Ok(Some(_)) => Ok(()),
        Ok(None) => {
            drop(to_worker);
            leave_standard_files(&null)?;
            begin(Role::Worker, holdings, to_keeper)
        }
        Err(errno) => {
            // The keeper would wait a minute for a listener that never comes.
            let _ = kill(keeper, Signal::SIGKILL);
            Err(errno).context("the worker")
        }
    }
}

/// Replaces the standard files with `null`. The caller notices sooner that the first process has ended when
/// no other process has its pipe open.
fn leave_standard_files(null: &File) -> Result<()> {
    nix::unistd::dup2_stdin(null)?;
    nix::unistd::dup2_stdout(null)?;
    nix::unistd::dup2_stderr(null)?;
    Ok(())
}

/// Claims the first slot of a lease's budget that no living supervisor has. It belongs to the open file,
/// which keeper and worker share.
fn claim_slot(budget: &OwnedFd) -> Result<usize> {
    let page = memory::map_budget(budget)?;
    let is_free = |slot: &usize| sys::lock_byte(budget, *slot, false).is_ok();
    // Memory left by a killed supervisor stays charged while there are other slots.
    let (clean, used): (Vec<usize>, Vec<usize>) = (0..MOST_SLOTS).partition(|slot| page.is_clean(*slot));
    let found = clean.into_iter().chain(used).find(is_free);
    found.with_context(|| format!("the lease has {MOST_SLOTS} containers already"))
}

fn work(
    args: Args,
    holdings: Holdings,
    era: &'static Era,
    devices: Devices,
    link: Option<OwnedFd>,
) -> Result<()> {
    // Wait until an earlier worker has ended: books and journal have one writer.
    let _turn = await_turn(&holdings.memory).context("the last worker")?;
    let Mapped { entry, records, written, touch } = memory::map(&holdings.memory)?;
    let page = memory::map_budget(&holdings.budget)?;
    let books = Books::open(records, written);
    let limits = File::from(holdings.limits.try_clone()?);
    // Do not map the limits: a container that may mount could truncate the file under the mapping. A reader
    // that sees a half-written word refuses or queries in vain once.
    let publish = move |gpu, bytes: u64| {
        let at = u64::try_from(charged_at(gpu)).unwrap_or(u64::MAX);
        let _ = limits.write_all_at(&bytes.to_ne_bytes(), at); // informs programs, and decides nothing
    };
    let budget = Budget::new(page, args.slot).published_by(publish);
    let parts = (books, budget, Journal::open(entry));
    let on_race = Box::new(|race: &Race, processes: &[&OwnedFd]| {
        // Below the limit the memory is charged, and takes nothing from other containers.
        let ended = processes.iter().filter(|_| race.is_above).filter(|one| sys::kill(one.as_fd()).is_ok());
        ended.fold(0, |count, _| count + 1)
    });
    let kernel = Kernel::new(args.control, args.gpus);
    let ground = Ground { era, kernel: kernel.clone(), page };
    let compute = timekeeper::start(&ground, &args.boards).context("the GPUs' boards")?;
    Worker::new(era, (devices, kernel), parts, (Peer { holdings, link }, touch), compute, on_race).run()?;
    Ok(())
}

/// Waits for the lock that one worker at a time holds until it ends. The file is opened again for it:
/// processes that share an open file description share its locks, and a process lock would be lost when any
/// descriptor of the file is closed.
fn await_turn(memory: &OwnedFd) -> Result<OwnedFd> {
    let own = open(&Path::new("/proc/self/fd").join(memory.as_raw_fd().to_string()))?;
    sys::lock_byte(&own, 0, true)?;
    Ok(own)
}

/// Resets attributes that the process inherited from its caller.
fn leave_the_caller() {
    sys::reset_signals();
    // Each process and thread of the container that makes a call takes a descriptor.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
    let _ = setsid(); // it may already lead a session
    let _ = chdir("/");
    // If the OOM killer ended the supervisor, the container's calls would fail. Some machines do not let root
    // set this.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
}

impl Args {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self> {
        let mut args = Self::default();
        while let Some(flag) = words.next() {
            let value = words.next().with_context(|| format!("{flag} has no value"))?;
            let number = || value.parse::<i32>().with_context(|| format!("{flag} {value} is no descriptor"));
            match flag.as_str() {
                "--link" => args.link = Some(number()?),
                "--memory" => args.memory = Some(number()?),
                "--budget" => args.budget = Some(number()?),
                "--limits" => args.limits = Some(number()?),
                "--socket" => args.socket = Some(number()?),
                "--listener" => args.listeners.push(number()?),
                "--socket-path" => args.socket_path = value.into(),
                "--budget-path" => args.budget_path = value.into(),
                "--limits-path" => args.limits_path = value.into(),
                _ => {
                    args.common.extend([flag.clone(), value.clone()]);
                    match flag.as_str() {
                        "--driver" => args.driver = value,
                        "--control" => args.control = value.into(),
                        "--uvm" => args.uvm = value.into(),
                        "--gpu" => args.gpus.push(value.into()),
                        "--boards" => args.boards = value.into(),
                        "--slot" => args.slot = value.parse().context("--slot")?,
                        _ => bail!("unknown flag {flag}"),
                    }
                }
            }
        }
        Ok(args)
    }

    /// Takes ownership of the descriptors that the other role left this process.
    fn holdings(&self) -> Result<Holdings> {
        let one = |fd: Option<i32>, what| inherited(fd.context(what)?).context(what);
        let memory = one(self.memory, "--memory")?;
        let budget = one(self.budget, "--budget")?;
        let limits = one(self.limits, "--limits")?;
        let socket = one(self.socket, "--socket")?;
        let listeners = self.listeners.iter().map(|fd| inherited(*fd)).collect::<Result<_, _>>()?;
        Ok(Holdings { memory, budget, limits, socket, listeners, words: self.common.clone() })
    }
}

/// Opens a file for reading and writing, without waiting for a file lease of another process.
fn open(path: &Path) -> io::Result<OwnedFd> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = (OFlag::O_NONBLOCK | OFlag::O_CLOEXEC).bits();
    File::options().read(true).write(true).custom_flags(flags).open(path).map(OwnedFd::from)
}

/// Returns a new socket that listens at `path`, accessible to its owner only.
fn listen_at(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    let old = umask(Mode::from_bits_truncate(0o177));
    let done = at_path(path, |address| Ok(bind(socket.as_raw_fd(), address)?));
    umask(old);
    done?;
    listen(&socket, Backlog::MAXCONN)?;
    Ok(socket)
}
