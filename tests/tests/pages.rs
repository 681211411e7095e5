//! The pages for people: their links lead somewhere, their commands have the options that they name, and
//! their settings are settings.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use gpushare_config::Config;
use gpushare_tests::artifacts::{self, checkout};
use gpushare_tests::command;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::pages::{Block, Page, blocks, pages, prose};

/// Commands that have commands of their own.
const GROUPS: [&str; 8] = ["cdi", "config", "create", "inventory", "mps", "rollout", "secret", "system"];

/// The name by which links call a heading, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|&letter| letter.is_alphanumeric() || " -_".contains(letter));
    kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).into_iter().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#'))).collect()
}

/// The targets of a page's links within the checkout.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in prose(text) {
        let without_code: String = line.split('`').step_by(2).collect();
        let targets = without_code.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        let targets = targets.map(|(target, _)| target.to_owned());
        found.extend(targets.filter(|target| !target.contains("://") && !target.starts_with("mailto:")));
    }
    found
}

/// What is wrong with a link of `page`; `None` if nothing is.
fn broken(page: &Page, link: &str) -> Option<String> {
    let (file, heading) = link.split_once('#').map_or((link, None), |(file, heading)| (file, Some(heading)));
    let target = match file {
        "" => page.path.clone(),
        file => page.path.with_file_name(file),
    };
    if !target.exists() {
        return Some(format!("{}: {link}: there is no such file", page.path.display()));
    }
    let heading = heading?;
    let text = fs::read_to_string(&target).ok()?;
    (!anchors(&text).contains(heading))
        .then(|| format!("{}: {link}: there is no such heading", page.path.display()))
}

/// The commands of a block, each as its words: without `sudo`, variables before the program, and comments.
fn commands(block: &str) -> Vec<Vec<String>> {
    let joined = block.replace("\\\n", " ");
    let lines = joined.lines().map(|line| line.split(" #").next().unwrap_or_default());
    let lines = lines.filter(|line| !line.starts_with('#'));
    let single = lines.flat_map(|line| line.split(['|', ';', '&']));
    let words = single.map(|command| {
        let words =
            command.split_whitespace().map(|word| word.trim_matches(['(', ')', '\'', '"']).to_owned());
        words.skip_while(|word| word == "sudo" || word.contains('=')).collect::<Vec<_>>()
    });
    words.filter(|words| !words.is_empty()).collect()
}

/// A command: the words that name it, and the options that it is called by.
fn called(words: &[String]) -> (Vec<&str>, Vec<&str>) {
    // kubectl takes a namespace before its command.
    let first = if words.get(1).is_some_and(|word| word == "-n") { 3 } else { 1 };
    let plain = words.iter().skip(first).map(String::as_str).take_while(|word| !word.starts_with('-'));
    let mut name: Vec<&str> = Vec::new();
    for word in plain {
        if name.last().is_some_and(|group| !GROUPS.contains(group)) {
            break;
        }
        name.push(word);
    }
    let options = words.iter().filter(|word| word.starts_with("--"));
    (name, options.map(|word| word.split('=').next().unwrap_or(word)).collect())
}

