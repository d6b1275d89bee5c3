//! Files that hold a secret: nobody but their owner has access.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file with a secret is not read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretFileError {
    /// It cannot be read.
    #[error("the key file {} cannot be read", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Others could read or change it.
    #[error(
        "the key file {} has mode {mode:03o} and belongs to user {owner}: it has to be a regular file of this user or of root, without access for others; `chmod 600` it",
        path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
        /// The user that it belongs to.
        owner: u32,
    },
}

impl SecretFileError {
    pub(super) fn unreadable(path: &Path, source: io::Error) -> Self {
        Self::Unreadable { path: path.to_owned(), source }
    }
}

/// Opens a regular file of this user or of root, to which nobody else has access; one of root's may be read by its group, as
/// Kubernetes mounts secrets.
pub(super) fn open(path: &Path) -> Result<File, SecretFileError> {
    let unreadable = |source| SecretFileError::unreadable(path, source);
    // A FIFO is refused below, and not waited for.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(unreadable)?;
    // Of the open file: what its name leads to may change meanwhile.
    let meta = file.metadata().map_err(unreadable)?;
    let (mode, owner) = (meta.mode() & 0o777, meta.uid());
    // SAFETY: geteuid has no conditions, and cannot fail.
    let own = owner == unsafe { libc::geteuid() };
    let private = mode & 0o077 == 0 || (owner == 0 && mode & 0o037 == 0);
    if !meta.is_file() || !private || !(own || owner == 0) {
        return Err(SecretFileError::Exposed { path: path.to_owned(), mode, owner });
    }
    Ok(file)
}
