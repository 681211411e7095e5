//! Circles between the files of a crate. A module may use its ancestors.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{File, UseTree};

use crate::children;
use crate::source::Source;

/// The paths that a file uses and that begin with `crate`, `super` or `self`.
pub fn paths(file: &File) -> BTreeSet<Vec<String>> {
    let mut visitor = Paths::default();
    visitor.visit_file(file);
    visitor.0.retain(|path| {
        path.first().is_some_and(|first| ["crate", "super", "self"].contains(&first.as_str()))
    });
    visitor.0
}

#[derive(Default)]
struct Paths(BTreeSet<Vec<String>>);

impl<'a> Visit<'a> for Paths {
    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        flatten(&item.tree, &mut Vec::new(), &mut self.0);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.0.insert(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }
}

fn flatten(tree: &UseTree, prefix: &mut Vec<String>, all: &mut BTreeSet<Vec<String>>) {
    match tree {
        UseTree::Path(path) => {
            prefix.push(path.ident.to_string());
            flatten(&path.tree, prefix, all);
            prefix.pop();
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, prefix, all)),
        UseTree::Name(name) => _ = all.insert([&prefix[..], &[name.ident.to_string()]].concat()),
        UseTree::Rename(name) => _ = all.insert([&prefix[..], &[name.ident.to_string()]].concat()),
        UseTree::Glob(_) => _ = all.insert(prefix.clone()),
    }
}

/// Number of files that are part of a circle.
pub fn files_in_circles(sources: &BTreeMap<PathBuf, Source>) -> usize {
    let modules: BTreeMap<Vec<String>, &PathBuf> =
        sources.keys().filter_map(|path| Some((module(path)?, path))).collect();
    let edges: BTreeMap<&PathBuf, BTreeSet<&PathBuf>> =
        modules.iter().map(|(name, path)| (*path, uses(name, &sources[*path], &modules).collect())).collect();
    let reaches_itself = |start: &&PathBuf| {
        let mut seen = BTreeSet::new();
        let mut open: Vec<&PathBuf> = edges[*start].iter().copied().collect();
        while let Some(next) = open.pop() {
            if next == *start {
                return true;
            }
            if seen.insert(next) {
                open.extend(&edges[next]);
            }
        }
        false
    };
    edges.keys().filter(|start| reaches_itself(start)).count()
}

/// Names of the modules from the crate's root to that of `path`; `None` for a test.
fn module(path: &Path) -> Option<Vec<String>> {
    let parts: Vec<&str> = path.iter().filter_map(|part| part.to_str()).collect();
    let source = parts.iter().rposition(|part| *part == "src")?;
    let is_root = ["lib.rs", "main.rs"].contains(parts.last()?) && parts.len() == source + 2;
    let folder = if is_root { return Some(Vec::new()) } else { children(path) };
    Some(folder.iter().skip(source + 1).filter_map(|part| Some(part.to_str()?.to_owned())).collect())
}

/// The files whose modules `source` uses, without its own and its ancestors'.
fn uses<'m>(
    name: &'m [String],
    source: &'m Source,
    modules: &'m BTreeMap<Vec<String>, &'m PathBuf>,
) -> impl Iterator<Item = &'m PathBuf> {
    let resolved = source.paths.iter().map(|path| absolute(name, path));
    let longest = |path: Vec<String>| {
        (0..=path.len()).rev().map(|length| path[..length].to_vec()).find(|path| modules.contains_key(path))
    };
    let others = resolved.filter_map(longest).filter(|other| !name.starts_with(other));
    others.map(|other| modules[&other])
}

fn absolute(module: &[String], path: &[String]) -> Vec<String> {
    let mut all = module.to_vec();
    for part in path {
        match part.as_str() {
            "crate" => all.clear(),
            "super" => _ = all.pop(),
            "self" => {}
            _ => all.push(part.clone()),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_use_each_other_are_a_circle_and_ancestors_are_none() {
        let files = [
            ("src/lib.rs", "mod a; mod b; mod c; pub use a::X;"),
            ("src/a.rs", "use super::b::Y; mod deep;"),
            ("src/a/deep.rs", "use crate::a::X; use crate::Z;"),
            ("src/b.rs", "fn f() { crate::c::g() }"),
            ("src/c.rs", "use super::a::X;"),
        ];
        let read = |text: &str| Source::read(text, false).unwrap();
        let mut sources: BTreeMap<PathBuf, Source> =
            files.iter().map(|(path, text)| (PathBuf::from(path), read(text))).collect();
        assert_eq!(files_in_circles(&sources), 3);
        sources.insert(PathBuf::from("src/c.rs"), read("use super::X;"));
        assert_eq!(files_in_circles(&sources), 0);
    }
}
