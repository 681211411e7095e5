//! The words of a bundle as sources read them: each occurrence, with the rank of its channel.

use std::fmt;

use crate::container::{Container, Writer};
use crate::error::{RequestError, ValueError, shortened};
use crate::policy::Policy;
use crate::rank::Rank;

/// One word of a bundle.
#[derive(Clone, Copy, Debug)]
pub struct Word<'a> {
    /// The name of the variable or annotation, or the kind of what was handed over.
    pub key: &'a str,
    /// As it was written.
    pub value: &'a str,
    /// Who can have written it.
    pub rank: Rank,
    /// Whether it is a variable: podman's annotations have the rank of one, and are none.
    pub is_variable: bool,
}

impl fmt::Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={:?}", shortened(self.key).escape_debug(), shortened(self.value))
    }
}

impl<'a> Word<'a> {
    /// A variable of the bundle's.
    pub fn variable(key: &'a str, value: &'a str) -> Self {
        Self { key, value, rank: Rank::Environment, is_variable: true }
    }

    /// A part of the bundle that its engine was handed: a device node or a mount.
    pub fn handed(key: &'a str, value: &'a str) -> Self {
        Self { key, value, rank: Rank::Handed, is_variable: false }
    }

    /// The error that says what is wrong with the value and what to write.
    pub fn wrong(&self, why: impl Into<String>) -> RequestError {
        RequestError::Malformed {
            key: shortened(self.key).escape_debug().to_string(),
            value: shortened(self.value),
            source: ValueError::Foreign(why.into()),
        }
    }
}

/// The error of two words that contradict each other.
pub fn conflict(first: impl fmt::Display, second: impl fmt::Display) -> RequestError {
    RequestError::Conflict { first: first.to_string(), second: second.to_string() }
}

/// A bundle under the node's rules, less the keys that another dialect has for its own.
#[derive(Clone, Debug)]
pub struct Words<'a> {
    /// Its annotations, environment, mounts and nodes, as the engine wrote them.
    pub container: &'a Container,
    /// The node's rules.
    pub policy: &'a Policy,
    hidden: Vec<fn(&str) -> bool>,
}

impl<'a> Words<'a> {
    /// All words of the bundle.
    pub fn new(container: &'a Container, policy: &'a Policy) -> Self {
        Self { container, policy, hidden: Vec::new() }
    }

    /// The same without the keys that `owns` is true of.
    pub fn without(mut self, owns: fn(&str) -> bool) -> Self {
        self.hidden.push(owns);
        self
    }

    fn shows(&self, key: &str) -> bool {
        !self.hidden.iter().any(|owns| owns(key))
    }

    /// Every variable, doubles included, in order.
    pub fn variables(&self) -> impl Iterator<Item = Word<'a>> {
        let all = self.container.env().filter(|(key, _)| self.shows(key));
        all.map(|(key, value)| Word::variable(key, value))
    }

    /// Every annotation.
    pub fn annotations(&self) -> impl Iterator<Item = Word<'a>> {
        let all = self.container.annotations().iter().filter(|(key, _)| self.shows(key));
        all.map(|(key, value)| self.annotated(key, value))
    }

    fn annotated(&self, key: &'a str, value: &'a str) -> Word<'a> {
        Word { key, value, rank: rank_of_annotation(key, self.container, self.policy), is_variable: false }
    }

    /// The variables of this name, in order.
    pub fn named(&self, key: &str) -> impl DoubleEndedIterator<Item = Word<'a>> + use<'a> {
        let all = if self.shows(key) { self.container.named(key).collect() } else { Vec::new() };
        all.into_iter().map(|(key, value)| Word::variable(key, value))
    }

    /// Whether there is a variable of this name.
    pub fn has(&self, key: &str) -> bool {
        self.shows(key) && self.container.named(key).next().is_some()
    }

    /// The annotation of this name.
    pub fn annotation(&self, key: &str) -> Option<Word<'a>> {
        let (key, value) = self.container.annotations().get_key_value(key)?;
        self.shows(key).then(|| self.annotated(key, value))
    }

    /// The one value of a variable that is no amount: different ones are a conflict on every node.
    pub fn one(&self, key: &str) -> Result<Option<Word<'a>>, RequestError> {
        let mut all = self.named(key);
        let Some(first) = all.next() else { return Ok(None) };
        match all.find(|word| word.value != first.value) {
            Some(other) => Err(conflict(first, other)),
            None => Ok(Some(first)),
        }
    }
}

/// The rank of the annotation `key`. A bundle tells which annotations a device plugin wrote only by their names. podman
/// passes the annotations of an image, too, so below it no annotation is worth more than a variable.
pub fn rank_of_annotation(key: &str, container: &Container, policy: &Policy) -> Rank {
    let is_listed = || policy.trusted_annotations.has(key);
    match container.writer() {
        Writer::Podman => Rank::Environment,
        Writer::CriO if is_listed() && policy.crio && is_of_container(key, container) => Rank::Granted,
        Writer::CriO => Rank::Pod,
        Writer::Containerd | Writer::Other if is_listed() => Rank::Granted,
        Writer::Containerd | Writer::Other => Rank::Pod,
    }
}

/// Whether kubelet wrote it for the container itself.
fn is_of_container(key: &str, container: &Container) -> bool {
    let own = container.cri_o_annotations().get(key);
    own.is_some_and(|value| container.annotations().get(key) == Some(value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rank(annotations: serde_json::Value, key: &str, crio: bool) -> Rank {
        let container = Container::from_json(&json!({ "annotations": annotations }));
        rank_of_annotation(key, &container, &Policy { crio, ..Policy::default() })
    }

    #[test]
    fn an_annotation_is_believed_by_its_name_and_by_the_engine_that_passed_it() {
        let key = "alloc.gpushare.io/memory";
        let pod = json!({"io.kubernetes.cri.container-type": "container", key: "4GiB", "gpushare.io/memory": "4GiB"});
        assert_eq!(rank(pod.clone(), key, false), Rank::Granted);
        assert_eq!(rank(pod, "gpushare.io/memory", false), Rank::Pod);
        assert_eq!(rank(json!({key: "4GiB"}), key, false), Rank::Granted);
        // podman passes what the image's author wrote into the image's manifest, and marks its bundles last.
        let podman = json!({key: "80GiB", "io.container.manager": "libpod", "io.kubernetes.cri.container-type": "container"});
        assert_eq!(rank(podman, key, true), Rank::Environment);
    }

    #[test]
    fn cri_o_is_believed_in_what_it_says_of_the_container_alone() {
        let key = "alloc.gpushare.io/memory";
        let bundle = |own: &str| {
            json!({
                key: "4GiB", "io.kubernetes.cri-o.ContainerType": "container", "io.kubernetes.cri-o.Annotations": own,
            })
        };
        let own = r#"{"alloc.gpushare.io/memory":"4GiB"}"#;
        assert_eq!(rank(bundle(own), key, true), Rank::Granted);
        assert_eq!(rank(bundle(own), key, false), Rank::Pod, "the settings name another engine");
        assert_eq!(rank(bundle("{}"), key, true), Rank::Pod, "a pod's annotation");
        let other = r#"{"alloc.gpushare.io/memory":"1GiB"}"#;
        assert_eq!(rank(bundle(other), key, true), Rank::Pod, "another value");
    }
}
