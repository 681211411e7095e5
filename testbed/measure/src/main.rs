//! Measures the sources of the workspace: size, circles between files, closures, functions, and the language
//! of comments and names.
//!
//! Tests are code in `#[cfg(test)]` and in folders named `tests`. They count for language alone.

mod circles;
mod language;
mod source;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Parser;

use crate::language::Finding;
use crate::source::Source;

/// Prints a table of the workspace's crates.
#[derive(Parser)]
struct Arguments {
    /// Root of the checkout.
    #[arg(long, default_value = ".")]
    root: PathBuf,
    /// List each sentence and name that breaks a rule, with its place.
    #[arg(long)]
    list: bool,
}

/// Figures of one crate, or of several.
#[derive(Default)]
struct Figures {
    code: usize,
    tests: usize,
    functions: usize,
    longest: usize,
    closures: usize,
    in_circles: usize,
    openings: usize,
    names: usize,
}

impl Figures {
    fn from_sources(sources: &BTreeMap<PathBuf, Source>) -> Self {
        let mut all = Self { in_circles: circles::files_in_circles(sources), ..Self::default() };
        for source in sources.values() {
            all.code += source.code;
            all.tests += source.tests;
            all.functions += source.functions.len();
            all.longest = all.longest.max(source.functions.iter().copied().max().unwrap_or(0));
            all.closures += source.named_closures;
            all.openings += source.findings.iter().filter(|one| matches!(one, Finding::Opening(..))).count();
            all.names += source.findings.iter().filter(|one| matches!(one, Finding::Name(..))).count();
        }
        all
    }

    fn add(&mut self, other: &Self) {
        self.code += other.code;
        self.tests += other.tests;
        self.functions += other.functions;
        self.longest = self.longest.max(other.longest);
        self.closures += other.closures;
        self.in_circles += other.in_circles;
        self.openings += other.openings;
        self.names += other.names;
    }

    fn print(&self, name: &str) {
        let Self { code, tests, functions, longest, closures, in_circles, openings, names } = self;
        let per_thousand = if *code > 0 { closures * 10_000 / code } else { 0 };
        println!(
            "{name:24} {code:7} {tests:7} {functions:6} {longest:8} {closures:9} {:7}.{} {in_circles:8} {openings:9} {names:6}",
            per_thousand / 10,
            per_thousand % 10
        );
    }
}

fn main() -> Result<()> {
    let Arguments { root, list } = Arguments::parse();
    println!(
        "                            code   tests     fn  longest  closures  /1,000  circles  openings  names"
    );
    let (mut product, mut testbed) = (Figures::default(), Figures::default());
    for member in members(&root)? {
        let sources = read(&root.join(&member))?;
        if list {
            for (path, source) in &sources {
                source.findings.iter().for_each(|finding| println!("{}:{finding}", path.display()));
            }
        }
        let figures = Figures::from_sources(&sources);
        figures.print(&member);
        let is_product = !member.starts_with("test");
        if is_product { &mut product } else { &mut testbed }.add(&figures);
    }
    product.print("product");
    testbed.print("tests and testbed");
    Ok(())
}

/// Folders of the workspace's crates.
fn members(root: &Path) -> Result<Vec<String>> {
    let path = root.join("Cargo.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let manifest: toml::Table = text.parse().with_context(|| format!("cannot parse {}", path.display()))?;
    let members = manifest.get("workspace").and_then(|workspace| workspace.get("members")?.as_array());
    let members = members.with_context(|| format!("{} has no workspace.members", path.display()))?;
    Ok(members.iter().filter_map(|member| member.as_str().map(str::to_owned)).collect())
}

/// Reads the crate in `folder`. A crate in one of its subfolders is another one.
fn read(folder: &Path) -> Result<BTreeMap<PathBuf, Source>> {
    let mut sources = BTreeMap::new();
    for part in ["src", "tests", "benches", "examples", "build.rs"] {
        read_into(&mut sources, &folder.join(part), part != "src" && part != "build.rs")?;
    }
    source::mark_test_modules(&mut sources);
    Ok(sources)
}

fn read_into(sources: &mut BTreeMap<PathBuf, Source>, path: &Path, is_test: bool) -> Result<()> {
    if path.is_dir() {
        if path.join("Cargo.toml").exists() {
            return Ok(());
        }
        for entry in fs::read_dir(path)? {
            let entry = entry?.path();
            read_into(sources, &entry, is_test || entry.ends_with("tests"))?;
        }
    } else if path.is_file() && path.extension().is_some_and(|extension| extension == "rs") {
        let text = fs::read_to_string(path)?;
        let source =
            Source::read(&text, is_test).with_context(|| format!("cannot parse {}", path.display()))?;
        sources.insert(path.to_owned(), source);
    }
    Ok(())
}

/// The folder with the files of a file's modules.
fn children(path: &Path) -> PathBuf {
    let is_root = ["lib.rs", "main.rs", "mod.rs"].iter().any(|name| path.ends_with(name));
    if is_root { path.parent().unwrap_or(path).to_owned() } else { path.with_extension("") }
}
