//! The containers of a lease: how they join it and leave it.

use rusqlite::{Transaction, params};

use super::{ReserveError, Store, StoreError};
use crate::lease::{Lease, LeaseKey, Member};
use crate::pid_namespace::PidNamespace;
use crate::pod::Pod;
use crate::rows::signed;

/// How many of the containers that left a lease the history names. It is bounded, since a container that
/// fails and is restarted again and again beside another of its pod leaves each time.
const REMEMBERED: usize = 8;

impl Store {
    /// The lease of `pod` that its container joins instead of getting its own: the lease of the container
    /// whose pid namespace it joins, or the pod's, if it asks for that. `asked` is then the request in words,
    /// and has to equal those of the pod's lease.
    pub(super) fn to_join(
        &self,
        root: &str,
        pod: &Pod,
        asked: Option<&str>,
    ) -> Result<Option<i64>, ReserveError> {
        if let Some(target) =
            pod.joins.map(|namespace| self.target(root, pod, namespace)).transpose()?.flatten()
        {
            return Ok(Some(target));
        }
        let Some(asked) = asked else { return Ok(None) };
        match self.of_pod(root, pod)? {
            Some((_, held)) if held != asked => Err(ReserveError::Differs { held, asked: asked.to_owned() }),
            found => Ok(found.map(|(id, _)| id)),
        }
    }

    /// The lease of the container of `pod` whose pid namespace this is.
    fn target(&self, root: &str, pod: &Pod, namespace: PidNamespace) -> Result<Option<i64>, StoreError> {
        let leases =
            self.select("WHERE lease.root = ?1 AND lease.sandbox = ?2", params![root, pod.sandbox])?;
        let leads = |lease: &&Lease| lease.members().any(|member| member.holder.leads_in(namespace));
        Ok(leases.iter().find(leads).map(|lease| lease.id))
    }

    /// The pod's lease, and the words of its request.
    fn of_pod(&self, root: &str, pod: &Pod) -> Result<Option<(i64, String)>, StoreError> {
        const ITS: &str =
            "SELECT id, pod_request FROM lease WHERE root = ?1 AND sandbox = ?2 AND pod_request IS NOT NULL";
        let found = self.rows(ITS, params![root, pod.sandbox], |row| Ok((row.get(0)?, row.get(1)?)))?;
        Ok(found.into_iter().next())
    }

    pub(super) fn insert_member(
        &self,
        tx: &Transaction,
        lease: i64,
        member: &Member,
    ) -> Result<(), StoreError> {
        let (Member { key, state, holder }, start_time) = (member, signed(member.holder.start_time));
        self.run(
            tx,
            "INSERT INTO member (lease, root, container, state, pid, start_time)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            params![lease, key.root, key.container, state.name(), holder.pid, start_time],
        )
    }

    /// Takes the container `key` out of a lease that others hold.
    pub(super) fn leave(&self, tx: &Transaction, lease: &Lease) -> Result<(), StoreError> {
        let key = &lease.member.key;
        let former = self.former(tx, lease.id, [key])?;
        self.sql(tx.execute("UPDATE lease SET former = ?2 WHERE id = ?1", params![lease.id, former]))?;
        let left = "DELETE FROM member WHERE root = ?1 AND container = ?2";
        self.sql(tx.execute(left, params![key.root, key.container])).map(drop)
    }

    /// The ids of the last containers that left the lease `id`, and of those that leave it now, at most
    /// [`REMEMBERED`]. They are divided by spaces, which no id has.
    pub(super) fn former<'a>(
        &self,
        tx: &Transaction,
        id: i64,
        leaving: impl IntoIterator<Item = &'a LeaseKey>,
    ) -> Result<String, StoreError> {
        let before: String =
            self.sql(tx.query_row("SELECT former FROM lease WHERE id = ?1", params![id], |row| row.get(0)))?;
        let mut ids: Vec<&str> = before.split_whitespace().collect();
        ids.extend(leaving.into_iter().map(|key| key.container.as_str()));
        Ok(ids.split_off(ids.len().saturating_sub(REMEMBERED)).join(" "))
    }
}
