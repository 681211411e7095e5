//! Figures of one file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::Result;
use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Block, Expr, ImplItemFn, Item, ItemFn, ItemMod, Local, Pat, TraitItemFn};

use crate::children;
use crate::circles;
use crate::language::{self, Finding};

/// One file.
#[derive(Default)]
pub struct Source {
    /// Lines of code outside of tests, without comments and blanks.
    pub code: usize,
    /// Lines of code in tests.
    pub tests: usize,
    /// Lines of each function's body outside of tests.
    pub functions: Vec<usize>,
    /// Closures outside of tests that `let` gives a name.
    pub named_closures: usize,
    /// Paths that it uses, from the crate's root on (`crate`) or from its own module on (`super`, `self`).
    pub paths: BTreeSet<Vec<String>>,
    /// Sentences and names that break a rule.
    pub findings: Vec<Finding>,
    /// Modules that are compiled for tests alone, and have a file of their own.
    test_modules: Vec<String>,
}

impl Source {
    /// Measures a file with this text.
    pub fn read(text: &str, is_test: bool) -> Result<Self> {
        let file = syn::parse_file(text)?;
        let mut lines = BTreeSet::new();
        token_lines(text.parse::<TokenStream>().map_err(|error| anyhow::anyhow!("{error}"))?, &mut lines);
        let trimmed: Vec<&str> = text.lines().map(str::trim).collect();
        lines.retain(|line| trimmed.get(line - 1).is_some_and(|line| !line.starts_with("//")));
        let mut visitor = Visitor { is_test, ..Visitor::default() };
        visitor.visit_file(&file);
        let in_tests = |line: &usize| is_test || visitor.test_lines.contains(line);
        let tests = lines.iter().filter(|line| in_tests(line)).count();
        Ok(Self {
            code: lines.len() - tests,
            tests,
            functions: visitor.functions,
            named_closures: visitor.named_closures,
            paths: if is_test { BTreeSet::new() } else { circles::paths(&file) },
            findings: language::check(text, &visitor.names),
            test_modules: visitor.test_modules,
        })
    }

    fn become_test(&mut self) {
        self.tests += std::mem::take(&mut self.code);
        self.functions.clear();
        self.named_closures = 0;
        self.paths.clear();
    }
}

/// Counts files of modules that are compiled for tests alone as tests.
pub fn mark_test_modules(sources: &mut BTreeMap<PathBuf, Source>) {
    let folders: Vec<PathBuf> = sources
        .iter()
        .flat_map(|(path, source)| source.test_modules.iter().map(|name| children(path).join(name)))
        .collect();
    for (path, source) in sources {
        if folders.iter().any(|folder| path.starts_with(folder) || path == &folder.with_extension("rs")) {
            source.become_test();
        }
    }
}

fn token_lines(tokens: TokenStream, lines: &mut BTreeSet<usize>) {
    for token in tokens {
        let span = token.span();
        if let TokenTree::Group(group) = token {
            lines.extend([group.span_open().start().line, group.span_close().end().line]);
            token_lines(group.stream(), lines);
        } else {
            lines.extend(span.start().line..=span.end().line);
        }
    }
}

#[derive(Default)]
struct Visitor {
    is_test: bool,
    test_lines: BTreeSet<usize>,
    functions: Vec<usize>,
    named_closures: usize,
    test_modules: Vec<String>,
    /// Names that the file defines, with their lines.
    names: Vec<(String, usize)>,
}

impl Visitor {
    fn function(&mut self, attributes: &[Attribute], name: &syn::Ident, body: Option<&Block>) {
        self.names.push((name.to_string(), name.span().start().line));
        if let Some(body) = body.filter(|_| !self.is_test && !is_for_tests(attributes)) {
            let span = body.span();
            self.functions.push(span.end().line - span.start().line + 1);
        }
    }
}

