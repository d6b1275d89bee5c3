//! Child processes that do not outlive the one that started them. Shared with tests/traffic.
//!
//! Killing a child when its handle is dropped does not help when the parent is killed itself, nor does the end of the child's
//! standard input when the child is stopped. So the kernel is asked to kill it: `PR_SET_PDEATHSIG`.

use std::io;
use std::process;

/// Has the kernel kill the child when the thread that starts it ends, which must not be before the child is to.
pub(crate) trait Tied {
    fn tied(&mut self) -> &mut Self;
}

impl Tied for process::Command {
    fn tied(&mut self) -> &mut Self {
        use std::os::unix::process::CommandExt;
        let parent = process::id();
        // SAFETY: `die_with` makes two system calls, allocates nothing and takes no lock.
        unsafe { self.pre_exec(move || die_with(parent)) }
    }
}

impl Tied for tokio::process::Command {
    fn tied(&mut self) -> &mut Self {
        let parent = process::id();
        // SAFETY: `die_with` makes two system calls, allocates nothing and takes no lock.
        unsafe { self.pre_exec(move || die_with(parent)) }
    }
}

/// In the child, before it is the other program.
fn die_with(parent: u32) -> io::Result<()> {
    // SAFETY: a system call that takes a number.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // It may have ended before that, and then nothing comes any more.
    // SAFETY: a system call without arguments.
    let now = unsafe { libc::getppid() };
    if u32::try_from(now) == Ok(parent) { Ok(()) } else { Err(io::ErrorKind::NotConnected.into()) }
}
