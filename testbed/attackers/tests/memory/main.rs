//! Tests attackers under the supervisor, against a resource manager that the kernel reaches like a driver.

mod node;
mod survival;

use std::process::Command;
use std::time::{Duration, Instant};

use node::{MIB, Node, has_fuse};

const DIRECT: [&str; 8] = ["long", "short", "heap", "pitch", "range", "other-type", "wrapped", "duplicate"];

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn an_attacker_gets_its_share_and_not_a_page_more() {
    if !has_fuse() {
        return;
    }
    for mode in DIRECT.iter().chain(&["export", "flip", "x32"]) {
        let node = Node::new(1024 * MIB);
        let bare = node.attack_bare(&[mode, "--pieces", "40"]);
        assert!(
            mode == &"x32" || node.used() >= 40 * 64 * MIB,
            "{mode} alone: {}{}",
            bare.said,
            node.figures()
        );
        drop(bare);
        node.eventually("the attacker's memory is gone", || node.used() == 0);
        let held = node.attack(&[mode, "--pieces", "40"]);
        assert!(node.used() <= 1024 * MIB, "{mode}: {}{}", held.said, node.figures());
        // The kernel may not support x32 programs.
        if !(*mode == "x32" && held.said.contains("ENOSYS")) {
            assert!(node.used() >= 960 * MIB, "{mode}: {}{}", held.said, node.figures());
        }
        assert!(node.figures().starts_with("privileged 0\n"), "{mode}: {}", node.figures());
    }
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn pieces_are_charged_as_the_card_rounds_them() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(64 * MIB);
    let held = node.attack(&["long", "--piece", "4", "--pieces", "3000"]);
    assert_eq!(held.said, "got 1024 pieces: Status(Status(81))\n");
    assert_eq!(node.used(), 64 * MIB);
}

/// RM lets any program stop the channels of any other.
#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn a_program_stops_its_own_channels_and_nobody_elses() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(1024 * MIB);
    let stopped =
        || node.figures().lines().find_map(|line| line.strip_prefix("stopped ")?.parse::<u32>().ok());
    let victim = node.attack_bare(&["stop"]);
    assert!(victim.said.ends_with("Ok(())\n"), "{}", victim.said);
    let [client, channel, ..] = victim.said.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{}", victim.said)
    };
    assert_eq!(stopped(), Some(1));
    let others = ["stop", "--channel", client, channel];
    let bare = node.attack_bare(&others);
    assert!(bare.said.ends_with("Ok(())\n"), "{}", bare.said);
    // The supervisor ends with the last of them.
    let held =
        [&[][..], &["--wrapped"], &["--planted"]].map(|more| node.attack(&[&others[..], more].concat()));
    for one in &held {
        assert!(one.said.ends_with("Err(Status(Status(27)))\n"), "{}", one.said);
    }
    let own = [node.attack(&["stop"]), node.attack(&["stop", "--wrapped"])];
    assert!(own.iter().all(|one| one.said.ends_with("Ok(())\n")), "{}{}", own[0].said, own[1].said);
    assert_eq!(stopped(), Some(3), "{}", node.figures());
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn page_tables_of_address_ranges_are_charged() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(1024 * MIB);
    // 64 GiB of addresses take 136.5 MiB of page tables.
    let held = node.attack(&["ranges", "--piece", &(64 << 20).to_string(), "--pieces", "20"]);
    assert!(held.said.starts_with("got 7 pieces"), "{}", held.said);
    assert!(node.used() <= 1024 * MIB, "{}", node.figures());
}

/// A program may name a wrong parent for an object.
#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn a_planted_name_takes_nothing_off_the_books() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(256 * MIB);
    // 64 GiB of addresses take 136.5 MiB of page tables.
    let bare = node.attack_bare(&["planted", "--piece", &(64 << 20).to_string(), "--pieces", "4"]);
    assert!(bare.said == "got 4 pieces\n" && node.used() > 512 * MIB, "{}{}", bare.said, node.figures());
    drop(bare);
    node.eventually("the attacker's memory is gone", || node.used() == 0);
    let held = node.attack(&["planted", "--piece", &(64 << 20).to_string(), "--pieces", "4"]);
    assert!(node.used() <= 256 * MIB, "{}{}", held.said, node.figures());
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn memory_that_is_freed_can_be_had_again() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(128 * MIB);
    let held = node.attack(&["rounds", "--pieces", "500"]);
    assert_eq!(held.said, "got 500 pieces: limit of pieces, then 2 at once\n");
    assert_eq!(node.used(), 128 * MIB);
}

/// Memory that a neighbour holds only for moments must not look like memory that is gone from the card.
#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn a_neighbour_that_comes_and_goes_frees_nothing_that_is_still_held() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(256 * MIB);
    // They bypass the supervisor, as programs of other runtimes do.
    let _neighbours =
        [0; 2].map(|_| node.bare_unread(&["rounds", "--piece", "1048576", "--pieces", "1000000"]));
    let held = node.attack(&["export", "--pieces", "40"]);
    assert_eq!(held.said, "got 4 pieces: Status(Status(81))\n");
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        // Before each refusal the supervisor looks for memory that is gone.
        let more = node.attack(&["long", "--piece", "1024", "--pieces", "50"]);
        assert_eq!(more.said, "got 0 pieces: Status(Status(81))\n", "{}", node.figures());
    }
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn older_drivers_are_held_too() {
    if !has_fuse() {
        return;
    }
    for driver in ["515.43.04", "525.147.05", "535.54.03", "550.163.01", "570.211.01"] {
        for mode in ["long", "short", "heap"] {
            let node = Node::of_driver(256 * MIB, driver);
            let mut around = Command::new(env!("CARGO_BIN_EXE_around"));
            around.arg("--socket").arg(node.folder.path().join("socket")).args(["--driver", driver]);
            around.arg(env!("CARGO_BIN_EXE_attacker"));
            let held = node.started(around, &[mode, "--driver", driver, "--pieces", "40"]).heard();
            assert_eq!(held.said, "got 4 pieces: Status(Status(81))\n", "{driver} {mode}");
            drop(held);
            node.eventually("the attacker's memory is gone", || node.used() == 0);
        }
    }
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn who_races_past_the_supervisor_is_ended() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(256 * MIB);
    let mut held = node.attack(&["race", "--pieces", "100000"]);
    let ended = held.child.wait().expect("it ends");
    assert!(!ended.success(), "{}", held.said);
    node.eventually("its memory is gone", || node.used() == 0);
}
