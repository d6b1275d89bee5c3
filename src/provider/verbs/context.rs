//! Opened devices, and the libibverbs objects that only hold others together: contexts and protection domains.
//!
//! Each type owns one object and destroys it when dropped. What an object needs it keeps alive by an `Arc`, so that
//! the order is always queue pair, completion queue, channel and regions, domain, context (R7), whoever drops what
//! first. An object whose destruction is refused is left to the process's end, with all that it needs: the device
//! may still use it. Unless the device is gone, and its objects with it.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use super::calls::{check, object};
use super::load;
use super::sys::{LibIbverbs, ibv_context, ibv_device, ibv_pd};
use crate::background::Lane;
use crate::error::DeviceError;
use crate::provider::events::ObjectId;

/// Where the kernel lists the devices that a process can open, by the names that their removals are announced with.
const USER_DEVICES: &str = "/sys/class/infiniband_verbs";

/// Where their files are.
const DEVICE_FILES: &str = "/dev/infiniband";

/// An opened device.
pub(super) struct Context {
    pub(super) lib: &'static LibIbverbs,
    raw: NonNull<ibv_context>,
    /// What tells its entry among [`USER_DEVICES`] from one that has its name later. `None` where there is no such list.
    entry: Option<u64>,
    /// Where its objects are destroyed, which waits for the device.
    pub(super) lane: Arc<Lane>,
}

// SAFETY: libibverbs' calls on a context and on what belongs to it may come from any thread and at the same time; no
// call but the close, in `drop`, ends its life.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn raw(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }

    /// Whether a destruction that was refused with `error` had happened before: the device was taken away, and the kernel
    /// had destroyed everything of it then. By what the kernel lists, since a driver may use these errors for its own.
    pub(super) fn took(&self, error: &io::Error) -> bool {
        matches!(error.raw_os_error(), Some(libc::EIO | libc::ENODEV)) && self.is_removed()
    }

    /// Whether the kernel does not list the device any more. The name may be another device's by now.
    pub(super) fn is_removed(&self) -> bool {
        self.entry.is_some() && entry(&self.user_device()) != self.entry
    }

    /// The name of its device among [`USER_DEVICES`].
    pub(super) fn user_device(&self) -> String {
        // SAFETY: an open context holds its device.
        unsafe { user_device((*self.raw()).device) }
    }
}

/// # Safety
/// `device` is of a list that has not been freed, or of an open context.
unsafe fn user_device(device: *mut ibv_device) -> String {
    // SAFETY: by the caller; the name is an array of the device, NUL-terminated by the library.
    let name = unsafe { CStr::from_ptr((*device).dev_name.as_ptr()) };
    name.to_string_lossy().into_owned()
}

/// The number of a device's entry among [`USER_DEVICES`], which sysfs does not give out again before billions of others.
fn entry(user_device: &str) -> Option<u64> {
    std::fs::metadata(Path::new(USER_DEVICES).join(user_device)).ok().map(|entry| entry.ino())
}

/// The error of a device file that is there and may not be opened. libibverbs looks for another one then, and ends with
/// the error of having found none.
fn not_permitted(user_device: &str) -> Option<io::Error> {
    let file = Path::new(DEVICE_FILES).join(user_device);
    let error = std::fs::File::options().read(true).write(true).open(file).err()?;
    (error.kind() == io::ErrorKind::PermissionDenied).then_some(error)
}

/// An object's user pointer, which libibverbs keeps and nobody follows: the number by which events name the object.
pub(super) fn user_pointer(id: ObjectId) -> *mut c_void {
    std::ptr::without_provenance_mut(id.get() as usize)
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened by `DeviceList::open`, closed only here; what belongs to it holds an `Arc` of it and is gone.
        if let Err(error) = check(unsafe { self.lib.ibv_close_device(self.raw()) }) {
            tracing::warn!(%error, "closing an RDMA device failed");
        }
    }
}

/// An object that nobody uses any more, and what it needs until it is destroyed. Destroying may wait in the kernel, so it is
/// moved to where that may be (R9).
pub(super) struct Ended<T, K> {
    pub(super) context: Arc<Context>,
    pub(super) raw: NonNull<T>,
    pub(super) keep: K,
}

