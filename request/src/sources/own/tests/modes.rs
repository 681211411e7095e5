//! The ways in which a container holds GPUs, and the words that may accompany each.

use super::*;

#[test]
fn turns_on_a_gpu_have_no_limit_and_yield_to_every_limit() {
    let mode = |annotations: &[(&str, &str)], env: &[&str]| {
        let request = read(annotations, env).unwrap().unwrap();
        (request.mode, request.memory, request.cores, request.notes.len())
    };
    let slice = "GPUSHARE_MODE=time-slice";
    let turns = |memory| (Mode::TimeSlice, memory, None, 1);
    assert_eq!(mode(&[], &[slice]), turns(MemoryRequest::Rest));
    let annotated = [("gpushare.io/mode", "time-slice"), ("gpushare.io/memory", "4GiB")];
    let pod = [("io.kubernetes.cri.container-type", "container"), ("io.kubernetes.cri.sandbox-id", "pod")];
    assert_eq!(mode(&[&pod[..], &annotated].concat(), &[]), turns(gib(4)), "a need, by one author");
    let told = read(&annotated, &[]).unwrap_err().to_string();
    assert!(told.contains("gpushare.io/memory"), "one may be an image's: {told}");
    // Every other word is a limit, which time-slicing would lift.
    assert_eq!(mode(&annotated[..1], &["GPUSHARE_MEMORY=4GiB"]), (Mode::Share, gib(4), None, 0));
    for limit in ["CUDA_DEVICE_MEMORY_LIMIT=3000m", "CUDA_DEVICE_SM_LIMIT=30"] {
        for annotations in [&[][..], &annotated[..1]] {
            let env = ["NVIDIA_VISIBLE_DEVICES=0", limit, slice];
            let env = if annotations.is_empty() { &env[..] } else { &env[..2] };
            assert_eq!(mode(annotations, env).0, Mode::Share, "{annotations:?} {env:?}");
        }
    }
    for (annotations, env, want) in [
        (&[][..], &[slice, "GPUSHARE_CORES=30"][..], "GPUSHARE_CORES"),
        (&[], &[slice, "GPUSHARE_COMPUTE_POLICY=burst"], "GPUSHARE_COMPUTE_POLICY"),
        // An image may have written one of them.
        (&[], &[slice, "GPUSHARE_MEMORY=4GiB"], "GPUSHARE_MEMORY"),
        (&[("gpushare.io/mode", "share")], &[slice], "gpushare.io/mode"),
        // The more trusted author has stated the amount.
        (&[("gpushare.io/memory", "4GiB")], &[slice], "gpushare.io/memory"),
        (&[], &["GPUSHARE_MODE=timeslice"], "known are share, mps, time-slice and exclusive"),
    ] {
        let told = read(annotations, env).unwrap_err().to_string();
        assert!(told.contains(want), "{annotations:?} {env:?}: {told}");
    }
}

#[test]
fn mps_has_a_shares_limits_and_holds_compute_of_one_gpu_by_itself() {
    let mode = |annotations: &[(&str, &str)], env: &[&str]| {
        let request = read(annotations, env).unwrap().unwrap();
        (request.mode, request.memory, request.cores.map(|cores| cores.percent()))
    };
    let mps = "GPUSHARE_MODE=mps";
    let limits = [mps, "GPUSHARE_MEMORY=4GiB", "GPUSHARE_CORES=30"];
    assert_eq!(mode(&[], &limits), (Mode::Mps, gib(4), Some(30)));
    let annotated = [("gpushare.io/mode", "mps"), ("gpushare.io/memory", "2GiB")];
    assert_eq!(mode(&annotated, &[]), (Mode::Mps, gib(2), None));
    assert_eq!(mode(&annotated[..1], &["GPUSHARE_MEMORY=1GiB"]), (Mode::Mps, gib(1), None));
    let limited = ["NVIDIA_VISIBLE_DEVICES=0", "CUDA_DEVICE_MEMORY_LIMIT=3000m", mps];
    assert_eq!(mode(&[], &limited).0, Mode::Mps, "one author wrote both");
    let foreign = ["NVIDIA_VISIBLE_DEVICES=0", "CUDA_DEVICE_MEMORY_LIMIT=3000m", "CUDA_DEVICE_SM_LIMIT=30"];
    let foreign = mode(&[("gpushare.io/mode", "mps")], &foreign);
    assert_eq!((foreign.0, foreign.2), (Mode::Mps, Some(30)), "another system's limits are its limits");
    for (annotations, env, want) in [
        (&[("gpushare.io/mode", "share")][..], &[mps][..], "GPUSHARE_MODE"),
        // An image must not expose a container whose size the pod's author set to its neighbours' faults.
        (&annotated[1..], &[mps], "gpushare.io/memory"),
        (&[], &[mps, "GPUSHARE_MEMORY=1GiB", "GPUSHARE_COUNT=2"], "is for one GPU"),
        (&[], &[mps, "GPUSHARE_MEMORY=1GiB", "GPUSHARE_DEVICES=all"], "is for one GPU"),
        (&[], &[mps, "GPUSHARE_CORES=10", "GPUSHARE_COMPUTE_POLICY=none"], "thread percentage alone"),
    ] {
        let told = read(annotations, env).unwrap_err().to_string();
        assert!(told.contains(want), "{annotations:?} {env:?}: {told}");
    }
}

