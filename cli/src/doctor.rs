//! `gpushare doctor`: what is wrong with this node, in the order in which a container would meet it.

mod report;
mod runc;

use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Result;
use gpushare_config::{Config, OnCheating};
use gpushare_inject::{
    DriverLimiter, DriverLimits, MpsFolder, Region, SupervisorMode, can_supervise, has_lost_supervisor,
    is_served, knows_driver, one_line, out_of_service,
};
use gpushare_inventory::{Faults, Gpu, Node};
use gpushare_quota::{Lease, LeaseState, StateFolder, Store};
use gpushare_request::ComputePolicy;
use schemars::JsonSchema;
use serde::Serialize;

use self::runc::Runc;
use crate::configure::{Engine, Known};
use crate::container::containers;
use crate::violation::{self, Kind, Violation};
use crate::{Output, answer, configure, inventory, lock, meter, node, program, system, table};

/// The systemd timer that runs `gpushare sweep` every minute.
const SWEEP_TIMER: &str = "gpushare-sweep.timer";

/// How a check ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Ok,
    Warning,
    Failure,
}

impl Verdict {
    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failure => "FAILURE",
        }
    }
}

/// What was found.
#[derive(Serialize, JsonSchema)]
pub struct Findings {
    /// In the order in which a container would meet it.
    findings: Vec<ToldFinding>,
}

/// One finding.
#[derive(Serialize, JsonSchema)]
struct ToldFinding {
    check: &'static str,
    /// `ok`, `warning` or `failure`.
    verdict: String,
    text: String,
}

struct Finding {
    check: &'static str,
    verdict: Verdict,
    text: String,
}

/// How to tell what was found.
#[derive(clap::Args)]
pub struct Doctor {
    /// Print all that a bug report needs, without the names of containers.
    #[arg(long, conflicts_with = "json")]
    report: bool,
    #[command(flatten)]
    output: Output,
}

