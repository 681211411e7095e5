//! Where an object lies: below which device, and so on which GPU.
//!
//! RM is asked, and not the books alone. A client whose file was closed may have come back with the same
//! handle, and a program gives its objects handles as it likes. So what the books say of an object's parents
//! counts while RM says the same, and a living object's parents in the books are RM's.

use super::{Call, MOST_PASSING, Processes, Supervisor};
use crate::abi::{Class, Kind, Status};
use crate::books::{Gpu, Object};
use crate::manager::{Manager, Subdevice, class_of, parent_of, subdevice_of};

/// Most parents that are kept as confirmed.
const MOST_CONFIRMED: usize = 4096;

impl<M: Manager, P: Processes<File = M::File>> Supervisor<'_, M, P> {
    /// The GPU that an object is to lie on. RM is asked once for each parent until the next allocation is let
    /// through, which could make a client of the same handle.
    ///
    /// # Errors
    /// As [`Self::gpu_of`].
    pub(super) fn place_of(&mut self, object: &Object, call: &Call, file: &M::File) -> Result<Gpu, Status> {
        let parent = (object.client, object.parent);
        let confirmed = self.confirmed.get(&parent).copied();
        let known = self.books.get(object.client, object.parent).and_then(|parent| parent.gpu);
        if let Some(gpu) = confirmed.filter(|gpu| known == Some(*gpu)) {
            return Ok(gpu);
        }
        let gpu = self.gpu_of(object.client, object.parent, file)?;
        // One that still runs would be late.
        if self.let_allocate_at.is_none_or(|last| call.at.saturating_sub(last) > MOST_PASSING) {
            if self.confirmed.len() >= MOST_CONFIRMED {
                self.confirmed.clear();
            }
            self.confirmed.insert(parent, gpu);
        }
        Ok(gpu)
    }

    /// The GPU that objects under `parent` lie on.
    ///
    /// # Errors
    /// INVALID_PARENT where RM knows no such object or tells no GPU of it, NO_MEMORY for a GPU that the lease
    /// does not have, and RM's own status for a subdevice that it does not make.
    pub(super) fn gpu_of(&mut self, client: u32, parent: u32, file: &M::File) -> Result<Gpu, Status> {
        // Channels are noted that RM need not have made.
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
            // Below a device, or below what is.
            Some(kind) if kind != Kind::Client => match parent_of(&mut self.manager, file, client, parent) {
                Some(above) if above != client => self.gpu_of(client, above, file),
                _ => Err(Status::INVALID_PARENT),
            },
            _ => Err(Status::INVALID_PARENT),
        }
    }

    /// The GPU of an object of the books, where RM still has it in the same place.
    ///
    /// # Errors
    /// Where RM does not say.
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

    /// The GPU of a device, which RM tells of its subdevice.
    fn gpu_of_device(&mut self, client: u32, device: u32, file: &M::File) -> Result<Gpu, Status> {
        // RM has one subdevice for each device: the program's, if it made one.
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

    /// Takes a client out of the books whose objects RM does not have where they say. What it had counts as
    /// orphaned until it is proved to be gone. Its channels are still stopped: they may be there.
    fn give_up(&mut self, client: u32) {
        for object in self.books.tree(client, client) {
            if let Some(gpu) = object.gpu {
                // First what stays charged, so that a worker that is killed here leaves too much and not too
                // little.
                let _ = self.books.orphan(gpu, object.cost);
                let passed = self.books.sums(gpu).passed;
                let _ = self.books.set_passed(gpu, passed.saturating_add(object.bytes));
            }
            self.books.remove(client, object.handle);
            object.gpu.into_iter().for_each(|gpu| self.settle_budget(gpu));
        }
    }
}
