//! Reads the TOML files, checks them, and turns their texts into values.

mod salvage;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpushare_inject::{DriverLimits, ExtraMount, SupervisorMode};
use gpushare_inventory::{DeviceMemory, GpuUuid, LeftOut, Roots};
use gpushare_quota::{Admission, Placement};
use gpushare_request::ShareName;
use serde::Deserialize;
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use crate::error::{ConfigError, value};
use crate::locate::is_ours;
use crate::log::{FORMATS, LEVELS};
use crate::request::{
    DialectsAliyunSection, DialectsHamiSection, DialectsMpsSection, DialectsSection, DialectsSlurmSection,
    RequestSection, policy, size,
};
use crate::word::checked;
use crate::{Config, Kubernetes, Log, Meter, OnCheating, Paths, RecordFiles, Rule, Rules, SHIPPED};
pub(crate) use salvage::salvage;

const PLACEMENTS: [(&str, Placement); 2] = [("binpack", Placement::Binpack), ("spread", Placement::Spread)];
/// Whether to prevent containers from creating user namespaces.
const USER_NAMESPACES: [(&str, bool); 2] = [("allow", false), ("deny", true)];
/// Whether the driver limits containers, too.
const DRIVER_LIMITS: [(&str, DriverLimits); 3] =
    [("off", DriverLimits::Off), ("auto", DriverLimits::Auto), ("require", DriverLimits::Required)];
/// Whether supervisors hold memory.
const SUPERVISOR_MODES: [(&str, SupervisorMode); 3] =
    [("off", SupervisorMode::Off), ("auto", SupervisorMode::Auto), ("required", SupervisorMode::Required)];
/// Whether driver calls fail in containers that have no NVIDIA device.
const BYSTANDERS: [(&str, bool); 2] = [("allow", false), ("deny", true)];
/// Whether supervisors hold compute.
const COMPUTE: [(&str, bool); 2] = [("library", false), ("supervisor", true)];
/// Whether MPS gets the card for its server alone.
const MPS_COMPUTE_MODE: [(&str, bool); 2] = [("exclusive", true), ("unchanged", false)];
/// Whether a rule ends containers.
const ON_RULE: [(&str, bool); 2] = [("report", false), ("end", true)];
/// Whether containers end others of lower priority.
const PREEMPTION: [(&str, bool); 2] = [("off", false), ("lower", true)];
const ON_CHEATING: [(&str, OnCheating); 3] =
    [("report", OnCheating::Report), ("cap", OnCheating::Cap), ("end", OnCheating::End)];

