//! One list of scenarios for every engine. Each test fills one column of a table, prints it, and fails if a
//! cell does. The whole table is left in target/tmp/engines.md, which `tests/run.sh` prints at its end.
//!
//! A cell says `passed`, or why there is nothing to pass: the engine has no such thing ([`table::absent`]),
//! or this machine lacks a feature of the kernel ([`column`]).

mod column;
mod cri;
mod cri_client;
mod ctr;
mod docker;
mod engine;
mod low_level;
mod of_cri;
mod of_docker;
mod place;
mod podman;
mod pods;
mod rootless;
mod scenarios;
mod schedulers;
#[path = "../dialects/sets.rs"]
#[allow(dead_code, clippy::unwrap_used, clippy::expect_used)]
mod sets;
mod table;

use gpushare_tests::artifacts::checkout;
use gpushare_tests::docker::{Docker, Settings};
use gpushare_tests::hooked::{self, Cgroups};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::runtime::LowLevel;
use gpushare_tests::scratch::Scratch;
use gpushare_tests::view::View;

use column::Filling;
use cri::Cri;
use ctr::Ctr;
use docker::DockerEngine;
use low_level::Bundles;
use place::Place;
use podman::Podman;
use table::{Engine, Row};

const ALWAYS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

fn fill_docker(engine: Engine, low_level: LowLevel) {
    let place = Place::new(low_level);
    let settings = Settings { by_default: true, view: low_level.view(), ..Settings::default() };
    let start = |settings: &Settings| {
        DockerEngine(Docker::with(&place.installed.wrapper(), &place.config, settings.clone()))
    };
    let mut filling = Filling::new(engine, settings.view);
    let mut docker = start(&settings);
    of_docker::assert_found_by_doctor(&docker, &place);
    // docker is the engine whose containers people restart, so it gets the long run.
    filling.restarts = if engine == Engine::Docker { 100 } else { 10 };
    filling.general(&mut docker, &place);
    filling.check(Row::Gpus, &mut docker, &place, of_docker::takes_nvidias_hook_out);
    let composed = docker.0.address();
    filling.check(Row::Compose, &mut docker, &place, |scene| of_docker::composes(scene, &composed));
    drop(docker);
    if table::absent(engine, Row::UserNamespace).is_none() {
        let mut docker = start(&Settings { remapped: true, ..settings.clone() });
        filling.user_namespace(&mut docker, &place);
    }
    // The low-level runtime itself, with the settings at their default place.
    let etc = Scratch::new("etc");
    let shown = hooked::settings_in_place(&etc, &place.config);
    let bare = hooked::program_behind(low_level, &place.folder(), Cgroups::Machine, &shown);
    let in_nvidias_place = Settings { hook: Some(place.installed.hook()), ..settings };
    let docker = Docker::with(&bare, &place.config, in_nvidias_place);
    let address = docker.address();
    filling.check(Row::GpusHook, &mut DockerEngine(docker), &place, |scene| {
        of_docker::takes_nvidias_place(scene, low_level, &address);
    });
    filling.finish();
}

#[test]
#[ignore = "needs root and docker: starts daemons"]
fn docker_with_runc() {
    if met(ALWAYS) && met(&[Need::Docker, Need::Compose]) {
        fill_docker(Engine::Docker, LowLevel::Runc);
    }
}

#[test]
#[ignore = "needs root, docker and crun: starts daemons"]
fn docker_with_crun() {
    if met(ALWAYS) && met(&[Need::Docker, Need::Compose, Need::Crun]) {
        fill_docker(Engine::DockerCrun, LowLevel::Crun);
    }
}

#[test]
#[ignore = "needs root and containerd: starts a daemon"]
fn containerd_by_ctr() {
    if !met(ALWAYS) || !met(&[Need::Containerd]) {
        return;
    }
    let place = Place::new(LowLevel::Runc);
    let mut ctr = Ctr::start(&place.installed.wrapper(), &place.config);
    let mut filling = Filling::new(Engine::Ctr, View::AsItIs);
    filling.general(&mut ctr, &place);
    filling.finish();
}

#[test]
#[ignore = "needs root and containerd: starts a daemon"]
fn containerd_by_cri() {
    if !met(ALWAYS) || !met(&[Need::Containerd]) {
        return;
    }
    let place = Place::new(LowLevel::Runc);
    let mut cri = Cri::start(&place.installed.wrapper(), &place.config);
    let mut filling = Filling::new(Engine::Cri, View::AsItIs);
    filling.general(&mut cri, &place);
    of_cri::fill(&mut filling, &mut cri, &place);
    filling.finish();
}

