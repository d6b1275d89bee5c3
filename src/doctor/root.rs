//! Reading below a root, with bounds: nothing that a file says is believed without a look.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::report::Evidence;
use crate::counters::Sysfs;

/// Far more than any file here has but the table of sockets, which is read up to there.
const MAX_TEXT: u64 = 4 << 20;
/// Entries of a directory that are looked at.
const MAX_ENTRIES: usize = 65_536;

/// `/`, or a directory that is like it.
#[derive(Clone, Debug)]
pub(super) struct Root {
    path: PathBuf,
    host: bool,
}

/// A file as it was read.
#[derive(Debug)]
pub(super) struct Seen {
    source: String,
    said: io::Result<String>,
}

impl Root {
    /// This host itself.
    pub(super) fn host() -> Self {
        Self { path: PathBuf::from("/"), host: true }
    }

    pub(super) fn at(path: PathBuf) -> Self {
        Self { host: path == Path::new("/"), path }
    }

    /// Whether what this process can do tells something about what is below.
    pub(super) fn is_host(&self) -> bool {
        self.host
    }

    pub(super) fn path(&self, at: &str) -> PathBuf {
        self.path.join(at)
    }

    /// As evidence names it.
    pub(super) fn name(&self, at: &str) -> String {
        self.path(at).display().to_string()
    }

    pub(super) fn sysfs(&self) -> Sysfs {
        Sysfs::at(self.path("sys"))
    }

    pub(super) fn read(&self, at: &str) -> Seen {
        Seen { source: self.name(at), said: text(&self.path(at)) }
    }

    /// What a file says, trimmed. `None` when it cannot be read.
    pub(super) fn text(&self, at: &str) -> Option<String> {
        self.read(at).said.ok().map(|said| said.trim().to_owned())
    }

    pub(super) fn exists(&self, at: &str) -> bool {
        self.path(at).symlink_metadata().is_ok()
    }

    /// The last part of what a link points to.
    pub(super) fn link_name(&self, at: &str) -> Option<String> {
        let target = std::fs::read_link(self.path(at)).ok()?;
        target.file_name()?.to_str().map(str::to_owned)
    }

    /// The names in a directory, in their order. Empty where there is none.
    pub(super) fn names(&self, at: &str) -> Vec<String> {
        names(&self.path(at))
    }

    /// Whether this process may open a file for reading and writing. Opening a device file of verbs does nothing yet.
    pub(super) fn opens(&self, at: &str) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
        options.open(self.path(at)).map(drop)
    }
}

impl Seen {
    /// What it says, trimmed.
    pub(super) fn value(&self) -> Option<&str> {
        self.said.as_ref().ok().map(|said| said.trim())
    }

    /// The file is not there, as against one that cannot be read.
    pub(super) fn is_missing(&self) -> bool {
        self.said.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    pub(super) fn evidence(&self) -> Evidence {
        match &self.said {
            Ok(said) => Evidence::new(&self.source, short(said.trim())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Evidence::new(&self.source, "not there"),
            Err(error) => Evidence::new(&self.source, format!("cannot be read: {error}")),
        }
    }

    /// With what was made of it, instead of all that it says.
    pub(super) fn evidence_of(&self, found: impl Into<String>) -> Evidence {
        match &self.said {
            Ok(_) => Evidence::new(&self.source, found),
            Err(_) => self.evidence(),
        }
    }
}

/// One line, and not too long a one.
fn short(said: &str) -> String {
    let line = said.lines().next().unwrap_or("");
    let mut text: String = line.chars().filter(|c| !c.is_control()).take(120).collect();
    if text.len() < said.len() {
        text.push('…');
    }
    text
}

pub(super) fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).ok().into_iter().flatten().take(MAX_ENTRIES);
    let mut names: Vec<_> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

fn text(path: &Path) -> io::Result<String> {
    // Not to wait for ever for the other end of what is no file of sysfs but a pipe.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let mut said = Vec::new();
    file.take(MAX_TEXT).read_to_end(&mut said)?;
    Ok(String::from_utf8_lossy(&said).into_owned())
}
