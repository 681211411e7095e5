//! Rules for comments and names.

use std::fmt;

/// Words that begin no sentence: it begins with its subject or with a verb.
const OPENINGS: [&str; 9] = ["What", "Who", "Whoever", "Whose", "That", "Of", "As", "Nor", "One that"];

/// Names that say too little: a name is a noun or a verb of the field.
const NAMES: [&str; 11] =
    ["told", "its", "asked", "said", "of", "look", "Held", "Known", "Which", "Whose", "Way"];

/// A sentence or name that breaks a rule, with its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A sentence that begins with one of [`OPENINGS`], with the line of its comment.
    Opening(usize, &'static str),
    /// An identifier of [`NAMES`] that the file defines, with its line.
    Name(usize, String),
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Opening(line, opening) => write!(formatter, "{line}: a sentence begins with {opening:?}"),
            Self::Name(line, name) => write!(formatter, "{line}: the name {name:?}"),
        }
    }
}

/// Checks the comments of a file with this text, and the names that it defines.
pub fn check(text: &str, names: &[(String, usize)]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = comments(text)
        .into_iter()
        .flat_map(|(line, comment)| {
            sentences(&comment)
                .filter_map(opening)
                .map(|opening| Finding::Opening(line, opening))
                .collect::<Vec<_>>()
        })
        .collect();
    let bad = names.iter().filter(|(name, _)| NAMES.contains(&name.as_str()));
    findings.extend(bad.map(|(name, line)| Finding::Name(*line, name.clone())));
    findings
}

/// Comments on consecutive lines as one text each, with the line on which it begins. An empty comment line
/// ends a text.
fn comments(text: &str) -> Vec<(usize, String)> {
    let mut all: Vec<(usize, String)> = Vec::new();
    let mut continues = false;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        let comment = line.strip_prefix("//").map(|rest| rest.trim_start_matches(['/', '!']).trim());
        match (comment, all.last_mut()) {
            (Some(comment), Some((_, last))) if continues && !comment.is_empty() => {
                last.push(' ');
                last.push_str(comment);
            }
            (Some(comment), _) if !comment.is_empty() => all.push((number, comment.to_owned())),
            _ => {}
        }
        continues = comment.is_some_and(|comment| !comment.is_empty());
    }
    all
}

fn sentences(comment: &str) -> impl Iterator<Item = &str> {
    comment.split(". ").map(str::trim)
}

fn opening(sentence: &str) -> Option<&'static str> {
    let begins = |opening: &&&str| {
        sentence.strip_prefix(**opening).is_some_and(|rest| rest.starts_with([' ', ',', '\'']))
    };
    OPENINGS.iter().find(begins).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_and_names_that_break_a_rule_are_found() {
        let text = "/// Returns it. What\n/// else.\nfn of() {}\n// Who waits\n//\n// Offers nothing.\n";
        let names = [("of".to_owned(), 3), ("offer".to_owned(), 3)];
        assert_eq!(
            check(text, &names),
            [Finding::Opening(1, "What"), Finding::Opening(4, "Who"), Finding::Name(3, "of".to_owned())]
        );
    }
}
