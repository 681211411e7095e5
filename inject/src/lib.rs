//! Decides what must change in a container that gets GPUs, and makes the change.
//!
//! [`Plan`] is a value made of OCI parts: device nodes and their rules, mounts, two hooks. [`Bundle::apply`]
//! writes it into a bundle's config.json, without loss; a second time changes nothing more. [`Live`] puts it
//! into a container that exists already. [`CdiSpec`] offers shares and whole GPUs to engines as CDI devices.
//! [`Region`] makes the two files that container and host share. The container's image decides only in which
//! of its folders the libraries appear.
#![deny(unsafe_code)]

mod allocation;
mod bundle;
mod bystander;
mod called;
mod cdi;
mod change;
mod child;
mod claim;
mod context_costs;
mod driver_limit;
mod edit;
pub mod ending;
mod fitted;
mod give_back;
mod grant;
mod host_files;
mod image;
mod interpreter;
mod json;
mod live;
mod loader;
mod loader_cache;
mod message;
mod mount_table;
mod mps;
mod node_facts;
mod outside_plan;
mod parts;
mod plan;
mod plan_parts;
mod pod;
mod reason;
mod region;
mod requirement;
mod rights;
mod settings;
mod supervision;
mod sys;
mod used;

pub use allocation::{
    AllocationError, Allocations, PodAllocation, Presence, known_allocation, look_up_allocation,
};
pub use bundle::{Bundle, BundleError, Edited};
pub use bystander::is_bystander;
pub use called::title;
pub use cdi::{CdiDevice, CdiSpec, UNFINISHED};
pub use change::{
    ChangeError, LONGEST, RestateError, change_share, changes, fit, living_configuration, own_annotations,
    restate,
};
pub use claim::{ClaimError, look_up_claim};
pub use context_costs::ContextCosts;
pub use driver_limit::{DriverLimitError, DriverLimiter, DriverLimits, Limit, has_limits};
pub use edit::{EditError, lease_of_previous_plan, refuse_previous_plan, take_out_driver};
pub use fitted::{FitError, Fitted};
pub use give_back::{Whose, forget_ended, forget_swept, give_back, give_back_ended};
pub use grant::{
    GrantError, Requester, admit, admit_mode, beside_sick, clear, grant, known_node, too_little,
};
pub use host_files::{HostFileError, HostFiles, HostLibrary, LibraryKind, is_same_file};
pub use image::{CacheFile, Image, ImageError, RootFolder};
pub use interpreter::missing_interpreters;
pub use live::{Applied, Live, LiveError, run_child};
pub use loader_cache::{LoaderCacheError, with_libraries};
pub use message::{REFUSAL, one_line, out_of_service};
pub use mps::{MpsError, MpsFolder, is_served};
pub use node_facts::NodeFactsError;
pub use outside_plan::OutsidePlan;
pub use plan::{CacheChange, Plan, PlanError};
pub use plan_parts::PlanParts;
pub use pod::of as pod_of;
pub use reason::reason_of;
pub use region::{Measuring, Region, RegionError, UsageError};
pub use requirement::{Offer, RequirementError, Requirements};
pub use rights::{RIGHTS, Right};
pub use settings::{ExtraMount, Programs, SETTINGS_VARIABLE, Settings};
pub use supervision::{
    Hindrance, Passed, PauseError, Record, StartError, Starting, Supervised, Supervision, SupervisionError,
    SupervisorMode, SupervisorSettings, boards, check_lease, decide, has_lost_supervisor, knows_driver,
    on_node as can_supervise, pause, supervision,
};
pub use sys::outlive_file_size_limit;
pub use used::{MemoryUse, measured, open_measured, used};
