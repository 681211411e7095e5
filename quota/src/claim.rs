//! Resource claims: shares that a cluster's scheduler placed on this node. The node's agent reserves them
//! before their containers exist.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A claim that holds a lease. The claim is a member of its lease like a container, so the lease lasts while
/// containers come and go, and ends when the claim is released and its last container is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResourceClaim {
    /// The claim's name, for users.
    pub name: ClaimName,
    /// The secret that a container must present to join the lease.
    pub token: ClaimToken,
    /// UIDs of the pods that the cluster allows to use it; `None` allows all pods.
    pub pods: Option<Vec<String>>,
    /// The request in words. A claim that is reserved again with the same words keeps its lease.
    pub(crate) request: String,
}

/// A claim's name in its cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimName {
    /// The API server's UID. It identifies the claim in the quota store, as a container id does.
    pub uid: String,
    /// The Kubernetes namespace. Only containers of this namespace may join the lease.
    pub namespace: String,
    /// The name within the namespace.
    pub name: String,
}

impl fmt::Display for ClaimName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A secret of 128 random bits, in hexadecimal digits. It cannot be guessed from a claim's UID or name.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClaimToken(String);

/// Length of a token in characters.
const LENGTH: usize = 32;

/// The text is not a valid token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a claim's token is {LENGTH} of the characters 0-9 a-f")]
pub struct BadToken;

impl ClaimToken {
    /// Generates a new token.
    ///
    /// # Errors
    /// When the kernel's random numbers cannot be read.
    pub(crate) fn random() -> io::Result<Self> {
        let mut bytes = [0; LENGTH / 2];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// The text that a container presents.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ClaimToken {
    type Err = BadToken;

    fn from_str(text: &str) -> Result<Self, BadToken> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let sound = text.len() == LENGTH && text.bytes().all(is_digit);
        sound.then(|| Self(text.to_owned())).ok_or(BadToken)
    }
}

impl TryFrom<String> for ClaimToken {
    type Error = BadToken;

    fn try_from(text: String) -> Result<Self, BadToken> {
        text.parse()
    }
}

impl From<ClaimToken> for String {
    fn from(token: ClaimToken) -> Self {
        token.0
    }
}

impl fmt::Debug for ClaimToken {
    /// Hides the secret from logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClaimToken(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_random_and_read_as_it_was_written() {
        let (one, other) = (ClaimToken::random().unwrap(), ClaimToken::random().unwrap());
        assert_ne!(one, other);
        assert_eq!(one.as_str().parse(), Ok(one.clone()));
        assert!(!format!("{one:?}").contains(one.as_str()));
    }

    #[test]
    fn what_is_no_token_is_refused() {
        let long = "0".repeat(LENGTH + 1);
        for text in ["", "0", &long, &"g".repeat(LENGTH), &"A".repeat(LENGTH), &"\u{e9}".repeat(LENGTH / 2)] {
            assert_eq!(text.parse::<ClaimToken>(), Err(BadToken), "{text:?}");
        }
    }
}
