//! When the programs of containers run on a card, as it is set from outside of the containers.
//!
//! A card's own scheduler lets each channel group run for its slice, in turn with the others, and not at all
//! while its channels are stopped. This crate says what a container's supervisor has to tell the card. It
//! performs nothing and knows no clock, so that whole days of it can be tried in a second.
//!
//! | policy | how | module |
//! |---|---|---|
//! | `fixed` | a window in each frame, outside of which the container is stopped | [`windows`], its place in [`frame`] |
//! | `burst`, and no limit | slices in proportion to shares | [`slices`] |
//! | a ceiling | slices, in a window of what `fixed` containers leave | both |
//!
//! All times are microseconds. Those of an H200 with driver 580: stopping a container's channels takes a call
//! of 500, starting them one of 300, and a switch between two groups 185 of work.

pub mod controller;
pub mod frame;
pub mod slices;
pub mod windows;

use frame::{Frame, Place};

/// How a container shares the time of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// A guarantee and a cap: a window in each frame.
    Fixed(Place),
    /// At least its share while others work, and more while they do not.
    Burst {
        /// Per cent of the card.
        share: u32,
        /// The most that it gets, in per cent of what `fixed` containers leave; 100 is no ceiling.
        ceiling: u32,
    },
    /// A part of what is left, without a promise.
    Unlimited,
}

/// A container on a card, as everybody knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its lease.
    pub lease: i64,
    /// How it shares.
    pub policy: Policy,
    /// Whether it has a context and is not paused. The window of one that has none belongs to the others.
    pub is_present: bool,
    /// How many of its channel groups work.
    pub working: u32,
}

/// How many of so many channel groups of a container work, where the card's own record says how many had the
/// engine of late. One that has contexts counts, whether it works or not: it may begin at any time.
pub fn working(groups: u32, recorded: Option<u32>) -> u32 {
    recorded.map_or(groups, |recorded| recorded.clamp(groups.min(1), groups))
}

/// A card and who shares it.
#[derive(Clone, Copy, Debug)]
pub struct Card<'l> {
    /// The frame of its windows.
    pub frame: Frame,
    /// Containers that share it, each lease once.
    pub tenants: &'l [Tenant],
}

impl Card<'_> {
    fn tenant(&self, lease: i64) -> Option<&Tenant> {
        self.tenants.iter().find(|tenant| tenant.lease == lease)
    }
}
