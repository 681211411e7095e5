//! `gpushare describe`: one share whole: who holds it, what it gives, what is used of it, what happened to
//! it, and what would help.

use std::io::{self, Write};

use anyhow::Result;
use gpushare_config::Config;
use gpushare_inject::{
    Hindrance, SupervisorMode, can_supervise, has_lost_supervisor, living_configuration, too_little,
};
use gpushare_inventory::Node;
use gpushare_quota::{Enforcement, Lease, LeaseKey};
use gpushare_request::read;
use schemars::JsonSchema;
use serde::Serialize;

use crate::container::{find, short};
use crate::failure::Failure;
use crate::overview::{Looker, Overview, PartView, Process, ShareView, holders};
use crate::table::{age, escaped};
use crate::{Output, answer, node};

/// Whose share.
#[derive(clap::Args)]
pub struct Describe {
    /// The container's name, its id or the beginning of that; in a cluster NAMESPACE/POD/CONTAINER.
    container: String,
    /// The runtime root, where the id alone is not unique.
    #[arg(long)]
    root: Option<String>,
    #[command(flatten)]
    output: Output,
}

/// One share whole.
#[derive(Serialize, JsonSchema)]
pub struct Description {
    share: ShareView,
    /// In whose words it was asked for.
    asked_by: Vec<&'static str>,
    /// What was decided about the request, and why.
    notes: Vec<String>,
    /// The processes of its containers.
    processes: Vec<Process>,
    /// What its user could do.
    helps: Vec<String>,
}

/// Prints one share.
pub fn describe(asked: &Describe) -> Result<()> {
    let config = Config::load()?;
    let (state, store) = node::store(&config)?;
    let lease = find(&store, &asked.container, asked.root.as_deref())?;
    let mut looker = Looker::open(config.clone())?;
    let overview = looker.look()?;
    let Some(share) = overview.shares.iter().find(|share| share.lease == lease.id) else {
        let message = format!("the share of {} was given back just now", asked.container);
        return Err(Failure::not_found(message).into());
    };
    let processes = looker.processes(lease.id)?;
    // What the bundle says, where the low-level runtime still knows it.
    let inventory = node::inventory(&config, &state).ok();
    let request = living_configuration(&lease.member.key).ok().and_then(|bundle| {
        let gpus = &inventory.as_ref()?.gpus;
        read(&config.container(&bundle), &config.request, gpus).ok()?
    });
    let (dialects, mut notes) = request.map(|request| (request.dialects, request.notes)).unwrap_or_default();
    notes.extend(inventory.and_then(|node| why_no_supervisor(&config, &lease, &node)));
    let mut helps = helps(share, &overview);
    if has_lost_supervisor(state.path(), &lease) && !lease.is_gone() {
        helps.push(
            "its supervisor has ended: the driver's calls fail until the container is started again"
                .to_owned(),
        );
    }
    helps.extend(too_little(&lease));
    if asked.output.json {
        let share = share.clone();
        return Ok(answer::print(Description { share, asked_by: dialects, notes, processes, helps })?);
    }
    Ok(print(share, &dialects.join(", "), &notes, &processes, &helps)?)
}

/// Says why libraries hold a share although the settings ask for a supervisor where one can.
fn why_no_supervisor(config: &Config, lease: &Lease, node: &Node) -> Option<String> {
    let is_held_by_libraries = lease.enforcement == Enforcement::Intercepted;
    if !is_held_by_libraries || config.supervisor_mode == SupervisorMode::Off {
        return None;
    }
    let why = match lease.member.key.root.as_str() {
        LeaseKey::HOOK_ONLY => Hindrance::HookOnly,
        _ => can_supervise(&config.paths.supervisor, node).err()?,
    };
    Some(why.note())
}

/// What its user could do, by what is seen of it.
fn helps(share: &ShareView, overview: &Overview) -> Vec<String> {
    let mut helps = Vec::new();
    // Not by the name: others chose it, and it would be a part of a command.
    let (name, is_update) = (short(&share.id), !matches!(share.mode, "exclusive" | "time-slice"));
    let is_cheating = !share.violations.is_empty();
    if is_update
        && !is_cheating
        && (share.allocations_refused > 0 || share.parts.iter().any(PartView::is_full))
    {
        let why = match share.allocations_refused {
            0 => "it has used up its memory".to_owned(),
            refused => format!("its limit refused {refused} allocations"),
        };
        helps.push(format!(
            "{why}: `gpushare update {name} --memory SIZE` gives more, as far as the GPU has it"
        ));
    }
    // The container itself says how long.
    let held = share.parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.throttled_nanoseconds));
    if is_update && held > 0 {
        helps.push(format!(
            "its launches were held back: `gpushare update {name} --cores PERCENT` gives more, and --compute-policy burst the \
             time that others leave"
        ));
    }
    if !overview.is_metered {
        helps.push("`gpushare meter` does not run: GPU time is not measured".to_owned());
    }
    helps
}

fn print(
    share: &ShareView,
    dialects: &str,
    notes: &[String],
    processes: &[Process],
    helps: &[String],
) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let mut line = |key: &str, value: &str| match value {
        "" => Ok(()),
        value => writeln!(out, "{key:<10} {}", escaped(value)),
    };
    line("container", &share.name)?;
    line("id", &share.id)?;
    line("image", &share.image)?;
    line("project", &share.project)?;
    line("state", &format!("{}, for {}", share.state, age(share.granted_at)))?;
    line("asked by", dialects)?;
    for note in notes {
        line("note", note)?;
    }
    line("mode", share.mode)?;
    line("held by", &holders(share.held_by, share.compute_held_by))?;
    for part in &share.parts {
        let size = |bytes: u64| gpushare_inventory::DeviceMemory::from_bytes(bytes).to_string();
        let memory = match (part.memory_bytes, part.limit_bytes) {
            (Some(granted), Some(limit)) if limit > granted => {
                format!("{} up to {}", size(granted), size(limit))
            }
            (Some(granted), _) => size(granted),
            (None, _) => "no limit of memory".to_owned(),
        };
        let cores = part.cores.map_or_else(|| "no limit of compute".to_owned(), |cores| format!("{cores}%"));
        line("gives", &format!("{memory}, {cores} on GPU {} ({})", part.gpu, part.uuid))?;
        let seconds = |time: u64| format!("{:.1} s", std::time::Duration::from_nanos(time).as_secs_f64());
        let time = part.gpu_nanoseconds.map_or_else(|| "not measured".to_owned(), seconds);
        let held = seconds(part.throttled_nanoseconds);
        let contexts = part.context_bytes.map(|bytes| format!(" (contexts {})", size(bytes)));
        let used = format!("{}{}", size(part.used_bytes), contexts.unwrap_or_default());
        let by = match part.gpu_time_by {
            Some("record") => " by the card's record",
            Some(_) => " by samples",
            None => "",
        };
        line("uses", &format!("{used}; GPU time {time}{by}; held back {held}"))?;
    }
    if let Some(peak) = share.peak_bytes {
        line("peak", &gpushare_inventory::DeviceMemory::from_bytes(peak).to_string())?;
    }
    line("refused", &format!("{} allocations", share.allocations_refused))?;
    for violation in &share.violations {
        line("CHEATING", violation)?;
    }
    for process in processes {
        line("process", &format!("{} {}", process.pid, process.name))?;
    }
    for help in helps {
        line("helps", help)?;
    }
    Ok(())
}
