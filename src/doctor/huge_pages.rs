//! Huge pages, with which a device's page table of a region is 512 times shorter and pinning it is faster.
//!
//! Pools ask for transparent ones (`madvise`), so that `always` and `madvise` of
//! `/sys/kernel/mm/transparent_hugepage/enabled` both do (`Documentation/admin-guide/mm/transhuge.rst`).

use super::host::Host;
use super::report::{Check, Evidence};

const NAME: &str = "huge_pages";
const TRANSPARENT: &str = "sys/kernel/mm/transparent_hugepage/enabled";
const RESERVED: &str = "sys/kernel/mm/hugepages";

pub(super) fn check(host: &Host<'_>) -> Check {
    let transparent = host.root.read(TRANSPARENT);
    let reserved: Vec<Evidence> = host
        .root
        .names(RESERVED)
        .into_iter()
        .filter_map(|size| {
            let read = |file: &str| host.root.text(&format!("{RESERVED}/{size}/{file}"));
            let (all, free) = (read("nr_hugepages")?, read("free_hugepages")?);
            let some = all.parse::<u64>().is_ok_and(|all| all > 0);
            some.then(|| {
                Evidence::new(host.root.name(&format!("{RESERVED}/{size}")), format!("{free} of {all} free"))
            })
        })
        .collect();
    let check = match transparent.value().and_then(chosen) {
        Some(mode @ ("always" | "madvise")) => {
            Check::ok(NAME, format!("transparent huge pages are on ({mode}): pools get them"))
        }
        Some(mode) => Check::warning(
            NAME,
            format!("transparent huge pages are off ({mode}): registering large pools takes longer"),
            format!("`echo madvise > /{TRANSPARENT}`"),
        ),
        None if !reserved.is_empty() => {
            Check::ok(NAME, "huge pages are reserved, for memory that the program brings")
        }
        None => Check::unknown(NAME, "whether there are transparent huge pages cannot be read"),
    };
    check.with([transparent.evidence()]).with(reserved)
}

/// The word in brackets: `always [madvise] never`.
fn chosen(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word)
}
