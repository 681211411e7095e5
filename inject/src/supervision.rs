//! The supervisor, which holds a container's memory from outside: whether one can hold this container, its
//! start, and what the state folder keeps of it.

mod budget;
mod plans;
mod record;

use std::path::{Path, PathBuf};
use std::process::Command;

use gpushare_inventory::Node;
use gpushare_quota::{Enforcement, Lease};
use gpushare_request::{ComputePolicy, Cores, InterceptorPolicy, Mode, Request};
use gpushare_supervisor::abi::Era;
pub use gpushare_supervisor::budget::Passed;
use gpushare_supervisor::program::START;
use gpushare_supervisor::sys::{can_listen, notification_fits};
use serde_json::Value;

use crate::child::{self, Ended, Running};

pub(crate) use budget::Budgets;
pub use record::Record;

/// Whether supervisors hold the memory of containers (`supervisor.mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SupervisorMode {
    /// None does.
    Off,
    /// Where one can. Else gpushare's libraries hold it.
    Auto,
    /// A container that none can hold gets no share.
    Required,
}

/// The settings of supervisors.
#[derive(Clone, Copy, Debug)]
pub struct SupervisorSettings<'a> {
    /// Whether they hold memory (`supervisor.mode`).
    pub mode: SupervisorMode,
    /// Path of the program.
    pub program: &'a Path,
    /// Whether they hold compute, too (`supervisor.compute`).
    pub holds_compute: bool,
}

impl SupervisorSettings<'_> {
    /// None holds anything.
    pub fn off() -> Self {
        Self {
            mode: SupervisorMode::Off,
            program: Path::new("/usr/bin/gpushare-supervisor"),
            holds_compute: false,
        }
    }
}

/// A supervisor that is to be started for a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Supervised {
    /// Path of `gpushare-supervisor`.
    pub program: PathBuf,
    /// The driver's version.
    pub driver: String,
    /// nvidiactl on the host.
    pub control: PathBuf,
    /// nvidia-uvm on the host; it need not be there.
    pub uvm: PathBuf,
    /// The GPUs' own device files on the host, in the lease's order.
    pub gpus: Vec<PathBuf>,
    /// The lease's budget.
    pub budget: PathBuf,
    /// The limits that its programs read.
    pub limits: PathBuf,
    /// The folder of all GPUs' boards.
    pub boards: PathBuf,
}

impl Supervised {
    /// Starts the supervisor, which is to take listeners at `socket`. It gets nothing of the caller's
    /// environment, and none of its descriptors.
    ///
    /// # Errors
    /// When its program cannot be run.
    pub fn start(&self, socket: &Path) -> Result<Starting, StartError> {
        let Self { program, driver, control, uvm, gpus, budget, limits, boards } = self;
        let mut start = Command::new(program);
        start.arg(START).arg("--driver").arg(driver).arg("--control").arg(control).arg("--uvm").arg(uvm);
        for gpu in gpus {
            start.arg("--gpu").arg(gpu);
        }
        start.arg("--budget-path").arg(budget).arg("--limits-path").arg(limits);
        start.arg("--socket-path").arg(socket).arg("--boards").arg(boards);
        let path = program.clone();
        match Running::start(start) {
            Ok(running) => Ok(Starting { path, running }),
            Err(source) => Err(StartError::Run { path, source }),
        }
    }
}

/// A supervisor that is being started.
#[derive(Debug)]
pub struct Starting {
    path: PathBuf,
    running: Running,
}

impl Starting {
    /// Waits until the supervisor is there. Whoever brings it a listener after this waits for its answer.
    ///
    /// # Errors
    /// When it could not start, or gives no answer within 20 seconds.
    pub fn ready(self) -> Result<(), StartError> {
        let Self { path, running } = self;
        match running.end(child::DEADLINE) {
            Ok(Ended::Well) => Ok(()),
            Ok(Ended::Failed(line)) => Err(StartError::Refused { path, line }),
            Ok(Ended::NoAnswer) => Err(StartError::NoAnswer { path }),
            Err(source) => Err(StartError::Run { path, source }),
        }
    }
}

