//! What one peer may have of us, and how often it may come.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Limits of what one peer may have of an endpoint. There are none by default but those of the protocol: they are for services whose
/// peers need not be as honest as their keys.
///
/// Grants are counted on a channel, of which two endpoints have one at a time; connects by the address that they come from, since
/// they are counted before a peer has shown who it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct PeerLimits {
    pub(crate) connects: Option<u32>,
    pub(crate) grants: Option<u32>,
    pub(crate) bytes: Option<u64>,
}

impl PeerLimits {
    /// Connects a second from one address (an IPv6 network of 64 bits counts as one): so many at once, and then as many a second.
    /// Further ones are refused with [`ConnectError::TooOften`](crate::connect::ConnectError::TooOften);
    /// under TLS and by a connection manager the peer is not told why.
    pub fn connects_per_second(mut self, most: u32) -> Self {
        self.connects = Some(most);
        self
    }

    /// Grants that are open on a channel; one by layer counts once for each layer. Further ones are refused with
    /// [`GrantRefusal::TooMany`](super::GrantRefusal::TooMany).
    pub fn grants(mut self, most: u32) -> Self {
        self.grants = Some(most);
        self
    }

    /// Bytes of blocks under a channel's open grants, which nobody else can use meanwhile: those in quarantine count until they
    /// are back. Further grants are refused with [`GrantRefusal::TooLarge`](super::GrantRefusal::TooLarge).
    pub fn granted_bytes(mut self, most: u64) -> Self {
        self.bytes = Some(most);
        self
    }
}

/// Addresses of which is remembered how often they have come.
const ADDRESSES: usize = 4096;

/// How often each address may come: a bucket of as many connects as a second has, which fills in a second.
#[derive(Debug, Default)]
pub(super) struct ConnectRate {
    buckets: HashMap<IpAddr, Bucket>,
}

#[derive(Debug)]
struct Bucket {
    /// Connects that are left, in billionths.
    left: u64,
    at: Instant,
}

const ONE: u64 = 1_000_000_000;

impl ConnectRate {
    /// Whether one more from `from` is within `most` a second.
    pub(super) fn admit(&mut self, from: IpAddr, most: u32, now: Instant) -> bool {
        let from = network(from);
        if self.buckets.len() >= ADDRESSES && !self.buckets.contains_key(&from) {
            // Who has not come for a second has a full bucket, as a newcomer has.
            self.buckets.retain(|_, b| now.saturating_duration_since(b.at) < Duration::from_secs(1));
            if self.buckets.len() >= ADDRESSES {
                // So many at once: those that are known are still counted.
                return true;
            }
        }
        let full = u64::from(most) * ONE;
        let bucket = self.buckets.entry(from).or_insert(Bucket { left: full, at: now });
        // A second fills it.
        let since = now.saturating_duration_since(bucket.at).min(Duration::from_secs(1));
        bucket.left = (bucket.left + u64::from(most) * since.as_nanos() as u64).min(full);
        bucket.at = now;
        let admitted = bucket.left >= ONE;
        bucket.left -= if admitted { ONE } else { 0 };
        admitted
    }
}

/// What counts as one address.
pub(super) fn network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6((ip.to_bits() >> 64 << 64).into()),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b1_an_address_comes_as_often_as_it_may() {
        let (mut rate, start) = (ConnectRate::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let ip = |s: &str| s.parse::<IpAddr>().unwrap();
        let mut come = |from: &str, ms| rate.admit(ip(from), 4, at(ms));
        assert!((0..4).all(|_| come("10.0.0.1", 0)));
        assert!(!come("10.0.0.1", 0) && !come("::ffff:10.0.0.1", 200));
        // Others have a bucket of their own, and hosts of one network share theirs.
        assert!(come("10.0.0.2", 0));
        assert!((1..5).all(|n| come(&format!("fd00::{n}"), 0)));
        assert!(!come("fd00::9", 0) && come("fd00:1::1", 0));
        // A quarter of a second brings one. What was refused costs nothing.
        assert!(come("10.0.0.1", 250) && !come("10.0.0.1", 250));
        assert!((0..4).all(|_| come("10.0.0.1", 60_000)) && !come("10.0.0.1", 60_000));
    }

    #[test]
    fn b1_addresses_that_are_remembered_are_bounded() {
        let (mut rate, start) = (ConnectRate::default(), Instant::now());
        for n in 0..2 * ADDRESSES as u32 {
            assert!(rate.admit(IpAddr::V4(n.into()), 1, start));
        }
        assert_eq!(rate.buckets.len(), ADDRESSES);
        assert!(!rate.admit(IpAddr::V4(0.into()), 1, start));
        assert!(rate.admit(IpAddr::V4(u32::MAX.into()), 1, start + Duration::from_secs(2)));
        assert_eq!(rate.buckets.len(), 1);
    }
}
