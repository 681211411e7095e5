//! The parts of a container's files that its processes and the meter share.

use std::sync::atomic::Ordering::Relaxed;

use gpushare_intercept::compute::{Credit, Ground};
use gpushare_region::{Bucket, LimitLine, Measured, Settlement};

use crate::container::Container;

/// The files of one container.
#[derive(Default)]
pub(crate) struct Books {
    line: LimitLine,
    pub(crate) measured: Measured,
    bucket: Bucket,
    settlement: Settlement,
}

impl Books {
    pub(crate) fn new(container: &Container) -> Self {
        let books = Self::default();
        books.line.cores_percent.store(container.cores, Relaxed);
        books.line.policy.store(container.policy.number(), Relaxed);
        books.line.ceiling_percent.store(container.ceiling, Relaxed);
        books
    }

    pub(crate) fn ground<'a>(&'a self, credit: &'a Credit) -> Ground<'a> {
        let Self { line, measured, bucket, settlement } = self;
        Ground { line, grants: 0, measured, bucket, settlement, credit, capturing: false }
    }
}
