//! Errors of GPUs in the kernel's log take them out of service.

use std::fs::{self, OpenOptions};
use std::io::Write;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::eventually;
use gpushare_tests::leases::{cli, leases_of};
use gpushare_tests::meter;
use gpushare_tests::needs::met;
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::runtime::{LowLevel, Runtime};

use crate::{NEEDS, SOON};

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_gpu_that_the_kernel_reports_gets_no_new_container_until_it_is_uncordoned() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::create(2, MODEL, "80GiB");
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let config = runtime.config();
    let log = node.root().join("dev/kmsg");
    fs::write(&log, "6,1,10,-;Linux version 6.18\n").expect("a file can be written");
    let tell = |records: &str| {
        let mut log = OpenOptions::new().append(true).open(&log).expect("it is there");
        log.write_all(records.as_bytes()).expect("it can be written");
    };
    let topology = cli(config, &["devices", "--topology"]).expect_success("devices").stdout;
    let addresses: Vec<&str> = topology
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().last()?.strip_suffix(".0"))
        .collect();
    let share = |device: &str| Bundle::small().env("GPUSHARE_MEMORY", "1GiB").env("GPUSHARE_DEVICES", device);
    let held = share("1");
    let container = runtime.run(&held);
    let meter = meter::start(config);
    // What programs do wrong by themselves is no fault of the GPU, nor is what others write into the log.
    tell(&format!(
        "4,2,20,-;NVRM: Xid (PCI:{0}): 31, pid=7, name=python3, MMU Fault\n\
         12,3,30,-;NVRM: Xid (PCI:{0}): 79, said by a program\n4,4,40,-;NVRM: Xid (PCI:ff00:00:00): 79, no such GPU\n",
        addresses[0]
    ));
    let storm: String = (5..505)
        .map(|record| {
            format!(
                "4,{record},50,-;NVRM: Xid (PCI:{}): 79, pid=7, GPU has fallen off the bus.\n",
                addresses[1]
            )
        })
        .collect();
    tell(&storm);
    let shown = || cli(config, &["devices"]).expect_success("devices").stdout;
    assert!(eventually(SOON, || shown().contains("Xid 79")), "{}: {}", shown(), meter.log());
    assert_eq!(meter.log().matches("GPU out of service").count(), 1, "{}", meter.log());
    let line = runtime.create(&share("1")).expect_err("it is out of service").line();
    assert!(line.contains("Xid 79") && line.contains("gpushare uncordon"), "{line}");
    let doctor = cli(config, &["doctor"]);
    assert!(!doctor.success() && doctor.stdout.contains("Xid 79"), "{}", doctor.stdout);
    assert_eq!(leases_of(config, held.id()).len(), 1, "who has it keeps it");
    drop(runtime.run(&share("0")));
    let any = Bundle::small().env("GPUSHARE_MEMORY", "60GiB");
    let line = Bundle::small().env("GPUSHARE_MEMORY", "1GiB").env("GPUSHARE_COUNT", "2");
    drop(runtime.run(&any));
    let line = runtime.create(&line).expect_err("one is left").line();
    assert!(line.contains("Xid 79"), "{line}");

    let told = cli(config, &["uncordon", "1"]).expect_success("uncordon").stdout;
    assert!(told.contains("its fault is forgotten"), "{told}");
    drop(runtime.run(&share("1")));
    meter.kill();
    // What happens while nobody looks counts, unless an administrator has seen to the GPU since.
    tell(&format!("4,590,60,-;NVRM: Xid (PCI:{}): 95, Uncontained\n", addresses[1]));
    let _ = cli(config, &["uncordon", "1"]).expect_success("uncordon");
    let meter = meter::start(config);
    tell(&format!("4,600,60,-;NVRM: Xid (PCI:{}): 48, Double Bit ECC Error\n", addresses[0]));
    assert!(eventually(SOON, || shown().contains("Xid 48")), "{}: {}", shown(), meter.log());
    assert!(!shown().contains("Xid 79") && !shown().contains("Xid 95"), "what was forgotten stays so");
    // The last one, too, is not given.
    tell(&format!("4,601,70,-;NVRM: Xid (PCI:{}): 79, x\n", addresses[1]));
    let refused = || {
        runtime
            .create(&share("1"))
            .is_err_and(|refusal| refusal.line().contains("no GPU of this node is in service"))
    };
    assert!(eventually(SOON, refused), "{}", meter.log());
    drop(container);
}
