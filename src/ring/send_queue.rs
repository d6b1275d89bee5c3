//! The accounting of one send queue: what was posted, what a completion retires (R2, R4).
//!
//! A token stands for a posted work request. [`SendQueue::push`] keeps it and gives the key that goes into the work
//! request's id; [`SendQueue::complete`] gives back every token that a completion retires:
//!
//! - On an **ordered** queue (RC) completions come in posting order, so that one retires the requests before it that
//!   were not signalled: they succeeded, because one that fails or is flushed completes by itself, signalled or not.
//! - On an **unordered** queue (SRD) each retires itself only, and every request is signalled.
//!
//! A queue of unsignalled requests never completes anything, so [`SendQueue::must_signal`] says when the next request
//! has to be signalled: at least every half depth, and the last of a chain. Then each posted request has a signalled
//! one behind it in its chain and every token is retired. The exception is a chain whose posting failed half-way: take
//! the unposted tokens back with [`SendQueue::revoke`], move the queue pair to the error state, and after it has been
//! destroyed take what is left with [`SendQueue::drain`].
//!
//! Allocates when it is created, and never after. Imports no tokio.

use super::wr_id::{INDEX_BITS, Key};

/// See the module.
#[derive(Debug)]
pub(crate) struct SendQueue<T> {
    entries: Box<[Entry<T>]>,
    /// Ordered: entries are a ring from `head` on. Unordered: `free` is a stack of indices and `head` is not used.
    head: u32,
    free: Vec<u32>,
    outstanding: u32,
    /// Unsignalled requests behind the last signalled one.
    unsignaled: u32,
    ordered: bool,
    all_signaled: bool,
}

#[derive(Clone, Copy, Debug)]
struct Entry<T> {
    generation: u32,
    token: Option<T>,
}

impl<T: Copy> SendQueue<T> {
    /// A queue of `depth` requests, at least 1 and at most 2^22. An unordered queue signals every request.
    pub(crate) fn new(depth: u32, ordered: bool, all_signaled: bool) -> Self {
        let depth = depth.clamp(1, 1 << INDEX_BITS);
        Self {
            entries: vec![Entry { generation: 0, token: None }; depth as usize].into_boxed_slice(),
            head: 0,
            free: if ordered { Vec::new() } else { (0..depth).rev().collect() },
            outstanding: 0,
            unsignaled: 0,
            ordered,
            all_signaled: all_signaled || !ordered,
        }
    }

