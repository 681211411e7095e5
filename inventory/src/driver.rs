//! The driver's user-space files: which version, which folder, which files a capability needs.
//!
//! Files are looked up at each creation, never from a stored list: a list goes stale when the driver is upgraded.
//! All of one container's files have the version of the kernel module. Nothing here trusts `ld.so.cache`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::capability::{Capabilities, Capability};
use crate::node::Roots;
use crate::root::Root;

/// A shared library of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverLibrary {
    /// The name that programs open: the SONAME.
    pub soname: String,
    /// The real file on this host, links followed.
    pub host_path: PathBuf,
}

/// A program of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverProgram {
    /// The name below the container's `/usr/bin`.
    pub name: String,
    /// The real file on this host, links followed.
    pub host_path: PathBuf,
}

/// The driver's version and the folders its files were found in.
#[derive(Clone, Debug)]
pub struct Driver {
    /// The version of kernel module and libraries, as `535.309.01`.
    pub version: String,
    root: Root,
    /// Folders to take libraries from: the one that holds libcuda or libnvidia-ml first, then the one above it.
    folders: Vec<PathBuf>,
}

/// Why the driver's files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// No library of the kernel module's version anywhere.
    #[error(
        "no libcuda.so.{version} or libnvidia-ml.so.{version} below {root}{others}; install the driver's libraries of \
         that version, or set node.driver_root"
    )]
    NotFound {
        /// The kernel module's version.
        version: String,
        /// The driver root.
        root: PathBuf,
        /// Other versions that were met, as text for the message.
        others: String,
    },
    /// A library that the request cannot do without is missing.
    #[error("the driver's {library} is missing in {folder}; reinstall the driver's libraries")]
    Missing {
        /// The file's name.
        library: String,
        /// The folder where it should be.
        folder: PathBuf,
    },
    /// A file that everybody may write is no part of a driver.
    #[error("{path} is not owned by root or writable by others; correct its owner and mode")]
    Untrusted {
        /// The file or folder.
        path: PathBuf,
    },
}

/// File stem and SONAME suffix; an empty suffix means that the SONAME is the full versioned name.
type Library = (&'static str, &'static str);

const COMPUTE: &[Library] = &[
    ("libnvidia-ptxjitcompiler", ".so.1"),
    ("libnvidia-nvvm", ".so.4"),
    ("libnvidia-nvvm70", ".so.4"),
    ("libnvidia-gpucomp", ""),
    ("libnvidia-pkcs11", ""),
    ("libnvidia-pkcs11-openssl3", ""),
    ("libnvidia-fatbinaryloader", ""),
];
const UTILITY: &[Library] = &[("libnvidia-cfg", ".so.1")];
const VIDEO: &[Library] = &[
    ("libnvcuvid", ".so.1"),
    ("libnvidia-encode", ".so.1"),
    ("libnvidia-opticalflow", ".so.1"),
    ("libvdpau_nvidia", ".so.1"),
];
const GRAPHICS: &[Library] = &[
    ("libGLX_nvidia", ".so.0"),
    ("libEGL_nvidia", ".so.0"),
    ("libGLESv1_CM_nvidia", ".so.1"),
    ("libGLESv2_nvidia", ".so.2"),
    ("libnvidia-glcore", ""),
    ("libnvidia-eglcore", ""),
    ("libnvidia-glsi", ""),
    ("libnvidia-tls", ""),
    ("libnvidia-glvkspirv", ""),
    ("libnvidia-rtcore", ""),
    ("libnvidia-allocator", ".so.1"),
    ("libnvidia-fbc", ".so.1"),
    ("libnvoptix", ".so.1"),
];
const NGX: &[Library] = &[("libnvidia-ngx", ".so.1")];

/// Folders of the known systems, relative to the driver root, in the order of trust.
const FOLDERS: &[&str] = &[
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib64",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu",
    "usr/local/nvidia/lib64",
    "var/lib/nvidia/lib64",
    "run/opengl-driver/lib",
    "usr/local/glibc/usr/lib",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
];
const PROGRAM_FOLDERS: &[&str] = &[
    "usr/lib/nvidia/current",
    "usr/bin",
    "usr/local/nvidia/bin",
    "run/current-system/sw/bin",
    "usr/local/bin",
    "bin",
];

impl Driver {
    /// Finds the folder with the libraries of `version`.
    ///
    /// # Errors
    /// When no folder has them, or their files could be written by somebody else than root.
    pub(crate) fn locate(roots: &Roots, version: &str) -> Result<Self, DriverError> {
        let root = Root::open(&roots.driver);
        let mut others = BTreeMap::new();
        for folder in candidates(roots) {
            let found = ["libcuda", "libnvidia-ml"]
                .iter()
                .find_map(|stem| root.file(&folder.join(format!("{stem}.so.{version}"))));
            if let Some(file) = found {
                trusted(&file)?;
                let folder = file.parent().unwrap_or(&roots.driver).to_path_buf();
                let above = folder.parent().map(Path::to_path_buf);
                let beside = [
                    Some(folder.join("vdpau")),
                    above.as_ref().and_then(|a| a.parent().map(Path::to_path_buf)),
                ];
                let folders = [Some(folder), above].into_iter().chain(beside).flatten().collect();
                return Ok(Self { version: version.to_owned(), root, folders });
            }
            note_other_versions(&folder, &mut others);
        }
        let others = others.into_iter().next().map(|(version, folder)| {
            format!(" (version {version} lies in {}: kernel module and libraries differ)", folder.display())
        });
        Err(DriverError::NotFound {
            version: version.to_owned(),
            root: roots.driver.clone(),
            others: others.unwrap_or_default(),
        })
    }

