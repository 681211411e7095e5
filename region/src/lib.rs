//! The two files that the host and one container share.
//!
//! `limits` is written by the host and mapped read-only by the interception libraries; `usage` is written by
//! the processes of the container, and the host reads it as hostile input. This crate defines their layout,
//! versions and sizes, the fixed paths inside the container, and the host's reader. It makes no system calls:
//! opening, mapping, locking and waiting belong to the two sides.

#![no_std]

mod limits;
pub mod path;
mod reports;
mod usage;

pub use limits::{
    ComputePolicy, ContextCost, DeviceLimits, LIMITS_LEN, LIMITS_VERSION, LimitLine, LimitsFile,
    LimitsHeader, Measured, Measurement, Overhead, TooManyDevices, charged_at, encode_limits, grants_are,
    measurements, set_supervised,
};
pub use reports::{read_throttled, read_wishes};
pub use usage::{
    Bucket, Damaged, DeviceLine, DeviceUsage, Identity, NO_HOLDER, ProcessUsage, Processes, SLOT_FREE,
    SLOT_LIVE, SLOTS, USAGE_HEADER_LEN, USAGE_LEN, USAGE_VERSION, Usage, UsageFile, UsageHeader, Wish,
    empty_usage_header, lock_byte, processes, read_usage, read_usage_of, usage_length,
};

/// Maximum number of GPUs of which one container can have a share.
pub const MAX_DEVICES: usize = 16;
