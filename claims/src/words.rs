//! The words of a bundle as sources read them. Each occurrence has the rank of its channel.

use std::fmt;

use crate::container::{Container, Writer};
use crate::error::{RequestError, ValueError, shortened};
use crate::policy::Policy;
use crate::rank::Rank;

/// One word of a bundle: a variable, an annotation, or something that the engine was handed.
#[derive(Clone, Copy, Debug)]
pub struct Word<'a> {
    /// Name of the variable or annotation, or the kind of handed-over device or mount.
    pub key: &'a str,
    /// The value exactly as written.
    pub value: &'a str,
    /// The possible author, which decides how far the word is trusted.
    pub rank: Rank,
    /// Whether it is a variable. The rank does not show this: annotations in podman bundles have the rank of
    /// variables.
    pub is_variable: bool,
}

impl fmt::Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={:?}", shortened(self.key).escape_debug(), shortened(self.value))
    }
}

impl<'a> Word<'a> {
    /// A variable of the bundle, with the lowest rank.
    pub fn variable(key: &'a str, value: &'a str) -> Self {
        Self { key, value, rank: Rank::Environment, is_variable: true }
    }

    /// A device node or mount that the engine was handed, with the highest rank.
    pub fn handed(key: &'a str, value: &'a str) -> Self {
        Self { key, value, rank: Rank::Handed, is_variable: false }
    }

    /// The error for a value that is invalid in this dialect. `why` names the mistake and what to write
    /// instead.
    pub fn wrong(&self, why: impl Into<String>) -> RequestError {
        RequestError::Malformed {
            key: shortened(self.key).escape_debug().to_string(),
            value: shortened(self.value),
            source: ValueError::Foreign(why.into()),
        }
    }
}

/// The error for two words that contradict each other.
pub fn conflict(first: impl fmt::Display, second: impl fmt::Display) -> RequestError {
    RequestError::Conflict { first: first.to_string(), second: second.to_string() }
}

/// A bundle's words under the node's rules, without the keys that another dialect owns.
#[derive(Clone, Debug)]
pub struct Words<'a> {
    /// The bundle's content as the engine wrote it, hidden keys included.
    pub container: &'a Container,
    /// The node's rules, which decide the rank of annotations.
    pub policy: &'a Policy,
    hidden: Vec<fn(&str) -> bool>,
}

impl<'a> Words<'a> {
    /// All words of the bundle, with no key hidden.
    pub fn new(container: &'a Container, policy: &'a Policy) -> Self {
        Self { container, policy, hidden: Vec::new() }
    }

    /// Hides the keys for which `owns` returns true.
    pub fn without(mut self, owns: fn(&str) -> bool) -> Self {
        self.hidden.push(owns);
        self
    }

    fn shows(&self, key: &str) -> bool {
        !self.hidden.iter().any(|owns| owns(key))
    }

    /// Every visible variable, in order, duplicates included.
    pub fn variables(&self) -> impl Iterator<Item = Word<'a>> {
        let all = self.container.env().filter(|(key, _)| self.shows(key));
        all.map(|(key, value)| Word::variable(key, value))
    }

    /// Every visible annotation, in the order of the keys.
    pub fn annotations(&self) -> impl Iterator<Item = Word<'a>> {
        let all = self.container.annotations().iter().filter(|(key, _)| self.shows(key));
        all.map(|(key, value)| self.annotated(key, value))
    }

    fn annotated(&self, key: &'a str, value: &'a str) -> Word<'a> {
        Word { key, value, rank: rank_of_annotation(key, self.container, self.policy), is_variable: false }
    }

    /// The variables with this name, in order; none if the key is hidden.
    pub fn named(&self, key: &str) -> impl DoubleEndedIterator<Item = Word<'a>> + use<'a> {
        let all = if self.shows(key) { self.container.named(key).collect() } else { Vec::new() };
        all.into_iter().map(|(key, value)| Word::variable(key, value))
    }

    /// Whether there is a visible variable with this name.
    pub fn has(&self, key: &str) -> bool {
        self.shows(key) && self.container.named(key).next().is_some()
    }

    /// The annotation with this name; `None` if the key is hidden.
    pub fn annotation(&self, key: &str) -> Option<Word<'a>> {
        let (key, value) = self.container.annotations().get_key_value(key)?;
        self.shows(key).then(|| self.annotated(key, value))
    }

    /// The value of a variable that states no amount. Two different values are a conflict on every node,
    /// strict or not.
    pub fn one(&self, key: &str) -> Result<Option<Word<'a>>, RequestError> {
        let mut all = self.named(key);
        let Some(first) = all.next() else { return Ok(None) };
        let other = all.find(|word| word.value != first.value);
        other.map_or(Ok(Some(first)), |other| Err(conflict(first, other)))
    }
}

/// The rank of the annotation `key`. Only the name of an annotation shows whether a device plugin wrote it.
/// podman also passes an image's annotations, so in its bundles an annotation counts no more than a variable.
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

/// Whether kubelet wrote the annotation for the container itself, according to CRI-O's list of the
/// container's own annotations.
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
        // podman passes the annotations of the image's manifest and sets its own mark last.
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
