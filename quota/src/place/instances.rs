//! Tests of placement on MIG instances.

use std::collections::BTreeSet;

use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid, Instance, InstanceId};
use gpushare_request::{Container, Policy};

use super::tests::gpu;
use super::{Admission, GpuLoad, place};

const CARD: u32 = 0;

/// An instance of GPU 0.
fn instance(position: u32, profile: &str, gib: u64) -> Gpu {
    let whole = gpu(CARD, gib);
    let mut bytes = [0xcc; 16];
    bytes[0] = u8::try_from(position).unwrap();
    Gpu {
        uuid: GpuUuid::of_instance(bytes),
        instance: Some(Instance {
            card: whole.uuid,
            id: InstanceId { gpu: 2 * position + 1, compute: 0 },
            position,
            stands_for_gpu: false,
            profile: profile.parse().unwrap(),
            nodes: [whole.node.clone(), whole.node.clone()],
        }),
        ..whole
    }
}

fn placed(gpus: &[Gpu], env: &[&str], rules: &Admission) -> Result<Vec<String>, String> {
    placed_beside(gpus, env, rules, |_| GpuLoad::default())
}

fn placed_beside(
    gpus: &[Gpu],
    env: &[&str],
    rules: &Admission,
    load: impl Fn(GpuUuid) -> GpuLoad,
) -> Result<Vec<String>, String> {
    let env = env.iter().map(|entry| (*entry).to_owned()).collect();
    let container = Container::new(std::collections::BTreeMap::new(), env);
    let request = gpushare_request::read(&container, &Policy::default(), gpus);
    let request = request.map_err(|error| error.to_string())?.expect("it asks");
    let grants = place(&request, gpus, load, &[], rules).map_err(|error| error.to_string())?;
    let named = |uuid| gpus.iter().find(|gpu| gpu.uuid == uuid).expect("a GPU of the node").number();
    Ok(grants.iter().map(|grant| format!("{} {}", named(grant.gpu), grant.memory)).collect())
}