/// A settings file. A missing key has the shipped value.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct File {
    node: NodeSection,
    paths: PathsSection,
    runtime: RuntimeSection,
    request: RequestSection,
    dialects: DialectsSection,
    quota: QuotaSection,
    rules: RulesSection,
    inject: InjectSection,
    supervisor: SupervisorSection,
    mps: MpsSection,
    cdi: CdiSection,
    kubernetes: KubernetesSection,
    meter: MeterSection,
    log: LogSection,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct NodeSection {
    driver_root: PathBuf,
    dev_root: PathBuf,
    proc_root: PathBuf,
    library_folders: Vec<PathBuf>,
    unusable_memory: String,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct PathsSection {
    state: PathBuf,
    history: PathBuf,
    cache: PathBuf,
    hook: PathBuf,
    cli: PathBuf,
    supervisor: PathBuf,
    libraries: PathBuf,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RuntimeSection {
    candidates: Vec<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct QuotaSection {
    placement: String,
    reserve: String,
    memory_percent: u16,
    cores_percent: u16,
    compute_reserve: u8,
    cordoned: Vec<String>,
    cordoned_by_command: Vec<String>,
    replicas: u16,
    host_memory: String,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RulesSection {
    idle: String,
    on_idle: String,
    hold: String,
    on_hold: String,
    grace: String,
    preemption: String,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct InjectSection {
    user_namespaces: String,
    driver_limit: String,
    mounts: Vec<MountEntry>,
    leave_out: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct SupervisorSection {
    mode: String,
    compute: String,
    bystanders: String,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct MpsSection {
    compute_mode: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MountEntry {
    source: PathBuf,
    destination: PathBuf,
    #[serde(default)]
    writable: bool,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct CdiSection {
    spec_dirs: Vec<PathBuf>,
    shares: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct KubernetesSection {
    resources: Vec<String>,
    memory_granule: String,
    slots: u16,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct MeterSection {
    tolerance: String,
    on_cheating: String,
    xids: Vec<u32>,
    record: String,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct LogSection {
    file: PathBuf,
    format: String,
    level: String,
}

// The shipped values of each section. The build script writes them as code, so that the runtime never has to
// parse gpushare.toml.
include!(concat!(env!("OUT_DIR"), "/shipped.rs"));

/// The shipped settings overlaid with `files`. `base` is the program's folder.
pub(crate) fn config(files: &[PathBuf], base: &Path) -> Result<Config, ConfigError> {
    merge(files)?.into_config(base).map_err(|error| located(error, files))
}

/// The shipped settings overlaid with `files`. A later file overrides an earlier one.
fn merge(files: &[PathBuf]) -> Result<File, ConfigError> {
    match files {
        [] => Ok(File::default()),
        [path] => merge_text(path, &read(path)?),
        _ => {
            // Each file was already checked alone, with line numbers; merging only adds keys.
            let merged = over(Table::new(), files)?;
            File::deserialize(merged).map_err(|error| mistake(Path::new(SHIPPED_NAME), SHIPPED, &error))
        }
    }
}

pub(crate) fn show(files: &[PathBuf]) -> Result<String, ConfigError> {
    Ok(toml::to_string_pretty(&over(shipped()?, files)?).unwrap_or_else(|error| format!("# {error}\n")))
}

/// The settings that would be in force if the file `path`, which may not exist yet, contained `text`.
pub(crate) fn tried(files: &[PathBuf], path: &Path, text: &str, base: &Path) -> Result<Table, ConfigError> {
    let mut files = files.to_vec();
    // The settings file comes before its drop-ins.
    if !files.iter().any(|file| file == path) {
        files.insert(0, path.to_path_buf());
    }
    let text_of = |file: &Path| if file == path { Ok(text.to_owned()) } else { read(file) };
    let merged = over_by(shipped()?, &files, text_of)?;
    let all = File::deserialize(merged.clone());
    let all = all.map_err(|error| mistake(Path::new(SHIPPED_NAME), SHIPPED, &error))?;
    all.into_config(base).map_err(|error| located(error, &files))?;
    Ok(merged)
}

/// The settings as shipped.
pub(crate) fn shipped() -> Result<Table, ConfigError> {
    toml::from_str(SHIPPED).map_err(|error| mistake(Path::new(SHIPPED_NAME), SHIPPED, &error))
}

/// The last of `files` that sets `key`, with the line number.
pub(crate) fn origin(files: &[PathBuf], key: &str) -> Option<(PathBuf, usize)> {
    files.iter().rev().find_map(|path| Some((path.clone(), line_of(&read(path).ok()?, key)?)))
}

/// The shipped settings overlaid with `text`; `name` stands for the text in messages.
pub(crate) fn merge_text(name: &Path, text: &str) -> Result<File, ConfigError> {
    toml::from_str(text).map_err(|error| mistake(name, text, &error))
}

const SHIPPED_NAME: &str = "gpushare.toml (shipped)";

/// Checks each of `files` and overlays it on `base`.
fn over(base: Table, files: &[PathBuf]) -> Result<Table, ConfigError> {
    over_by(base, files, read)
}

fn over_by(
    mut base: Table,
    files: &[PathBuf],
    read: impl Fn(&Path) -> Result<String, ConfigError>,
) -> Result<Table, ConfigError> {
    for path in files {
        let text = read(path)?;
        merge_text(path, &text)?;
        overlay(&mut base, toml::from_str(&text).map_err(|error| mistake(path, &text, &error))?);
    }
    Ok(base)
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let error = |source| ConfigError::Read { path: path.into(), source };
    let metadata = fs::symlink_metadata(path).map_err(error)?;
    if !metadata.is_file() || !is_ours(&metadata).map_err(error)? || metadata.mode() & 0o022 != 0 {
        return Err(ConfigError::Unsafe { path: path.into() });
    }
    fs::read_to_string(path).map_err(error)
}

fn mistake(path: &Path, text: &str, error: &toml::de::Error) -> ConfigError {
    let line = line(text, error.span().map_or(0, |span| span.start));
    ConfigError::Mistake { path: path.into(), line, message: error.message().replace('\n', ", ") }
}

/// The line number, from 1, of the byte at `place`.
fn line(text: &str, place: usize) -> usize {
    text.bytes().take(place).filter(|byte| *byte == b'\n').count() + 1
}

/// Adds file and line to an error about a value. If several files have the key, names the last one.
fn located(error: ConfigError, files: &[PathBuf]) -> ConfigError {
    let ConfigError::Value { key, .. } = &error else { return error };
    match origin(files, key) {
        Some((path, line)) => ConfigError::Mistake { path, line, message: error.to_string() },
        None => error,
    }
}

/// The line in `text` of `key`, or of the list of tables that has the key.
fn line_of(text: &str, key: &str) -> Option<usize> {
    let document = DeTable::parse(text).ok()?;
    let (mut table, mut words) = (document.get_ref(), key.split('.'));
    loop {
        let (name, value) = table.get_key_value(words.next()?)?;
        match value.get_ref() {
            DeValue::Table(inner) => table = inner,
            _ => return Some(line(text, name.span().start)),
        }
    }
}

/// The libraries that limits depend on.
const NEEDED: [&str; 4] = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Checks the names of driver files to leave out.
fn left_out(names: Vec<String>) -> Result<Vec<String>, ConfigError> {
    for name in &names {
        if name.is_empty() || name.contains('/') || name.trim_end_matches('*').contains('*') {
            return Err(value("inject.leave_out", name, "must be a file's name, perhaps with * at its end"));
        }
        if NEEDED.iter().any(|file| LeftOut(std::slice::from_ref(name)).has(file)) {
            return Err(value(
                "inject.leave_out",
                name,
                "every share needs libcuda and libnvidia-ml: take it out",
            ));
        }
    }
    Ok(names)
}

fn overlay(base: &mut Table, over: Table) {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(base)), Value::Table(over)) => overlay(base, over),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

impl File {
    /// Checks the strings and converts them to values. An empty path means the default place relative to the
    /// program's folder `base`.
    pub fn into_config(self, base: &Path) -> Result<Config, ConfigError> {
        let beside =
            |path: PathBuf, default: PathBuf| if path.as_os_str().is_empty() { default } else { path };
        Ok(Config {
            request: policy(&self.request, &self.dialects)?,
            quota: admission(&self.quota)?,
            cordoned_by_command: by_command(&self.quota)?,
            rules: rules(&self.rules)?,
            denies_user_namespaces: checked(
                "inject.user_namespaces",
                &self.inject.user_namespaces,
                &USER_NAMESPACES,
            )?,
            driver_limits: checked("inject.driver_limit", &self.inject.driver_limit, &DRIVER_LIMITS)?,
            supervisor_mode: checked("supervisor.mode", &self.supervisor.mode, &SUPERVISOR_MODES)?,
            supervisor_holds_compute: checked("supervisor.compute", &self.supervisor.compute, &COMPUTE)?,
            denies_bystanders: checked("supervisor.bystanders", &self.supervisor.bystanders, &BYSTANDERS)?,
            left_out: left_out(self.inject.leave_out)?,
            mps_is_exclusive: checked("mps.compute_mode", &self.mps.compute_mode, &MPS_COMPUTE_MODE)?,
            mounts: self.inject.mounts.into_iter().map(extra_mount).collect::<Result<_, _>>()?,
            cdi_folders: all_absolute("cdi.spec_dirs", self.cdi.spec_dirs)?,
            cdi_shares: self.cdi.shares.into_iter().map(share_name).collect::<Result<_, _>>()?,
            kubernetes: Kubernetes {
                resources: self.kubernetes.resources,
                memory_granule: granule(&self.kubernetes.memory_granule)?,
                slots: slots(self.kubernetes.slots)?,
            },
            meter: Meter {
                tolerance: size("meter.tolerance", &self.meter.tolerance)?,
                xids: self.meter.xids.iter().copied().collect(),
                on_cheating: checked("meter.on_cheating", &self.meter.on_cheating, &ON_CHEATING)?,
                record: record(self.meter.record)?,
            },
            log: log(self.log)?,
            runtimes: all_absolute("runtime.candidates", self.runtime.candidates)?,
            roots: Roots {
                driver: absolute("node.driver_root", self.node.driver_root)?,
                dev: absolute("node.dev_root", self.node.dev_root)?,
                proc: absolute("node.proc_root", self.node.proc_root)?,
                library_folders: self.node.library_folders,
                unusable_memory: size("node.unusable_memory", &self.node.unusable_memory)?,
            },
            paths: Paths {
                state: absolute("paths.state", self.paths.state)?,
                history: absolute("paths.history", self.paths.history)?,
                cache: absolute("paths.cache", self.paths.cache)?,
                hook: absolute("paths.hook", beside(self.paths.hook, base.join("gpushare-hook")))?,
                cli: absolute("paths.cli", beside(self.paths.cli, base.join("gpushare")))?,
                supervisor: absolute(
                    "paths.supervisor",
                    beside(self.paths.supervisor, base.join("gpushare-supervisor")),
                )?,
                libraries: absolute("paths.libraries", beside(self.paths.libraries, libraries(base)))?,
            },
        })
    }
}

/// PREFIX/lib/gpushare for a program in PREFIX/bin. It contains no `..`, because the path is written into
/// bundles.
fn libraries(base: &Path) -> PathBuf {
    base.parent().unwrap_or(base).join("lib/gpushare")
}

fn record(text: String) -> Result<Option<RecordFiles>, ConfigError> {
    match text.as_str() {
        "off" => Ok(None),
        "auto" => Ok(Some(RecordFiles::OfNode)),
        folder if Path::new(folder).is_absolute() => Ok(Some(RecordFiles::In(text.into()))),
        _ => Err(value("meter.record", &text, "must be `auto`, `off` or an absolute path")),
    }
}

fn absolute(key: &'static str, path: PathBuf) -> Result<PathBuf, ConfigError> {
    match path.is_absolute() {
        true => Ok(path),
        false => Err(value(key, &path.to_string_lossy(), "must be an absolute path")),
    }
}

fn all_absolute(key: &'static str, paths: Vec<PathBuf>) -> Result<Vec<PathBuf>, ConfigError> {
    paths.into_iter().map(|path| absolute(key, path)).collect()
}

fn admission(section: &QuotaSection) -> Result<Admission, ConfigError> {
    let placement = checked("quota.placement", &section.placement, &PLACEMENTS)?;
    for (key, percent) in
        [("quota.memory_percent", section.memory_percent), ("quota.cores_percent", section.cores_percent)]
    {
        if !(1..=1000).contains(&percent) {
            return Err(value(key, &percent.to_string(), "must be from 1 to 1000"));
        }
    }
    if section.compute_reserve > 50 {
        let reserve = section.compute_reserve.to_string();
        return Err(value("quota.compute_reserve", &reserve, "must be from 0 to 50"));
    }
    Ok(Admission {
        placement,
        reserve: size("quota.reserve", &section.reserve)?,
        memory_percent: section.memory_percent,
        cores_percent: section.cores_percent,
        compute_reserve: section.compute_reserve,
        replicas: section.replicas,
        host_memory: size("quota.host_memory", &section.host_memory)?,
        cordoned: &cordoned("quota.cordoned", &section.cordoned)? | &by_command(section)?,
    })
}

fn rules(section: &RulesSection) -> Result<Rules, ConfigError> {
    let rule = |key, after, on_key, on| {
        let (after, ends) = (span(key, after)?, checked(on_key, on, &ON_RULE)?);
        Ok(after.map(|after| Rule { after, ends }))
    };
    let grace = span("rules.grace", &section.grace)?;
    Ok(Rules {
        idle: rule("rules.idle", &section.idle, "rules.on_idle", &section.on_idle)?,
        hold: rule("rules.hold", &section.hold, "rules.on_hold", &section.on_hold)?,
        grace: grace.ok_or_else(|| value("rules.grace", &section.grace, SPAN))?,
        preempts: checked("rules.preemption", &section.preemption, &PREEMPTION)?,
    })
}

const SPAN: &str = "must be a time as \"30s\", \"15m\", \"12h\" or \"7d\", of a year at most";

/// A duration of at least a second; `None` for an empty string.
fn span(key: &'static str, text: &str) -> Result<Option<Duration>, ConfigError> {
    if text.is_empty() {
        return Ok(None);
    }
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86400)];
    let read = units.iter().find_map(|(unit, seconds)| {
        let count =
            text.strip_suffix(unit).filter(|count| count.bytes().all(|byte| byte.is_ascii_digit()))?;
        count.parse::<u64>().ok()?.checked_mul(*seconds)
    });
    let seconds = read.filter(|seconds| (1..=366 * 86400).contains(seconds));
    seconds.map(|seconds| Some(Duration::from_secs(seconds))).ok_or_else(|| value(key, text, SPAN))
}

fn by_command(section: &QuotaSection) -> Result<BTreeSet<GpuUuid>, ConfigError> {
    cordoned("quota.cordoned_by_command", &section.cordoned_by_command)
}

fn cordoned(key: &'static str, list: &[String]) -> Result<BTreeSet<GpuUuid>, ConfigError> {
    list.iter().map(|text| gpu(key, text)).collect()
}

/// The unit of a Kubernetes memory resource, in whole mebibytes.
fn granule(text: &str) -> Result<DeviceMemory, ConfigError> {
    let key = "kubernetes.memory_granule";
    let granule = size(key, text)?;
    match granule.bytes() > 0 && granule.bytes().is_multiple_of(1 << 20) {
        true => Ok(granule),
        false => Err(value(key, text, "must be whole mebibytes, as \"256MiB\"")),
    }
}

/// How many shares a GPU has.
fn slots(count: u16) -> Result<u16, ConfigError> {
    match count {
        1..=100 => Ok(count),
        _ => Err(value("kubernetes.slots", &count.to_string(), "must be from 1 to 100")),
    }
}

fn gpu(key: &'static str, text: &str) -> Result<GpuUuid, ConfigError> {
    text.parse().map_err(|_| value(key, text, "must be the UUID of a GPU as `gpushare devices` prints it"))
}

fn extra_mount(entry: MountEntry) -> Result<ExtraMount, ConfigError> {
    Ok(ExtraMount {
        source: absolute("inject.mounts.source", entry.source)?,
        destination: absolute("inject.mounts.destination", entry.destination)?,
        writable: entry.writable,
    })
}

fn share_name(name: String) -> Result<String, ConfigError> {
    match name.parse::<ShareName>() {
        Ok(_) => Ok(name),
        Err(error) => Err(value("cdi.shares", &name, error)),
    }
}

fn log(section: LogSection) -> Result<Log, ConfigError> {
    let file = Some(section.file).filter(|path| !path.as_os_str().is_empty());
    Ok(Log {
        file: file.map(|path| absolute("log.file", path)).transpose()?,
        json: checked("log.format", &section.format, &FORMATS)?,
        level: checked("log.level", &section.level, &LEVELS)?,
    })
}

#[cfg(test)]
mod tests;
