use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::Arc;

use super::super::super::rng::Rng;
use super::super::super::{SoftDevice, SoftMr, SoftPd};
use super::*;
use crate::device::SoftConfig;
use crate::memory::{Mapping, Memory};
use crate::provider::AccessFlags;

const KINDS: [Streams; 3] = [Streams::None, Streams::Sse2, Streams::Avx];

/// Whether this processor can run it.
fn has(streams: Streams) -> bool {
    streams == Streams::None || Streams::detect() == Streams::Avx || Streams::detect() == streams
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| rng.below(256) as u8).collect()
}

#[test]
fn k1_every_alignment_and_length_is_copied_and_nothing_beside_it() {
    const QUAD: u64 = 16 << 10;
    const ROOM: usize = 64 + 2 * QUAD as usize + 700;
    let source = pattern(1, ROOM);
    let before = vec![0xa5; ROOM];
    let mut target = before.clone();
    let mut rng = Rng::new(2);
    for streams in KINDS.into_iter().filter(|&s| has(s)) {
        for to in 0..64 {
            // Each alignment of the source with some of the target.
            for from in (to % 5..64).step_by(5) {
                // The lengths at which the parts of a copy begin and end, and any others.
                let edges = [0, 1, 63, 64, 65].into_iter();
                let quads = [-64, -63, -1, 0, 1, 63, 64].map(|n| QUAD.wrapping_add_signed(n));
                let any = [rng.below(640), QUAD + rng.below(QUAD + 640)];
                for len in edges.chain(quads).chain(any).map(|n| n as usize) {
                    target.copy_from_slice(&before);
                    // SAFETY: `from + len` and `to + len` are below `ROOM`, and the two are different allocations.
                    unsafe {
                        raw_copy::stream(
                            source.as_ptr().add(from),
                            target.as_mut_ptr().add(to),
                            len,
                            streams,
                        );
                    }
                    assert_eq!(
                        target[to..to + len],
                        source[from..from + len],
                        "{streams:?} {from} {to} {len}"
                    );
                    assert_eq!(target[..to], before[..to], "{streams:?} {from} {to} {len}");
                    assert_eq!(target[to + len..], before[to + len..], "{streams:?} {from} {to} {len}");
                }
            }
        }
    }
}

/// A registered target of `len` bytes, and a source of as many in a peer's memfd.
struct Both {
    pd: Arc<SoftPd>,
    mr: SoftMr,
    target: Arc<Mapping>,
    owner: Mapping,
    source: Arc<PeerMap>,
}

const ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE;

impl Both {
    fn new(len: u64) -> Self {
        let device = SoftDevice::open(&SoftConfig::new()).unwrap();
        let pd = device.alloc_pd().unwrap();
        let target = Arc::new(Memory::anonymous(len).map().unwrap());
        let mr = pd.reg_mr(target.clone(), 0, len, ACCESS).unwrap();
        let owner = Memory::memfd(len).map().unwrap();
        let fd: OwnedFd = owner.memfd_ref().unwrap().fd.try_clone_to_owned().unwrap();
        let source = PeerMap::map(fd, len).unwrap();
        let both = Self { pd, mr, target, owner, source };
        for (i, byte) in pattern(3, len as usize).into_iter().enumerate() {
            // SAFETY: inside of a mapping of this test's own.
            unsafe { at(&both.owner, i).write_volatile(byte) };
        }
        both
    }

    /// Copies, by a range that was resolved from the key.
    fn copy(&self, from: u64, to: u64, len: u64, hint: CopyHint) -> Option<()> {
        let guard = self.pd.device.mrs.read();
        let addr = self.target.addr() + to;
        let range = guard.registered(self.mr.lkey(), self.pd.id, addr, len, ACCESS).unwrap();
        copy_from(&self.source, from, range, hint)
    }
}

fn at(mapping: &Mapping, offset: usize) -> *mut u8 {
    ptr::with_exposed_provenance_mut(mapping.addr() as usize + offset)
}

fn bytes(mapping: &Mapping) -> Vec<u8> {
    let len = mapping.len() as usize;
    // SAFETY: the whole of a mapping of this test's own, which nothing else writes now.
    unsafe { std::slice::from_raw_parts(at(mapping, 0), len) }.to_vec()
}

#[test]
fn k1_what_a_peer_has_arrives_where_it_belongs_at_every_size() {
    const LEN: u64 = 300_000;
    let both = Both::new(LEN);
    let source = bytes(&both.owner);
    let mut expected = vec![0; LEN as usize];
    let mut rng = Rng::new(4);
    // By the size of the transfer plain, and past the caches.
    for hint in [CopyHint::default(), CopyHint::part_of(STREAM_BYTES - 1), CopyHint::part_of(STREAM_BYTES)] {
        for _ in 0..100 {
            let len = match rng.below(3) {
                0 => rng.below(300),
                1 => rng.below(70_000),
                _ => rng.below(LEN + 1),
            };
            let (from, to) = (rng.below(LEN - len + 1), rng.below(LEN - len + 1));
            both.copy(from, to, len, hint).unwrap();
            let [from, to, len] = [from, to, len].map(|n| n as usize);
            expected[to..to + len].copy_from_slice(&source[from..from + len]);
        }
        assert!(bytes(&both.target) == expected);
    }
}

#[test]
fn r10_bytes_that_the_peer_does_not_have_are_not_copied() {
    let both = Both::new(4096);
    for (from, len) in [(4097, 0), (4096, 1), (4095, 2), (1, 4096), (u64::MAX, 1), (u64::MAX - 4095, 4096)] {
        assert!(both.copy(from, 0, len, CopyHint::default()).is_none(), "{from} {len}");
    }
    assert!(bytes(&both.target).iter().all(|&b| b == 0));
    both.copy(4096, 0, 0, CopyHint::default()).unwrap();
    both.copy(0, 0, 4096, CopyHint::part_of(u64::MAX)).unwrap();
    assert!(bytes(&both.target) == bytes(&both.owner));
}

#[test]
fn r1_a_peer_that_writes_meanwhile_tears_its_own_data_only() {
    const LEN: u64 = 200_000;
    let both = Both::new(LEN + 128);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut byte = 0u8;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                byte = (byte + 1) % 100;
                for i in (0..LEN as usize + 128).step_by(61) {
                    // SAFETY: inside of the owner's mapping, as the peer's own process would write it.
                    unsafe { at(&both.owner, i).write_volatile(byte) };
                }
            }
        });
        for n in 0..200 {
            both.copy(n % 64, 64, LEN, CopyHint::part_of(n % 2 * STREAM_BYTES)).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let target = bytes(&both.target);
    assert!(target[..64].iter().chain(&target[64 + LEN as usize..]).all(|&b| b == 0), "beside the target");
    // Once the peer is quiet, what it has is what arrives.
    both.copy(0, 0, LEN, CopyHint::part_of(STREAM_BYTES)).unwrap();
    assert!(bytes(&both.target)[..LEN as usize] == bytes(&both.owner)[..LEN as usize]);
}
