//! Reports which processes held a card's compute engine, and for how long, from the card's own record of
//! context switches.
//!
//! The firmware records each switch with its time in nanoseconds, and RM hands the record out some 33 ms
//! later ([`reader`]). [`time`] computes residency from it. Residency is exact while contexts take turns. A
//! context that is not displaced stays resident whether it works or not, so weigh such time with other
//! evidence.
//!
//! The record names processes by bare PIDs, so do not punish a process on its evidence.

pub mod event;
pub mod reader;
pub mod time;
