//! Finds an object's place: the device above it, and so its GPU.
//!
//! The supervisor queries RM and does not rely on the books alone. A client whose file was closed may have
//! come back with the same handle, and a program chooses the handles of its objects. The books' entry for an
//! object's parents therefore counts while RM confirms it. While an object lives, its parents in the books
//! are RM's.

use super::{Call, MOST_PASSING, Processes, Supervisor};
use crate::abi::{Class, Kind, Status};
use crate::books::{Gpu, Object};
use crate::manager::{Manager, Subdevice, class_of, parent_of, subdevice_of};

/// Most parents that are kept as confirmed.
const MOST_CONFIRMED: usize = 4096;

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    /// Returns the GPU for a new object. Queries RM once per parent until the next allocation is let through,
    /// which could make a client with the same handle.
    ///
    /// # Errors
    /// The errors of [`Self::gpu_of`].
    pub(super) fn place_of(&mut self, object: &Object, call: &Call, file: &M::File) -> Result<Gpu, Status> {
        let parent = (object.client, object.parent);
        let confirmed = self.confirmed.get(&parent).copied();
        let known = self.books.get(object.client, object.parent).and_then(|parent| parent.gpu);
        if let Some(gpu) = confirmed.filter(|gpu| known == Some(*gpu)) {
            return Ok(gpu);
        }
        let gpu = self.gpu_of(object.client, object.parent, file)?;
        // An allocation that still runs could make a client after this answer.
        if self.let_allocate_at.is_none_or(|last| call.at.saturating_sub(last) > MOST_PASSING) {
            if self.confirmed.len() >= MOST_CONFIRMED {
                self.confirmed.clear();
            }
            self.confirmed.insert(parent, gpu);
        }
        Ok(gpu)
    }

    /// Returns the GPU of objects under `parent`.
    ///
    /// # Errors
    /// INVALID_PARENT if RM knows no such object or reports no GPU for it, NO_MEMORY for a GPU that the lease
    /// does not have, and RM's own status for a subdevice that it does not make.
    pub(super) fn gpu_of(&mut self, client: u32, parent: u32, file: &M::File) -> Result<Gpu, Status> {
        // The books include channels that RM may not have made.
        let known = self.books.get(client, parent).filter(|known| known.class.kind() != Kind::Channel);
        if let Some(known) = known.filter(|known| known.gpu.is_some()) {
            if let Some(gpu) = self.confirmed(&known, file)? {
                return Ok(gpu);
            }
            self.give_up(client);
        }
        match class_of(&mut self.manager, file, client, parent).map(Class::kind) {
            Some(Kind::Device) => self.gpu_of_device(client, parent, file),
            Some(Kind::Subdevice) => {
                let device = parent_of(&mut self.manager, file, client, parent);
                let gpu = self.gpu_of_subdevice(client, parent, file)?;
                self.note_place(client, device.ok_or(Status::INVALID_PARENT)?, parent, gpu);
                Ok(gpu)
            }
            // Below a device, or below an object that is.
            Some(kind) if kind != Kind::Client => match parent_of(&mut self.manager, file, client, parent) {
                Some(above) if above != client => self.gpu_of(client, above, file),
                _ => Err(Status::INVALID_PARENT),
            },
            _ => Err(Status::INVALID_PARENT),
        }
    }

    /// Returns the GPU of an object in the books, if RM still has it in the same place.
    ///
    /// # Errors
    /// If RM does not say.
    fn confirmed(&mut self, known: &Object, file: &M::File) -> Result<Option<Gpu>, Status> {
        let Object { client, handle, parent, class, .. } = *known;
        let gpu = if class.kind() == Kind::Device {
            match self.gpu_of_device(client, handle, file) {
                Ok(gpu) => Some(gpu),
                Err(_) if class_of(&mut self.manager, file, client, handle) != Some(class) => None,
                Err(status) => return Err(status),
            }
        } else if parent_of(&mut self.manager, file, client, handle) != Some(parent) {
            None
        } else if class.kind() == Kind::Subdevice {
            Some(self.gpu_of_subdevice(client, handle, file)?)
        } else if class_of(&mut self.manager, file, client, handle) != Some(class) {
            None
        } else {
            match self.books.get(client, parent).filter(|above| above.gpu.is_some()) {
                Some(above) => self.confirmed(&above, file)?,
                None => None,
            }
        };
        Ok(gpu.filter(|gpu| known.gpu == Some(*gpu)))
    }

    /// Returns the GPU of a device, which RM reports for its subdevice.
    fn gpu_of_device(&mut self, client: u32, device: u32, file: &M::File) -> Result<Gpu, Status> {
        // RM has one subdevice per device: the program's, if it made one.
        let subdevice = match subdevice_of(&mut self.manager, file, client, device) {
            Some(known) => known,
            None => self.own_subdevice(client, device, file)?,
        };
        let gpu = self.gpu_of_subdevice(client, subdevice, file)?;
        self.note_place(client, device, subdevice, gpu);
        Ok(gpu)
    }

    fn gpu_of_subdevice(&mut self, client: u32, handle: u32, file: &M::File) -> Result<Gpu, Status> {
        let uuid = Subdevice { file, client, handle }.uuid(&mut self.manager);
        self.budget.gpu(&uuid.ok_or(Status::INVALID_PARENT)?).ok_or(Status::NO_MEMORY)
    }

    fn note_place(&mut self, client: u32, device: u32, subdevice: u32, gpu: Gpu) {
        let places = [(device, client, Class::DEVICE), (subdevice, device, Class::SUBDEVICE)];
        for (handle, parent, class) in places {
            let object = Object { client, handle, parent, class, gpu: Some(gpu), bytes: 0, cost: 0 };
            if self.books.get(client, handle) != Some(object) {
                let _ = self.books.add(&object);
            }
        }
    }

    /// Removes a client from the books because RM does not have its objects in the recorded places. Its
    /// memory counts as orphaned until it is proved to be gone. Its channels still get stopped, because they
    /// may exist.
    fn give_up(&mut self, client: u32) {
        for object in self.books.tree(client, client) {
            if let Some(gpu) = object.gpu {
                // Charge first: a worker killed here must leave too much in the books and not too little.
                let _ = self.books.orphan(gpu, object.cost);
                let passed = self.books.sums(gpu).passed;
                let _ = self.books.set_passed(gpu, passed.saturating_add(object.bytes));
            }
            self.books.remove(client, object.handle);
            object.gpu.into_iter().for_each(|gpu| self.settle_budget(gpu));
        }
    }
}
