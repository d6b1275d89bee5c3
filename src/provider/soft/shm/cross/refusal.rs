//! Why the kernel does not let us read another process's memory, in words that say what to change.
//!
//! The system call only says EPERM. What it goes by (see ptrace(2), "Ptrace access mode checking") can mostly be read in `/proc`:
//! users and groups, whether the target may be dumped, capabilities, Yama. The facts are gathered here, and judged in the
//! kernel's order.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use super::CrossError;

const CAP_SYS_PTRACE: u64 = 1 << 19;

/// What decides, as far as it can be read.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// The call is not there at all.
    pub(super) no_call: bool,
    pub(super) this: Status,
    /// `None` where `/proc` hides the peer.
    pub(super) peer: Option<Status>,
    /// The owner of the peer's directory in `/proc`.
    pub(super) peer_owner: Option<u32>,
    /// The value of `kernel.yama.ptrace_scope`.
    pub(super) yama: Option<u32>,
}

/// A process, from `/proc/PID/status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Status {
    /// Real, effective, saved.
    pub(super) uids: [u32; 3],
    pub(super) gids: [u32; 3],
    pub(super) permitted: u64,
    pub(super) effective: u64,
}

impl Status {
    /// `None` when a line is missing or is no number.
    fn parse(text: &str) -> Option<Self> {
        let line = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        let ids = |name| {
            let mut ids = line(name)?.split_ascii_whitespace().map_while(|id| id.parse().ok());
            Some([ids.next()?, ids.next()?, ids.next()?])
        };
        let bits = |name| u64::from_str_radix(line(name)?.trim(), 16).ok();
        Some(Self {
            uids: ids("Uid:")?,
            gids: ids("Gid:")?,
            permitted: bits("CapPrm:")?,
            effective: bits("CapEff:")?,
        })
    }

    fn read(process: &str) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{process}/status")).ok()?)
    }
}

impl Facts {
    /// Of a read of process `pid` that ended with `error`.
    pub(super) fn of(pid: libc::pid_t, error: &io::Error) -> Self {
        let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
        Self {
            no_call: error.raw_os_error() == Some(libc::ENOSYS),
            this: Status::read("self").unwrap_or_default(),
            peer: Status::read(&pid.to_string()),
            peer_owner: fs::metadata(format!("/proc/{pid}")).ok().map(|dir| dir.uid()),
            yama: scope.ok().and_then(|value| value.trim().parse().ok()),
        }
    }

    /// The directory of a process that may not be dumped is root's. (Of root's own processes it says nothing.)
    fn undumpable(&self, peer: &Status) -> bool {
        self.peer_owner == Some(0) && peer.uids[1] != 0
    }
}

/// The first thing in the way.
pub(super) fn explain(facts: &Facts) -> CrossError {
    let refused = |reason: &str, setting: &str, fix| CrossError::NotPermitted {
        reason: reason.to_owned(),
        setting: setting.to_owned(),
        fix,
    };
    if facts.no_call {
        return refused(
            "this kernel or its sandbox has no process_vm_readv",
            "CONFIG_CROSS_MEMORY_ATTACH, or a seccomp filter",
            "allow the system call",
        );
    }
    let Some(peer) = &facts.peer else {
        return refused(
            "/proc does not show the peer's process, and the kernel refuses",
            "hidepid of the mount of /proc",
            "run both as the same user, or give this process CAP_SYS_PTRACE",
        );
    };
    let this = &facts.this;
    if this.effective & CAP_SYS_PTRACE == 0 {
        let (uid, gid) = (this.uids[0], this.gids[0]);
        if peer.uids.iter().any(|&id| id != uid) || peer.gids.iter().any(|&id| id != gid) {
            return CrossError::NotPermitted {
                reason: format!(
                    "this process is of user {uid} and group {gid}, the peer of user {} and group {}",
                    ids(peer.uids),
                    ids(peer.gids)
                ),
                setting: "uid and gid of the two processes".to_owned(),
                fix: "run both as the same user and group, or give this process CAP_SYS_PTRACE",
            };
        }
        if facts.undumpable(peer) {
            return refused(
                "the peer may not be dumped: it asked for that, changed its user, or was started from a file with privileges",
                "PR_SET_DUMPABLE of the peer is 0",
                "let the peer call prctl(PR_SET_DUMPABLE, 1), or give this process CAP_SYS_PTRACE",
            );
        }
        if peer.permitted & !this.permitted != 0 {
            return CrossError::NotPermitted {
                reason: "the peer has capabilities that this process lacks".to_owned(),
                setting: format!("CapPrm {:x} here, {:x} there", this.permitted, peer.permitted),
                fix: "give both the same capabilities, or this process CAP_SYS_PTRACE",
            };
        }
    }
    match facts.yama {
        Some(1) if this.effective & CAP_SYS_PTRACE == 0 => refused(
            "Yama lets a process read its descendants only",
            "kernel.yama.ptrace_scope = 1",
            "set it to 0, let the peer call prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY), or give this process CAP_SYS_PTRACE",
        ),
        Some(2) if this.effective & CAP_SYS_PTRACE == 0 => refused(
            "Yama lets only processes with CAP_SYS_PTRACE read others",
            "kernel.yama.ptrace_scope = 2",
            "set it to 0, or give this process CAP_SYS_PTRACE",
        ),
        Some(scope @ 3..) => CrossError::NotPermitted {
            reason: "Yama lets no process read another".to_owned(),
            setting: format!("kernel.yama.ptrace_scope = {scope}"),
            fix: "set it to less at boot: it cannot be lowered later",
        },
        _ => refused(
            "the kernel refuses, though users, capabilities and Yama would allow it",
            "a seccomp filter, a security module (SELinux, AppArmor), the peer's PR_SET_DUMPABLE, or a user namespace in which this process has no capabilities",
            "run both in the same container and under the same policy",
        ),
    }
}

