//! Runs each set once through real engines, on a simulated node: what a CUDA client inside sees, and what is
//! refused.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use gpushare_tests::artifacts::Installed;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::docker::Docker;
use gpushare_tests::leases::{leases, shares};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use serde_json::{Value, json};

use super::sets::{DRIVER, MINORS, Set, Sets, UUIDS, all, handed, seen};

/// The nodes of the sets, one for each memory size of GPUs, and a settings file for each set.
pub struct Nodes(BTreeMap<u64, SimulatedNode>);

/// Where `set` runs.
struct Place {
    config: PathBuf,
    /// The folder of the driver's libraries.
    libraries: PathBuf,
}

impl Nodes {
    pub fn new() -> Self {
        Self(BTreeMap::new())
    }

    fn place(&mut self, name: &str, set: &Set) -> Place {
        let config = self.config(name, set);
        Place { config, libraries: self.0[&memory(set)].libraries() }
    }

    /// The settings of `set` on its node.
    pub fn config(&mut self, name: &str, set: &Set) -> PathBuf {
        let total = memory(set);
        let minors = MINORS.map(|minor| minor.to_string()).join(",");
        let node = self.0.entry(total).or_insert_with(|| {
            let more = ["--minors", &minors, "--uuids", &UUIDS.join(",")];
            SimulatedNode::with(UUIDS.len(), "Tesla T4", &format!("{total}MiB"), &more)
        });
        node.config_with(name, &format!("{}\n{}", LowLevel::Runc.settings(), set.settings))
    }
}

/// Memory of each of the node's GPUs, in MiB.
fn memory(set: &Set) -> u64 {
    set.total.unwrap_or(15360)
}

/// The compute shares in the store, in percent for each GPU of the first lease.
fn cores(config: &Path) -> Vec<Option<u64>> {
    let shares = shares(config);
    let Some(first) = shares.first() else { return Vec::new() };
    first["gpus"].as_array().into_iter().flatten().map(|gpu| gpu["cores"].as_u64()).collect()
}

fn wanted_cores(set: &Set) -> Vec<Option<u64>> {
    let cores = |grant: &String| {
        let before_burst = grant.split(" burst ").next()?;
        before_burst.strip_suffix('%')?.rsplit(' ').next()?.parse().ok()
    };
    set.grants.iter().map(cores).collect()
}

const PROBE: [&str; 3] = ["/bin/gpushare-simulator", "probe", "--json"];

#[test]
#[ignore = "needs root and runc: would run containers"]
fn every_set_through_runc_gives_its_limits_to_a_cuda_client_or_its_refusal() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    run_through_runc(&all());
}

#[test]
#[ignore = "needs root and runc: would run containers"]
fn every_bundle_that_was_handed_a_gpu_runs_through_runc_with_its_limits() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    run_through_runc(&handed());
}

fn run_through_runc(all: &[Sets]) {
    let faults = two_at_once(all, |nodes, Sets { dialect, writers, set: sets }| {
        let mut faults = Vec::new();
        for (number, set) in sets.iter().enumerate() {
            let place = nodes.place(&format!("{dialect}-{number}"), set);
            if let Err(fault) = through_runc(set, &place) {
                faults.push(format!("{writers}: {}: {fault}", set.case));
            }
        }
        faults
    });
    assert!(faults.is_empty(), "{}:\n{}", faults.len(), faults.join("\n"));
}

/// What goes wrong with each of `items`. Two run at a time, on different nodes, since a single one waits half
/// of the time.
fn two_at_once<T: Sync>(items: &[T], run: impl Fn(&mut Nodes, &T) -> Vec<String> + Sync) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let work = || {
        let (mut nodes, mut faults) = (Nodes::new(), Vec::new());
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            faults.extend(run(&mut nodes, item));
        }
        faults
    };
    thread::scope(|scope| {
        let workers = [scope.spawn(work), scope.spawn(work)];
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    })
}

