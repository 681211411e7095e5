//! Channels on compute engines, and the program's calls on them.

use gpushare_schedule::controller::Running;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::allocate::COPY_GROUP;
use super::{Call, Processes, Supervisor};
use crate::abi::{Kind, Status};
use crate::books::{Gpu, MOST_GPUS, Object};
use crate::engine::{Engine, Maker, Seat};
use crate::manager::Manager;

/// The container's part of each GPU's engine. The call handler and the timekeepers share it.
pub struct Engines<F>(Arc<[Mutex<Engine<F>>]>);

impl<F> Clone for Engines<F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<F> Default for Engines<F> {
    fn default() -> Self {
        Self((0..MOST_GPUS).map(|_| Mutex::default()).collect())
    }
}

impl<F> Engines<F> {
    /// Locks a GPU's engine.
    pub fn on(&self, gpu: Gpu) -> MutexGuard<'_, Engine<F>> {
        self.0[gpu].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the engines of all GPUs, one after the other.
    pub(super) fn all(&self) -> impl Iterator<Item = (Gpu, MutexGuard<'_, Engine<F>>)> {
        (0..self.0.len()).map(|gpu| (gpu, self.on(gpu)))
    }
}

/// The state that enforces a container's compute share.
pub struct Compute<F> {
    /// Engines with the container's channels.
    pub engines: Engines<F>,
    /// Notifies a GPU's timekeeper that something has changed.
    pub wake: Box<dyn Fn(Gpu)>,
}

impl<'m, M: Manager, P: Processes<File = M::File>> Supervisor<'m, M, P> {
    /// Also enforces the container's compute share: channels of its compute engines run by a schedule.
    #[must_use]
    pub fn holding_compute(mut self, compute: Compute<M::File>) -> Self {
        self.compute = Some(compute);
        for channel in self.books.channels() {
            let owner = self.books.get(channel.client, channel.client);
            let owner = owner.map(|client| (client.parent, client.bytes));
            let file =
                owner.and_then(|(pid, fd)| self.processes.file(pid, u32::try_from(fd).ok()?.cast_signed()));
            self.enter_engine(&channel, owner.map_or(0, |(pid, _)| pid), file);
        }
        self
    }

    /// Whether the supervisor performs channel allocations.
    pub(super) fn holds_compute(&self) -> bool {
        self.compute.is_some()
    }

    /// Adds a new channel to the schedule, which decides whether it runs.
    ///
    /// # Errors
    /// The status to return to the program if the channel could not be stopped.
    pub(super) fn schedule(&mut self, channel: &Object, call: &Call, file: &M::File) -> Result<(), Status> {
        let copy = self.manager.copy(file).filter(|_| self.processes.watch(call.process).is_some());
        if copy.is_none() {
            return Err(Status::INSUFFICIENT_RESOURCES); // the supervisor has no descriptor left
        }
        if !self.is_scheduled(channel) {
            self.confirm_owner(channel, call, file);
        }
        // The card's own record would not attribute its work to any process. Libraries never leave their
        // clients to other processes.
        let owner = self.books.client(channel.client).and_then(|client| client.owner);
        let lives = || owner.is_some_and(|owner| self.processes.lives(owner.pid));
        if self.maker_of(channel.client).has_ended(|_| !lives()) {
            return Err(Status::INSUFFICIENT_PERMISSIONS);
        }
        self.enter_engine(channel, call.process, copy);
        Ok(())
    }

    fn enter_engine(&mut self, channel: &Object, owner: u32, file: Option<M::File>) {
        let Object { client, parent, .. } = *channel;
        let Some(gpu) = channel.gpu else { return };
        let group = self.books.get(client, parent).filter(|above| above.class.kind() == Kind::ChannelGroup);
        let copies = group.is_some_and(|group| group.cost == COPY_GROUP);
        let device = group.map_or(parent, |group| group.parent);
        let subdevice = self.books.subdevice_of(client, device).map_or(0, |known| known.handle);
        let (watch, maker) = (self.processes.watch(owner), self.maker_of(client));
        let Some(compute) = &self.compute else { return };
        let group = group.map_or(channel.handle, |group| group.handle);
        let mut engine = compute.engines.on(gpu);
        engine.add(client, (group, channel.handle), copies, || Seat {
            client,
            watch,
            maker,
            file,
            device,
            subdevice,
        });
        let running = engine.running();
        // Its program stopped it under an earlier worker.
        if self.books.is_stopped(client, channel.handle) {
            engine.want(client, channel.handle, false);
        }
        if running != Running::All {
            let _ = engine.set(&mut self.manager, self.era, &mut self.handles, running);
        }
        drop(engine);
        (compute.wake)(gpu);
    }