#[test]
#[ignore = "needs root and containerd: starts a daemon"]
fn requests_of_other_schedulers_by_cri() {
    if !met(ALWAYS) || !met(&[Need::Containerd]) {
        return;
    }
    let (count, faults) = schedulers::Cluster::start().faults();
    assert!(count > 0);
    assert!(faults.is_empty(), "{} of {count}:\n{}", faults.len(), faults.join("\n"));
}

#[test]
#[ignore = "needs root and containerd: starts a daemon"]
fn two_systems_share_one_gpu_and_a_third_is_refused_for_the_sum() {
    if met(ALWAYS) && met(&[Need::Containerd]) {
        schedulers::Cluster::start().three_systems_on_one_gpu();
    }
}

#[test]
#[ignore = "needs root and podman: runs containers"]
fn podman_as_root() {
    if !met(ALWAYS) || !met(&[Need::Podman]) {
        return;
    }
    let place = Place::new(LowLevel::Runc);
    let mut podman = Podman::start(&place.installed.wrapper(), &place.config);
    let mut filling = Filling::new(Engine::Podman, View::AsItIs);
    filling.general(&mut podman, &place);
    filling.user_namespace(&mut podman, &place);
    filling.finish();
}

#[test]
#[ignore = "needs root and podman: runs containers"]
fn podman_by_hooks_dir() {
    if !met(ALWAYS) || !met(&[Need::Podman]) {
        return;
    }
    let place = Place::new(LowLevel::Runc);
    let mut podman = Podman::by_hooks(&place.installed.hook(), &place.config);
    let mut filling = Filling::new(Engine::PodmanHooks, View::AsItIs);
    filling.general(&mut podman, &place);
    filling.user_namespace(&mut podman, &place);
    filling.finish();
}

#[test]
#[ignore = "needs root and podman: runs containers as another user"]
fn podman_rootless() {
    if !met(ALWAYS) || !met(&[Need::Podman, Need::SubordinateIds]) {
        return;
    }
    let place = Place::new(LowLevel::Runc);
    let podman = rootless::Podman::start(&place.installed.wrapper(), &place.config);
    let mut filling = Filling::new(Engine::PodmanRootless, View::AsItIs);
    filling.check_alone(Row::Rootless, || rootless::is_told_in_one_line(&podman, &place));
    filling.finish();
}

fn fill_bundles(engine: Engine, low_level: LowLevel, view: View) {
    let place = Place::new(low_level);
    let mut bundles = Bundles::new(low_level, &place.config, view);
    let mut filling = Filling::new(engine, view);
    filling.general(&mut bundles, &place);
    filling.user_namespace(&mut bundles, &place);
    filling.finish();
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn runc_alone() {
    if met(ALWAYS) {
        fill_bundles(Engine::Runc, LowLevel::Runc, View::AsItIs);
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn runc_on_cgroup_v2() {
    if met(ALWAYS) {
        fill_bundles(Engine::RuncV2, LowLevel::Runc, View::V2);
    }
}

#[test]
#[ignore = "needs root and crun: runs containers"]
fn crun_alone() {
    if met(ALWAYS) && met(&[Need::Crun]) {
        fill_bundles(Engine::Crun, LowLevel::Crun, View::Unmixed);
    }
}

#[test]
#[ignore = "needs root and crun: runs containers"]
fn crun_on_cgroup_v2() {
    if met(ALWAYS) && met(&[Need::Crun]) {
        fill_bundles(Engine::CrunV2, LowLevel::Crun, View::V2);
    }
}

#[test]
#[ignore = "needs root and youki: runs containers"]
fn youki_alone() {
    if met(ALWAYS) && met(&[Need::Youki]) {
        fill_bundles(Engine::Youki, LowLevel::Youki, View::Unmixed);
    }
}

#[test]
fn the_documentation_carries_the_table_that_the_tests_expect() {
    let page = std::fs::read_to_string(checkout().join("docs/engines.md")).expect("docs/engines.md is there");
    let table = table::print(&table::expected());
    assert!(page.contains(&table), "docs/engines.md has another table; it should be:\n\n{table}");
}
