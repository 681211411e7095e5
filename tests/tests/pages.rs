//! The pages for people: their links lead somewhere, their commands have the options that they name, and
//! their settings are settings.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpushare_config::Config;
use gpushare_tests::artifacts::{self, checkout};
use gpushare_tests::command;

/// Commands of `gpushare` that have commands of their own.
const GROUPS: [&str; 5] = ["cdi", "config", "inventory", "mps", "system"];

/// A page: its path, and its lines.
struct Page {
    path: PathBuf,
    text: String,
}

/// A fenced block: the word behind its first fence, and its text without the fence's indentation.
struct Block {
    kind: String,
    text: String,
}

/// All pages: those of the root, of `docs`, and of `examples` with its folders.
fn pages() -> Vec<Page> {
    let examples = checkout().join("examples");
    let mut folders = vec![checkout().to_path_buf(), checkout().join("docs"), examples.clone()];
    folders.extend(entries(&examples).into_iter().filter(|path| path.is_dir()));
    let files = folders.iter().flat_map(|folder| entries(folder));
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "md"));
    files.map(|path| Page { text: fs::read_to_string(&path).expect("a page can be read"), path }).collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).expect("the folder is there").flatten().map(|entry| entry.path()).collect()
}

/// The lines outside of fenced blocks and of indented code.
fn prose(text: &str) -> Vec<&str> {
    let mut fenced = false;
    let outside = |line: &&str| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fence && !fenced && !line.starts_with("    ")
    };
    text.lines().filter(outside).collect()
}

fn blocks(text: &str) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut indent = None;
    for line in text.lines() {
        let fence = line.trim_start().strip_prefix("```");
        match (indent, fence) {
            (None, Some(kind)) => {
                indent = Some(line.len() - line.trim_start().len());
                found.push(Block { kind: kind.to_owned(), text: String::new() });
            }
            (Some(_), Some(_)) => indent = None,
            (Some(indent), None) => {
                let block = found.last_mut().expect("a block has begun");
                block.text.push_str(line.get(indent..).unwrap_or_default());
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    found
}

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

/// A command of one of our programs: the words that name it, and the options that it is called by.
fn called(words: &[String]) -> (Vec<&str>, Vec<&str>) {
    let plain = words.iter().skip(1).map(String::as_str).take_while(|word| !word.starts_with('-'));
    let deep = words.get(1).is_some_and(|word| GROUPS.contains(&word.as_str()));
    let name = plain.take(if deep { 2 } else { 1 }).collect();
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
#[ignore = "needs the release build: asks its programs for help"]
fn every_command_of_a_page_has_the_options_that_it_is_called_by() {
    let mut count = 0;
    for page in pages() {
        let blocks = blocks(&page.text).into_iter().filter(|block| block.kind == "sh");
        for words in blocks.flat_map(|block| commands(&block.text)) {
            let program = match words[0].as_str() {
                "gpushare" => artifacts::cli(),
                "gpushare-simulator" => artifacts::simulator(),
                _ => continue,
            };
            let (name, options) = called(&words);
            let told = command::run(Command::new(program).args(&name).arg("--help"));
            assert!(told.success(), "{}: {words:?}: {}", page.path.display(), told.stderr);
            let known: BTreeSet<&str> = told.stdout.split(|c: char| c.is_whitespace() || c == ',').collect();
            for option in options {
                assert!(known.contains(option), "{}: {words:?} has no {option}", page.path.display());
            }
            count += 1;
        }
    }
    assert!(count > 20, "{count} commands");
}

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