    /// The real libcuda.
    ///
    /// # Errors
    /// When it is missing or not to be trusted.
    pub fn libcuda(&self) -> Result<PathBuf, DriverError> {
        self.required("libcuda")
    }

    /// The real libnvidia-ml.
    ///
    /// # Errors
    /// When it is missing or not to be trusted.
    pub fn libnvidia_ml(&self) -> Result<PathBuf, DriverError> {
        self.required("libnvidia-ml")
    }

    /// The libraries beside libcuda and libnvidia-ml that `capabilities` need and that this driver has. Which ones a
    /// driver has differs between versions, so an absent one is no error.
    ///
    /// # Errors
    /// When one could be written by somebody else than root.
    pub fn companions(&self, capabilities: &Capabilities) -> Result<Vec<DriverLibrary>, DriverError> {
        let mut found: Vec<DriverLibrary> = Vec::new();
        for (stem, suffix) in capabilities.iter().flat_map(libraries) {
            let file = format!("{stem}.so.{}", self.version);
            let Some(host_path) = self.find(&file) else { continue };
            trusted(&host_path)?;
            let soname = if suffix.is_empty() { file } else { format!("{stem}{suffix}") };
            if found.iter().all(|library| library.soname != soname) {
                found.push(DriverLibrary { soname, host_path });
            }
        }
        Ok(found)
    }

    /// The programs that `capabilities` bring: nvidia-smi for utility, where the host has it.
    ///
    /// # Errors
    /// When one could be written by somebody else than root.
    pub fn programs(&self, capabilities: &Capabilities) -> Result<Vec<DriverProgram>, DriverError> {
        if !capabilities.has(Capability::Utility) {
            return Ok(Vec::new());
        }
        let places = PROGRAM_FOLDERS.iter().map(|folder| self.root.path().join(folder).join("nvidia-smi"));
        let Some(host_path) = places.into_iter().find_map(|path| self.root.file(&path)) else {
            return Ok(Vec::new());
        };
        trusted(&host_path)?;
        Ok(vec![DriverProgram { name: "nvidia-smi".to_owned(), host_path }])
    }

    fn required(&self, stem: &str) -> Result<PathBuf, DriverError> {
        let library = format!("{stem}.so.{}", self.version);
        let folder = self.folders.first().cloned().unwrap_or_default();
        let path = self.find(&library).ok_or(DriverError::Missing { library, folder })?;
        trusted(&path)?;
        Ok(path)
    }

    fn find(&self, name: &str) -> Option<PathBuf> {
        self.folders.iter().find_map(|folder| self.root.file(&folder.join(name)))
    }
}

fn libraries(capability: Capability) -> &'static [Library] {
    match capability {
        Capability::Compute => COMPUTE,
        Capability::Utility => UTILITY,
        Capability::Video => VIDEO,
        Capability::Graphics | Capability::Display => GRAPHICS,
        Capability::Ngx => NGX,
        Capability::Compat32 => &[],
    }
}

/// Folders to search: the configured ones, those of the known systems, those that ld.so.conf names.
fn candidates(roots: &Roots) -> Vec<PathBuf> {
    let below = |folder: &Path| roots.driver.join(folder.strip_prefix("/").unwrap_or(folder));
    let configured = roots.library_folders.iter().map(|folder| below(folder));
    let known = FOLDERS.iter().map(|folder| below(Path::new(folder)));
    let conf = roots.driver.join("etc/ld.so.conf");
    let listed = loader_folders(&conf, &roots.driver, 0).into_iter().map(|folder| below(&folder));
    configured.chain(known).chain(listed).collect()
}

/// The folders of an ld.so.conf with its `include` lines, of which only the form `FOLDER/*.conf` is in use.
fn loader_folders(conf: &Path, root: &Path, depth: u32) -> Vec<PathBuf> {
    let Ok(text) = fs::read_to_string(conf) else { return Vec::new() };
    let mut folders = Vec::new();
    for line in text.lines().map(|line| line.split('#').next().unwrap_or("").trim()) {
        let Some(pattern) = line.strip_prefix("include ").map(str::trim) else {
            folders.extend((line.starts_with('/')).then(|| PathBuf::from(line)));
            continue;
        };
        let (Some(folder), true, 0) = (pattern.strip_suffix("/*.conf"), pattern.starts_with('/'), depth)
        else {
            continue;
        };
        let folder = root.join(folder.trim_start_matches('/'));
        let mut files: Vec<_> =
            fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).map(|e| e.path()).collect();
        files.sort();
        let included = files.iter().filter(|file| file.extension().is_some_and(|end| end == "conf"));
        folders.extend(included.flat_map(|file| loader_folders(file, root, depth + 1)));
    }
    folders
}

/// A driver file belongs to root and is writable by nobody else, and so is its folder: containers will run it.
fn trusted(file: &Path) -> Result<(), DriverError> {
    for path in [Some(file), file.parent()].into_iter().flatten() {
        let safe =
            fs::metadata(path).is_ok_and(|metadata| metadata.uid() == 0 && metadata.mode() & 0o022 == 0);
        if !safe {
            return Err(DriverError::Untrusted { path: path.into() });
        }
    }
    Ok(())
}

/// Remembers versions of libcuda that lie in `folder`, to tell a mismatch from a missing driver.
fn note_other_versions(folder: &Path, others: &mut BTreeMap<String, PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
        let name = entry.file_name();
        let version = name.to_str().and_then(|name| name.strip_prefix("libcuda.so."));
        if let Some(version) = version.filter(|version| version.contains('.')) {
            others.insert(version.to_owned(), folder.to_path_buf());
        }
    }
}

#[cfg(test)]
mod tests;
