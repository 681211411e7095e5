//! What a dialect reads: the words of a bundle by their channels, each occurrence of it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::Policy;
use crate::channel::Trust;
use crate::container::Container;
use crate::error::{RequestError, ValueError, shortened};

/// One word of a bundle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Said<'a> {
    pub key: &'a str,
    pub value: &'a str,
    pub trust: Trust,
}

impl fmt::Display for Said<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={:?}", shortened(self.key).escape_debug(), shortened(self.value))
    }
}

impl Said<'_> {
    /// The error that says what is wrong with the value and what to write.
    pub fn wrong(&self, why: impl Into<String>) -> RequestError {
        RequestError::Malformed {
            key: shortened(self.key).escape_debug().to_string(),
            value: shortened(self.value),
            source: ValueError::Foreign(why.into()),
        }
    }
}

/// A bundle under the node's rules, less the variables that an earlier dialect took for its own.
#[derive(Debug)]
pub(crate) struct Reading<'a> {
    pub container: &'a Container,
    pub policy: &'a Policy,
    /// Variables and annotations that are spoken for.
    taken: BTreeSet<&'a str>,
    /// Of variables that stand more than once, the value that counts.
    chosen: RefCell<BTreeMap<&'a str, &'a str>>,
    notes: RefCell<Vec<String>>,
}

impl<'a> Reading<'a> {
    pub fn new(container: &'a Container, policy: &'a Policy) -> Self {
        let (chosen, notes) = (RefCell::default(), RefCell::default());
        Self { container, policy, taken: BTreeSet::new(), chosen, notes }
    }

    /// Has no later dialect see the keys that `owns` says are one's own.
    pub fn take(&mut self, owns: impl Fn(&str) -> bool) {
        let variables = self.container.env().map(|(key, _)| key);
        let annotations = self.container.annotations().keys().map(String::as_str);
        self.taken.extend(variables.chain(annotations).filter(|key| owns(key)));
    }

    /// Something that whoever asked, or the administrator, should know.
    pub fn note(&self, note: impl Into<String>) {
        const MOST: usize = 32; // a bundle may hold a hundred thousand entries that differ
        let mut notes = self.notes.borrow_mut();
        if notes.len() < MOST {
            notes.push(note.into());
        }
    }

    /// The variables that were taken, each as it counted: of several the last, which the process would see, where nobody
    /// compared them.
    pub fn standing(&self) -> Vec<(String, String)> {
        let mut standing: BTreeMap<&str, &str> =
            self.container.env().filter(|(key, _)| self.taken.contains(key)).collect();
        let chosen = self.chosen.borrow();
        for (key, value) in &mut standing {
            if let Some(counted) = chosen.get(key) {
                *value = counted;
            }
        }
        standing.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    pub fn notes(self) -> Vec<String> {
        self.notes.into_inner()
    }

    /// Every variable, doubles included, in order.
    pub fn variables(&self) -> impl Iterator<Item = Said<'a>> {
        let all = self.container.env().filter(|(key, _)| !self.taken.contains(key));
        all.map(|(key, value)| Said { key, value, trust: Trust::Environment })
    }

    /// Every annotation.
    pub fn annotations(&self) -> impl Iterator<Item = Said<'a>> {
        let all = self.container.annotations().iter().filter(|(key, _)| !self.taken.contains(key.as_str()));
        all.map(|(key, value)| self.annotated(key, value))
    }

    fn annotated(&self, key: &'a str, value: &'a str) -> Said<'a> {
        Said { key, value, trust: Trust::of_annotation(key, self.container, self.policy) }
    }

    /// The variables of this name, in order.
    pub fn named(&self, key: &str) -> impl Iterator<Item = Said<'a>> {
        let all = self.container.named(key).filter(|(name, _)| !self.taken.contains(name));
        all.map(|(key, value)| Said { key, value, trust: Trust::Environment })
    }

    /// Whether there is a variable of this name.
    pub fn has(&self, key: &str) -> bool {
        self.named(key).next().is_some()
    }

    /// The annotation of this name.
    pub fn annotation(&self, key: &str) -> Option<Said<'a>> {
        let (key, value) = self.container.annotations().get_key_value(key)?;
        (!self.taken.contains(key.as_str())).then(|| self.annotated(key, value))
    }

    /// The one value of a variable that is no amount: different ones are a conflict on every node.
    pub fn one(&self, key: &str) -> Result<Option<Said<'a>>, RequestError> {
        let mut all = self.named(key);
        let Some(first) = all.next() else { return Ok(None) };
        match all.find(|said| said.value != first.value) {
            Some(other) => Err(conflict(first, other)),
            None => Ok(Some(first)),
        }
    }

    /// The value of a variable that is an amount. Of different ones (a plugin's and a pod's, which containerd leaves side by
    /// side) the least counts where the node is lenient.
    pub fn least<T: Ord>(
        &self,
        key: &str,
        parse: impl Fn(Said<'a>) -> Result<T, RequestError>,
    ) -> Result<Option<(Said<'a>, T)>, RequestError> {
        self.least_of(self.named(key), parse)
    }

    /// Has the variable of `said` stand afterwards with another's value, which counted for it.
    pub fn stands(&self, said: Said<'a>, value: &'a str) {
        self.chosen.borrow_mut().insert(said.key, value);
    }

    /// The same of `all` words that state one amount.
    pub fn least_of<T: Ord>(
        &self,
        all: impl Iterator<Item = Said<'a>>,
        parse: impl Fn(Said<'a>) -> Result<T, RequestError>,
    ) -> Result<Option<(Said<'a>, T)>, RequestError> {
        let mut least: Option<(Said, T)> = None;
        for said in all {
            let value = parse(said)?;
            let Some((first, smallest)) = &least else {
                least = Some((said, value));
                continue;
            };
            if value == *smallest {
                continue;
            }
            if self.policy.strict {
                return Err(conflict(*first, said));
            }
            self.note(format!("{first} and {said} differ: the smaller counts"));
            if value < *smallest {
                least = Some((said, value));
            }
        }
        if let Some((said, _)) = least.as_ref().filter(|(said, _)| said.trust == Trust::Environment) {
            self.chosen.borrow_mut().insert(said.key, said.value);
        }
        Ok(least)
    }
}

pub(crate) fn conflict(first: impl fmt::Display, second: impl fmt::Display) -> RequestError {
    RequestError::Conflict { first: first.to_string(), second: second.to_string() }
}
