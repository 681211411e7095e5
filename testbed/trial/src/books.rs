//! The parts of a container's files that its processes share.

use std::sync::atomic::Ordering::Relaxed;

use gpushare_intercept::compute::{Credit, Ground};
use gpushare_region::{Bucket, LimitLine};

use crate::container::Container;

/// The files of one container.
#[derive(Default)]
pub(crate) struct Books {
    line: LimitLine,
    bucket: Bucket,
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
        let Self { line, bucket } = self;
        Ground { line, bucket, credit, capturing: false }
    }
}
