//! Events on a node since the last poll: refusals, ended leases, findings, new shares.

use std::time::Duration;

use crate::ended;
use crate::found::{self, Found};
use crate::journal::Follower;
use crate::lease::PastLease;
use crate::made;
use crate::refusals::{self, Refused};
use crate::state::StateFolder;

/// Follows the journals of a state folder.
#[derive(Debug)]
pub struct Following {
    refused: Follower,
    ended: Follower,
    found: Follower,
    made: Follower,
}

/// The events since the last poll, oldest first.
#[derive(Debug, Default)]
pub struct News {
    /// Refused containers.
    pub refused: Vec<Refused>,
    /// Leases that ended.
    pub ended: Vec<PastLease>,
    /// Detected actions against shares.
    pub found: Vec<Found>,
    /// How long new shares took to make.
    pub made: Vec<Duration>,
}

impl Following {
    /// Starts at the current end of the journals.
    pub fn of(state: &StateFolder) -> Self {
        let state = state.path();
        Self {
            refused: Follower::of(&refusals::journal(state)),
            ended: Follower::of(&ended::journal(state)),
            found: Follower::of(&found::journal(state)),
            made: Follower::of(&made::journal(state)),
        }
    }

    /// Returns the events since the last call.
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
