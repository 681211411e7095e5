//! Tests of placement: the chosen GPUs, and the text of refusals.

use std::collections::BTreeMap;
use std::path::PathBuf;

use gpushare_claims::{Container, DeviceSelector, Policy};
use gpushare_inventory::DeviceNode;

use super::*;

const GIB: u64 = 1 << 30;

pub(crate) fn gpu(index: u32, gib: u64) -> Gpu {
    let mut bytes = [0; 16];
    bytes[0] = u8::try_from(index + 1).unwrap();
    let path = PathBuf::from(format!("/dev/nvidia{index}"));
    Gpu {
        index,
        uuid: GpuUuid::from_bytes(bytes),
        minor: index,
        model: if index == 2 { "NVIDIA A100".into() } else { "NVIDIA H100".into() },
        memory: Some(DeviceMemory::from_bytes(gib * GIB)),
        node: DeviceNode {
            host_path: path.clone(),
            path,
            major: 195,
            minor: index,
            mode: 0o666,
            uid: 0,
            gid: 0,
        },
        place: gpushare_inventory::Place::default(),
        instance: None,
    }
}

pub(crate) fn request(env: &[&str]) -> Request {
    read(env, &[]).unwrap()
}

pub(crate) fn request_on(gpus: &[Gpu], env: &[&str]) -> Request {
    read(env, gpus).unwrap()
}

/// Parses the request for a node with these GPUs, or for any node if the list is empty.
fn read(env: &[&str], gpus: &[Gpu]) -> Result<Request, String> {
    let env = env.iter().map(|entry| entry.to_string()).collect();
    let container = Container::new(BTreeMap::new(), env);
    let request = gpushare_request::read(&container, &Policy::default(), gpus);
    request.map(Option::unwrap).map_err(|error| error.to_string())
}

fn load(memory_gib: u64, cores: u64) -> GpuLoad {
    GpuLoad {
        memory: DeviceMemory::from_bytes(memory_gib * GIB),
        cores,
        leases: 1,
        company: Some(Company::Shares),
        of_instances: 0,
        ..GpuLoad::default()
    }
}

/// Places the request on GPUs of 80 GiB with these loads. Returns indexes and GiB, or the refusal's text.
fn placed(env: &[&str], loads: &[GpuLoad], rules: &Admission) -> Result<Vec<(u32, u64)>, String> {
    let gpus: Vec<Gpu> = (0..).zip(loads).map(|(index, _)| gpu(index, 80)).collect();
    let index = |uuid: GpuUuid| gpus.iter().position(|gpu| gpu.uuid == uuid).unwrap();
    let grants = place(&read(env, &gpus)?, &gpus, |uuid| loads[index(uuid)], &[], rules);
    let grants = grants.map_err(|refusal| refusal.to_string())?;
    Ok(grants.iter().map(|grant| (gpus[index(grant.gpu)].index, grant.memory.bytes() / GIB)).collect())
}

fn binpack(env: &[&str], loads: &[GpuLoad]) -> Result<Vec<(u32, u64)>, String> {
    placed(env, loads, &Admission::default())
}

const EMPTY: GpuLoad = GpuLoad {
    memory: DeviceMemory::ZERO,
    cores: 0,
    leases: 0,
    company: None,
    of_instances: 0,
    windows: 0,
    between: 0,
    latency: 0,
};

#[test]
fn binpack_takes_the_fullest_gpu_that_fits_and_spread_the_emptiest() {
    let loads = [load(10, 0), load(70, 0), load(40, 0)];
    assert_eq!(binpack(&["GPUSHARE_MEMORY=20GiB"], &loads), Ok(vec![(2, 20)]));
    let spread = Admission { placement: Placement::Spread, ..Admission::default() };
    assert_eq!(placed(&["GPUSHARE_MEMORY=20GiB"], &loads, &spread), Ok(vec![(0, 20)]));
}