#[test]
fn an_instance_is_for_who_names_it_or_its_size_and_for_all_where_no_gpu_is_whole() {
    let [large, small, other] = [(0, "3g.40gb", 40), (1, "1g.10gb", 10), (2, "1g.10gb", 10)]
        .map(|(position, profile, gib)| instance(position, profile, gib));
    let mixed = [large.clone(), small.clone(), other.clone(), gpu(1, 80)];
    let alone = |mut gpu: Gpu| {
        gpu.instance.as_mut().unwrap().stands_for_gpu = true;
        gpu
    };
    let parts = [large, small, other].map(alone);
    let rules = Admission::default();
    let uuid = parts[2].uuid.to_string();
    let legacy = format!("GPUSHARE_DEVICES=MIG-{}/1/0", parts[0].card());
    let named = format!("GPUSHARE_DEVICES={uuid}");
    let prefix = format!("GPUSHARE_DEVICES={}", &uuid[..8]);
    for (gpus, env, want) in [
        (&mixed[..], &["GPUSHARE_MEMORY=4GiB"][..], Ok(&["1 4 GiB"][..])),
        (&mixed, &["GPUSHARE_MODE=exclusive"], Ok(&["1 80 GiB"])),
        (&mixed, &["NVIDIA_VISIBLE_DEVICES=all"], Ok(&["1 80 GiB"])),
        (&mixed, &["GPUSHARE_MEMORY=4GiB", "GPUSHARE_MIG=1g.10gb"], Ok(&["0:1 4 GiB"])),
        (&mixed, &["GPUSHARE_MIG=1G.10GB"], Ok(&["0:1 10 GiB"])),
        (
            &mixed,
            &["GPUSHARE_MODE=exclusive", "GPUSHARE_MIG=1g.10gb", "GPUSHARE_COUNT=2"],
            Ok(&["0:1 10 GiB", "0:2 10 GiB"]),
        ),
        (&mixed, &["GPUSHARE_MEMORY=25%", "NVIDIA_VISIBLE_DEVICES=0:0"], Ok(&["0:0 10 GiB"])),
        (&mixed, &["GPUSHARE_MEMORY=1GiB", &named], Ok(&["0:2 1 GiB"])),
        (&mixed, &["GPUSHARE_MEMORY=1GiB", &legacy], Ok(&["0:0 1 GiB"])),
        (&mixed, &["GPUSHARE_MEMORY=1GiB", &prefix], Ok(&["0:2 1 GiB"])),
        (&mixed, &["GPUSHARE_MEMORY=1GiB", "NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0:2"], Ok(&["0:2 1 GiB"])),
        (&mixed, &["GPUSHARE_MEMORY=12GiB", "GPUSHARE_MIG=1g.10gb"], Err("12 GiB requested, but MIG 0:")),
        (&mixed, &["GPUSHARE_DEVICES=0"], Err("0 is divided into MIG instances")),
        (&mixed, &["GPUSHARE_DEVICES=0:0", "GPUSHARE_MIG=1g.10gb"], Err("contradict")),
        (&mixed, &["GPUSHARE_MIG=1g.10gb", "GPUSHARE_MODE=mps"], Err("no MPS control daemon")),
        (&mixed, &["GPUSHARE_MIG=1g.10gb", "GPUSHARE_COUNT=3"], Err("3")),
        (&mixed[3..], &["GPUSHARE_MIG=1g.10gb"], Err("it has none")),
        // The whole GPU is out of service: nothing replaces it.
        (&mixed[..3], &["GPUSHARE_MEMORY=4GiB"], Err("1 ")),
        (&mixed[..3], &["NVIDIA_VISIBLE_DEVICES=all", "GPUSHARE_MODE=exclusive"], Err("")),
        (
            &mixed,
            &["GPUSHARE_DEVICES=all", "GPUSHARE_MIG=1g.10gb", "GPUSHARE_MEMORY=1GiB"],
            Ok(&["0:1 1 GiB", "0:2 1 GiB"]),
        ),
        (&mixed, &["GPUSHARE_DEVICES=GPU-01"], Err("GPU-01 is divided into MIG instances")),
        (&parts, &["GPUSHARE_MEMORY=4GiB"], Ok(&["0:1 4 GiB"])),
        (&parts, &["GPUSHARE_MEMORY=12GiB"], Ok(&["0:0 12 GiB"])),
        (
            &parts,
            &["GPUSHARE_DEVICES=all", "GPUSHARE_MEMORY=2GiB"],
            Ok(&["0:0 2 GiB", "0:1 2 GiB", "0:2 2 GiB"]),
        ),
    ] {
        let found = placed(gpus, env, &rules);
        match want {
            Ok(want) => assert_eq!(
                found.as_deref(),
                Ok(&want.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()[..]),
                "{env:?}"
            ),
            Err(want) => assert!(found.as_ref().is_err_and(|told| told.contains(want)), "{env:?}: {found:?}"),
        }
    }
    let memory = DeviceMemory::from_bytes(40 << 30);
    assert_eq!(parts[0].memory, Some(memory));
    let cordoned = Admission { cordoned: BTreeSet::from([parts[0].card()]), ..Admission::default() };
    let told = placed(&mixed, &["GPUSHARE_MIG=1g.10gb"], &cordoned).unwrap_err();
    assert!(told.contains("is cordoned"), "{told}");
    let cordoned = Admission { cordoned: BTreeSet::from([parts[1].uuid]), ..Admission::default() };
    assert_eq!(placed(&mixed, &["GPUSHARE_MIG=1g.10gb"], &cordoned), Ok(vec!["0:2 10 GiB".to_owned()]));
}

#[test]
fn a_card_and_its_instances_are_never_both_held_whenever_it_was_divided() {
    let (whole, part) = (gpu(CARD, 80), instance(1, "1g.10gb", 10));
    let part = Gpu { instance: part.instance.map(|it| Instance { stands_for_gpu: true, ..it }), ..part };
    let rules = Admission::default();
    let held = GpuLoad { leases: 1, memory: DeviceMemory::from_bytes(1 << 30), ..GpuLoad::default() };
    let by_instances = GpuLoad { of_instances: 1, ..GpuLoad::default() };
    let of_card = |load| move |uuid: GpuUuid| if uuid.is_instance() { GpuLoad::default() } else { load };
    let env = ["GPUSHARE_MEMORY=1GiB"];
    for (gpu, load, want) in [
        (&whole, by_instances, Err("while it was")),
        (&part, held, Err("cannot be given beside")),
        (&part, by_instances, Ok("0:1 1 GiB")),
        (&whole, GpuLoad::default(), Ok("0 1 GiB")),
    ] {
        let found = placed_beside(std::slice::from_ref(gpu), &env, &rules, of_card(load));
        match want {
            Ok(want) => assert_eq!(found, Ok(vec![want.to_owned()])),
            Err(want) => assert!(found.as_ref().is_err_and(|told| told.contains(want)), "{found:?}"),
        }
    }
}
