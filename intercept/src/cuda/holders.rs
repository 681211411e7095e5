//! The families that hold memory beyond its use. Pools, pending frees and graphs hold it until work has run;
//! pools and graphs also keep a reserve; exports hold it until their descriptor is closed. Queues and charges
//! reach each family through this module.

use super::queue::{Holders, Ran};
use super::stream_handle::relaxed;
use super::virtual_memory::share;
use super::{Cuda, Here, Stream, graph, pending, pool};

impl Holders for Cuda {
    fn await_nothing(here: Here) -> bool {
        pool::is_unused(here) && graph::is_unused() && pending::is_unused(here)
    }

    fn ran(here: Here, work: Ran) {
        pool::ran(here, work);
        pending::ran(here, work);
        graph::ran(here, work);
    }

    fn forget(here: Here, stream: Stream) {
        pool::forget(here, stream);
        pending::forget(here, stream);
        graph::forget(here, stream);
    }

    fn line_ended(here: Here, line: u8) {
        pool::line_ended(here, line);
        pending::line_ended(here, line);
        graph::line_ended(here, line);
    }

    fn give_back_unused(here: Here) -> bool {
        if Self::await_nothing(here) && share::is_unused(here) {
            return false;
        }
        share::reap(here);
        relaxed(|| {
            pending::ask_driver(here);
            pool::ask_driver(here);
            graph::ask_driver(here);
            pool::trim_all(here);
            graph::trim_all(here);
        });
        true
    }
}