#[test]
fn a_share_goes_to_a_gpu_of_its_pod_where_it_fits_there() {
    let gpus: Vec<Gpu> = (0..4).map(|index| gpu(index, 80)).collect();
    let loads = [load(60, 50), load(70, 0), load(10, 0), EMPTY];
    let at = |uuid: GpuUuid| gpus.iter().position(|gpu| gpu.uuid == uuid).unwrap();
    let spread = Admission { placement: Placement::Spread, ..Admission::default() };
    for (env, near, binpacked, spread_out) in [
        (&["GPUSHARE_MEMORY=5GiB"][..], &[2][..], &[2][..], &[2][..]),
        (&["GPUSHARE_MEMORY=5GiB"], &[2, 0], &[0], &[2]),
        (&["GPUSHARE_MEMORY=20GiB"], &[1], &[0], &[3]),
        (&["GPUSHARE_MEMORY=5GiB", "GPUSHARE_CORES=60"], &[0], &[1], &[3]),
        (&["GPUSHARE_MEMORY=5GiB", "GPUSHARE_DEVICES=3"], &[2], &[3], &[3]),
        (&["GPUSHARE_MEMORY=5GiB", "GPUSHARE_COUNT=2"], &[2], &[1, 2], &[2, 3]),
        (&["GPUSHARE_DEVICES=all"], &[2], &[0, 1, 2, 3], &[0, 1, 2, 3]),
        (&["GPUSHARE_COUNT=1"], &[1], &[3], &[3]),
    ] {
        let near: Vec<GpuUuid> = near.iter().map(|index: &usize| gpus[*index].uuid).collect();
        for (rules, want) in [(&Admission::default(), binpacked), (&spread, spread_out)] {
            let grants = place(&read(env, &gpus).unwrap(), &gpus, |uuid| loads[at(uuid)], &near, rules);
            let grants: Vec<usize> = grants.unwrap().iter().map(|grant| at(grant.gpu)).collect();
            assert_eq!(grants, want, "{env:?} {:?}", rules.placement);
        }
    }
}

#[test]
fn no_new_share_is_given_of_a_cordoned_gpu() {
    let loads = [load(10, 0), EMPTY, load(40, 0)];
    let without = |cordoned: &[u32]| Admission {
        cordoned: cordoned.iter().map(|index| gpu(*index, 80).uuid).collect(),
        ..Admission::default()
    };
    let of = |env: &[&str], cordoned: &[u32]| placed(env, &loads, &without(cordoned));
    assert_eq!(of(&["GPUSHARE_MEMORY=20GiB"], &[2]), Ok(vec![(0, 20)]));
    assert_eq!(of(&["GPUSHARE_COUNT=1"], &[1, 2]), Ok(vec![(0, 70)]));
    let named = of(&["GPUSHARE_MEMORY=1GiB", "GPUSHARE_DEVICES=1"], &[1]).unwrap_err();
    assert!(named.starts_with("GPU 1 (GPU-") && named.contains("quota.cordoned"), "{named}");
    // `all` means every GPU: a cordoned GPU refuses the request instead of shrinking it.
    let every = of(&["GPUSHARE_MEMORY=5GiB", "GPUSHARE_DEVICES=all"], &[2]).unwrap_err();
    assert!(every.starts_with("GPU 2 (GPU-") && every.contains("is cordoned"), "{every}");
    let gpus: Vec<Gpu> = (0..3).map(|index| gpu(index, 80)).collect();
    let whole = place(&Request::whole(Devices::All), &gpus, |_| EMPTY, &[], &without(&[2])).unwrap_err();
    assert_eq!(whole.to_string(), every);
    let all = of(&["GPUSHARE_MEMORY=1GiB"], &[0, 1, 2]).unwrap_err();
    assert!(all.contains("GPU 0") && all.contains("GPU 2") && all.contains("is cordoned"), "{all}");
    let many = of(&["GPUSHARE_MEMORY=1GiB", "GPUSHARE_COUNT=3"], &[2]).unwrap_err();
    assert!(many.contains("has 2 that may be chosen"), "{many}");
}

