//! Who may write, in which boot and namespaces, and what a lease is written as.

use std::ops::Deref;

use gpushare_claims::Cores;
use rusqlite::{OptionalExtension, Transaction, TransactionBehavior, params};

use super::{HISTORY_ROWS, Store};
use crate::error::StoreError;
use crate::lease::{Lease, Release, ReleaseReason};
use crate::pod::Pod;
use crate::rows::{now, signed, summary};
use crate::schema::{self, Boot};
use crate::write_queue::Turn;

impl Store {
    /// Retires the leases of an earlier boot. In the same boot the store was kept in other namespaces, and
    /// has to be claimed. The boot is looked at again inside the transaction: when several processes see the
    /// new boot first, only one may retire leases, or it would retire the others' new leases.
    pub(super) fn enter_boot(&self, boot: &Boot) -> Result<(), StoreError> {
        let tx = self.begin_anywhere()?;
        let known = self.sql(Boot::known(&tx).optional())?;
        if known.is_some_and(|known| known.id == boot.id) {
            self.claim(&tx, boot)?;
            return self.commit(tx);
        }
        // If the stored boot id were damaged, the code below would end the leases of living containers.
        if !self.sql(schema::is_sound(&tx))? {
            return Err(StoreError::Damaged { path: self.path.clone() });
        }
        let earlier = self.leases()?;
        for lease in &earlier {
            self.retire(&tx, lease, ReleaseReason::Reboot)?;
        }
        self.sql(tx.execute("DELETE FROM boot", []))?;
        let insert = "INSERT INTO boot (id, namespaces) VALUES (?1, ?2)";
        self.sql(tx.execute(insert, params![boot.id, boot.namespaces]))?;
        self.commit(tx)?;
        earlier.iter().for_each(|lease| lease.log_release(Release::Ended, ReleaseReason::Reboot));
        Ok(())
    }

    /// Fails if the store is kept in other namespaces than this process's: from here each holder would seem
    /// gone. A store without leases moves to this process's namespaces.
    pub(super) fn claim(&self, tx: &Transaction, boot: &Boot) -> Result<(), StoreError> {
        let known = self.sql(Boot::known(tx))?;
        if known == *boot {
            return Ok(());
        }
        let Boot { id, namespaces: theirs } = known;
        if id != boot.id || self.finds("SELECT 1 FROM lease", params![])? {
            let (path, ours) = (self.path.clone(), boot.namespaces.clone());
            return Err(StoreError::Stranger { path, theirs, ours });
        }
        self.sql(tx.execute("UPDATE boot SET namespaces = ?1", [&boot.namespaces])).map(drop)
    }

    /// Waits for this process's turn and begins a writing transaction. Both end on drop, the transaction
    /// first.
    pub(super) fn begin(&self) -> Result<Writing<'_>, StoreError> {
        let writing = self.begin_anywhere()?;
        self.claim(&writing, &Boot::here()?)?;
        Ok(writing)
    }

    /// As [`Store::begin`], without the check that the store is kept in this process's namespaces.
    pub(super) fn begin_anywhere(&self) -> Result<Writing<'_>, StoreError> {
        let turn = Turn::take(&self.path)?;
        let tx = self.sql(Transaction::new_unchecked(&self.db, TransactionBehavior::Immediate))?;
        Ok(Writing { tx, _turn: turn })
    }

    pub(super) fn commit(&self, writing: Writing) -> Result<(), StoreError> {
        self.sql(writing.tx.commit())
    }

    pub(super) fn insert(
        &self,
        tx: &Transaction,
        lease: &Lease,
        pod: Option<&Pod>,
        pod_request: Option<&str>,
    ) -> Result<i64, StoreError> {
        const GRANT: &str = "INSERT INTO granted (lease, position, gpu, memory, cores, exclusive)
                             VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
        let terms = lease.enforcement.terms();
        self.run(
            tx,
            "INSERT INTO lease (root, sandbox, pod_request, former, enforcement, compute_policy, ceiling, priority,
                                granted_at)
             VALUES (?1, ?2, ?3, '', ?4, ?5, ?6, ?7, ?8)",
            params![
                lease.member.key.root,
                pod.map(|pod| &pod.sandbox),
                pod_request,
                terms.name,
                lease.compute_policy.name(),
                lease.ceiling.percent(),
                lease.priority.level(),
                signed(lease.granted_at),
            ],
        )?;
        let id = tx.last_insert_rowid();
        for (position, grant) in (0_i64..).zip(&lease.grants) {
            let (memory, cores) = (signed(grant.memory.bytes()), grant.cores.map(Cores::percent));
            let values = params![id, position, grant.gpu.to_string(), memory, cores, !terms.has_neighbours];
            self.run(tx, GRANT, values)?;
        }
        self.insert_member(tx, id, &lease.member)?;
        Ok(id)
    }

    /// Moves a lease into the history.
    pub(super) fn retire(
        &self,
        tx: &Transaction,
        lease: &Lease,
        reason: ReleaseReason,
    ) -> Result<(), StoreError> {
        self.forget_grants(tx, lease)?;
        let key = &lease.member.key;
        let others = self.former(tx, lease.id, lease.others.iter().map(|member| &member.key))?;
        self.sql(tx.execute(
            "INSERT INTO past (root, container, grants, granted_at, released_at, reason, others)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            params![
                key.root,
                key.container,
                summary(&lease.grants),
                signed(lease.granted_at),
                signed(now()),
                reason.name(),
                others
            ],
        ))?;
        let oldest = "DELETE FROM past WHERE id <= (SELECT max(id) FROM past) - ?1";
        self.sql(tx.execute(oldest, params![HISTORY_ROWS]))?;
        self.sql(tx.execute("DELETE FROM lease WHERE id = ?1", params![lease.id])).map(drop)
    }
}

/// A writing transaction of the process whose turn it is.
pub(super) struct Writing<'store> {
    pub(super) tx: Transaction<'store>,
    pub(super) _turn: Turn,
}

impl<'store> Deref for Writing<'store> {
    type Target = Transaction<'store>;

    fn deref(&self) -> &Transaction<'store> {
        &self.tx
    }
}