#[test]
fn every_link_of_a_page_leads_to_a_file_and_to_a_heading() {
    let pages = pages();
    assert!(pages.len() > 20, "{} pages", pages.len());
    let broken: Vec<String> = pages
        .iter()
        .flat_map(|page| links(&page.text).into_iter().filter_map(|link| broken(page, &link)))
        .collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn every_block_of_settings_in_a_page_is_read_without_a_mistake() {
    let mut count = 0;
    for page in pages() {
        for block in blocks(&page.text).into_iter().filter(|block| block.kind == "toml") {
            if let Err(why) = Config::from_text(&page.path, &block.text, Path::new("/usr/bin")) {
                panic!("{why}: {}\n{}", page.path.display(), block.text);
            }
            count += 1;
        }
    }
    assert!(count >= 4, "{count} blocks");
}

#[test]
#[ignore = "needs the release build, kubectl and helm: asks programs for help"]
fn every_command_of_a_page_has_the_options_that_it_is_called_by() {
    if !met(&[Need::Kubectl, Need::Helm]) {
        return;
    }
    let mut count = 0;
    for page in pages() {
        let blocks = page.blocks().into_iter().filter(Block::is_shell);
        for words in blocks.flat_map(|block| commands(&block.text)) {
            let program = match words[0].as_str() {
                "gpushare" => artifacts::cli(),
                "gpushare-simulator" => artifacts::simulator(),
                "kubectl" => artifacts::kubectl(),
                "helm" => artifacts::helm(),
                _ => continue,
            };
            let (name, options) = called(&words);
            // A plugin of ours, whose options its own tests know.
            if name.first() == Some(&"gpushare") {
                continue;
            }
            let told = command::run(Command::new(program).args(&name).arg("--help"));
            assert!(told.success(), "{}: {words:?}: {}", page.path.display(), told.stderr);
            let known: BTreeSet<&str> =
                told.stdout.split(|c: char| c.is_whitespace() || ",=:[".contains(c)).collect();
            for option in options.into_iter().filter(|option| !of_every_kubectl(&words[0], option)) {
                assert!(known.contains(option), "{}: {words:?} has no {option}", page.path.display());
            }
            count += 1;
        }
    }
    assert!(count > 60, "{count} commands");
}

/// Options that kubectl lists apart from those of a command.
fn of_every_kubectl(program: &str, option: &str) -> bool {
    program == "kubectl" && ["--namespace", "-n"].contains(&option)
}

/// Code in backticks of a line, each with whether it directly follows the one before.
fn code(line: &str) -> Vec<(&str, bool)> {
    let parts: Vec<&str> = line.split('`').collect();
    let follows = |at: usize| at > 1 && parts[at - 1] == " ";
    (1..parts.len()).step_by(2).map(|at| (parts[at], follows(at))).collect()
}

#[test]
fn the_map_names_files_that_exist_and_what_stands_in_them() {
    const MAP: &str = "docs/architecture.md";
    let text = fs::read_to_string(checkout().join(MAP)).expect("the map can be read");
    let (mut count, mut source) = (0, None);
    for (number, line) in (1..).zip(text.lines()) {
        for (word, follows) in code(line) {
            let is_file = word.contains('/') && word.ends_with(".rs") && !word.contains(char::is_uppercase);
            if is_file {
                let read = fs::read_to_string(checkout().join(word));
                source = Some((word, read.unwrap_or_else(|error| panic!("{MAP}:{number}: {word}: {error}"))));
                count += 1;
            } else if let Some((file, source)) = source.as_ref().filter(|_| follows) {
                let name = word.rsplit("::").next().unwrap_or(word).trim_end_matches("()");
                assert!(source.contains(name), "{MAP}:{number}: {file} has no {word}");
            } else {
                source = None;
            }
        }
    }
    assert!(count > 100, "{count} files");
}

/// Pages whose indented lines are no commands of a reader: pictures, and what a developer types.
const OTHERS: [&str; 3] = ["CONTRIBUTING.md", "docs/architecture.md", "docs/dialects.md"];

#[test]
fn every_command_of_a_page_stands_in_a_block_that_says_its_kind() {
    const KINDS: [&str; 11] = [
        "sh",
        "sh cluster",
        "sh download",
        "sh package",
        "sh slurm",
        "sh source",
        "sh stays",
        "json",
        "text",
        "toml",
        "yaml",
    ];
    for page in pages().iter().filter(|page| !OTHERS.contains(&&*page.name())) {
        for block in page.blocks() {
            let kind = &block.kind;
            assert!(KINDS.contains(&kind.as_str()), "{}:{}: kind {kind:?}", page.name(), block.line);
        }
        let fenced: String = page.blocks().iter().map(|block| block.text.as_str()).collect();
        for line in page.text.lines().filter(|line| line.starts_with("    ")) {
            let words = commands(line.trim_start());
            let Some(first) = words.first().and_then(|words| words.first()) else { continue };
            let is_command = PROGRAMS.contains(&first.as_str());
            let hidden = is_command && !fenced.contains(line.trim());
            assert!(!hidden, "{}: a command outside of a block: {line}", page.name());
        }
    }
}

/// What a line of commands begins with.
const PROGRAMS: [&str; 12] = [
    "docker",
    "gpushare",
    "gpushare-kube",
    "gpushare-simulator",
    "helm",
    "kubectl",
    "make",
    "openssl",
    "podman",
    "sbatch",
    "srun",
    "systemctl",
];

#[test]
fn a_link_is_found_in_prose_alone_and_a_heading_by_its_name() {
    let text = "# A b: `c`, d's\n[x](#a-b-c-ds) `[y](z)` [`w`](v.md)\n```sh\n[u](t)\n```\n    [s](r)\n";
    assert_eq!(links(text), ["#a-b-c-ds", "v.md"]);
    let page = Page { path: checkout().join("README.md"), text: text.to_owned() };
    for (link, wrong) in
        [("Cargo.toml", false), ("no-such-file.md", true), ("docs/modes.md#no-heading", true)]
    {
        assert_eq!(broken(&page, link).is_some(), wrong, "{link}");
    }
    assert!(anchors(text).contains("a-b-c-ds"));
}

#[test]
fn a_command_is_read_without_sudo_variables_and_comments() {
    let block = "A=b sudo gpushare configure docker \\\n    --default-share 25%   # --no\ncat x | gpushare cdi list\n";
    let found = commands(block);
    let found: Vec<_> =
        found.iter().filter(|words| words[0] == "gpushare").map(|words| called(words)).collect();
    assert_eq!(found, [(vec!["configure"], vec!["--default-share"]), (vec!["cdi", "list"], vec![])]);
}
