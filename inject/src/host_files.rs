//! Looks for the host's files that a container gets, and checks them, so that a plan is a pure value.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use gpushare_inventory::{Capability, Driver, DriverError, DriverFile, DriverLibrary, Extent, FileIdentity};
use gpushare_region::path as inner;
use gpushare_request::Request;

use crate::fitted;
use crate::image::Image;
use crate::settings::{ExtraMount, Programs};

/// The host's files for one container. Every file was there when it was looked at, and only root could write
/// the driver's files and ours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFiles {
    /// Path of the hook's program.
    pub hook: PathBuf,
    /// libcuda and libnvidia-ml, as far as the container gets them.
    pub libraries: Vec<HostLibrary>,
    /// The driver's further libraries for the capabilities.
    pub companions: Vec<DriverLibrary>,
    /// The driver's programs and data for the capabilities.
    pub driver_files: Vec<DriverFile>,
    /// The administrator's mounts, and whether each is a folder.
    pub extra_mounts: Vec<(ExtraMount, bool)>,
    /// The folders that plans mount the driver's files from.
    pub sources: Vec<PathBuf>,
}

/// One of the two libraries that can be intercepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostLibrary {
    /// Which of the two.
    pub kind: &'static LibraryKind,
    /// Whether the container's capabilities ask for it. A share also gets one of which its image has a copy,
    /// because a copy needs no capability to reach the device nodes.
    pub requested: bool,
    /// Path of the driver's own file on the host.
    pub driver: PathBuf,
    /// Path of our library's copy that is fitted to it; `None` where nothing is intercepted.
    pub fitted: Option<PathBuf>,
}

/// A library by which programs reach the GPU.
#[derive(Debug, PartialEq, Eq)]
pub struct LibraryKind {
    /// The capability that brings it.
    pub capability: Capability,
    /// The file's name before `.so`.
    pub stem: &'static str,
    /// Where the driver's own file lies in a container whose calls are intercepted.
    pub private: &'static str,
}

pub(crate) const KINDS: [LibraryKind; 2] = [
    LibraryKind { capability: Capability::Compute, stem: "libcuda", private: inner::DRIVER_CUDA },
    LibraryKind { capability: Capability::Utility, stem: "libnvidia-ml", private: inner::DRIVER_NVML },
];

/// Why a file of the host's cannot be given to a container.
#[derive(Debug, thiserror::Error)]
pub enum HostFileError {
    /// A driver file is missing or not to be trusted.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A file of ours is not where it was installed.
    #[error("{path} is missing; install gpushare completely, or set paths.{key}")]
    NotInstalled {
        /// Path of the file on the host.
        path: PathBuf,
        /// The setting that names its folder.
        key: &'static str,
    },
    /// Our library was not fitted to this driver.
    #[error("{path} is not fitted to this node's driver; run `gpushare inventory refresh`")]
    NotFitted {
        /// Our library as it was built.
        path: PathBuf,
    },
    /// Somebody else than root could change a file of ours, which root or every container would run.
    #[error(
        "{path} must belong to root and be writable by nobody else; install gpushare with `make install` as root"
    )]
    Untrusted {
        /// Path of the file on the host.
        path: PathBuf,
    },
    /// A mount of the settings has no source.
    #[error("{path} is missing, which inject.mounts of the settings names; make it, or take the mount out")]
    NoSource {
        /// Path of the source on the host, as the settings write it.
        path: PathBuf,
    },
}

impl HostFiles {
    /// Looks for the files of a container with this image: our own, and those of `driver` to the given
    /// extent.
    ///
    /// # Errors
    /// When one is missing, or somebody else than root could change it.
    pub fn gather(
        request: &Request,
        extent: Extent,
        driver: &Driver,
        programs: &Programs,
        image: &Image,
    ) -> Result<Self, HostFileError> {
        let mut libraries = Vec::new();
        for kind in &KINDS {
            let requested = request.capabilities.has(kind.capability);
            let covered = extent == Extent::Share && image.copies_of(kind.stem).next().is_some();
            if !requested && !covered {
                continue;
            }
            let of_driver = match kind.capability {
                Capability::Compute => driver.libcuda()?,
                _ => driver.libnvidia_ml()?,
            };
            let fitted = match extent {
                Extent::Share => Some(fitted_library(programs, kind.stem, &of_driver)?),
                Extent::Whole => None,
            };
            libraries.push(HostLibrary { kind, requested, driver: of_driver, fitted });
        }
        Ok(Self {
            libraries,
            companions: driver.companions(&request.capabilities, extent, programs.left_out)?,
            driver_files: driver.files(&request.capabilities, extent, programs.left_out)?,
            extra_mounts: programs.extra_mounts.iter().map(extra_mount).collect::<Result<_, _>>()?,
            hook: installed(programs.hook.to_path_buf(), "hook")?,
            sources: driver.sources(),
        })
    }
}

fn extra_mount(extra: &ExtraMount) -> Result<(ExtraMount, bool), HostFileError> {
    let found = fs::metadata(&extra.source);
    let found = found.map_err(|_| HostFileError::NoSource { path: extra.source.clone() })?;
    Ok((extra.clone(), found.is_dir()))
}

/// Our library, as it was made for the driver's file `real`.
fn fitted_library(programs: &Programs, stem: &str, real: &Path) -> Result<PathBuf, HostFileError> {
    let ours = installed(programs.libraries.join(format!("{stem}.so.1")), "libraries")?;
    let copy = fitted::copy_of(programs.cache, &ours, real).ok().filter(|copy| fitted::is_sound(copy));
    copy.ok_or(HostFileError::NotFitted { path: ours })
}

/// Whether both paths lead to one file that exists.
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    FileIdentity::of(one).is_ok_and(|one| FileIdentity::of(other).is_ok_and(|other| one == other))
}

/// `path`, after checking that it is there and that only root can write it.
pub(crate) fn installed(path: PathBuf, key: &'static str) -> Result<PathBuf, HostFileError> {
    match fs::metadata(&path) {
        Ok(metadata) if metadata.uid() == 0 && metadata.mode() & 0o022 == 0 => Ok(path),
        Ok(_) => Err(HostFileError::Untrusted { path }),
        Err(_) => Err(HostFileError::NotInstalled { path, key }),
    }
}