/// Runs all checks and prints them. The exit code is a failure if one of them is.
pub fn doctor(asked: &Doctor) -> Result<ExitCode> {
    if asked.report {
        io::stdout().write_all(report::report()?.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let findings = examine();
    if asked.output.json {
        let told = |finding: &Finding| ToldFinding {
            check: finding.check,
            verdict: finding.verdict.name().to_lowercase(),
            text: finding.text.clone(),
        };
        answer::print(Findings { findings: findings.iter().map(told).collect() })?;
    } else {
        let rows = findings.iter().map(|finding| {
            [finding.verdict.name().to_owned(), finding.check.to_owned(), finding.text.clone()]
        });
        table::print(["", "CHECK", "FINDING"], rows)?;
    }
    let failed = findings.iter().any(|finding| finding.verdict == Verdict::Failure);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn examine() -> Vec<Finding> {
    let mut findings = vec![user()];
    let config = match Config::load() {
        Ok(config) => config,
        Err(error) => {
            findings.push(failure("settings", one_line(&error)));
            return findings;
        }
    };
    findings.push(ok("settings", files()));
    findings.extend(runtime(&config));
    findings.extend(installation(&config));
    findings.extend(engines());
    findings.extend(sweep_timer());
    findings.extend(driver(&config));
    findings.extend(quota(&config));
    findings
}

fn ok(check: &'static str, text: impl Into<String>) -> Finding {
    Finding { check, verdict: Verdict::Ok, text: text.into() }
}

fn warning(check: &'static str, text: impl Into<String>) -> Finding {
    Finding { check, verdict: Verdict::Warning, text: text.into() }
}

fn failure(check: &'static str, text: impl Into<String>) -> Finding {
    Finding { check, verdict: Verdict::Failure, text: text.into() }
}

fn user() -> Finding {
    match nix::unistd::geteuid().is_root() {
        true => ok("user", "root"),
        false => failure(
            "user",
            "not root: engines run gpushare as root, and only root may read its state; use sudo",
        ),
    }
}

fn files() -> String {
    let files: Vec<String> =
        Config::files().unwrap_or_default().iter().map(|file| file.display().to_string()).collect();
    if files.is_empty() { "shipped settings, no file".to_owned() } else { files.join(", ") }
}

fn runtime(config: &Config) -> Vec<Finding> {
    let check = "low-level runtime";
    let Some(runtime) = config.runtimes.iter().find(|path| path.is_file()) else {
        return vec![failure(check, "none of runtime.candidates exists: install runc or crun")];
    };
    let output = match program::output(Command::new(runtime).arg("--version").env_clear()) {
        Ok(output) => output,
        Err(error) => {
            return vec![failure(check, format!("cannot run {}: {error}", runtime.display()))];
        }
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.lines().next().unwrap_or("no version").trim();
    let found = format!("{} ({version})", runtime.display());
    let links = system::wrong_links(config).unwrap_or_default();
    let faults = faults(&text, has_systemd() && !links.is_empty());
    if faults.is_empty() {
        return vec![ok(check, found)];
    }
    faults.iter().map(|fault| warning(check, format!("{found}; {fault}"))).collect()
}

/// What is wrong with the runtime that wrote `version`. `by_link` says that its device rules may depend on
/// links in /dev/char, of which some are missing.
fn faults(version: &str, by_link: bool) -> Vec<&'static str> {
    const DROPS_RULES: &str = "with the systemd cgroup driver this runc drops device rules of nodes without a /dev/char link: \
                               update runc to 1.1.7, or run `gpushare system dev-char` (gpushare-system.service does at boot)";
    const RACED: &str = "an image can race this runc into leaving empty files on the host (CVE-2024-45310), unless your \
                         distribution has mended it: update runc to 1.1.14 or later, or use crun";
    let Some(runc) = Runc::parse(version) else { return Vec::new() };
    let faults = [(runc.drops_rules() && by_link, DROPS_RULES), (runc.is_raced(), RACED)];
    faults.into_iter().filter(|(has, _)| *has).map(|(_, fault)| fault).collect()
}

fn installation(config: &Config) -> Vec<Finding> {
    let libraries = &config.paths.libraries;
    let files = [
        config.paths.hook.clone(),
        config.paths.cli.clone(),
        libraries.join("libcuda.so.1"),
        libraries.join("libnvidia-ml.so.1"),
    ];
    let missing: Vec<String> =
        files.iter().filter(|path| !path.is_file()).map(|path| path.display().to_string()).collect();
    if missing.is_empty() {
        return vec![ok("installation", format!("hook, libraries in {}", libraries.display()))];
    }
    vec![failure("installation", format!("missing: {}; install gpushare completely", missing.join(", ")))]
}

/// Engines of this machine, by their settings, and by the flags of those that run.
fn engines() -> Vec<Finding> {
    let finding = |known: Known| {
        let file = known.named.as_ref().map(|file| format!(" ({})", file.display())).unwrap_or_default();
        let engine = known.engine;
        match &known.knows {
            Err(why) => warning(
                "engine",
                format!("{engine}{file}: nobody can tell whether it knows the runtime: {why:#}"),
            ),
            Ok(true)
                if engine == Engine::Docker
                    && known.named.is_none()
                    && configure::docker_lacks_the_runtime() =>
            {
                warning(
                    "engine",
                    format!(
                        "{engine} runs without the runtime, which its settings know: systemctl reload docker"
                    ),
                )
            }
            Ok(true) => ok("engine", format!("{engine}{file} knows the runtime")),
            Ok(false) => {
                warning("engine", format!("{engine}{file} does not know the runtime: {}", known.remedy()))
            }
        }
    };
    configure::engines().into_iter().map(finding).collect()
}

/// Without the timer, what a killed engine left behind is swept only when the node looks full.
fn sweep_timer() -> Option<Finding> {
    let enabled =
        Path::new("/etc/systemd/system/timers.target.wants").join(SWEEP_TIMER).symlink_metadata().is_ok();
    has_systemd().then(|| match enabled {
        true => ok("sweep", format!("{SWEEP_TIMER} is enabled")),
        false => warning("sweep", format!("not run by itself: systemctl enable --now {SWEEP_TIMER}")),
    })
}

fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

fn driver(config: &Config) -> Vec<Finding> {
    let faults = Faults::load(&config.paths.state);
    let node = match Node::open(&config.roots).and_then(|node| node.without_faulty(&faults)) {
        Ok(node) => node,
        Err(error) => {
            let has_driver = config.roots.proc.join("proc/driver/nvidia").exists();
            let hint =
                "; without a GPU, `gpushare-simulator create DIR` makes a simulated one (docs/node.md)";
            return vec![failure(
                "driver",
                format!("{}{}", one_line(&error), if has_driver { "" } else { hint }),
            )];
        }
    };
    let mut findings =
        vec![ok("driver", format!("version {}, {} GPU(s)", node.driver.version, node.gpus.len()))];
    findings.extend(node.sick.iter().map(|sick| failure("GPU", out_of_service(sick))));
    for library in [node.driver.libcuda(), node.driver.libnvidia_ml()] {
        findings.push(match library {
            Ok(path) => ok("library", path.display().to_string()),
            Err(error) => failure("library", one_line(&error)),
        });
    }
    findings.extend(driver_limit(config.driver_limits, &node.driver.version));
    findings.extend(bystanders(config, &node));
    findings.push(device_nodes(config, &node));
    findings.push(device_links(config));
    if let Ok(state) = StateFolder::open(&config.paths.state) {
        findings.push(match inventory::fit(config, &node, &state) {
            Ok(()) => ok("fitted libraries", config.paths.cache.display().to_string()),
            Err(error) => failure("fitted libraries", one_line(error.as_ref())),
        });
        let known = node::inventory(config, &state);
        findings.push(match &known {
            Ok(node) if node.gpus.iter().all(|gpu| gpu.memory.is_some()) => {
                ok("memory sizes", "known for every GPU")
            }
            Ok(_) => warning("memory sizes", "unknown for some GPUs, which therefore take no shares"),
            Err(error) => failure("memory sizes", one_line(error.as_ref())),
        });
        // An inventory with memory sizes knows of MIG instances, too.
        let complete = known.as_ref().unwrap_or(&node);
        findings.push(supervisor(config.supervisor_mode, &config.paths.supervisor, complete));
        findings.extend(lost_supervisors(&state));
        findings.extend(known.iter().flat_map(mig));
    } else {
        findings.push(supervisor(config.supervisor_mode, &config.paths.supervisor, &node));
    }
    findings
}

/// The driver's own limit, where the settings ask for it.
fn driver_limit(wanted: DriverLimits, driver: &str) -> Option<Finding> {
    let check = "driver's limit";
    Some(match (wanted, DriverLimiter::available(driver)) {
        (DriverLimits::Off, _) => return None,
        (_, Ok(())) => ok(check, "is set beside the libraries' (inject.driver_limit)"),
        (DriverLimits::Auto, Err(why)) => warning(check, format!("{why}; only the libraries limit memory")),
        (DriverLimits::Required, Err(why)) => failure(check, format!("{why}; every share is refused")),
    })
}

/// Whether supervisors can hold containers of this node, and do by the settings.
fn supervisor(wanted: SupervisorMode, program: &Path, node: &Node) -> Finding {
    let check = "supervisor";
    match (wanted, can_supervise(program, node)) {
        (SupervisorMode::Off, Ok(())) => {
            ok(check, "can hold shares here, and does for those that ask for one (supervisor.mode = \"off\")")
        }
        (SupervisorMode::Off, Err(why)) => ok(check, format!("cannot hold shares here: {why}")),
        (_, Ok(())) => ok(check, "holds the memory of shares that start from now on (supervisor.mode)"),
        (SupervisorMode::Auto, Err(why)) => {
            warning(check, format!("cannot hold shares here: {why}; libraries hold their memory"))
        }
        (SupervisorMode::Required, Err(why)) => failure(
            check,
            format!("cannot hold shares here: {why}; every share is refused (supervisor.mode)"),
        ),
    }
}

/// Says what keeps supervisors from holding shares on this node, as these settings ask; `None` where nothing
/// does, or there is no node.
pub fn misses_supervisors(config: &Config) -> Option<String> {
    let node = Node::open(&config.roots).ok()?;
    let Finding { verdict, text, .. } = supervisor(config.supervisor_mode, &config.paths.supervisor, &node);
    (!matches!(verdict, Verdict::Ok)).then_some(text)
}

/// Containers whose supervisor has ended: the driver's calls fail there.
fn lost_supervisors(state: &StateFolder) -> Option<Finding> {
    let leases = Store::open(state.path()).ok()?.leases().ok()?;
    let lost = |lease: &&Lease| !lease.is_gone() && has_lost_supervisor(state.path(), lease);
    let lost: Vec<String> = leases.iter().filter(lost).map(containers).collect();
    let names = lost.join(", ");
    (!lost.is_empty()).then(|| {
        warning(
            "supervisors",
            format!("that of {names} has ended: the driver's calls fail until they are started again"),
        )
    })
}

/// Containers without a share, where the settings deny them the driver's calls.
fn bystanders(config: &Config, node: &Node) -> Option<Finding> {
    let check = "bystanders";
    let driver = &node.driver.version;
    config.denies_bystanders.then(|| {
        if knows_driver(driver) {
            let what = "the driver's calls fail in containers without a share that gpushare-runtime starts from \
                        now on (supervisor.bystanders)";
            ok(check, what)
        } else {
            let why = format!("driver {driver} is not known");
            warning(check, format!("{why}; its calls do not fail in containers without a share"))
        }
    })
}

/// The GPUs in MIG mode, with their instances or what is wrong with them.
fn mig(node: &Node) -> Vec<Finding> {
    let sick = node.sick.iter().filter(|sick| {
        node.divided.iter().any(|gpu| gpu.index == sick.index) // others have been told
    });
    let instances = |card: &Gpu| {
        let its = node.gpus.iter().filter(|gpu| gpu.instance.is_some() && gpu.card() == card.uuid);
        let its: Vec<String> = its.map(Gpu::to_string).collect();
        (!its.is_empty()).then(|| ok("MIG", format!("{card}: {}", its.join(", "))))
    };
    let whole = node.divided.iter().filter_map(instances);
    whole.chain(sick.map(|sick| failure("MIG", out_of_service(sick)))).collect()
}

/// Without the nodes of GPUs there is no inventory, and without UVM no CUDA. Few containers need the other
/// nodes.
fn device_nodes(config: &Config, node: &Node) -> Finding {
    let check = "device nodes";
    let remedy = "run `gpushare system nodes`, or nvidia-modprobe -c 0 -u";
    match system::wrong_nodes(config) {
        Ok(wrong) if wrong.is_empty() => ok(check, "all that containers need"),
        Ok(wrong) if node.nodes.uvm.is_some() => warning(check, format!("{}; {remedy}", wrong.join(", "))),
        Ok(wrong) => failure(check, format!("{}; CUDA needs nvidia-uvm: {remedy}", wrong.join(", "))),
        Err(error) => failure(check, one_line(error.as_ref())),
    }
}

fn device_links(config: &Config) -> Finding {
    let check = "device links";
    match system::wrong_links(config) {
        Ok(wrong) if wrong.is_empty() => ok(check, "every node of a container has its link in /dev/char"),
        Ok(wrong) => {
            let why = "a systemd cgroup driver may drop their rules: run `gpushare system dev-char`";
            warning(check, format!("{}; {why}", wrong.join(", ")))
        }
        Err(error) => failure(check, one_line(error.as_ref())),
    }
}

fn quota(config: &Config) -> Vec<Finding> {
    let state = match StateFolder::open(&config.paths.state) {
        Ok(state) => state,
        Err(error) => return vec![failure("state folder", one_line(&error))],
    };
    let mut findings = vec![ok("state folder", state.path().display().to_string())];
    let leases =
        Store::open(state.path()).and_then(|store| store.check_writable().and_then(|()| store.leases()));
    match leases {
        Err(error) => findings.push(failure("quota store", one_line(&error))),
        Ok(leases) => {
            let stale =
                leases.iter().flat_map(Lease::members).filter(|member| member.holder.is_gone()).count();
            let text = format!("{} share(s) held", leases.len());
            findings.push(match stale {
                0 => ok("quota store", text),
                _ => warning(
                    "quota store",
                    format!("{text}, {stale} by containers that are gone: gpushare sweep"),
                ),
            });
            findings.push(meter(config, state.path(), &leases));
            findings.extend(mps(state.path()));
            findings.extend(unseen(state.path(), &leases));
            findings.extend(cheating(config, state.path(), &leases));
        }
    }
    findings
}

/// Shares hold without the meter too, and nobody measures them.
fn meter(config: &Config, state: &Path, leases: &[Lease]) -> Finding {
    let limited = |lease: &&Lease| {
        lease.compute_policy != ComputePolicy::None && lease.grants.iter().any(|grant| grant.cores.is_some())
    };
    let limited = leases.iter().filter(limited).count();
    if let Some(pid) = lock::stopped(&meter::lock_file(state)) {
        let remedy = format!("continue it with `kill -CONT {pid}`, or end it and start it anew");
        return failure("meter", format!("process {pid} is stopped, so it measures nothing; {remedy}"));
    }
    match (lock::is_held(&meter::lock_file(state)), limited) {
        (true, _) if config.meter.on_cheating == OnCheating::Cap => warning(
            "meter",
            "runs, and stops nobody any more: meter.on_cheating = \"cap\" counts as \"report\"; set one of \"report\" and \"end\"",
        ),
        (true, _) => ok("meter", "runs"),
        (false, _) if config.meter.on_cheating == OnCheating::End => warning(
            "meter",
            "does not run, so nobody is ended who goes past a limit (meter.on_cheating): keep it running",
        ),
        (false, _) if config.rules.idle.is_some() || config.rules.hold.is_some() => warning(
            "meter",
            "does not run, so nobody is told or ended who is idle or holds a GPU for long (rules): keep it running",
        ),
        (false, _) if leases.iter().any(|lease| lease.elastic.is_some()) => {
            warning("meter", "does not run, so no share grows to its memory-limit: keep it running")
        }
        (false, 0) => ok("meter", "does not run, and nobody holds a compute share"),
        (false, count) => warning(
            "meter",
            format!(
                "does not run, though {count} container(s) hold a compute share: nobody measures what they use, or names \
                 who uses more; {}",
                if has_systemd() {
                    "systemctl enable --now gpushare-meter"
                } else {
                    "keep `gpushare meter` running"
                }
            ),
        ),
    }
}

/// What mode mps has on this node: nothing is said where nobody serves it and nothing is left of it.
fn mps(state: &Path) -> Vec<Finding> {
    let check = "MPS";
    let folders = MpsFolder::existing(state);
    let failures = folders.iter().filter_map(|folder| {
        let why = std::fs::read_to_string(folder.error()).ok()?;
        Some(failure(check, format!("does not run on {}: {why}", folder.gpu())))
    });
    let mut findings: Vec<Finding> = failures.collect();
    let running = folders.iter().filter(|folder| folder.daemon().is_some()).count();
    match is_served(state) {
        true if findings.is_empty() => {
            let unchanged = folders.iter().filter(|folder| folder.keeps_compute_mode()).count();
            let unchanged = match unchanged {
                0 => String::new(),
                _ => format!("; {unchanged} of them keep their compute mode (mps.compute_mode)"),
            };
            findings.push(ok(check, format!("is served; it runs on {running} GPU(s){unchanged}")));
        }
        false if !folders.is_empty() => findings.push(warning(
            check,
            format!(
                "is not served any more, though {} GPU(s) have its daemon or its compute mode: no daemon is started, and \
                 nothing is given back; {}",
                folders.len(),
                match has_systemd() {
                    true => "systemctl start gpushare-mps",
                    false => "run `gpushare mps serve`",
                }
            ),
        )),
        _ => {}
    }
    findings
}

/// Counts regions that cannot be measured or changed from here, for one of two reasons. An engine
/// with a mount namespace of its own makes them where they are not visible here. Or another version of
/// gpushare made it.
fn unseen(state: &Path, leases: &[Lease]) -> Vec<Finding> {
    let lives = |lease: &&Lease| {
        lease.enforcement.terms().has_region && lease.state() == LeaseState::Active && !lease.is_gone()
    };
    let unseen = leases.iter().filter(lives).map(|lease| Region::of(state, lease.id));
    let is_unseen = |region: &Region| region.measured().is_err() || region.identities()[1].is_none();
    let (foreign, hidden): (Vec<_>, Vec<_>) = unseen.filter(is_unseen).partition(Region::is_foreign);
    let finding = |count: usize, why: &str| {
        let text = format!(
            "the limits of {count} container(s) are not to be seen from here, so they are neither measured nor changed: {why}"
        );
        (count > 0).then(|| warning("regions", text))
    };
    let hidden = finding(
        hidden.len(),
        "the engine that made them runs in a mount namespace of its own (systemd's PrivateMounts, MountFlags, ProtectSystem, …)",
    );
    let foreign = finding(
        foreign.len(),
        "another version of gpushare started them, in whose layout they are held as they are; start them anew",
    );
    hidden.into_iter().chain(foreign).collect()
}

/// What containers do against their shares: what the meter found, or, where none runs, what a single look can
/// tell.
fn cheating(config: &Config, state: &Path, leases: &[Lease]) -> Vec<Finding> {
    // A meter that waits, for instance for a file lease to expire, reports nothing.
    let found = match lock::is_held(&meter::lock_file(state)) && violation::is_fresh(state) {
        true => violation::read(state),
        false => meter::look_once(config, state, leases),
    };
    let finding = |violation: &Violation| match violation.kind == Kind::Stranger.name() {
        true => warning("stranger", violation.to_string()),
        false if !violation.is_cheating() => warning("unsearched", format!("container {violation}")),
        false => failure("cheating", format!("container {violation}")),
    };
    found.iter().map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_of_a_runc_is_told_where_it_matters() {
        for (version, by_link, told) in [
            ("runc version 1.1.5+ds1\n", true, &["/dev/char", "CVE-2024-45310"][..]),
            ("runc version 1.1.5+ds1\n", false, &["CVE-2024-45310"]),
            ("runc version 1.1.12\n", true, &["CVE-2024-45310"]),
            ("runc version 1.1.14\n", true, &[]),
            ("crun version 1.1.5\n", true, &[]),
            ("youki version 0.3.3\n", true, &[]),
            ("", true, &[]),
        ] {
            let faults = faults(version, by_link);
            assert_eq!(faults.len(), told.len(), "{version:?}: {faults:?}");
            assert!(
                faults.iter().zip(told).all(|(fault, word)| fault.contains(word)),
                "{version:?}: {faults:?}"
            );
        }
    }
}
