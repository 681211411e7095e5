//! Real Slurm with gpushare as the runtime of its containers: what a step gets, what srun prints when it is
//! refused, and when a share is released.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::Duration;

use gpushare_tests::artifacts::{Installed, checkout};
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, alive, eventually};
use gpushare_tests::leases::{Lease, cli, leases, sweep};
use gpushare_tests::meter::listed;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::pages::pages;
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::LowLevel;
use gpushare_tests::scratch::Scratch;
use gpushare_tests::slurm::{HOST, Sharing, Slurm, Step};
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Slurm, Need::Busybox];
const SOON: Duration = Duration::from_secs(30);
const PROBE: [&str; 7] =
    ["gpushare-simulator", "probe", "--json", "--allocate", "5GiB", "--allocate", "3GiB"];

/// Slurm on a node, with an installed gpushare.
struct Place {
    slurm: Slurm,
    config: PathBuf,
    _installed: Installed,
    _node: SimulatedNode,
}

impl Place {
    /// One GPU of 80 GiB that Slurm divides into 100 parts.
    fn new() -> Self {
        Self::with(1, Sharing::Mps(100), "")
    }

    fn with(gpus: usize, sharing: Sharing, settings: &str) -> Self {
        let node = SimulatedNode::create(gpus, MODEL, "80GiB");
        let config = node.config_with("slurm", &format!("{}\n{settings}", LowLevel::Runc.settings()));
        let installed = Installed::new();
        let slurm = Slurm::start(&installed, &config, &node, sharing);
        Self { slurm, config, _installed: installed, _node: node }
    }

    /// The only lease, once a step runs.
    fn lease(&self) -> Lease {
        let active = || leases(&self.config).iter().any(|lease| lease.state == "active");
        assert!(eventually(SOON, active), "no step runs: {}", self.slurm.log());
        leases(&self.config).remove(0)
    }

    fn assert_given_back(&self, when: &str) {
        let gone = eventually(SOON, || leases(&self.config).is_empty());
        assert!(gone, "{when}: {:?}\n{}", leases(&self.config), self.slurm.log());
    }
}

