//! The program: a keeper or a worker of one container's supervisor.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::abi::Era;
use crate::books::Books;
use crate::budget::Budget;
use crate::calls::Race;
use crate::devices::Devices;
use crate::journal::Journal;
use crate::keeper::{Holdings, Role, inherited, keep};
use crate::kernel::Kernel;
use crate::memory::Mapped;
use crate::worker::{Peer, Worker};
use crate::{memory, rights, sys};
use anyhow::{Context, Result, bail};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{chdir, setsid};

/// What the command line says. Descriptors are there where one of the two starts the other.
#[derive(Default)]
struct Args {
    driver: String,
    control: PathBuf,
    uvm: PathBuf,
    gpus: Vec<PathBuf>,
    slot: usize,
    socket_path: Option<PathBuf>,
    budget_path: Option<PathBuf>,
    link: Option<i32>,
    memory: Option<i32>,
    budget: Option<i32>,
    socket: Option<i32>,
    listeners: Vec<i32>,
    /// The words that both roles need.
    common: Vec<String>,
}

/// Runs the program with the words of its command line.
pub fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpushare-supervisor: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let role = match words.next().as_deref() {
        Some("keeper") => Role::Keeper,
        Some("worker") => Role::Worker,
        _ => bail!("the runtime wrapper starts this program; it does nothing by itself"),
    };
    let args = Args::parse(words)?;
    let version = args.driver.parse().ok().and_then(Era::for_version);
    let era = version.with_context(|| format!("driver {} is not known", args.driver))?;
    let gpus: Vec<&Path> = args.gpus.iter().map(PathBuf::as_path).collect();
    let devices = Devices::find(&args.control, &args.uvm, &gpus).context("the driver's device files")?;
    leave_the_caller();
    rights::drop_all_but_needed().context("capabilities")?;
    let link = args.link.map(inherited).transpose()?;
    let holdings = args.holdings()?;
    match role {
        Role::Keeper => keep(holdings, link).context("keeper"),
        Role::Worker => {
            // Until an earlier worker has ended: books and journal have one writer.
            await_turn(&holdings.memory).context("the last worker")?;
            let Mapped { entry, records, touch } = memory::map(&holdings.memory)?;
            let page = memory::map_budget(&holdings.budget)?;
            let books = Books::open(records);
            let parts = (books, Budget::new(page, args.slot), Journal::open(entry));
            let on_race = Box::new(|race: &Race, processes: &[&OwnedFd]| {
                // Below the limit it is charged, and nobody else's memory is at stake.
                for process in processes.iter().filter(|_| race.is_above) {
                    let _ = sys::kill(process.as_fd());
                }
            });
            let kernel = Kernel::new(args.control);
            Worker::new(era, (devices, kernel), parts, (Peer { holdings, link }, touch), on_race)
                .run()
                .context("worker")
        }
    }
}

/// Waits for the lock that one worker at a time holds until its end.
fn await_turn(memory: &OwnedFd) -> nix::Result<()> {
    let kind = i16::try_from(libc::F_WRLCK).unwrap_or(0);
    let whole = libc::flock { l_type: kind, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    loop {
        match fcntl(memory, FcntlArg::F_SETLKW(&whole)) {
            Ok(_) => return Ok(()),
            Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// What the process inherited of whoever started it does not matter to it any more.
fn leave_the_caller() {
    sys::reset_signals();
    // Each process and thread of the container that makes a call takes a descriptor.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
    let _ = setsid(); // it may lead a session already
    let _ = chdir("/");
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
                "--socket" => args.socket = Some(number()?),
                "--listener" => args.listeners.push(number()?),
                "--socket-path" => args.socket_path = Some(value.into()),
                "--budget-path" => args.budget_path = Some(value.into()),
                _ => {
                    args.common.extend([flag.clone(), value.clone()]);
                    match flag.as_str() {
                        "--driver" => args.driver = value,
                        "--control" => args.control = value.into(),
                        "--uvm" => args.uvm = value.into(),
                        "--gpu" => args.gpus.push(value.into()),
                        "--slot" => args.slot = value.parse().context("--slot")?,
                        _ => bail!("unknown flag {flag}"),
                    }
                }
            }
        }
        Ok(args)
    }

    /// The descriptors that were inherited, or the first ones of this container.
    fn holdings(&self) -> Result<Holdings> {
        let memory = match self.memory {
            Some(fd) => inherited(fd)?,
            None => {
                let memory = memfd_create("gpushare-supervisor", MFdFlags::MFD_CLOEXEC)?;
                nix::unistd::ftruncate(&memory, i64::try_from(memory::SIZE)?)?;
                memory
            }
        };
        let budget = match (self.budget, &self.budget_path) {
            (Some(fd), _) => inherited(fd)?,
            (None, Some(path)) => open(path).with_context(|| format!("budget {}", path.display()))?,
            (None, None) => bail!("no budget"),
        };
        let socket = match (self.socket, &self.socket_path) {
            (Some(fd), _) => inherited(fd)?,
            (None, Some(path)) => bound(path).with_context(|| format!("socket {}", path.display()))?,
            (None, None) => bail!("no socket"),
        };
        let listeners = self.listeners.iter().map(|fd| inherited(*fd)).collect::<Result<_, _>>()?;
        Ok(Holdings { memory, budget, socket, listeners, words: self.common.clone() })
    }
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC).bits();
    File::options().read(true).write(true).custom_flags(flags).open(path).map(OwnedFd::from)
}

/// A socket at `path`, which is there once it listens, so that whoever sees it can connect.
fn bound(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    let unfinished = path.with_extension("new");
    let old = umask(Mode::from_bits_truncate(0o177));
    let done = bind(socket.as_raw_fd(), &UnixAddr::new(&unfinished)?);
    umask(old);
    done?;
    listen(&socket, Backlog::MAXCONN)?;
    std::fs::rename(&unfinished, path)?;
    Ok(socket)
}
