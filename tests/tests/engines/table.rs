//! The table: which scenario goes with which engine, what came of it, and how it is printed.
//! `docs/engines.md` carries it as it is on a machine that lacks nothing.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use Row::*;

/// One row: what a user does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Row {
    Run,
    NoRequest,
    Annotation,
    Exec,
    Stop,
    Kill,
    Restart,
    Pause,
    EngineUpdate,
    ShareUpdate,
    KilledForMemory,
    Refused,
    FailedCreate,
    Crash,
    ReadOnlyRoot,
    User,
    NoCapabilities,
    NoNewPrivileges,
    UserNamespace,
    HostPids,
    Privileged,
    PrivilegedStrict,
    DefaultRuntime,
    OtherRuntime,
    Gpus,
    GpusHook,
    Compose,
    RuntimeClass,
    ContainerAnnotation,
    UnlistedAnnotation,
    Sandbox,
    Rootless,
}

/// Every row, in the table's order, in a user's words.
pub const ROWS: &[(Row, &str)] = &[
    (Run, "a CUDA program sees its share, and no more can be allocated"),
    (NoRequest, "a container without a request is not touched"),
    (Annotation, "a request by annotation"),
    (Exec, "exec sees the same GPU"),
    (Stop, "stop gives the share back"),
    (Kill, "kill gives the share back"),
    (Restart, "restarts leave nothing behind"),
    (Pause, "pause keeps the share, unpause goes on"),
    (EngineUpdate, "the engine's update keeps the GPU's device rules"),
    (ShareUpdate, "`gpushare update` is seen inside"),
    (KilledForMemory, "killed for host memory: the share comes back"),
    (Refused, "a refusal reaches the user in full"),
    (FailedCreate, "a start that fails gives the share back"),
    (Crash, "the daemon is killed and comes back: what runs is accounted, what ended is not"),
    (ReadOnlyRoot, "read-only root"),
    (User, "ordinary user"),
    (NoCapabilities, "no capabilities"),
    (NoNewPrivileges, "no new privileges"),
    (UserNamespace, "user namespace"),
    (HostPids, "the host's pid namespace"),
    (Privileged, "privileged: granted by the default policy"),
    (PrivilegedStrict, "privileged: refused under `request.strict`"),
    (DefaultRuntime, "gpushare as the default runtime"),
    (OtherRuntime, "a container of another runtime beside it"),
    (Gpus, "`--gpus` beside a request: NVIDIA's hook is taken out"),
    (GpusHook, "`--gpus` with our hook in NVIDIA's place"),
    (Compose, "a compose file"),
    (RuntimeClass, "RuntimeClass: its handler alone grants, an unknown one is refused"),
    (ContainerAnnotation, "the device plugin's annotation grants under `request.strict`"),
    (UnlistedAnnotation, "an annotation that the handler does not list asks for nothing"),
    (Sandbox, "a pod's sandbox is left alone, whatever the pod asks for"),
    (Rootless, "rootless: a request is refused in one clear line, everything else runs"),
];

/// One column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Engine {
    Docker,
    DockerCrun,
    Ctr,
    Cri,
    Podman,
    PodmanHooks,
    PodmanRootless,
    Runc,
    RuncV2,
    Crun,
    CrunV2,
    Youki,
}

/// Every column, in the table's order.
pub const ENGINES: &[(Engine, &str)] = &[
    (Engine::Docker, "docker"),
    (Engine::DockerCrun, "docker, crun"),
    (Engine::Ctr, "ctr"),
    (Engine::Cri, "CRI"),
    (Engine::Podman, "podman"),
    (Engine::PodmanHooks, "podman hooks.d"),
    (Engine::PodmanRootless, "podman rootless"),
    (Engine::Runc, "runc"),
    (Engine::RuncV2, "runc, cgroup v2"),
    (Engine::Crun, "crun"),
    (Engine::CrunV2, "crun, cgroup v2"),
];

/// Columns that few machines can fill. The documentation leaves them out.
const RARE: &[(Engine, &str)] = &[(Engine::Youki, "youki")];