    pub(crate) fn depth(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Requests that can be pushed now.
    pub(crate) fn room(&self) -> u32 {
        self.depth() - self.outstanding
    }

    #[cfg(test)]
    pub(crate) fn outstanding(&self) -> u32 {
        self.outstanding
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.outstanding == 0
    }

    /// Whether the next request has to be signalled. `last` says that it is the last of its chain.
    pub(crate) fn must_signal(&self, last: bool) -> bool {
        self.all_signaled || last || self.unsignaled + 1 >= self.depth().div_ceil(2)
    }

    /// Keeps `token`. `None` when the queue is full.
    pub(crate) fn push(&mut self, token: T, signaled: bool) -> Option<Key> {
        debug_assert!(signaled || !self.all_signaled, "every request of this queue must be signalled");
        if self.room() == 0 {
            return None;
        }
        let index = if self.ordered { self.at(self.outstanding) } else { self.free.pop()? };
        self.outstanding += 1;
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        let entry = &mut self.entries[index as usize];
        entry.token = Some(token);
        Some(Key { index, generation: entry.generation })
    }

    /// Retires what the completion of `key` retires: calls `retire` with each token, oldest first, and whether it is
    /// the one that completed (the others succeeded). False when nothing of that key is outstanding: a stale
    /// completion.
    pub(crate) fn complete(&mut self, key: Key, mut retire: impl FnMut(T, bool)) -> bool {
        if !self.is_live(key) {
            return false;
        }
        if self.ordered {
            loop {
                let index = self.head;
                self.head = self.at(1);
                let token = self.take(index);
                let this = index == key.index;
                retire(token, this);
                if this {
                    break;
                }
            }
            self.unsignaled = self.unsignaled.min(self.outstanding);
        } else {
            let token = self.take(key.index);
            self.free.push(key.index);
            retire(token, true);
        }
        true
    }

    /// Takes back a request that was pushed and not posted. On an ordered queue: the youngest first.
    pub(crate) fn revoke(&mut self, key: Key) -> Option<T> {
        if !self.is_live(key) {
            return None;
        }
        if self.ordered && self.at(self.outstanding - 1) != key.index {
            debug_assert!(false, "revoked out of order");
            return None;
        }
        let token = self.take(key.index);
        if !self.ordered {
            self.free.push(key.index);
        }
        // What is left may lack the signalled request that followed it: signal the next one.
        self.unsignaled = self.outstanding;
        Some(token)
    }

    /// Takes every token, oldest first on an ordered queue: for a queue pair that has been destroyed.
    pub(crate) fn drain(&mut self, mut retire: impl FnMut(T)) {
        let depth = self.depth();
        for step in 0..depth {
            let index = (self.head + step) % depth;
            if self.entries[index as usize].token.is_some() {
                let token = self.take(index);
                if !self.ordered {
                    self.free.push(index);
                }
                retire(token);
            }
        }
        self.unsignaled = 0;
    }

    fn is_live(&self, key: Key) -> bool {
        self.entries
            .get(key.index as usize)
            .is_some_and(|e| e.token.is_some() && e.generation == key.generation)
    }

    /// The index of the entry `n` behind the head.
    fn at(&self, n: u32) -> u32 {
        ((u64::from(self.head) + u64::from(n)) % u64::from(self.depth())) as u32
    }

    fn take(&mut self, index: u32) -> T {
        let entry = &mut self.entries[index as usize];
        entry.generation = Key::next_generation(entry.generation);
        self.outstanding -= 1;
        entry.token.take().expect("entries between head and tail are in use")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small generator: the tests are the same at every run.
    struct Rng(u64);

    impl Rng {
        fn below(&mut self, n: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % n
        }
    }

    #[test]
    fn r4_full_at_depth_and_never_above() {
        for ordered in [true, false] {
            let mut q = SendQueue::new(16, ordered, false);
            let keys: Vec<Key> = (0..16).map(|n| q.push(n, true).unwrap()).collect();
            assert_eq!((q.room(), q.push(16, true)), (0, None));
            assert!(q.complete(keys[0], |token, this| assert_eq!((token, this), (0, true))));
            assert_eq!(q.room(), 1);
            assert!(q.push(16, true).is_some());
        }
    }

    #[test]
    fn r2_a_completion_retires_the_unsignalled_before_it() {
        let mut q = SendQueue::new(8, true, false);
        let keys: Vec<Key> = (0..6).map(|n| q.push(n, n % 3 == 2).unwrap()).collect();
        let mut seen = Vec::new();
        assert!(q.complete(keys[2], |t, this| seen.push((t, this))));
        assert!(q.complete(keys[5], |t, this| seen.push((t, this))));
        assert_eq!(seen, [(0, false), (1, false), (2, true), (3, false), (4, false), (5, true)]);
        assert!(q.is_empty());
    }

    #[test]
    fn r5_a_stale_key_retires_nothing() {
        for ordered in [true, false] {
            let mut q = SendQueue::new(2, ordered, false);
            let old = q.push('a', true).unwrap();
            assert!(q.complete(old, |_, _| ()));
            while let Some(key) = q.push('b', true) {
                assert_ne!(key, old);
            }
            assert!(!q.complete(old, |_, _| panic!("foreign completion")));
            assert_eq!(q.outstanding(), 2);
        }
    }

    #[test]
    fn r2_what_was_not_posted_is_taken_back() {
        let mut q = SendQueue::new(4, true, false);
        let keys: Vec<Key> = (0..3).map(|n| q.push(n, n == 2).unwrap()).collect();
        assert_eq!(q.revoke(keys[2]), Some(2));
        assert_eq!(q.revoke(keys[1]), Some(1));
        assert_eq!(q.revoke(keys[1]), None);
        // Request 0 is posted and has no signalled one behind it any more.
        q.push(9, true).unwrap();
        let mut left = Vec::new();
        q.drain(|t| left.push(t));
        assert_eq!(left, [0, 9]);
        assert_eq!(q.room(), 4);
    }

    /// Random chains against a model of a device: every token is retired exactly once, in order on an ordered queue,
    /// never more than `depth` are outstanding, and the policy alone keeps the queue moving.
    #[test]
    fn r2_r4_random_chains_retire_every_token_once() {
        for seed in 1..60u64 {
            let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let depth = 1 + rng.below(40) as u32;
            let ordered = seed % 3 != 0;
            let mut q = SendQueue::new(depth, ordered, seed % 5 == 0);
            let mut device: Vec<(Key, bool)> = Vec::new();
            let (mut pushed, mut retired) = (0u32, Vec::new());
            while retired.len() < 400 {
                let chain = (1 + rng.below(u64::from(depth)) as u32).min(q.room());
                for n in 0..chain {
                    let signaled = q.must_signal(n + 1 == chain);
                    device.push((q.push(pushed, signaled).expect("there is room"), signaled));
                    pushed += 1;
                }
                assert!(q.outstanding() <= depth);
                // The device completes some of what it has: the oldest first when ordered, any when not.
                for _ in 0..=rng.below(u64::from(depth)) {
                    if device.is_empty() {
                        break;
                    }
                    let at = if ordered { 0 } else { rng.below(device.len() as u64) as usize };
                    let (key, signaled) = device.remove(at);
                    if signaled {
                        assert!(q.complete(key, |t, _| retired.push(t)));
                    }
                }
                assert!(chain > 0 || !device.is_empty() || q.room() > 0, "stuck at seed {seed}");
            }
            for (key, signaled) in device {
                if signaled {
                    q.complete(key, |t, _| retired.push(t));
                }
            }
            assert!(q.is_empty(), "seed {seed}: {} tokens were never retired", q.outstanding());
            if !ordered {
                retired.sort_unstable();
            }
            assert!(retired.iter().copied().eq(0..pushed), "seed {seed}");
        }
    }
}