/// Why a supervisor did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The program cannot be run.
    #[error("cannot start the supervisor {path}")]
    Run {
        /// Path of the program.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It ended with an error.
    #[error("cannot start the supervisor {path}: {line}")]
    Refused {
        /// Path of the program.
        path: PathBuf,
        /// The last line of its standard error.
        line: String,
    },
    /// It did not end within the deadline.
    #[error("the supervisor {path} gave no answer for {} seconds", child::DEADLINE.as_secs())]
    NoAnswer {
        /// Path of the program.
        path: PathBuf,
    },
}

/// Why a container with a share cannot start under a supervisor, or beside containers that one holds.
#[derive(Debug, thiserror::Error)]
pub enum SupervisionError {
    /// The bundle's seccomp filter reports calls to a program of its own. The kernel lets one filter do that.
    #[error(
        "the bundle's seccomp filter has a listener of its own, beside which no supervisor can hold a share; take \
         {place} out, or go without a supervisor (supervisor.mode = \"off\", no GPUSHARE_SUPERVISOR)"
    )]
    Listener {
        /// What it has in the bundle.
        place: &'static str,
    },
    /// A supervisor is required.
    #[error(
        "supervisor.mode is \"required\", and no supervisor can hold this container: {0}; with \"auto\" libraries would \
         hold it"
    )]
    Required(Hindrance),
    /// The container asks for one.
    #[error(
        "the container requires a supervisor (GPUSHARE_SUPERVISOR, gpushare.io/supervisor), and none can hold \
         it: {0}; without that word supervisor.mode decides"
    )]
    Asked(Hindrance),
    /// Containers of one share are all held in one way: a supervisor knows nothing of what others charge.
    #[error("the share that it joins is held by a supervisor, and none can hold this container: {0}")]
    Beside(Hindrance),
}

/// What keeps a supervisor from holding a container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Hindrance {
    /// A hook comes too late: the filter has to stand before the low-level runtime starts.
    #[error("it is created in hook-only mode, and only gpushare-runtime can start one")]
    HookOnly,
    /// MPS' server makes the driver's calls for its clients.
    #[error("it is a client of MPS, whose server holds its memory")]
    Mps,
    /// There is no limit that anybody could hold.
    #[error("a whole GPU and a time slice have no limit of memory: ask for a share (mode=share)")]
    Unlimited,
    /// Another system's library holds the memory.
    #[error("another system's library holds its memory (request.interceptor)")]
    Interceptor,
    /// Nothing is known of what RM tells of instances.
    #[error("the node has MIG instances")]
    Instances,
    /// Another container has the share already.
    #[error("libraries hold the share that it joins")]
    Joined,
    /// The driver's calls have not been compared.
    #[error("driver {0} is not among those that it knows (515 to 595)")]
    Driver(String),
    /// A kernel before 5.19, or a machine other than x86-64.
    #[error("this kernel cannot report system calls as is needed (Linux 5.19 or newer, on x86-64)")]
    Kernel,
    /// Yama's ptrace_scope 3 keeps everybody from others' memory and descriptors.
    #[error("kernel.yama.ptrace_scope = 3 keeps everybody from the memory of containers")]
    Yama,
    /// The program is not installed.
    #[error("its program {0} is not there (paths.supervisor)")]
    Program(PathBuf),
}

impl Hindrance {
    /// Tells the user why libraries hold a share although the settings ask for a supervisor where one can.
    pub fn note(&self) -> String {
        format!("libraries hold its memory, since no supervisor can: {self}")
    }
}

/// Name of the folder of all GPUs' boards, in the state folder.
const BOARDS: &str = "boards";

/// The folder of all GPUs' boards.
pub fn boards(state: &Path) -> PathBuf {
    state.join(BOARDS)
}

/// Decides whether a supervisor is to hold the memory of a container with this request, and notes why not.
///
/// # Errors
/// When one is required and none can, or the bundle's filter has a listener of its own.
pub fn decide(
    request: &mut Request,
    settings: SupervisorSettings,
    node: &Node,
    (json, is_read): (&Value, bool),
) -> Result<(), SupervisionError> {
    choose(request, settings, node, (json, is_read))?;
    request.notes.extend(compute_note(request));
    Ok(())
}