#[test]
fn host_memory_is_the_least_that_is_named_and_granted_by_who_may_grant() {
    let host = |annotations: &[(&str, &str)], env: &[&str]| {
        read(annotations, env).map(|request| request.unwrap().host_memory.bytes() >> 30)
    };
    let annotated = [("gpushare.io/memory", "4GiB"), ("gpushare.io/host-memory", "2GiB")];
    assert_eq!(host(&annotated, &[]), Ok(2));
    assert_eq!(host(&annotated[..1], &[]), Ok(0));
    assert_eq!(host(&[], &["GPUSHARE_MEMORY=4GiB", "GPUSHARE_HOST_MEMORY=3Gi"]), Ok(3));
    assert_eq!(host(&[("gpushare.io/host-memory", "1GiB")], &["GPUSHARE_MODE=mps"]), Ok(1));
    for (annotations, env, want) in [
        (&[][..], &["GPUSHARE_HOST_MEMORY=50%"][..], "an amount with a unit"),
        (&[], &["GPUSHARE_HOST_MEMORY=4"], "needs a unit"),
        (&[], &["GPUSHARE_HOST_MEMORY=1GiB", "GPUSHARE_MODE=exclusive"], "no limit to pass"),
        (&[], &["GPUSHARE_HOST_MEMORY=1GiB", "GPUSHARE_MODE=time-slice"], "no limit to pass"),
        (&annotated, &["GPUSHARE_HOST_MEMORY=3GiB"], "GPUSHARE_HOST_MEMORY"),
    ] {
        let told = host(annotations, env).unwrap_err().to_string();
        assert!(told.contains(want), "{annotations:?} {env:?}: {told}");
    }
    // A strict node's variables grant nothing, unless it gives them a ceiling.
    let granted = [("alloc.gpushare.io/memory", "4GiB"), ("alloc.gpushare.io/host-memory", "2GiB")];
    let told = strict(&granted[..1], &["GPUSHARE_HOST_MEMORY=1GiB"]).unwrap_err().to_string();
    assert!(told.contains("GPUSHARE_HOST_MEMORY") && told.contains("request.strict"), "{told}");
    assert!(strict(&granted, &["GPUSHARE_HOST_MEMORY=1GiB"]).is_ok(), "it may lower what was granted");
    // A ceiling does not cover host memory, and an unchecked image cannot request it.
    let env = Some(MemoryRequest::Percent(100));
    let bounded = Policy { ceilings: Ceilings { env, ..Ceilings::default() }, ..Policy::default() };
    let unchecked = Policy { ignore_env: true, ..Policy::default() };
    for policy in [Policy { strict: true, ..bounded.clone() }, bounded, unchecked] {
        let bundle = container(&granted[..1], &["GPUSHARE_HOST_MEMORY=1GiB"]);
        let told =
            crate::read::read(&bundle, &policy, &four()).map(|request| request.map(|one| one.host_memory));
        assert!(!matches!(told, Ok(Some(memory)) if memory > DeviceMemory::ZERO), "{told:?}");
    }
}

#[test]
fn a_memory_limit_is_above_bytes_of_memory_and_said_by_who_is_believed_as_far() {
    let limit = |annotations: &[(&str, &str)], env: &[&str]| {
        read(annotations, env).map(|request| request.unwrap().memory_limit.map(|limit| limit.bytes() >> 30))
    };
    let pod = [("gpushare.io/memory", "4GiB"), ("gpushare.io/memory-limit", "10GiB")];
    let (four, ten) = ("GPUSHARE_MEMORY=4GiB", "GPUSHARE_MEMORY_LIMIT=10GiB");
    assert_eq!(limit(&pod, &[]), Ok(Some(10)));
    assert_eq!(limit(&[], &[four, ten]), Ok(Some(10)));
    assert_eq!(limit(&[], &[four, ten, "GPUSHARE_MODE=mps"]), Ok(Some(10)));
    assert_eq!(limit(&[], &[four, "GPUSHARE_MEMORY_LIMIT=4GiB"]), Ok(None), "nothing lies between");
    for (annotations, env, want) in [
        (&[][..], &[ten][..], "needs memory in bytes beside it"),
        (&[], &["GPUSHARE_MEMORY=25%", ten], "needs memory in bytes beside it"),
        (&[], &["GPUSHARE_MEMORY=11GiB", ten], "at most as much"),
        (&[], &[four, "GPUSHARE_MEMORY_LIMIT=50%"], "an amount with a unit"),
        (&[], &[ten, "GPUSHARE_MODE=exclusive"], "no limit to pass"),
        (&[], &[ten, "GPUSHARE_MODE=time-slice"], "no limit to pass"),
        (&pod[..1], &[ten], "GPUSHARE_MEMORY_LIMIT"),
    ] {
        let told = limit(annotations, env).unwrap_err().to_string();
        assert!(told.contains(want), "{annotations:?} {env:?}: {told}");
    }
    let granted = [("alloc.gpushare.io/memory", "4GiB"), ("alloc.gpushare.io/memory-limit", "8GiB")];
    let request = strict(&granted, &[]).unwrap().unwrap();
    assert_eq!(request.memory_limit.map(|limit| limit.bytes() >> 30), Some(8));
    let told = strict(&granted[..1], &[ten]).unwrap_err().to_string();
    assert!(told.contains("GPUSHARE_MEMORY_LIMIT"), "{told}");
}