    /// Whether the schedule of its GPU contains the channel's client. A copy of the client's file keeps the
    /// client alive, so no other client can get its handle.
    fn is_scheduled(&self, channel: &Object) -> bool {
        let Some((compute, gpu)) = self.compute.as_ref().zip(channel.gpu) else { return false };
        compute.engines.on(gpu).has_client(channel.client)
    }

    /// Returns the process that made a client.
    fn maker_of(&self, client: u32) -> Maker<M::File> {
        let Some(owner) = self.books.client(client).and_then(|client| client.owner) else {
            return Maker::Unknown;
        };
        let Some(watch) = self.processes.watch(owner.pid) else { return Maker::Ended };
        match owner.birth.map(|birth| self.processes.birth(owner.pid) == Some(birth)) {
            None => Maker::Unknown,
            Some(true) => Maker::Known(watch),
            Some(false) => Maker::Ended,
        }
    }

    /// Passes the now known maker of a client to the engines.
    pub(super) fn tell_engines_maker(&mut self, client: u32) {
        let Some(compute) = &self.compute else { return };
        for (gpu, mut engine) in compute.engines.all().filter(|(_, engine)| engine.has_client(client)) {
            engine.set_maker(client, || self.maker_of(client));
            (compute.wake)(gpu);
        }
    }

    /// Runs a call that frees `tree` and whatever else is below `handle`, while no timekeeper stops or starts
    /// channels.
    pub(super) fn freeing<E>(
        &mut self,
        (client, handle): (u32, u32),
        tree: &[Object],
        perform: impl FnOnce(&mut Self) -> Result<Status, E>,
    ) -> Result<Status, E> {
        let leads_to_channels =
            |object: &Object| !matches!(object.class.kind(), Kind::Memory | Kind::VirtualRange);
        let Some(engines) = self.engines().filter(|_| tree.iter().any(leads_to_channels)) else {
            return perform(self);
        };
        let mut locked: Vec<_> = engines.all().filter(|(_, engine)| engine.has_client(client)).collect();
        let status = perform(self)?;
        if status == Status::OK {
            for (gpu, engine) in &mut locked {
                tree.iter().for_each(|object| engine.remove(client, object.handle));
                engine.remove(client, handle);
                self.wake(*gpu);
            }
        }
        Ok(status)
    }

    /// Returns the subdevice through which a client's channels are stopped.
    pub(super) fn timekeepers_subdevice(&self, client: u32, device: u32) -> Option<u32> {
        self.compute.as_ref()?.engines.all().find_map(|(_, engine)| engine.subdevice(client, device))
    }

    /// Records a change of a client's subdevices: `old` is gone, and `new` replaces it.
    pub(super) fn note_subdevice(&mut self, client: u32, device: u32, old: Option<u32>, new: Option<u32>) {
        let Some(compute) = &self.compute else { return };
        for (_, mut engine) in compute.engines.all() {
            old.into_iter().for_each(|old| engine.remove(client, old));
            new.into_iter().for_each(|new| engine.set_subdevice(client, device, new));
        }
    }

    /// Whether to perform a program's call that lets a group or a channel run. The schedule must know it, and
    /// must not have stopped it since it first ran.
    pub(super) fn may_begin(&self, client: u32, handle: u32) -> bool {
        let Some(engines) = self.engines() else { return true };
        let mut knows = false;
        let mut is_stopped = false;
        for (_, mut engine) in engines.all().filter(|(_, engine)| engine.leads(client, handle)) {
            knows = true;
            is_stopped |= engine.begin(client, handle) && engine.has_stopped(client, handle);
        }
        knows && !is_stopped
    }

    /// Stops channels again that should not run.
    pub(super) fn stop_again(&mut self) {
        let Some(engines) = self.engines() else { return };
        for (_, mut engine) in engines.all().filter(|(_, engine)| !engine.is_empty()) {
            let running = engine.running();
            if running != Running::All {
                engine.doubt();
                let _ = engine.set(&mut self.manager, self.era, &mut self.handles, running);
            }
        }
    }

    /// Records that a program may have started channels of its own.
    pub(super) fn disturb(&mut self) {
        let Some(compute) = &self.compute else { return };
        for (gpu, mut engine) in compute.engines.all() {
            if engine.running() != Running::All {
                engine.disturb();
                (compute.wake)(gpu);
            }
        }
    }

    /// Returns the container's engines, if the supervisor enforces its compute share.
    pub(super) fn engines(&self) -> Option<Engines<M::File>> {
        self.compute.as_ref().map(|compute| compute.engines.clone())
    }

    fn wake(&self, gpu: Gpu) {
        self.compute.iter().for_each(|compute| (compute.wake)(gpu));
    }
}