/// What is said where idle time may be used, and no supervisor gives it.
fn compute_note(request: &Request) -> Option<String> {
    let policy = match request.compute_policy {
        ComputePolicy::Burst => "burst",
        ComputePolicy::Latency => "latency",
        ComputePolicy::Fixed | ComputePolicy::None => return None,
    };
    let terms = Enforcement::of(request).terms();
    if request.is_scheduled || request.cores.is_none() || !terms.is_intercepted || !terms.shares_time {
        return None;
    }
    let held = match request.burst.filter(|ceiling| *ceiling < Cores::ALL) {
        None => "holds nobody back".to_owned(),
        Some(ceiling) => format!("is held to its ceiling of {ceiling}"),
    };
    Some(format!(
        "compute-policy={policy} {held} and keeps no part of the GPU for the container: no supervisor holds its compute \
         (supervisor.compute)"
    ))
}

fn choose(
    request: &mut Request,
    SupervisorSettings { mode, program, holds_compute }: SupervisorSettings,
    node: &Node,
    (json, is_read): (&Value, bool),
) -> Result<(), SupervisionError> {
    let is_limited = !matches!(request.mode, Mode::Exclusive | Mode::TimeSlice);
    if !request.needs_supervisor && (mode == SupervisorMode::Off || !is_limited) {
        return Ok(());
    }
    match (hindrance(program, node, request, is_read), mode) {
        (None, _) => match own_listener(json) {
            Some(place) => return Err(SupervisionError::Listener { place }),
            None => (request.is_supervised, request.is_scheduled) = (true, holds_compute),
        },
        (Some(why), _) if request.needs_supervisor => return Err(SupervisionError::Asked(why)),
        (Some(why), SupervisorMode::Required) => return Err(SupervisionError::Required(why)),
        (Some(why), _) => {
            request.notes.push(why.note());
        }
    }
    Ok(())
}

fn hindrance(program: &Path, node: &Node, request: &Request, is_read: bool) -> Option<Hindrance> {
    match &request.interceptor {
        _ if matches!(request.mode, Mode::Exclusive | Mode::TimeSlice) => Some(Hindrance::Unlimited),
        _ if request.mode == Mode::Mps => Some(Hindrance::Mps),
        Some((_, InterceptorPolicy::StandDown)) => Some(Hindrance::Interceptor),
        _ if is_read => Some(Hindrance::HookOnly),
        _ => on_node(program, node).err(),
    }
}

/// Whether the calls of this driver are known.
pub fn knows_driver(version: &str) -> bool {
    version.parse().ok().and_then(Era::for_version).is_some()
}

/// Checks that supervisors can hold containers of this node.
///
/// # Errors
/// What keeps them from it.
pub fn on_node(program: &Path, node: &Node) -> Result<(), Hindrance> {
    let version = &node.driver.version;
    if !knows_driver(version) {
        return Err(Hindrance::Driver(version.clone()));
    }
    if !node.divided.is_empty() {
        return Err(Hindrance::Instances);
    }
    if !program.is_file() {
        return Err(Hindrance::Program(program.into()));
    }
    let yama = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    if yama.trim() == "3" {
        return Err(Hindrance::Yama);
    }
    if can_listen() && notification_fits() { Ok(()) } else { Err(Hindrance::Kernel) }
}

/// Checks that a container can be held as its lease is, whatever the setting is by now.
///
/// # Errors
/// When the lease's other containers are held by a supervisor and this one cannot be, or the other way round
/// where one is required.
pub fn check_lease(
    lease: &Lease,
    request: &Request,
    SupervisorSettings { mode, program, .. }: SupervisorSettings,
    node: &Node,
    (json, is_read): (&Value, bool),
) -> Result<(), SupervisionError> {
    match (lease.enforcement, lease.enforcement_for(request)) {
        (held, _) if held.is_supervised() => match hindrance(program, node, request, is_read) {
            Some(why) => Err(SupervisionError::Beside(why)),
            None => own_listener(json).map_or(Ok(()), |place| Err(SupervisionError::Listener { place })),
        },
        (_, held) if !held.is_supervised() && request.needs_supervisor => {
            Err(SupervisionError::Asked(Hindrance::Joined))
        }
        (_, held) if mode == SupervisorMode::Required && held.terms().has_region => {
            Err(SupervisionError::Required(Hindrance::Joined))
        }
        (_, held) => {
            if request.is_supervised && !held.is_supervised() {
                let why = Hindrance::Joined;
                tracing::warn!(%why, "libraries hold its memory, since no supervisor can");
            }
            Ok(())
        }
    }
}