#[test]
fn a_refusal_names_what_was_asked_and_what_is_free() {
    let text = binpack(&["GPUSHARE_MEMORY=20GiB"], &[load(70, 0)]).unwrap_err();
    assert!(text.starts_with("20 GiB requested, 10 GiB free on GPU 0 (GPU-01000000-"), "{text}");
    let text = binpack(&["GPUSHARE_MEMORY=90GiB"], &[load(70, 0)]).unwrap_err();
    assert!(text.starts_with("90 GiB requested, but GPU 0") && text.contains("80 GiB"), "{text}");
    let text = binpack(&["GPUSHARE_MEMORY=1GiB", "GPUSHARE_CORES=60"], &[load(0, 50)]).unwrap_err();
    assert!(text.starts_with("60% of compute requested, 50% free"), "{text}");
    let text = binpack(&["GPUSHARE_MEMORY=50%"], &[load(60, 0)]).unwrap_err();
    assert!(text.starts_with("40 GiB (50%) requested, 20 GiB free"), "{text}");
}

#[test]
fn several_gpus_each_hold_the_share() {
    let loads = [load(10, 0), load(70, 0), load(40, 0)];
    assert_eq!(binpack(&["GPUSHARE_MEMORY=20GiB", "GPUSHARE_COUNT=2"], &loads), Ok(vec![(0, 20), (2, 20)]));
    let text = binpack(&["GPUSHARE_MEMORY=20GiB", "GPUSHARE_COUNT=3"], &loads).unwrap_err();
    assert!(text.starts_with("3 GPUs requested, 2 of 3 can hold"), "{text}");
    let text = binpack(&["GPUSHARE_MEMORY=20GiB", "GPUSHARE_COUNT=4"], &loads).unwrap_err();
    assert!(text.contains("this node has 3"), "{text}");
    assert_eq!(binpack(&["GPUSHARE_MEMORY=1GiB", "GPUSHARE_DEVICES=2,0"], &loads), Ok(vec![(2, 1), (0, 1)]));
    let text = binpack(&["GPUSHARE_MEMORY=20GiB", "GPUSHARE_DEVICES=0,1"], &loads).unwrap_err();
    assert!(text.starts_with("20 GiB requested, 10 GiB free on GPU 1"), "{text}");
}

#[test]
fn unknown_and_ambiguous_devices_are_refused() {
    let loads = [EMPTY, EMPTY];
    let text = binpack(&["GPUSHARE_DEVICES=7"], &loads).unwrap_err();
    assert_eq!(
        text,
        "GPUSHARE_DEVICES=\"7\": this node has no GPU 7: see `gpushare devices`; it has GPU 0 (GPU-01000000-0000-0000-0000-000000000000), GPU 1 (GPU-02000000-0000-0000-0000-000000000000)"
    );
    assert!(binpack(&["GPUSHARE_DEVICES=GPU-0"], &loads).unwrap_err().contains("several"));
    assert_eq!(binpack(&["GPUSHARE_DEVICES=GPU-02", "GPUSHARE_MEMORY=1GiB"], &loads), Ok(vec![(1, 1)]));
    assert!(binpack(&["GPUSHARE_DEVICES=GPU-02,1"], &loads).unwrap_err().contains("each GPU once"));
}

#[test]
fn a_model_filter_narrows_the_choice_and_never_drops_a_named_gpu_in_silence() {
    let loads = [EMPTY, EMPTY, EMPTY];
    let memory = "GPUSHARE_MEMORY=1GiB";
    assert_eq!(binpack(&[memory, "GPUSHARE_MODEL=A100*"], &loads), Ok(vec![(2, 1)]));
    assert!(binpack(&[memory, "GPUSHARE_MODEL=T4"], &loads).unwrap_err().contains("model filter \"T4\""));
    let named = [memory, "GPUSHARE_MODEL=A100*", "GPUSHARE_DEVICES=0,2"];
    assert!(binpack(&named, &loads).unwrap_err().contains("model filter"));
}