#[test]
#[ignore = "needs root and slurm: starts daemons"]
fn a_step_sees_a_gpu_of_the_size_that_its_bundle_or_its_user_asks() {
    if !met(NEEDS) {
        return;
    }
    let place = Place::new();
    let annotated = Bundle::with_probe().annotation("gpushare.io/memory", "4GiB");
    let of_image = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
    let plain = Bundle::with_probe();
    for (bundle, of_user) in [(&annotated, None), (&of_image, None), (&plain, Some("4GiB"))] {
        let mut srun = place.slurm.srun(&[], bundle, &PROBE);
        srun.envs(of_user.map(|memory| ("GPUSHARE_MEMORY", memory)));
        let told = command::run(&mut srun).expect_success("srun --container");
        let report = Report::parse(&told.stdout);
        report.assert_size(4 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
        // srun also tells when the job before has not let go of its node yet.
        let waits = ["queued and waiting for resources", "has been allocated resources"];
        let of_srun =
            |line: &&str| line.starts_with("srun: job ") && waits.iter().any(|wait| line.ends_with(wait));
        let others: Vec<&str> = told.stderr.lines().filter(|line| !of_srun(line)).collect();
        assert_eq!(others, [""; 0]);
        place.assert_given_back("the step has ended");
    }

    let told = command::run(&mut place.slurm.srun(&[], &plain, &["ls", "/dev"]));
    assert!(!told.expect_success("srun without a request").stdout.contains("nvidia"));
    let told = command::run(&mut place.slurm.srun(&[], &annotated, &["sh", "-c", "exit 7"]));
    assert_eq!(told.status.code(), Some(7), "{told:?}");
}

#[test]
#[ignore = "needs root and slurm: starts daemons"]
fn what_the_pages_type_gives_a_step_its_share() {
    if !met(NEEDS) || !met(&[Need::DriverLibraries]) {
        return;
    }
    let place = Place::new();
    let (bundle, folder) = (Bundle::with_probe(), Scratch::new("slurm-pages"));
    let annotated = bundle.annotation("gpushare.io/memory", "4GiB");
    annotated.write();
    let of_bundle = annotated.path().display().to_string();
    symlink(checkout().join("examples"), folder.path().join("examples")).expect("a link can be made");
    let mut count = 0;
    for page in pages() {
        for block in page.blocks().iter().filter(|block| block.kind == "sh slurm") {
            let lines =
                block.text.replace("$PWD/bundle", &of_bundle).replace("=BUNDLE", &format!("={of_bundle}"));
            let told = place.slurm.type_in(folder.path(), &lines).expect_success(&page.name());
            let shown = || {
                let outputs = fs::read_dir(folder.path()).into_iter().flatten().flatten();
                let outputs = outputs.filter(|entry| entry.file_name().to_string_lossy().ends_with(".out"));
                let texts = outputs.map(|entry| fs::read_to_string(entry.path()).unwrap_or_default());
                told.stdout.matches("4096MiB").count() + texts.filter(|text| text.contains("4096MiB")).count()
            };
            let runs = lines.matches("nvidia-smi").count() + lines.matches("sbatch").count();
            assert!(runs > 0 && eventually(SOON, || shown() == runs), "{}: {told:?}", page.name());
            place.assert_given_back(&page.name());
            count += 1;
        }
    }
    assert_eq!(count, 2, "blocks of docs/slurm.md and examples/slurm");
}

#[test]
#[ignore = "needs root and slurm: starts daemons"]
fn a_step_that_is_refused_tells_its_user_why() {
    if !met(NEEDS) {
        return;
    }
    let place = Place::new();
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "100GiB");
    let of_srun = command::run(&mut place.slurm.srun(&[], &bundle, &["true"]));
    let of_batch = place.slurm.batch(&[], &bundle, &["true"]);
    let inside = place.slurm.batch_inside(&[], &bundle, "true");
    for (outcome, text) in
        [(&of_srun, &of_srun.stderr), (&of_batch, &of_batch.stdout), (&inside, &inside.stdout)]
    {
        assert_eq!(outcome.status.code(), Some(1), "{outcome:?}");
        let ours: Vec<&str> = text.lines().filter(|line| line.starts_with("gpushare-runtime: ")).collect();
        let [line] = ours[..] else { panic!("not one line: {outcome:?}") };
        for part in ["cannot lease a GPU: ", "100 GiB requested", "80 GiB"] {
            assert!(line.contains(part), "{part:?} is not in: {line}");
        }
    }
    assert_eq!(leases(&place.config), []);
}

#[test]
#[ignore = "needs root and slurm: starts daemons"]
fn a_step_of_an_ordinary_user_is_refused_in_one_line() {
    if !met(NEEDS) {
        return;
    }
    let place = Place::new();
    // A user that every machine has, and who may not read root's files.
    let flags = ["--uid=daemon", "--gid=daemon"];
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
    let _ = command::run(&mut place.slurm.srun(&[], &bundle, &["true"])).expect_success("a step of root");
    place.slurm.wait_until_idle();
    let refused = command::run(&mut place.slurm.srun(&flags, &bundle, &["true"]));
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let line = refused.stderr.lines().find(|line| line.starts_with("gpushare-runtime: "));
    let line = line.unwrap_or_else(|| panic!("no line of ours: {refused:?}"));
    assert!(line.contains("cannot lease a GPU"), "{line}");
    assert!(line.contains("machine's root's") && !line.contains("move it away"), "{line}");
    place.assert_given_back("the step of root has ended");
}

