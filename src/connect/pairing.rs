//! Which devices of two sides make a rail together.
//!
//! The side with more devices leads, the client when both have as many: each of its devices, in their order, is joined to one of
//! the other side that it can speak to, in turn. So `max(L, R)` rails are made of L and R devices of one kind, device k of the
//! longer list with device k mod n of the shorter one; and where kinds are mixed, each is joined to its own kind. A device that
//! can speak to nobody is left out.
//!
//! Only the server applies the rule: its reply says what came of it.

/// A rail to be: places in the lists of the client and of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) client: usize,
    pub(crate) server: usize,
}

/// Pairs `client` devices with `server` devices, at most `limit` pairs; `meet` says whether two can speak to each other.
pub(crate) fn pair(
    client: usize,
    server: usize,
    limit: usize,
    meet: impl Fn(usize, usize) -> bool,
) -> Vec<Pair> {
    let client_leads = client >= server;
    let (long, short) = if client_leads { (client, server) } else { (server, client) };
    let of = |lead: usize, other: usize| match client_leads {
        true => Pair { client: lead, server: other },
        false => Pair { client: other, server: lead },
    };
    let join = |lead: usize| {
        let mut turn = (0..short).map(|n| of(lead, (lead + n) % short));
        turn.find(|p| meet(p.client, p.server))
    };
    (0..long).filter_map(join).take(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(client: &str, server: &str) -> Vec<(usize, usize)> {
        let (c, s) = (client.as_bytes(), server.as_bytes());
        let made = pair(c.len(), s.len(), 16, |a, b| c[a] == s[b]);
        made.into_iter().map(|p| (p.client, p.server)).collect()
    }

    #[test]
    fn k10_devices_of_one_kind_are_paired_in_turn() {
        assert_eq!(pairs("aaa", "aaa"), [(0, 0), (1, 1), (2, 2)]);
        assert_eq!(pairs("aaaa", "aa"), [(0, 0), (1, 1), (2, 0), (3, 1)]);
        assert_eq!(pairs("a", "aaa"), [(0, 0), (0, 1), (0, 2)]);
        assert_eq!(pairs("aa", "aaa"), [(0, 0), (1, 1), (0, 2)]);
    }

    #[test]
    fn k10_devices_are_paired_with_their_own_kind() {
        assert_eq!(pairs("ab", "ba"), [(0, 1), (1, 0)]);
        assert_eq!(pairs("aab", "ab"), [(0, 0), (1, 0), (2, 1)]);
        assert_eq!(pairs("ac", "ab"), [(0, 0)]);
        assert_eq!(pairs("a", "b"), []);
        assert_eq!(pairs("", "b"), []);
    }

    #[test]
    fn k10_pairs_are_bounded() {
        assert_eq!(pair(16, 16, 5, |_, _| true).len(), 5);
    }
}
