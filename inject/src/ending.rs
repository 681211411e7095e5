//! Ends the containers of a lease: first by asking them, then by force.

use std::fs;
use std::os::fd::AsFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use gpushare_quota::{Holder, Lease, LeaseState};
use gpushare_supervisor::sys;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Time that the kernel has to end killed processes.
const DEADLINE: Duration = Duration::from_secs(5);
/// Time between two looks whether they have ended.
const PAUSE: Duration = Duration::from_millis(10);

/// The containers of a lease that exist. While another one is being created, its holder is the engine's
/// runtime.
pub fn active(lease: &Lease) -> impl Iterator<Item = &Holder> {
    let active = lease.members().filter(|member| member.state == LeaseState::Active);
    active.map(|member| &member.holder)
}

/// Asks the first process of each container to end (SIGTERM). As at `docker stop`, one that does not handle
/// the signal may not hear it.
pub fn ask(lease: &Lease) {
    for holder in active(lease).filter(|holder| !holder.is_agent()) {
        signal(holder.pid, Signal::SIGTERM, || holder.lives());
    }
}

/// Kills every process of the containers, by their cgroups and never by a pid that a container wrote. The
/// engine finds them ended, and their share is released as at every end. Processes of the host in a
/// container's cgroup stay.
pub fn end(lease: &Lease) {
    for holder in active(lease).filter(|holder| !holder.is_gone()) {
        // With the first process of a pid namespace the kernel ends all others.
        if holder.leads && holder.lives() {
            signal(holder.pid, Signal::SIGKILL, || holder.lives());
            continue;
        }
        let own = holder.contained();
        let is_alone = own.len() == holder.processes().len();
        let whole = holder.cgroup.as_ref().filter(|_| is_alone);
        if whole.is_some_and(|cgroup| fs::write(cgroup.join("cgroup.kill"), "1").is_ok()) {
            continue;
        }
        for pid in own.into_iter().filter_map(|pid| i32::try_from(pid).ok()) {
            signal(pid, Signal::SIGKILL, || holder.has(pid));
        }
    }
}

/// Signals the process that has this number now, if that `is_meant`: whoever has the number afterwards is not. One
/// that has ended meanwhile needs no signal.
fn signal(pid: i32, signal: Signal, is_meant: impl FnOnce() -> bool) {
    let process = u32::try_from(pid).map_err(|_| Errno::ESRCH).and_then(sys::pidfd_open);
    if !is_meant() {
        return;
    }
    let _ = match process {
        Ok(process) if signal == Signal::SIGTERM => sys::terminate(process.as_fd()),
        Ok(process) => sys::kill(process.as_fd()),
        // Before Linux 5.3.
        Err(Errno::ENOSYS) => kill(Pid::from_raw(pid), signal),
        Err(errno) => Err(errno),
    };
}

/// Asks the containers of all these leases to end, kills those that have not after `grace`, and waits until
/// they are gone. Returns whether they are.
pub fn end_within(leases: &[Lease], grace: Duration) -> bool {
    leases.iter().for_each(ask);
    let are_gone = || leases.iter().flat_map(active).all(Holder::is_gone);
    let wait = |most: Duration| {
        let start = Instant::now();
        while !are_gone() && start.elapsed() < most {
            sleep(PAUSE);
        }
        are_gone()
    };
    if wait(grace) {
        return true;
    }
    leases.iter().for_each(end);
    wait(DEADLINE)
}
