//! Loading libibverbs and librdmacm, each once a process, when something of it is asked for the first time.
//!
//! Nothing is linked: the program starts on a machine without the libraries, and hears of it only when it asks for an
//! RDMA device. A library that was loaded stays loaded: devices, threads and providers are in it.

use std::ffi::c_int;
use std::sync::OnceLock;

use super::gpudirect::RegDmabufMr;
use super::sys::LibIbverbs;
use super::sys_cm::LibRdmacm;
use crate::error::DeviceError;

const IBVERBS: &str = "libibverbs.so.1";
const RDMACM: &str = "librdmacm.so.1";

/// libibverbs, or [`DeviceError::Library`].
pub(super) fn ibverbs() -> Result<&'static LibIbverbs, DeviceError> {
    static LOADED: OnceLock<Result<LibIbverbs, String>> = OnceLock::new();
    LOADED
        .get_or_init(|| load(IBVERBS))
        .as_ref()
        .map_err(|reason| DeviceError::Library { library: IBVERBS, reason: reason.clone() })
}

/// librdmacm, or [`DeviceError::Library`].
pub(super) fn rdmacm() -> Result<&'static LibRdmacm, DeviceError> {
    static LOADED: OnceLock<Result<LibRdmacm, String>> = OnceLock::new();
    // Its devices are those of libibverbs.
    ibverbs()?;
    LOADED
        .get_or_init(|| {
            // SAFETY: as for libibverbs, in `load`.
            unsafe { LibRdmacm::new(RDMACM) }.map_err(|e| e.to_string())
        })
        .as_ref()
        .map_err(|reason| DeviceError::Library { library: RDMACM, reason: reason.clone() })
}

/// Whether libibverbs can be loaded, or with `manager`, librdmacm as well.
pub(crate) fn loads(manager: bool) -> Result<(), DeviceError> {
    if manager { rdmacm().map(|_| ()) } else { ibverbs().map(|_| ()) }
}

fn load(library: &str) -> Result<LibIbverbs, String> {
    // SAFETY: libibverbs' initialisers do nothing but set up the library itself, and the declarations of `sys` are
    // made from the headers of its stable ABI (soname 1): the symbols have the types that they are used with.
    let lib = unsafe { LibIbverbs::new(library) }.map_err(|e| e.to_string())?;
    if !kernel_copies_at_fork(library) {
        // Before the first registration, as it demands.
        // SAFETY: a plain call; it takes nothing.
        let rc: c_int = unsafe { lib.ibv_fork_init() };
        if rc != 0 {
            tracing::warn!("ibv_fork_init failed ({rc}): do not fork while memory is registered");
        }
    }
    Ok(lib)
}

/// A call that the library may be too old to have. For a library that is loaded already.
pub(super) fn reg_dmabuf_mr() -> Option<RegDmabufMr> {
    // SAFETY: the library is loaded already, so that this runs no initialiser, and stays so; the type is that of its manual.
    unsafe {
        let lib = libloading::Library::new(IBVERBS).ok()?;
        lib.get::<RegDmabufMr>(b"ibv_reg_dmabuf_mr\0").ok().map(|symbol| *symbol)
    }
}

/// Kernels from 5.12 on copy pinned pages at a fork, so that they stay the device's and a child has its own. On older ones
/// `ibv_fork_init` keeps them out of children, whole pages, with what else is on them; it does so on newer ones as well, so
/// that it must not be called there. The library is asked, where it is new enough to know: from rdma-core 33 on.
fn kernel_copies_at_fork(library: &str) -> bool {
    const IBV_FORK_UNNEEDED: c_int = 2;
    // SAFETY: the library is loaded already, so that this runs no initialiser; the function takes nothing and returns an enum.
    unsafe {
        let Ok(lib) = libloading::Library::new(library) else { return false };
        let status = lib.get::<unsafe extern "C" fn() -> c_int>(b"ibv_is_fork_initialized\0");
        status.is_ok_and(|status| status() == IBV_FORK_UNNEEDED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the libraries are installed, they have every symbol that is declared.
    #[test]
    fn both_libraries_load_or_say_which_is_missing() {
        for (library, loaded) in [(IBVERBS, ibverbs().err()), (RDMACM, rdmacm().err())] {
            match loaded {
                None => {}
                Some(DeviceError::Library { library: named, .. }) => {
                    assert!(named == library || named == IBVERBS, "{named}");
                    assert!(!std::path::Path::new("/usr/lib/x86_64-linux-gnu").join(library).exists());
                }
                Some(other) => panic!("{other}"),
            }
        }
    }

    #[test]
    fn a_missing_library_is_an_error_that_names_it() {
        let reason = load("liblandfall-that-does-not-exist.so.1").err().unwrap();
        assert!(reason.contains("liblandfall-that-does-not-exist.so.1"), "{reason}");
        let e = DeviceError::Library { library: IBVERBS, reason }.to_string();
        assert!(e.contains(IBVERBS) && e.contains("install"), "{e}");
    }
}
