//! Every command of the pages, typed in the order of its page by a reader who has nothing else. README's are
//! typed by `first_steps.rs`, Slurm's by `slurm.rs`.

use std::collections::BTreeMap;
use std::time::Instant;

use gpushare_tests::artifacts;
use gpushare_tests::image;
use gpushare_tests::namespace::private;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::pages::{Block, Page, pages};
use gpushare_tests::workplace::Workplace;

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Runc,
    Need::Busybox,
    Need::Docker,
    Need::Compose,
    Need::Podman,
    Need::Python,
    Need::DriverLibraries,
    Need::MpsControl,
];

/// How a block of a page is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Typed as a whole; each of its lines succeeds.
    Typed,
    /// Each of its lines is typed by itself, and goes on until it is stopped.
    Stays,
    /// Not here; the reason.
    Elsewhere(&'static str),
}

/// What the words behind a block's fence mean; no other may stand there.
const WAYS: [(&str, Way); 7] = [
    ("sh", Way::Typed),
    ("sh stays", Way::Stays),
    ("sh cluster", Way::Elsewhere("kubernetes/tests/cluster types it, where there is a control plane")),
    ("sh download", Way::Elsewhere("it takes images of a registry")),
    ("sh package", Way::Elsewhere("packages.rs and first_steps.rs install packages")),
    ("sh slurm", Way::Elsewhere("slurm.rs types it")),
    ("sh source", Way::Elsewhere("the build that is tested came by it")),
];

/// What a page's placeholders stand for on the reader's machine.
fn filled_in(lines: &str) -> String {
    let line = |line: &str| {
        let image = if line.contains(" -d ") { Workplace::STAYS } else { "ubuntu" };
        let word = |word: &str| match word {
            "IMAGE" => image.to_owned(),
            "NAME" => "web".to_owned(),
            other => other.to_owned(),
        };
        line.split(' ').map(word).collect::<Vec<_>>().join(" ")
    };
    lines.lines().map(|text| line(text) + "\n").collect()
}

/// The sizes that the GPUs of a block's containers have by its words, as nvidia-smi prints them.
fn sizes(lines: &str) -> Vec<String> {
    let joined = lines.replace("\\\n", " ");
    let with_smi = joined.lines().filter(|line| line.contains("nvidia-smi"));
    let words = with_smi.flat_map(|line| line.split([' ', '=']).collect::<Vec<_>>());
    let gib = words.filter_map(|word| word.strip_suffix("GiB")?.parse::<u64>().ok());
    gib.map(|gib| format!("{}MiB", gib * 1024)).collect()
}

/// Types a block; what went wrong.
fn typed(place: &Workplace, block: &Block) -> Result<(), String> {
    let lines = filled_in(&block.text);
    let told = place.type_in(&lines);
    let wanted = sizes(&lines);
    let lacks = wanted.into_iter().find(|size| !told.stdout.contains(size.as_str()));
    match lacks {
        _ if !told.success() => Err(format!("{}\n{}\n{lines}", told.stdout, told.stderr)),
        Some(size) => Err(format!("no GPU of {size}:\n{}\n{lines}", told.stdout)),
        None => Ok(()),
    }
}

/// Types each line of a block, which must go on for two seconds.
fn stays(place: &Workplace, block: &Block) -> Result<(), String> {
    for line in filled_in(&block.text).lines() {
        // The status of a program that goes on, and is ended in time.
        const STOPPED: i32 = 124;
        let told = place.run(&["timeout", "2", "bash", "-ec", line]);
        if told.status.code() != Some(STOPPED) {
            return Err(format!("it ends by itself: {told:?}\n{line}"));
        }
    }
    Ok(())
}

/// Types what a page says, in order, until something fails: where, and what.
fn walk(place: &Workplace, page: &Page) -> Result<usize, String> {
    let ways = BTreeMap::from(WAYS);
    let mut count = 0;
    for block in page.blocks().iter().filter(|block| block.is_shell()) {
        let outcome = match ways.get(block.kind.as_str()) {
            Some(Way::Typed) => typed(place, block),
            Some(Way::Stays) => stays(place, block),
            Some(Way::Elsewhere(_)) => continue,
            None => Err(format!("the mark {:?} is not known", block.kind)),
        };
        outcome.map_err(|what| format!("{}:{}: {what}", page.name(), block.line))?;
        count += 1;
    }
    Ok(count)
}

/// A reader's machine, with GPUs as the page wants them. That of the first page has nothing else.
fn place_for(page: &str) -> Workplace {
    let place = Workplace::with_checkout();
    let gpus: &[&str] = match page {
        "docs/modes.md" => &["--gpus", "3", "--mig", "0=1g.10gb,1g.10gb"],
        _ => &["--gpus", "4"],
    };
    place.plug_in_gpus(&artifacts::simulator(), gpus);
    if page == "docs/modes.md" {
        let control = artifacts::mps_control();
        let copy = format!("cp {} /srv/node/driver/usr/bin/nvidia-cuda-mps-control", control.display());
        let _ = place.type_in(&copy).expect_success("the MPS control daemon is there");
    }
    if page != "docs/workstation.md" {
        let set_up =
            "make install && gpushare configure docker --default-share 25% && systemctl reload docker";
        let _ = place.type_in(set_up).expect_success("the machine is set up");
        let web = [
            "docker",
            "run",
            "-d",
            "--name=web",
            "--stop-signal=KILL",
            "--runtime=gpushare",
            "-e",
            "GPUSHARE_MEMORY=4GiB",
        ];
        let _ = place.run(&[&web[..], &[Workplace::STAYS]].concat()).expect_success("a container runs");
    }
    place
}

/// `GPUSHARE_PAGE` chooses pages by a part of their path.
#[test]
#[ignore = "needs root, docker, podman and the release build: types commands on machines of their own"]
fn every_command_of_a_page_succeeds_for_a_reader_who_has_nothing_else() {
    if !met(NEEDS) {
        return;
    }
    let chosen = std::env::var("GPUSHARE_PAGE").unwrap_or_default();
    let mut failed = Vec::new();
    let mut count = 0;
    for page in pages() {
        let name = page.name();
        let is_here = name != "README.md" && name != "CONTRIBUTING.md" && name.contains(&chosen);
        let has_any = page.blocks().iter().any(|block| ["sh", "sh stays"].contains(&&*block.kind));
        if !is_here || !has_any {
            continue;
        }
        let start = Instant::now();
        match private(|| walk(&place_for(&name), &page)) {
            Ok(blocks) => count += blocks,
            Err(what) => failed.push(what),
        }
        println!("{:5.1} s  {name}", start.elapsed().as_secs_f64());
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
    assert!(count > 30 || !chosen.is_empty(), "{count} blocks");
}

#[test]
fn a_placeholder_is_filled_in_and_a_size_is_read_from_the_line_of_its_container() {
    assert_eq!(filled_in("docker run -d IMAGE\n"), format!("docker run -d {}\n", image::PAUSE));
    assert_eq!(filled_in("docker run IMAGE # NAME"), "docker run ubuntu # web\n");
    let lines =
        "docker run -e GPUSHARE_MEMORY=4GiB \\\n  ubuntu nvidia-smi\ngpushare update web --memory 8GiB\n";
    assert_eq!(sizes(lines), ["4096MiB"]);
}
