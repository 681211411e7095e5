//! Who held a card's compute engine, and for how long, by the card's own record of context switches.
//!
//! The firmware writes down each switch with its time in nanoseconds, and RM hands the record out some 33 ms
//! later ([`reader`]). Residency is worked out of it ([`time`]). It is exact while contexts take turns. One
//! that nobody pushes off stays resident whether it works or not, so that such time has to be weighed by what
//! else is known.
//!
//! The record names processes by their bare numbers. Nobody is to be punished for what it says.

pub mod event;
pub mod reader;
pub mod time;
