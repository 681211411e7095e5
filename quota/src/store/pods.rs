//! Chooses the lease that a container of a pod joins.

use gpushare_inventory::GpuUuid;

use crate::error::{ReserveError, StoreError};
use crate::ledger::{Entry, Page, quoted};
use crate::pod::Pod;

impl Page {
    /// The GPUs on which containers of `pod` below this runtime root, or any root, have shares.
    pub(super) fn gpus_of(&self, root: Option<&str>, pod: &Pod) -> Result<Vec<GpuUuid>, StoreError> {
        let is_below = |entry: &Entry| root.is_none_or(|root| entry.root == root);
        let of_pod = |entry: &Entry| is_below(entry) && entry.sandbox.as_ref() == Some(&pod.sandbox);
        let its = self.all(&quoted(&pod.sandbox), of_pod)?;
        Ok(its.iter().flat_map(|entry| &entry.lease.grants).map(|grant| grant.gpu).collect())
    }

    /// The lease that a container of `pod` joins instead of getting its own: the lease of the container whose
    /// pid namespace it joins, or the pod's lease, if it requests that. `asked` is then the request in words,
    /// and must equal that of the pod's lease.
    pub(super) fn joined(
        &mut self,
        root: &str,
        pod: &Pod,
        asked: Option<&str>,
    ) -> Result<Option<&mut Entry>, ReserveError> {
        let of_pod = |entry: &Entry| entry.root == root && entry.sandbox.as_ref() == Some(&pod.sandbox);
        let is_target = |entry: &Entry| {
            let leads = |namespace| entry.lease.members().any(|member| member.holder.leads_in(namespace));
            of_pod(entry) && pod.joins.is_some_and(leads)
        };
        let mark = quoted(&pod.sandbox);
        if let Some(target) = self.find(&mark, is_target)?.map(|entry| entry.lease.id) {
            return Ok(self.lease(target)?);
        }
        let Some(asked) = asked else { return Ok(None) };
        let shared = self.find(&mark, |entry| of_pod(entry) && entry.pod_request.is_some())?;
        match shared.as_ref().and_then(|entry| entry.pod_request.as_deref()) {
            Some(held) if held != asked => {
                Err(ReserveError::Differs { held: held.to_owned(), asked: asked.to_owned() })
            }
            _ => Ok(shared),
        }
    }
}
