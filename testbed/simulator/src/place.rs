//! Finds the directories of a simulated driver's node, and the GPUs that its process may use.

use std::ffi::CStr;
use std::fs::OpenOptions;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use crate::state::{STATE_FILE, State};

/// Variable with the path of the shared directory.
pub const VARIABLE: &str = "GPUSHARE_SIMULATOR";
/// Path of the shared directory in containers.
pub const CONTAINER: &str = "/run/gpushare-simulator";

/// The directories of a node, as this process sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Directory of the state file.
    pub shared: PathBuf,
    /// Directory of the device nodes.
    pub dev: PathBuf,
}

impl Place {
    /// Finds the node by the variable [`VARIABLE`], otherwise by the container's directory, otherwise by the
    /// location of the library that contains this code.
    #[must_use]
    pub fn find() -> Option<Self> {
        if let Some(folder) = std::env::var_os(VARIABLE) {
            return Self::beside(Path::new(&folder));
        }
        if Path::new(CONTAINER).join(STATE_FILE).exists() {
            return Some(Self { shared: CONTAINER.into(), dev: "/dev".into() });
        }
        let library = own_library()?;
        library.ancestors().find_map(|folder| Self::beside(&folder.join("shared")))
    }

    /// Returns the node with the shared directory `shared`. Its device nodes are in the sibling directory
    /// `dev` if they are there, otherwise in `/dev`.
    fn beside(shared: &Path) -> Option<Self> {
        if !shared.join(STATE_FILE).exists() {
            return None;
        }
        let own = shared.parent().map(|node| node.join("dev")).filter(|dev| dev.join("nvidiactl").exists());
        Some(Self { shared: shared.to_owned(), dev: own.unwrap_or_else(|| "/dev".into()) })
    }

    /// Lists the indexes of the GPUs and MIG instances whose device nodes this process may open and which are
    /// not excluded. Empty if the process may not open the control node `nvidiactl`.
    #[must_use]
    pub fn granted(&self, state: &State) -> Vec<usize> {
        if !self.opens("nvidiactl") {
            return Vec::new();
        }
        let node = |index: &usize| {
            let gpu = &state.gpus()[*index];
            let minor = gpu.minor.load(Ordering::Relaxed);
            let reads = |minor: u32| self.reads(&format!("nvidia-caps/nvidia-cap{minor}"));
            gpu.excluded.load(Ordering::Relaxed) == 0
                && self.opens(&format!("nvidia{minor}"))
                && (gpu.card().is_none() || gpu.capabilities().into_iter().all(reads))
        };
        (0..state.gpus().len()).filter(node).collect()
    }

    fn opens(&self, name: &str) -> bool {
        self.lets(OpenOptions::new().read(true).write(true), name)
    }

    fn reads(&self, name: &str) -> bool {
        self.lets(OpenOptions::new().read(true), name)
    }

    /// Whether the kernel lets this process open the device node `name`. If the device rules allow it but no
    /// real driver serves the number, the kernel returns ENXIO. Device nodes outside /dev may lie on a file
    /// system mounted `nodev`, which returns EACCES.
    fn lets(&self, options: &OpenOptions, name: &str) -> bool {
        match options.open(self.dev.join(name)) {
            Ok(_) => true,
            Err(error) => match error.raw_os_error() {
                Some(libc::ENXIO) => true,
                Some(libc::EACCES) => self.dev != Path::new("/dev"),
                _ => false,
            },
        }
    }
}

/// Lists the GPUs of `granted` that CUDA_VISIBLE_DEVICES (`variable`) selects, in its order. A name that
/// matches no GPU ends the list. CUDA does not list a GPU in MIG mode, and a process sees one MIG instance:
/// the first, before all whole GPUs (MIG user guide, "CUDA Device Enumeration").
#[must_use]
pub fn visible(state: &State, granted: &[usize], variable: Option<&str>) -> Vec<usize> {
    let is_instance = |index: &usize| state.gpus()[*index].card().is_some();
    let granted: Vec<usize> = granted.iter().copied().filter(|index| !state.is_mig(*index)).collect();
    let first = granted.iter().copied().find(is_instance);
    let Some(text) = variable else { return first.map_or(granted, |first| vec![first]) };
    let granted = &granted[..];
    let mut chosen = Vec::new();
    for name in text.split(',').map(str::trim) {
        let found = match name.parse::<usize>() {
            Ok(index) => granted.get(index).copied(),
            Err(_) => unique(state, granted, name),
        };
        match found {
            // A GPU that is named twice makes the whole list empty.
            Some(index) if chosen.contains(&index) => return Vec::new(),
            Some(index) => chosen.push(index),
            None => break,
        }
    }
    match chosen.iter().copied().find(is_instance) {
        Some(instance) => vec![instance],
        None => chosen,
    }
}

fn unique(state: &State, granted: &[usize], prefix: &str) -> Option<usize> {
    let fits = |index: &usize| prefix.len() > 4 && state.gpus()[*index].uuid_text().starts_with(prefix);
    let mut found = granted.iter().copied().filter(fits);
    found.next().filter(|_| found.next().is_none())
}

/// Returns the path of the shared object (or program) that contains this code.
fn own_library() -> Option<PathBuf> {
    let mut found = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    let address: *const fn() -> Option<PathBuf> = &(own_library as fn() -> Option<PathBuf>);
    // SAFETY: reads one function pointer through a reference made in the line above.
    let code = unsafe { address.cast::<*const libc::c_void>().read() };
    // SAFETY: any address is allowed, and the result goes to a structure of ours.
    if unsafe { libc::dladdr(code, &raw mut found) } == 0 || found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader owns the text, which lives as long as the object that contains this code.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    Path::new(std::ffi::OsStr::from_bytes(name.to_bytes())).canonicalize().ok()
}
