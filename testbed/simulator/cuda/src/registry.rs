//! Tables of the objects with handles in C. A handle without an object is an error, never a crash.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::abi::{Code, Handle, Result};

/// The next handle. Handles look like addresses, are never reused, and differ between kinds of objects.
static NEXT: AtomicUsize = AtomicUsize::new(0x5600_0000_0040);

/// A handle that no object has.
pub fn new_handle() -> Handle {
    NEXT.fetch_add(0x40, Ordering::Relaxed)
}

/// All objects of one kind, by handle.
pub struct Registry<T> {
    objects: RwLock<HashMap<Handle, Arc<T>>>,
}

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Self { objects: RwLock::new(HashMap::new()) }
    }
}

impl<T> Registry<T> {
    /// Adds an object and returns its handle.
    pub fn add(&self, object: T) -> Handle {
        self.add_with(|_| object)
    }

    /// Adds the object that `make` creates from its handle, and returns the handle.
    pub fn add_with(&self, make: impl FnOnce(Handle) -> T) -> Handle {
        let handle = new_handle();
        self.write().insert(handle, Arc::new(make(handle)));
        handle
    }

    /// The object of a handle; INVALID_HANDLE if there is none.
    pub fn get(&self, handle: Handle) -> Result<Arc<T>> {
        let objects = self.objects.read().unwrap_or_else(PoisonError::into_inner);
        objects.get(&handle).cloned().ok_or(Code::INVALID_HANDLE)
    }

    /// Removes an object and returns it; INVALID_HANDLE if there is none.
    pub fn remove(&self, handle: Handle) -> Result<Arc<T>> {
        self.write().remove(&handle).ok_or(Code::INVALID_HANDLE)
    }

    /// Removes every object for which `gone` holds.
    pub fn remove_all(&self, gone: impl Fn(&T) -> bool) {
        self.write().retain(|_, object| !gone(object));
    }

    /// Returns all objects, in no particular order.
    pub fn all(&self) -> Vec<Arc<T>> {
        self.objects.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Returns the handle of some object for which `wanted` holds.
    pub fn find(&self, wanted: impl Fn(&T) -> bool) -> Option<Handle> {
        let objects = self.objects.read().unwrap_or_else(PoisonError::into_inner);
        objects.iter().find(|(_, object)| wanted(object)).map(|(handle, _)| *handle)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<Handle, Arc<T>>> {
        self.objects.write().unwrap_or_else(PoisonError::into_inner)
    }
}
