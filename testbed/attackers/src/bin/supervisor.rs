//! The supervisor for simulated nodes. If such a node has a directory `shared/manager` next to `dev`, RM's
//! files are there, because `dev` contains device nodes without a driver.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let control = words.iter().position(|word| word == "--control").and_then(|at| words.get(at + 1));
    if let Some(manager) = control.and_then(|control| manager_beside(Path::new(control))) {
        let served = |word: String| match Path::new(&word).parent() {
            Some(folder) if folder.ends_with("dev") => in_folder(&manager, Path::new(&word)),
            _ => word,
        };
        words = words.into_iter().map(served).collect();
        let names = fs::read_dir(&manager).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_gpu = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.strip_prefix("nvidia").is_some_and(|minor| minor.parse::<u8>().is_ok())
        };
        let gpus = names.filter(is_gpu).map(|path| path.to_string_lossy().into_owned());
        words.extend(gpus.flat_map(|gpu| ["--gpu".to_owned(), gpu]));
    }
    gpushare_supervisor::program::main(words.into_iter())
}

/// Returns the directory of the simulated RM on the node that has this control device.
fn manager_beside(control: &Path) -> Option<PathBuf> {
    let dev = control.parent().filter(|folder| folder.ends_with("dev"))?;
    Some(dev.parent()?.join("shared/manager")).filter(|folder| folder.join("nvidiactl").exists())
}

fn in_folder(folder: &Path, path: &Path) -> String {
    folder.join(path.file_name().unwrap_or_default()).to_string_lossy().into_owned()
}