#[test]
fn without_a_size_a_share_is_what_is_left_on_the_emptiest_gpu() {
    assert_eq!(binpack(&["GPUSHARE_CORES=10"], &[load(10, 0), load(70, 0)]), Ok(vec![(0, 70)]));
    let text = binpack(&["GPUSHARE_CORES=10"], &[load(80, 0)]).unwrap_err();
    assert!(text.starts_with("all that is left requested, 0 MiB free"), "{text}");
}

#[test]
fn exclusive_and_shared_never_meet_on_one_card() {
    let exclusive = GpuLoad {
        memory: DeviceMemory::from_bytes(80 * GIB),
        leases: 1,
        company: Some(Company::Nobody),
        ..EMPTY
    };
    assert_eq!(binpack(&["GPUSHARE_MODE=exclusive"], &[load(1, 0), EMPTY]), Ok(vec![(1, 80)]));
    assert!(binpack(&["GPUSHARE_MODE=exclusive"], &[load(1, 0)]).is_err());
    assert!(binpack(&["GPUSHARE_MEMORY=1GiB"], &[exclusive]).is_err());
}

#[test]
fn which_modes_meet_on_one_card() {
    let held = |company, leases| GpuLoad { leases, company: Some(company), ..EMPTY };
    let modes = [Company::Shares, Company::Mps, Company::TimeSlices, Company::Nobody];
    for asked in modes {
        let mode = asked.mode().name();
        let has_memory = matches!(asked, Company::Shares | Company::Mps);
        let memory = if has_memory { "GPUSHARE_MEMORY=4GiB" } else { "X=1" };
        let env = [&format!("GPUSHARE_MODE={mode}"), memory];
        for company in modes {
            let meets = binpack(&env, &[held(company, 1)]);
            assert_eq!(meets.is_ok(), asked == company && asked != Company::Nobody, "{mode}: {meets:?}");
            // Another GPU without leases is still available.
            assert!(binpack(&env, &[held(company, 1), EMPTY]).is_ok(), "{mode} beside {company:?}");
        }
        let told = binpack(&env, &[held(Company::TimeSlices, 1)]);
        let says =
            |text: &str| text.contains("is held in mode time-slice") || text.contains("without a lease");
        assert!(told.is_ok() || told.is_err_and(|text| says(&text)));
    }
}

/// If two leases together would leave no time to a container without a window, the later one is refused.
#[test]
fn windows_leave_a_part_of_the_gpu_to_those_without_one() {
    let gpus = [gpu(0, 80)];
    let placed = |env: &[&str], load: GpuLoad, rules: &Admission, is_scheduled: bool| {
        let read = read(&[env, &["GPUSHARE_MEMORY=1GiB"]].concat(), &gpus)?;
        let request = Request { is_supervised: true, is_scheduled, ..read };
        place(&request, &gpus, |_| load, &[], rules).map(drop).map_err(|refusal| refusal.to_string())
    };
    let held = |windows, between| GpuLoad { windows, between, cores: windows, ..load(10, 0) };
    let (window, burst) = (["GPUSHARE_CORES=30"], ["GPUSHARE_CORES=30", "GPUSHARE_COMPUTE_POLICY=burst"]);
    let rules = Admission::default();
    let none: [&str; 0] = [];
    for (env, load, is_granted) in [
        (&window[..], held(70, 0), true),
        (&window, held(65, 1), true),
        (&window, held(66, 1), false),
        (&none, held(95, 0), true),
        (&none, held(96, 0), false),
        (&burst, held(70, 3), true),
    ] {
        let told = placed(env, load, &rules, true);
        assert_eq!(told.is_ok(), is_granted, "{env:?} beside {load:?}: {told:?}");
        // Leases that libraries enforce do not count: their use of time is unknown.
        assert_eq!(placed(env, load, &rules, false), Ok(()), "{env:?} beside {load:?}");
    }
    let told = placed(&window, held(66, 1), &rules, true).unwrap_err();
    assert!(
        told.starts_with("a window of 30% of compute requested, 29% free for windows on GPU 0"),
        "{told}"
    );
    let told = placed(&none, held(96, 0), &rules, true).unwrap_err();
    assert!(told.starts_with("windows of other containers take 96% of GPU 0"), "{told}");
    // Only one lease on a GPU may have the latency policy.
    let latency = ["GPUSHARE_CORES=30", "GPUSHARE_COMPUTE_POLICY=latency"];
    assert_eq!(placed(&latency, held(30, 1), &rules, true), Ok(()));
    let told = placed(&latency, GpuLoad { latency: 1, ..held(30, 1) }, &rules, true).unwrap_err();
    assert!(told.starts_with("a container with compute-policy=latency is on GPU 0"), "{told}");
    assert_eq!(placed(&burst, GpuLoad { latency: 1, ..held(30, 1) }, &rules, true), Ok(()));
    let none_kept = Admission { compute_reserve: 0, ..rules };
    assert_eq!(placed(&window, held(70, 1), &none_kept, true), Ok(()));
}