#[test]
#[ignore = "needs root and slurm: starts daemons"]
fn scancel_ends_the_container_and_gives_its_share_back() {
    if !met(NEEDS) {
        return;
    }
    let place = Place::new();
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "70GiB");
    // As init, sleep ignores SIGTERM, so SIGKILL ends it.
    for batch in [false, true] {
        let step = (!batch).then(|| place.slurm.sleeper(&["--job-name=sleeper"], &bundle));
        if batch {
            place.slurm.batch_sleeper(&["--job-name=sleeper"], &bundle);
        }
        let lease = place.lease();
        assert_eq!(lease.memory, [70 * GIB]);
        let init = lease.pid.expect("an active lease has an init");
        assert!(alive(init) && lease.id.starts_with(&format!("{HOST}.root.")), "{lease:?}");
        let _ = place.slurm.call("scancel", &["--name=sleeper"]).expect_success("scancel");
        if place.slurm.version() >= (23, 2) {
            // Slurm then asks about a task -1, and never about the one that it ran.
            assert!(eventually(SOON, || !alive(init)), "{}", place.slurm.log());
            sweep(&place.config);
        }
        place.assert_given_back("scancel");
        assert!(!alive(init), "the lease went before its container");
        step.into_iter().for_each(Step::wait);
    }
    let again = Bundle::with_probe().env("GPUSHARE_MEMORY", "70GiB");
    let _ = command::run(&mut place.slurm.srun(&[], &again, &["true"])).expect_success("srun");
}

#[test]
#[ignore = "needs root and slurm: starts daemons"]
fn the_part_of_a_gpu_that_slurm_gives_a_job_is_the_share_that_holds() {
    if !met(NEEDS) {
        return;
    }
    for (sharing, gres, settings, memory, cores) in [
        (Sharing::Mps(100), "--gres=mps:25", "mps_memory = \"percent\"", 20 * GIB, 25),
        (Sharing::Shard(32), "--gres=shard:4", "shards_per_gpu = 32", 10 * GIB, 12),
    ] {
        let place = Place::with(2, sharing, &format!("[dialects.slurm]\n{settings}"));
        let bundle = Bundle::with_probe();
        // In a batch job, since Slurm 22.05 tells a container about its GPUs in no other case.
        let told = place.slurm.batch(&[gres], &bundle, &PROBE).expect_success(gres);
        Report::parse(&told.stdout).assert_size(memory);
        place.assert_given_back("the job has ended");

        let _first_gpu = place.slurm.holder(&["--gres=gpu:1"]);
        assert!(
            eventually(SOON, || place.slurm.call("squeue", &["-h", "-t", "R"]).stdout.lines().count() == 1)
        );
        place.slurm.batch_sleeper(&[gres], &bundle);
        let id = place.lease().id;
        let granted = listed(&place.config, &id, 0);
        let told = cli(&place.config, &["devices", "--json"]).expect_success("gpushare devices");
        let devices: Value = serde_json::from_str(&told.stdout).expect("gpushare devices --json prints JSON");
        assert_eq!(granted["uuid"], devices["gpus"][1]["uuid"], "{gres}");
        assert_eq!((&granted["memory_bytes"], &granted["cores"]), (&json!(memory), &json!(cores)), "{gres}");
    }
}

#[test]
#[ignore = "needs root and slurm: starts daemons"]
fn a_part_of_a_gpu_that_cannot_be_understood_is_refused_with_the_remedy() {
    if !met(NEEDS) {
        return;
    }
    let place = Place::with(1, Sharing::Shard(32), "");
    let told = place.slurm.batch(&["--gres=shard:4"], &Bundle::with_probe(), &["true"]);
    assert!(!told.success() && told.stdout.contains("shards_per_gpu"), "{told:?}");

    // Slurm sets neither variable here. The bundle does, with values as a wrong gres.conf would give.
    let of_bundle = |percent| {
        let bundle = Bundle::with_probe().env("SLURM_JOB_GPUS", "0");
        bundle.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent)
    };
    for percent in ["0", "200"] {
        let told = command::run(&mut place.slurm.srun(&[], &of_bundle(percent), &["true"]));
        assert_eq!(told.status.code(), Some(1), "{told:?}");
        let line = told.stderr.lines().find(|line| line.starts_with("gpushare-runtime: "));
        assert!(line.is_some_and(|line| line.contains("gres.conf")), "{percent}: {told:?}");
    }

    let none = place.slurm.batch(&["--gres=shard:0"], &Bundle::with_probe(), &["ls", "/dev"]);
    assert!(!none.expect_success("no shards").stdout.contains("nvidia"));
    assert_eq!(leases(&place.config), []);
}
