//! Files that hold a secret: nobody but their owner has access.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Why a file is not read.
#[derive(Debug)]
pub(super) enum Unread {
    Io(io::Error),
    /// Others could read or change it.
    Exposed {
        mode: u32,
        owner: u32,
    },
}

impl From<io::Error> for Unread {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

/// Opens a regular file of this user or of root, to which nobody else has access; one of root's may be read by its group, as
/// Kubernetes mounts secrets.
pub(super) fn open(path: &Path) -> Result<File, Unread> {
    let file = File::open(path)?;
    // Of the open file: what its name leads to may change meanwhile.
    let meta = file.metadata()?;
    let (mode, owner) = (meta.mode() & 0o777, meta.uid());
    // SAFETY: geteuid has no conditions, and cannot fail.
    let own = owner == unsafe { libc::geteuid() };
    let private = mode & 0o077 == 0 || (owner == 0 && mode & 0o037 == 0);
    if !meta.is_file() || !private || !(own || owner == 0) {
        return Err(Unread::Exposed { mode, owner });
    }
    Ok(file)
}