fn through_runc(set: &Set, place: &Place) -> Result<(), String> {
    let config = place.config.as_path();
    let runtime = Runtime::with_config(LowLevel::Runc, config);
    let files = Scratch::new("dialect");
    let bundle = bundle(set, &files, &place.libraries);
    let before = bundle.write();
    let container = match runtime.create(&bundle) {
        Err(refusal) => {
            let line = refusal.line();
            let right = !set.refused.is_empty() && line.contains(&set.refused);
            let nothing_left = leases(config).is_empty() && bundle.config_bytes() == before;
            runtime.delete_force(bundle.id());
            return if right && nothing_left { Ok(()) } else { Err(format!("refused: {line}")) };
        }
        Ok(container) => container,
    };
    container.start();
    if set.passes {
        let same = bundle.config_bytes() == before;
        return if same { Ok(()) } else { Err("its config.json was changed".to_owned()) };
    }
    as_granted(set, &container, config)?;
    if !set.was_handed_gpus() {
        return Ok(());
    }
    drop(container);
    // The bundle is not written anew, and what the engine handed over is gone from it.
    let again = runtime.create_as_it_is(&bundle).map_err(|refusal| format!("again: {}", refusal.line()))?;
    again.start();
    as_granted(set, &again, config).map_err(|fault| format!("again: {fault}"))
}

/// Whether a client in the container, the container's nodes and the store agree with `set`.
fn as_granted(set: &Set, container: &Container, config: &Path) -> Result<(), String> {
    let client = container.exec(&PROBE);
    if !client.success() {
        return Err(format!("the CUDA client failed: {}", client.stderr.trim()));
    }
    let inside = seen(&client.stdout);
    let (wanted, booked) = (set.visible(), cores(config));
    if inside != wanted || booked != wanted_cores(set) {
        return Err(format!("{inside:?} seen, compute {booked:?}"));
    }
    let nodes = container.exec(&["/bin/sh", "-c", "ls -d /dev/nvidia[0-9]*"]).expect_success("ls").stdout;
    let nodes: Vec<&str> = nodes.lines().collect();
    if nodes != set.granted_nodes() {
        return Err(format!("{nodes:?} are there"));
    }
    environment(&container.exec(&["/bin/env"]).expect_success("env").stdout)
}

/// Checks that nothing inside can act on a value that was not granted: each variable stands once, and
/// NVIDIA's list is void.
fn environment(text: &str) -> Result<(), String> {
    let names: Vec<&str> =
        text.lines().filter_map(|line| line.split_once('=')).map(|(name, _)| name).collect();
    let twice = names.iter().find(|name| names.iter().filter(|other| other == name).count() > 1);
    let void = text
        .lines()
        .filter(|line| line.starts_with("NVIDIA_VISIBLE_DEVICES="))
        .all(|line| line.ends_with("=void"));
    match twice {
        Some(name) => Err(format!("{name} stands twice")),
        None if !void => Err("NVIDIA_VISIBLE_DEVICES is not void".to_owned()),
        None => Ok(()),
    }
}

/// The set as a bundle that can run: the source of each mount is the test's own, or the node's driver.
fn bundle(set: &Set, files: &Scratch, libraries: &Path) -> Bundle {
    let told = set.bundle();
    Bundle::with_probe().edit(|spec| {
        spec["annotations"] = told["annotations"].clone();
        let list = |spec: &mut Value, pointer: &str, more: &Value| {
            let list = spec.pointer_mut(pointer).and_then(Value::as_array_mut).unwrap();
            list.extend(more.as_array().unwrap().iter().cloned());
        };
        list(spec, "/process/env", &told["process"]["env"]);
        let mounts = told["mounts"].as_array().unwrap().iter().enumerate().map(|(number, mount)| {
            let source = match mount["source"].as_str().unwrap() {
                "/dev/null" => PathBuf::from("/dev/null"),
                name if name.starts_with(DRIVER) => of_driver(&name[DRIVER.len()..], files, libraries),
                _ if is_folder(set, number) => files.folder(&format!("source-{number}")),
                _ => files.file(&format!("source-{number}"), String::new()),
            };
            json!({"destination": mount["destination"], "source": source, "type": "bind", "options": ["rbind"]})
        });
        list(spec, "/mounts", &mounts.collect());
        let nodes: Vec<Value> = told["linux"]["devices"].as_array().unwrap().clone();
        let rules = nodes.iter().map(|node| {
            json!({"allow": true, "type": "c", "major": node["major"], "minor": node["minor"], "access": "rwm"})
        });
        list(spec, "/linux/resources/devices", &rules.collect());
        spec["linux"]["devices"] = nodes.into();
        spec["hooks"] = told["hooks"].clone();
    })
}