impl<'a> Visit<'a> for Visitor {
    fn visit_item(&mut self, item: &'a Item) {
        let was_test = self.is_test;
        if is_for_tests(attributes(item)) {
            self.is_test = true;
            let span = item.span();
            self.test_lines.extend(span.start().line..=span.end().line);
        }
        let ident = match item {
            Item::Struct(one) => Some(&one.ident),
            Item::Enum(one) => Some(&one.ident),
            Item::Trait(one) => Some(&one.ident),
            Item::Type(one) => Some(&one.ident),
            Item::Const(one) => Some(&one.ident),
            Item::Static(one) => Some(&one.ident),
            _ => None,
        };
        self.names.extend(ident.map(|ident| (ident.to_string(), ident.span().start().line)));
        visit::visit_item(self, item);
        self.is_test = was_test;
    }

    fn visit_item_mod(&mut self, module: &'a ItemMod) {
        if module.content.is_none() && is_for_tests(&module.attrs) {
            self.test_modules.push(module.ident.to_string());
        }
        visit::visit_item_mod(self, module);
    }

    fn visit_item_fn(&mut self, function: &'a ItemFn) {
        self.function(&function.attrs, &function.sig.ident, Some(&function.block));
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'a ImplItemFn) {
        self.function(&function.attrs, &function.sig.ident, Some(&function.block));
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'a TraitItemFn) {
        self.function(&function.attrs, &function.sig.ident, function.default.as_ref());
        visit::visit_trait_item_fn(self, function);
    }

    fn visit_local(&mut self, local: &'a Local) {
        let is_closure = local.init.as_ref().is_some_and(|init| matches!(&*init.expr, Expr::Closure(_)));
        if is_closure && !self.is_test {
            self.named_closures += 1;
        }
        visit::visit_local(self, local);
    }

    fn visit_pat(&mut self, pattern: &'a Pat) {
        if let Pat::Ident(ident) = pattern {
            self.names.push((ident.ident.to_string(), ident.ident.span().start().line));
        }
        visit::visit_pat(self, pattern);
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(one) => &one.attrs,
        Item::Enum(one) => &one.attrs,
        Item::Fn(one) => &one.attrs,
        Item::Impl(one) => &one.attrs,
        Item::Mod(one) => &one.attrs,
        Item::Static(one) => &one.attrs,
        Item::Struct(one) => &one.attrs,
        Item::Trait(one) => &one.attrs,
        Item::Type(one) => &one.attrs,
        Item::Use(one) => &one.attrs,
        _ => &[],
    }
}

/// Whether an item has `#[cfg(test)]`, also as a part of a condition, or `#[test]`.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let is_condition = attribute.path().is_ident("cfg")
            && attribute
                .meta
                .require_list()
                .is_ok_and(|list| list.tokens.clone().into_iter().any(|token| token.to_string() == "test"));
        is_condition || attribute.path().is_ident("test")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "//! A file.\n\nuse crate::a;\n\n/// Does it.\nfn one() {\n    // Nothing.\n    let twice = |x: u32| {\n        x * 2\n    };\n    twice(a::b());\n}\n\n#[cfg(test)]\nmod tests {\n    fn two() {}\n}\n\n#[cfg(test)]\nmod more;\n";

    #[test]
    fn comments_blanks_and_tests_are_no_code() {
        let source = Source::read(TEXT, false).unwrap();
        assert_eq!((source.code, source.tests), (7, 6));
        assert_eq!((source.functions, source.named_closures), (vec![7], 1));
        assert_eq!(source.test_modules, ["more"]);
        let all = Source::read(TEXT, true).unwrap();
        assert_eq!((all.code, all.tests, all.named_closures), (0, 13, 0));
    }

    #[test]
    fn files_of_test_modules_are_tests() {
        let mut sources = BTreeMap::new();
        for path in ["src/lib.rs", "src/more.rs", "src/more/deep.rs", "src/other.rs"] {
            sources.insert(PathBuf::from(path), Source::read(TEXT, false).unwrap());
        }
        mark_test_modules(&mut sources);
        let code: Vec<usize> = sources.values().map(|source| source.code).collect();
        assert_eq!(code, [7, 0, 0, 7]);
    }
}