// SAFETY: the object is only passed to the call that destroys it, by its owner, which may be any thread.
unsafe impl<T, K: Send> Send for Ended<T, K> {}

impl<T, K> Ended<T, K> {
    /// Calls `destroy`, then lets go of what the object needed; or never, when it was refused.
    pub(super) fn destroy(self, what: &str, destroy: impl FnOnce(&LibIbverbs, *mut T) -> c_int) {
        if let Err(error) = check(destroy(self.context.lib, self.raw.as_ptr()))
            && !self.context.took(&error)
        {
            tracing::error!(%error, "destroying {what} failed");
            std::mem::forget((self.context, self.keep));
        }
    }
}

/// The devices that libibverbs has found.
pub(super) struct DeviceList {
    lib: &'static LibIbverbs,
    /// An array of as many pointers; null when there is no device.
    raw: *mut *mut ibv_device,
    len: usize,
}

impl DeviceList {
    /// Empty on a kernel without RDMA.
    pub(super) fn get() -> Result<Self, DeviceError> {
        let lib = load::ibverbs()?;
        let mut len = 0;
        // SAFETY: writes the number of devices; the array belongs to us until it is freed.
        let raw = unsafe { lib.ibv_get_device_list(&mut len) };
        if raw.is_null() {
            let source = io::Error::last_os_error();
            return match source.raw_os_error() {
                // No ib_uverbs in this kernel.
                Some(libc::ENOSYS) | Some(0) => Ok(Self { lib, raw, len: 0 }),
                _ => Err(DeviceError::Os { what: "listing the RDMA devices", source }),
            };
        }
        Ok(Self { lib, raw, len: usize::try_from(len).unwrap_or(0) })
    }

    fn devices(&self) -> impl Iterator<Item = *mut ibv_device> + '_ {
        // SAFETY: the array has `len` entries, until it is freed in `drop`.
        (0..self.len).map(|i| unsafe { *self.raw.add(i) })
    }

    fn name(&self, device: *mut ibv_device) -> String {
        // SAFETY: a device of a list that has not been freed; the name is NUL-terminated and part of the device.
        unsafe { CStr::from_ptr(self.lib.ibv_get_device_name(device)) }.to_string_lossy().into_owned()
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.devices().map(|d| self.name(d)).collect()
    }

    /// Opens the device of that name. `None` when there is none.
    pub(super) fn open(&self, name: &str) -> Option<io::Result<Context>> {
        let device = self.devices().find(|&d| self.name(d) == name)?;
        // SAFETY: a device of a list that has not been freed.
        let user_device = unsafe { user_device(device) };
        // Before the device is opened: what is open is of this entry, or of none.
        let entry = entry(&user_device);
        // SAFETY: as above. A context holds a reference to its device, which outlives the list.
        let raw = unsafe { self.lib.ibv_open_device(device) };
        let opened =
            object(raw).map(|raw| Context { lib: self.lib, raw, entry, lane: Arc::new(Lane::new()) });
        Some(opened.map_err(|error| not_permitted(&user_device).unwrap_or(error)))
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: given by `ibv_get_device_list`, freed only here.
            unsafe { self.lib.ibv_free_device_list(self.raw) };
        }
    }
}

/// A protection domain.
pub(super) struct RawPd {
    pub(super) context: Arc<Context>,
    raw: NonNull<ibv_pd>,
}

// SAFETY: as for `Context`; no call but the one in `drop` ends its life.
unsafe impl Send for RawPd {}
// SAFETY: as above.
unsafe impl Sync for RawPd {}

impl RawPd {
    pub(super) fn alloc(context: &Arc<Context>) -> io::Result<Self> {
        // SAFETY: the context is open.
        let raw = object(unsafe { context.lib.ibv_alloc_pd(context.raw()) })?;
        Ok(Self { context: context.clone(), raw })
    }

    pub(super) fn raw(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for RawPd {
    fn drop(&mut self) {
        // SAFETY: allocated by `alloc`, freed only here; its regions and queue pairs hold an `Arc` of it and are gone.
        if let Err(error) = check(unsafe { self.context.lib.ibv_dealloc_pd(self.raw()) })
            && !self.context.took(&error)
        {
            tracing::warn!(%error, "freeing a protection domain failed");
            std::mem::forget(self.context.clone());
        }
    }
}