fn is_folder(set: &Set, number: usize) -> bool {
    set.mounts.get(number).is_some_and(|mount| mount.split(' ').next().unwrap().ends_with('/'))
}

/// A library of the node's driver, or a folder of a driver's tree that holds the node's own.
fn of_driver(name: &str, files: &Scratch, libraries: &Path) -> PathBuf {
    if !name.is_empty() && !name.ends_with('/') {
        return libraries.join(name);
    }
    let (tree, inner) = (files.folder("driver"), files.folder("driver/lib64"));
    for library in std::fs::read_dir(libraries).unwrap().map(|entry| entry.unwrap().path()) {
        let copy = inner.join(library.file_name().unwrap());
        if library.is_file() && !copy.exists() {
            std::fs::hard_link(std::fs::canonicalize(&library).unwrap(), copy).unwrap();
        }
    }
    if name.is_empty() { tree } else { files.folder(&format!("driver/{}", name.trim_end_matches('/'))) }
}

#[test]
#[ignore = "needs root and docker: starts a daemon"]
fn sets_of_variables_alone_through_docker_give_their_limits_to_a_cuda_client_or_their_refusals() {
    if !met(&[Need::Root, Need::Runc, Need::Docker, Need::Busybox]) {
        return;
    }
    let mut by_config: BTreeMap<(u64, String), Vec<(String, Set)>> = BTreeMap::new();
    for Sets { dialect, set: sets, .. } in all() {
        for set in sets.into_iter().filter(is_dockers) {
            let key = (memory(&set), set.settings.clone());
            by_config.entry(key).or_default().push((dialect.clone(), set));
        }
    }
    // The largest group, which has the shipped settings, comes first.
    let mut groups: Vec<Vec<(String, Set)>> = by_config.into_values().collect();
    groups.sort_by_key(|sets| std::cmp::Reverse(sets.len()));
    let faults = two_at_once(&groups, |nodes, sets| {
        let config = nodes.config("docker", &sets[0].1);
        let installed = Installed::new();
        let docker = Docker::start(&installed.wrapper(), &config, false);
        let outcome = |(dialect, set): &(String, Set)| {
            let fault = through_docker(set, &docker).err()?;
            Some(format!("{dialect}: {}: {fault}", set.case))
        };
        sets.iter().filter_map(outcome).collect()
    });
    assert!(faults.is_empty(), "{}:\n{}", faults.len(), faults.join("\n"));
}

/// Whether docker can run the set: it passes variables, each once.
pub fn is_dockers(set: &Set) -> bool {
    let names: Vec<&str> = set.env.iter().map(|entry| entry.split('=').next().unwrap()).collect();
    let once = names.iter().all(|name| names.iter().filter(|other| other == &name).count() == 1);
    let plain = set.env.iter().all(|entry| entry.contains('='));
    set.annotations.is_empty()
        && set.mounts.is_empty()
        && set.nodes.is_empty()
        && set.engine.is_empty()
        && once
        && plain
}

fn through_docker(set: &Set, docker: &Docker) -> Result<(), String> {
    let mut flags = vec!["--rm", "--runtime=gpushare"];
    flags.extend(set.env.iter().flat_map(|entry| ["-e", entry.as_str()]));
    let outcome = docker.run(&flags, &PROBE);
    if !outcome.success() {
        let told = outcome.stderr;
        // docker quotes the runtime's words.
        let right = !set.refused.is_empty() && told.replace("\\\"", "\"").contains(&set.refused);
        return if right || set.passes && told.contains("libcuda") {
            Ok(())
        } else {
            Err(format!("failed: {told}"))
        };
    }
    let inside = seen(&outcome.stdout);
    if inside == set.visible() { Ok(()) } else { Err(format!("{inside:?} seen")) }
}
