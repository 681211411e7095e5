//! Notes on the driver's programs that cannot start in a container, because its image lacks their ELF
//! interpreter: a musl image has no loader of glibc, and a driver may bring a loader of its own in a folder
//! that no image has.

use std::path::{Path, PathBuf};

use crate::image::RootFolder;
use crate::plan::Plan;

/// One line for each program of `plan` whose ELF interpreter the container with this root folder will not
/// have. The kernel says "not found" when such a program is started.
pub fn missing_interpreters(plan: &Plan, root: &RootFolder) -> Vec<String> {
    let is_mounted = |path: &Path| plan.targets().any(|(target, _)| path.starts_with(target));
    let is_missing = |(_, needed): &&(PathBuf, PathBuf)| !is_mounted(needed) && root.lacks(needed);
    plan.interpreters.iter().filter(is_missing).map(note).collect()
}

fn note((program, needed): &(PathBuf, PathBuf)) -> String {
    let (program, needed) = (program.display(), needed.display());
    format!("{program} will not start: the image lacks its ELF interpreter {needed}")
}
