//! What is new on a node since the last look: refusals, leases that ended, what was found, shares that were made.

use std::time::Duration;

use crate::ended;
use crate::found::{self, Found};
use crate::journal::Follower;
use crate::lease::PastLease;
use crate::made;
use crate::refusals::{self, Refused};
use crate::state::StateFolder;

/// Follows the notes of a state folder.
#[derive(Debug)]
pub struct Following {
    refused: Follower,
    ended: Follower,
    found: Follower,
    made: Follower,
}

/// What was noted since the last look, oldest first.
#[derive(Debug, Default)]
pub struct News {
    /// Containers that were refused.
    pub refused: Vec<Refused>,
    /// Leases that ended.
    pub ended: Vec<PastLease>,
    /// What was found to be done against shares.
    pub found: Vec<Found>,
    /// How long shares took that were made.
    pub made: Vec<Duration>,
}

impl Following {
    /// Begins with what is noted after this.
    pub fn of(state: &StateFolder) -> Self {
        let state = state.path();
        Self {
            refused: Follower::of(&refusals::journal(state)),
            ended: Follower::of(&ended::journal(state)),
            found: Follower::of(&found::journal(state)),
            made: Follower::of(&made::journal(state)),
        }
    }

    /// What was noted since the last call.
    pub fn news(&mut self, state: &StateFolder) -> News {
        let state = state.path();
        News {
            refused: self.refused.lines(&refusals::journal(state), refusals::read),
            ended: self.ended.lines(&ended::journal(state), ended::read),
            found: self.found.lines(&found::journal(state), found::read),
            made: self.made.lines(&made::journal(state), made::read),
        }
    }
}