#[test]
fn containers_take_turns_by_their_number_and_by_memory_where_they_name_it() {
    let slices = |memory_gib: u64, leases| GpuLoad {
        memory: DeviceMemory::from_bytes(memory_gib * GIB),
        leases,
        company: Some(Company::TimeSlices),
        ..EMPTY
    };
    let rules = Admission { replicas: 3, ..Admission::default() };
    let placed = |memory: MemoryRequest, loads: &[GpuLoad], rules: &Admission| {
        let gpus: Vec<Gpu> = (0..).zip(loads).map(|(index, _)| gpu(index, 80)).collect();
        let request = Request { mode: Mode::TimeSlice, ..Request::new(Devices::Any(1), memory) };
        let load = |uuid: GpuUuid| loads[gpus.iter().position(|gpu| gpu.uuid == uuid).unwrap()];
        let grants = place(&request, &gpus, load, &[], rules).map_err(|refusal| refusal.to_string())?;
        let index = gpus.iter().position(|gpu| gpu.uuid == grants[0].gpu).unwrap();
        Ok::<_, String>((index, grants[0].memory.bytes() / GIB))
    };
    let any = MemoryRequest::Rest;
    let needs = MemoryRequest::Bytes(DeviceMemory::from_bytes(30 * GIB));
    assert_eq!(placed(any, &[EMPTY, slices(0, 2)], &rules), Ok((1, 0)), "packed");
    assert_eq!(placed(any, &[slices(0, 3), slices(0, 2)], &rules), Ok((1, 0)));
    let told = placed(any, &[slices(0, 3)], &rules).unwrap_err();
    assert!(told.contains("may take turns on a GPU (quota.replicas)"), "{told}");
    assert_eq!(placed(needs, &[slices(60, 2), slices(50, 1)], &rules), Ok((1, 30)));
    let told = placed(needs, &[slices(60, 2)], &rules).unwrap_err();
    assert!(told.starts_with("30 GiB requested, 20 GiB free"), "{told}");
    let spread = Admission { placement: Placement::Spread, ..rules.clone() };
    assert_eq!(placed(any, &[slices(0, 2), slices(0, 1)], &spread), Ok((1, 0)));
    let told = placed(any, &[EMPTY], &Admission { replicas: 0, ..rules.clone() }).unwrap_err();
    assert!(told.contains("quota.replicas = 0"), "{told}");
}

