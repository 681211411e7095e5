//! Bundles as Slurm itself wrote them (`tests/fixtures/slurm`), and what each comes to.

use std::fs;
use std::path::Path;

use gpushare_request::{Container, Request, read};

use super::golden::{gpus, granted, policy};
use super::sets::{Set, UUIDS};

const TOTAL: u64 = 15360;

/// What the bundle of `fixture` asks for.
fn request(fixture: &str) -> Option<Request> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fixtures/slurm/{fixture}.json"));
    let bundle = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let settings = "[dialects.slurm]\nshards_per_gpu = 32\nmps_memory = \"percent\"".to_owned();
    let policy = policy(&Set { settings, ..Set::default() }, false);
    read(&Container::from_json(&bundle), &policy, &gpus(TOTAL)).unwrap()
}

#[test]
fn a_bundle_of_slurms_gets_what_slurm_gave_its_task() {
    for (fixture, gpu, share) in [
        ("22.05-mps-sbatch-srun", 0, "7680 MiB 50%"),
        ("22.05-shard-sbatch-srun", 0, "3840 MiB 25%"),
        ("24.11-mps-srun", 0, "3840 MiB 25%"),
        ("24.11-mps-second-gpu", 1, "3840 MiB 25%"),
        ("24.11-mps-sbatch", 0, "7680 MiB 50%"),
        ("24.11-mps-sbatch-srun-smaller", 0, "768 MiB 5%"),
        ("24.11-mps-two-tasks", 0, "3840 MiB 25%"),
        ("24.11-shard-srun", 0, "1920 MiB 12%"),
        ("24.11-shard-second-gpu", 1, "1920 MiB 12%"),
        ("24.11-shard-sbatch", 0, "3840 MiB 25%"),
        ("24.11-shard-two-tasks", 0, "1920 MiB 12%"),
    ] {
        assert_eq!(
            request(fixture).as_ref().map(granted).unwrap_or_default(),
            [format!("{} {share}", UUIDS[gpu])],
            "{fixture}"
        );
    }
    for fixture in ["22.05-mps-srun", "24.11-gpu", "24.11-mps-sbatch-srun-none", "24.11-two-gpus"] {
        assert!(request(fixture).is_none(), "{fixture}");
    }
}

#[test]
fn the_variables_that_made_the_request_are_told() {
    for (fixture, key, value) in [
        ("24.11-mps-two-tasks", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50"),
        ("24.11-shard-two-tasks", "SLURM_SHARDS_ON_NODE", "8"),
    ] {
        let told = request(fixture).unwrap().variables;
        assert_eq!(told, [(key.to_owned(), value.to_owned())], "{fixture}");
    }
}