/// Figures of a lease's supervisors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Supervision {
    /// What went past them.
    pub passed: Passed,
    /// What they have charged, in bytes, by line of the lease.
    pub charged: Vec<u64>,
    /// Whether the lease's programs are paused.
    pub is_paused: bool,
}

/// Pauses the programs of a lease on their GPUs, or lets them run again. It is so within 50 milliseconds, or
/// 100 where frames are long.
///
/// # Errors
/// When no supervisor holds its compute, or the lease's budget cannot be written.
pub fn pause(state: &Path, lease: &Lease, is_paused: bool) -> Result<(), PauseError> {
    if lease.enforcement != Enforcement::Scheduled {
        return Err(PauseError::NotHeld);
    }
    Budgets::of(state).pause(lease.id, is_paused).map_err(PauseError::Budget)
}

/// Why a lease's programs cannot be paused.
#[derive(Debug, thiserror::Error)]
pub enum PauseError {
    /// No supervisor can stop them from outside.
    #[error(
        "no supervisor holds its compute, so that nobody can stop its programs on the GPU; start it anew with \
         supervisor.compute = \"supervisor\""
    )]
    NotHeld,
    /// Its supervisors read the file.
    #[error("cannot write what its supervisors read")]
    Budget(#[source] std::io::Error),
}

/// Reads the figures of a lease's supervisors; `None` where none holds it.
///
/// # Errors
/// When its budget cannot be read.
pub fn supervision(state: &Path, lease: i64) -> std::io::Result<Option<Supervision>> {
    Budgets::of(state).supervision(lease)
}

/// Whether a lease that a supervisor holds has lost all of its supervisors.
pub fn has_lost_supervisor(state: &Path, lease: &Lease) -> bool {
    lease.enforcement.is_supervised()
        && lease.has_containers()
        && Budgets::of(state).is_in_use(lease.id).is_ok_and(|is| !is)
}

/// What reports calls to a program of the bundle's choice.
fn own_listener(json: &Value) -> Option<&'static str> {
    let filter = &json["linux"]["seccomp"];
    let notifies = |action: &Value| action.as_str() == Some("SCMP_ACT_NOTIFY");
    let rules = filter["syscalls"].as_array().into_iter().flatten();
    if filter["listenerPath"].as_str().is_some_and(|path| !path.is_empty()) {
        return Some("linux.seccomp.listenerPath");
    }
    let mut actions = rules.map(|rule| &rule["action"]).chain([&filter["defaultAction"]]);
    actions.any(notifies).then_some("SCMP_ACT_NOTIFY")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_listener_of_the_bundles_own_is_found() {
        let listener_in = |filter: Value| own_listener(&json!({"linux": {"seccomp": filter}}));
        assert_eq!(listener_in(json!(null)), None);
        assert_eq!(
            listener_in(
                json!({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"action": "SCMP_ACT_ALLOW"}]})
            ),
            None
        );
        assert_eq!(listener_in(json!({"defaultAction": "SCMP_ACT_NOTIFY"})), Some("SCMP_ACT_NOTIFY"));
        assert_eq!(
            listener_in(json!({"syscalls": [{}, {"action": "SCMP_ACT_NOTIFY"}]})),
            Some("SCMP_ACT_NOTIFY")
        );
        assert_eq!(listener_in(json!({"listenerPath": "/x"})), Some("linux.seccomp.listenerPath"));
        assert_eq!(listener_in(json!({"listenerPath": ""})), None);
        assert_eq!(own_listener(&json!({})), None);
    }
}