#[test]
fn all_that_is_left_of_several_gpus_is_that_of_the_emptiest_however_near_they_are() {
    let mut gpus: Vec<Gpu> = (0..4).map(|index| gpu(index, 80)).collect();
    gpus[..2].iter_mut().for_each(|gpu| gpu.place.nvlink_group = "x".to_owned());
    let load_of =
        |uuid: GpuUuid| if gpus[..2].iter().any(|gpu| gpu.uuid == uuid) { load(79, 0) } else { EMPTY };
    let chosen = |memory, near: &[GpuUuid]| {
        let grants =
            place(&Request::new(Devices::Any(2), memory), &gpus, load_of, near, &Admission::default());
        grants
            .unwrap()
            .iter()
            .map(|grant| gpus.iter().position(|gpu| gpu.uuid == grant.gpu).unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(chosen(MemoryRequest::Rest, &[]), [2, 3]);
    let one = MemoryRequest::Bytes(DeviceMemory::from_bytes(GIB));
    assert_eq!(chosen(one, &[]), [0, 1], "by NVLink");
    assert_eq!(chosen(one, &[gpus[3].uuid]), [0, 3], "where its pod is already");
}

#[test]
fn reserve_and_over_commit_change_what_a_gpu_can_hold() {
    let reserve = Admission { reserve: DeviceMemory::from_bytes(2 * GIB), ..Admission::default() };
    assert!(placed(&["GPUSHARE_MEMORY=79GiB"], &[EMPTY], &reserve).is_err());
    assert_eq!(placed(&["GPUSHARE_MEMORY=100%"], &[EMPTY], &reserve), Ok(vec![(0, 78)]));
    let more = Admission { memory_percent: 150, ..Admission::default() };
    assert_eq!(placed(&["GPUSHARE_MEMORY=40GiB"], &[load(80, 0)], &more), Ok(vec![(0, 40)]));
    assert!(placed(&["GPUSHARE_MEMORY=81GiB"], &[EMPTY], &more).unwrap_err().contains("has 80 GiB"));
    assert_eq!(placed(&["GPUSHARE_MEMORY=100%"], &[EMPTY], &more), Ok(vec![(0, 80)]));
}

#[test]
fn a_gpu_of_unknown_size_takes_no_lease() {
    let mut gpus = [gpu(0, 80)];
    gpus[0].memory = None;
    let refusal = place(&request(&["GPUSHARE_MEMORY=1GiB"]), &gpus, |_| EMPTY, &[], &Admission::default());
    assert!(matches!(refusal, Err(Refusal::UnknownSize { .. })));
    let beside = [gpus[0].clone(), gpu(1, 80)];
    for (asked, taken) in [
        (Devices::Any(1), true),
        (Devices::Any(2), false),
        (Devices::These(vec![DeviceSelector::Index(0)]), false),
        (Devices::These(vec![DeviceSelector::Index(1)]), true),
        (Devices::All, false),
    ] {
        let request = Request { devices: asked.clone(), ..request(&["GPUSHARE_MEMORY=1GiB"]) };
        let placed = place(&request, &beside, |_| EMPTY, &[], &Admission::default());
        assert_eq!(
            placed.as_ref().map(|grants| grants[0].gpu).ok(),
            taken.then_some(beside[1].uuid),
            "{asked:?}"
        );
    }
}

#[test]
fn grants_never_sum_to_more_than_the_capacity_whatever_is_asked() {
    let gpus = [gpu(0, 8), gpu(1, 8)];
    let mut loads = BTreeMap::from([(gpus[0].uuid, EMPTY), (gpus[1].uuid, EMPTY)]);
    let mut seed = 1_u64;
    for _ in 0..10_000 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let mib = (seed >> 33) % 9000 + 1;
        let memory = format!("GPUSHARE_MEMORY={mib}MiB");
        let cores = format!("GPUSHARE_CORES={}", (seed >> 50) % 100 + 1);
        match place(&request(&[&memory, &cores]), &gpus, |uuid| loads[&uuid], &[], &Admission::default()) {
            Ok(grants) => {
                for grant in grants {
                    let load = loads.get_mut(&grant.gpu).unwrap();
                    load.memory = load.memory.saturating_add(grant.memory);
                    load.cores += u64::from(grant.cores.unwrap().percent());
                    load.leases += 1;
                }
            }
            Err(_) if seed & 1 == 0 => {
                *loads.get_mut(&gpus[usize::try_from(seed >> 63).unwrap()].uuid).unwrap() = EMPTY;
            }
            Err(_) => {}
        }
        assert!(loads.values().all(|load| load.memory.bytes() <= 8 * GIB && load.cores <= 100));
    }
}