/// Why an engine has no such scenario on any machine; `None` where it has to pass.
pub fn absent(engine: Engine, row: Row) -> Option<&'static str> {
    use Engine::*;
    let dockers = matches!(engine, Docker | DockerCrun);
    let low_level = matches!(engine, Runc | RuncV2 | Crun | CrunV2 | Youki);
    Some(match row {
        Rootless if engine == PodmanRootless => return None,
        Rootless => "an engine of root",
        _ if engine == PodmanRootless => "a rootless engine gets no share",
        RuntimeClass | ContainerAnnotation | UnlistedAnnotation | Sandbox if engine != Cri => {
            "Kubernetes' own"
        }
        Gpus | GpusHook | Compose if !dockers => "docker's own",
        Annotation if dockers => "docker passes annotations from version 24 on",
        Pause if engine == Cri => "CRI has no such call",
        EngineUpdate if engine == Ctr => "ctr has no such call",
        User if engine == Ctr => "ctr has no such flag in containerd 1.6",
        UserNamespace if engine == Cri => "containerd 1.6 gives pods no user namespace",
        UserNamespace if engine == Ctr => "with `--uidmap` ctr forgets its `--runc-binary`",
        UserNamespace if engine == Youki => {
            "youki mounts as the namespace's root, who cannot enter gpushare's folder"
        }
        UserNamespace if engine == DockerCrun => "the remapping daemon is tried over runc",
        Crash if matches!(engine, Podman | PodmanHooks) || low_level => "it has no daemon",
        DefaultRuntime | OtherRuntime if engine == PodmanHooks => "its hooks serve whatever runtime is named",
        DefaultRuntime | OtherRuntime if low_level || engine == Ctr => {
            "its caller names the runtime in each call"
        }
        _ => return None,
    })
}

/// What came of one scenario with one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// The scenario held.
    Passed,
    /// The scenario is not possible, on this machine or on any, for this reason.
    Absent(String),
    /// The scenario did not hold, with the failure.
    Failed(String),
}

/// All cells of one engine.
pub type Column = BTreeMap<Row, Cell>;

/// The columns of a machine that lacks nothing.
pub fn expected() -> BTreeMap<Engine, Column> {
    let cell = |engine, row| absent(engine, row).map_or(Cell::Passed, |why| Cell::Absent(why.to_owned()));
    let column = |engine| ROWS.iter().map(|(row, _)| (*row, cell(engine, *row))).collect();
    ENGINES.iter().map(|(engine, _)| (*engine, column(*engine))).collect()
}

/// The table in Markdown, with the reasons numbered below it.
pub fn print(columns: &BTreeMap<Engine, Column>) -> String {
    let mut reasons: Vec<&str> = Vec::new();
    let mut lines = vec![vec!["scenario".to_owned()]];
    lines[0].extend(columns.keys().map(|engine| name(*engine).to_owned()));
    for (row, text) in ROWS {
        let mut line = vec![(*text).to_owned()];
        line.extend(columns.values().map(|column| mark(column.get(row), &mut reasons)));
        lines.push(line);
    }
    let mut text = aligned(&lines);
    for (number, reason) in reasons.iter().enumerate() {
        // Writing to a string does not fail.
        let _ = write!(text, "\n{}. {reason}", number + 1);
    }
    text.push('\n');
    text
}

pub fn name(engine: Engine) -> &'static str {
    ENGINES.iter().chain(RARE).find(|(known, _)| *known == engine).map_or("", |(_, name)| name)
}

/// `passed`, `FAILED`, or the number of the reason, which joins `reasons` if it is new.
fn mark<'c>(cell: Option<&'c Cell>, reasons: &mut Vec<&'c str>) -> String {
    match cell {
        Some(Cell::Passed) => "passed".to_owned(),
        Some(Cell::Absent(reason)) => {
            let known = reasons.iter().position(|other| other == reason);
            let at = known.unwrap_or_else(|| {
                reasons.push(reason);
                reasons.len() - 1
            });
            format!("({})", at + 1)
        }
        Some(Cell::Failed(_)) => "FAILED".to_owned(),
        None => "-".to_owned(),
    }
}

/// A Markdown table whose columns also line up in a terminal.
fn aligned(lines: &[Vec<String>]) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..lines[0].len()).map(width).collect();
    let row = |line: &Vec<String>| {
        let cells: Vec<String> =
            line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let rule: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
    let mut text = row(&lines[0]) + &format!("|-{}-|\n", rule.join("-|-"));
    text.extend(lines[1..].iter().map(row));
    text
}