/// One number where all are the same.
fn ids(ids: [u32; 3]) -> String {
    match ids {
        [a, b, c] if a == b && b == c => a.to_string(),
        [real, effective, saved] => format!("{real} (effective {effective}, saved {saved})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What everything allows, and the kernel refuses all the same.
    fn allowed() -> Facts {
        let status = Status { uids: [1000; 3], gids: [100; 3], ..Status::default() };
        Facts { this: status, peer: Some(status), peer_owner: Some(1000), ..Facts::default() }
    }

    fn peer(change: impl FnOnce(&mut Status)) -> Facts {
        let mut facts = allowed();
        change(facts.peer.as_mut().unwrap());
        facts
    }

    /// The sentence that the user reads has all of `words`.
    #[track_caller]
    fn says(facts: &Facts, words: &[&str]) {
        let error = explain(facts);
        let text = error.to_string();
        assert!(matches!(error, CrossError::NotPermitted { .. }));
        for word in words {
            assert!(text.contains(word), "{word:?} is not in: {text}");
        }
    }

    #[test]
    fn k9_a_refusal_names_the_setting_its_value_and_the_fix() {
        says(&peer(|p| p.uids = [0; 3]), &["user 1000 and", "peer of user 0", "same user", "CAP_SYS_PTRACE"]);
        says(&peer(|p| p.uids[2] = 0), &["1000 (effective 1000, saved 0)"]);
        says(&peer(|p| p.gids[1] = 5), &["group 100", "100 (effective 5, saved 100)"]);
        says(&Facts { peer_owner: Some(0), ..allowed() }, &["PR_SET_DUMPABLE"]);
        says(&peer(|p| p.permitted = 0x400), &["capabilities", "0 here, 400 there"]);
        says(&Facts { yama: Some(1), ..allowed() }, &["ptrace_scope = 1", "PR_SET_PTRACER", "set it to 0"]);
        says(&Facts { yama: Some(2), ..allowed() }, &["ptrace_scope = 2", "CAP_SYS_PTRACE"]);
        says(&Facts { yama: Some(3), ..allowed() }, &["ptrace_scope = 3", "boot"]);
        says(&Facts { peer: None, ..allowed() }, &["hidepid"]);
        says(&Facts { no_call: true, ..allowed() }, &["process_vm_readv", "seccomp"]);
        says(&allowed(), &["seccomp", "SELinux", "AppArmor", "user namespace"]);
        // With the capability only a policy is left.
        let mut able = Facts { yama: Some(1), peer_owner: Some(0), ..peer(|p| p.uids = [0; 3]) };
        able.this.effective = CAP_SYS_PTRACE;
        says(&able, &["security module"]);
        says(&Facts { yama: Some(3), ..able }, &["ptrace_scope = 3"]);
    }

    #[test]
    fn b1_the_status_of_a_process_is_read_or_is_nothing() {
        let text = "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nCapInh:\t0\nCapPrm:\t00000000000000ff\nCapEff:\t80000\n";
        let status = Status { uids: [1, 2, 3], gids: [5, 6, 7], permitted: 255, effective: CAP_SYS_PTRACE };
        assert_eq!(Status::parse(text), Some(status));
        for wrong in ["", "Uid:\t1\t2\nGid:\t5\t6\t7\nCapPrm:\t0\nCapEff:\t0", &text.replace("ff", "xy")] {
            assert_eq!(Status::parse(wrong), None, "{wrong}");
        }
        let own = Status::read("self").unwrap();
        // SAFETY: plain queries.
        assert_eq!((own.uids[1], own.gids[1]), unsafe { (libc::geteuid(), libc::getegid()) });
    }
}
