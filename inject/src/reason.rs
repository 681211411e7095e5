//! Of which kind a refusal is, by the error that caused it: `gpushare history`, the figures and exit codes tell it.

use std::error::Error;
use std::iter;

use gpushare_quota::{Reason, Refusal, ReserveError};
use gpushare_request::RequestError;

use crate::allocation::AllocationError;
use crate::bundle::BundleError;
use crate::claim::ClaimError;
use crate::edit::EditError;
use crate::grant::GrantError;
use crate::image::ImageError;
use crate::mps::MpsError;
use crate::plan::PlanError;
use crate::requirement::RequirementError;
use crate::supervision::SupervisionError;

/// The kind of what is told as `error`; `None` where it is no refusal that is known here.
pub fn reason_of(error: &(dyn Error + 'static)) -> Option<Reason> {
    iter::successors(Some(error), |error| (*error).source()).find_map(of_cause)
}

fn of_cause(cause: &(dyn Error + 'static)) -> Option<Reason> {
    if let Some(error) = cause.downcast_ref() {
        return Some(of_grant(error));
    }
    let of_reserve = cause.downcast_ref::<ReserveError>().map(ReserveError::reason);
    of_reserve
        .or_else(|| cause.downcast_ref::<Refusal>().map(Refusal::reason))
        .or_else(|| cause.downcast_ref().map(of_request))
        .or_else(|| cause.downcast_ref().map(of_claim))
        .or_else(|| cause.downcast_ref().map(of_allocation))
        .or_else(|| cause.downcast_ref().map(of_mps))
        .or_else(|| cause.downcast_ref().map(of_plan))
        .or_else(|| cause.downcast_ref().map(of_supervision))
        .or_else(|| (cause.is::<BundleError>() || cause.is::<EditError>()).then_some(Reason::Request))
        .or_else(|| (cause.is::<ImageError>() || cause.is::<RequirementError>()).then_some(Reason::Image))
}

fn of_supervision(error: &SupervisionError) -> Reason {
    match error {
        SupervisionError::Listener { .. } | SupervisionError::Asked(_) => Reason::Request,
        SupervisionError::Required(_) | SupervisionError::Beside(_) => Reason::Rules,
    }
}

/// The kind of a grant's failure.
pub(crate) fn of_grant(error: &GrantError) -> Reason {
    match error {
        GrantError::Privileged | GrantError::Right { .. } | GrantError::HostMounts => Reason::Rules,
        GrantError::Loader { .. } | GrantError::Interceptor { .. } => Reason::Request,
        GrantError::Request(error) => of_request(error),
        GrantError::Claim(error) => of_claim(error),
        GrantError::Allocation(error) => of_allocation(error),
        GrantError::Mps(error) => of_mps(error),
        GrantError::Image(_) | GrantError::Requirement(_) => Reason::Image,
        GrantError::Reserve(why) | GrantError::Held { why, .. } => why.reason(),
        GrantError::OutOfService { reason, .. } => *reason,
        GrantError::Plan(error) => of_plan(error),
        GrantError::Supervision(error) => of_supervision(error),
        GrantError::State(_)
        | GrantError::Node(_)
        | GrantError::NodeFacts(_)
        | GrantError::Store(_)
        | GrantError::Holder(_)
        | GrantError::File(_)
        | GrantError::DriverLimit(_)
        | GrantError::Region(_) => Reason::Node,
    }
}

fn of_request(error: &RequestError) -> Reason {
    match error {
        RequestError::Untrusted { .. }
        | RequestError::NotAllocated { .. }
        | RequestError::AboveDefault { .. }
        | RequestError::Raised { .. }
        | RequestError::AboveCeiling { .. }
        | RequestError::UnreadVariables
        | RequestError::Unread { .. }
        | RequestError::UnreadCdiDevice { .. }
        | RequestError::NoShare
        | RequestError::NoMemory => Reason::Rules,
        RequestError::ClaimedGpuGone { .. } | RequestError::UnknownSize { .. } => Reason::Node,
        _ => Reason::Request,
    }
}

fn of_claim(error: &ClaimError) -> Reason {
    match error {
        ClaimError::Request(error) => of_request(error),
        ClaimError::Store(_) => Reason::Node,
        ClaimError::ForeignNamespace { .. } | ClaimError::ForeignPod { .. } => Reason::Rules,
    }
}

fn of_allocation(error: &AllocationError) -> Reason {
    match error {
        AllocationError::Refused(_) | AllocationError::Uid(_) => Reason::Request,
        AllocationError::Untold
        | AllocationError::Away
        | AllocationError::NoPod
        | AllocationError::Io { .. }
        | AllocationError::Damaged { .. }
        | AllocationError::Proc(_) => Reason::Node,
    }
}

fn of_mps(error: &MpsError) -> Reason {
    match error {
        MpsError::NotServed => Reason::Rules,
        MpsError::OtherUser { .. } => Reason::Room,
        MpsError::UserNamespace | MpsError::BelowSharedMemory { .. } => Reason::Request,
        MpsError::Failed { .. }
        | MpsError::Late { .. }
        | MpsError::Hidden { .. }
        | MpsError::NotGivenBack { .. }
        | MpsError::Io { .. }
        | MpsError::Store(_) => Reason::Node,
    }
}

fn of_plan(error: &PlanError) -> Reason {
    match error {
        PlanError::DriverVolume { .. } => Reason::Request,
        PlanError::NoUvm | PlanError::GpuGone(_) => Reason::Node,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_keeps_its_kind_beside_gpus_out_of_service() {
        let sick =
            |reason| GrantError::OutOfService { reason, why: "no room".to_owned(), sick: "GPU 1".to_owned() };
        for (error, want) in [
            (sick(Reason::Room), Reason::Room),
            (GrantError::Privileged, Reason::Rules),
            (GrantError::Request(RequestError::NoShare), Reason::Rules),
            (GrantError::Request(RequestError::SeveralClaims), Reason::Request),
            (GrantError::Mps(MpsError::NotServed), Reason::Rules),
            (GrantError::Plan(PlanError::NoUvm), Reason::Node),
        ] {
            assert_eq!(reason_of(&error), Some(want), "{error}");
        }
        assert_eq!(reason_of(&std::io::Error::other("the disk")), None);
    }
}
