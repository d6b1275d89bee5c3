//! Makes a failing run smaller: leaves out moves that the failure does not need.

use std::collections::BTreeSet;

use super::Script;
use super::campaign::{Failure, attempt};
use super::world::{FIRST_FAULT, FIRST_RAIL_FAULT};

/// The numbers that moves may have.
fn moves() -> impl Iterator<Item = u32> {
    (0..120).chain(FIRST_FAULT..FIRST_FAULT + 3).chain(FIRST_RAIL_FAULT..FIRST_RAIL_FAULT + 6)
}

/// Leaves out ranges of moves, shorter and shorter ones, as long as anything fails. What fails in the end may be
/// another check than at first, with the same cause or not.
pub(super) fn reduce(mut failure: Failure) -> Failure {
    let mut len = 64;
    while len > 0 {
        let mut smaller = false;
        let kept: Vec<u32> = moves().filter(|m| !failure.script.without.contains(m)).collect();
        for chunk in kept.chunks(len) {
            let mut script: Script = failure.script.clone();
            script.without.extend(chunk);
            if let Err(f) = attempt(&script) {
                failure = f;
                smaller = true;
            }
        }
        if !smaller || len > 1 {
            len /= 2;
        }
    }
    failure
}

/// `1,3-5`.
pub(super) fn as_list(set: &BTreeSet<u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &n in set {
        match ranges.last_mut() {
            Some((_, end)) if *end + 1 == n => *end = n,
            _ => ranges.push((n, n)),
        }
    }
    let text = ranges.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") });
    text.collect::<Vec<_>>().join(",")
}

pub(super) fn parse_list(text: &str) -> Option<BTreeSet<u32>> {
    let mut set = BTreeSet::new();
    for part in text.split(',') {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        let (a, b): (u32, u32) = (a.parse().ok()?, b.parse().ok()?);
        set.extend(a..=b.min(FIRST_FAULT + 100));
    }
    Some(set)
}

#[test]
fn k3_lists_of_moves_survive_print_and_parse() {
    let set = BTreeSet::from([1, 3, 4, 5, 9, 1000]);
    assert_eq!(as_list(&set), "1,3-5,9,1000");
    assert_eq!(parse_list(&as_list(&set)), Some(set));
    assert_eq!(parse_list("1,x"), None);
}
