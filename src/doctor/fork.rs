//! Whether a process may fork while memory is registered.
//!
//! From Linux 5.12 on a child gets copies of pinned pages at once, so that the device's pages stay the parent's
//! (mm/memory.c, `copy_present_page`; rdma-core's `ibv_is_fork_initialized` says `IBV_FORK_UNNEEDED` there). Before,
//! `ibv_fork_init` keeps them out of the child.

use super::host::Host;
use super::report::Check;
use super::root::Root;

const NAME: &str = "fork";
const RELEASE: &str = "proc/sys/kernel/osrelease";

pub(super) fn check(host: &Host<'_>) -> Check {
    let check = match release(host.root) {
        Some(release) if release >= (5, 12) => {
            Check::ok(NAME, "the kernel copies registered pages at a fork: parents and children are safe")
        }
        Some(_) => Check::warning(
            NAME,
            "the kernel is older than 5.12: registered pages, and what else is on them, are kept out of children",
            "do not fork while memory is registered, or let children exec at once; better, run Linux 5.12 or newer",
        ),
        None => Check::unknown(NAME, "the kernel's version cannot be read"),
    };
    check.with([host.root.read(RELEASE).evidence()])
}

/// Major and minor: `(6, 1)` of `6.1.0-49-amd64`.
pub(super) fn release(root: &Root) -> Option<(u32, u32)> {
    let text = root.text(RELEASE)?;
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}
