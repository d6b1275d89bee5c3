//! A test that is killed leaves nothing behind: neither a peer that runs, nor one that it had stopped.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use landfall::device::Profile;

use crate::harness::{PATIENCE, Peer, run};
use crate::roles::say;

/// The role of a process that has a peer of its own, stopped, and is killed.
pub(crate) const ROLE: &str = "parent";

/// Starts a peer and stops it, says its number, and waits to be killed.
pub(crate) async fn parent() {
    let mut child = Peer::start("receiver", Profile::Default, &[]);
    child.hear("listening").await;
    child.freeze();
    say(format_args!("stopped {}", child.id()));
    std::future::pending::<()>().await;
}

#[test]
fn k5_a_stopped_peer_does_not_outlive_the_process_that_started_it() {
    run(async {
        let mut parent = Peer::start(ROLE, Profile::Default, &[]);
        let pid: libc::pid_t = parent.hear("stopped").await.parse().unwrap();
        // While it cannot end: the number is its own.
        let process = pidfd(pid);
        parent.kill().await;
        let ended = tokio::task::spawn_blocking(move || wait(&process, PATIENCE)).await.unwrap();
        assert!(ended, "process {pid} is still there");
    });
}

fn pidfd(pid: libc::pid_t) -> OwnedFd {
    // SAFETY: a system call that takes numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    assert!(fd >= 0, "pidfd_open: {}", std::io::Error::last_os_error());
    // SAFETY: the call has just made it, and nobody else has it.
    unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) }
}

/// Whether the process ends in that time.
fn wait(process: &OwnedFd, time: Duration) -> bool {
    let mut poll = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which lives through the call.
    unsafe { libc::poll(&mut poll, 1, time.as_millis() as libc::c_int) == 1 }
}
