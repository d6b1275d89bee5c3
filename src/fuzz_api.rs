//! Entry points of the fuzz targets, under `cfg(fuzzing)` and in tests only. Not part of the API.
//!
//! Each takes any bytes. It must not panic, and what it can decode must survive encoding and decoding again.

use crate::kv::Grant;

/// Frames of the bootstrap, and what they hold; and what drivers say to each other to bring a rail back.
pub fn hello(data: &[u8]) {
    crate::connect::fuzz::frame(data);
    crate::kv::fuzz_rail_talk(data);
}

/// `Grant::from_bytes`, and the request of a read to the owner of a grant, which holds runs, too.
pub fn grant(data: &[u8]) {
    crate::kv::fuzz_ask(data);
    let Ok(grant) = Grant::from_bytes(data) else { return };
    assert_eq!(Grant::from_bytes(&grant.to_bytes()).as_ref(), Ok(&grant));
    // The views of it agree. A run can be as long as 2^32 blocks: look at its ends.
    let mut position = 0;
    for (start, len) in grant.runs() {
        assert_eq!(grant.block_at(position), Some(start));
        assert_eq!(grant.block_at(position + len - 1), Some(start + len - 1));
        position += len;
    }
    assert_eq!((grant.len(), grant.block_at(position)), (position, None));
}

/// The frames of an authenticated handshake, with an attacker in the middle.
pub fn sealed(data: &[u8]) {
    crate::connect::fuzz::sealed(data);
}

/// The protocol of a channel, against a hostile peer.
pub fn control(data: &[u8]) {
    crate::kv::proto::fuzz::operations(data);
}

/// The protocol of a channel, on both ends of a wire.
pub fn pair(data: &[u8]) {
    crate::kv::proto::fuzz::pair(data);
}

/// What a peer can do to a connection in shared memory.
pub fn queue(data: &[u8]) {
    crate::provider::soft::shm::fuzz::queue(data);
}

#[cfg(test)]
mod tests {
    /// Runs every committed input of a target.
    fn corpus(target: &str, run: fn(&[u8])) {
        let fuzz = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
        if !fuzz.join("Cargo.toml").exists() {
            // A published package is without it.
            return;
        }
        let dir = fuzz.join("corpus").join(target);
        let mut n = 0;
        for entry in std::fs::read_dir(dir).unwrap() {
            run(&std::fs::read(entry.unwrap().path()).unwrap());
            n += 1;
        }
        assert_ne!(n, 0);
    }

    #[test]
    fn b1_the_corpus_of_the_hello_target_passes() {
        corpus("hello", super::hello);
    }

    #[test]
    fn b1_the_corpus_of_the_sealed_target_passes() {
        corpus("sealed", super::sealed);
    }

    /// The attacker of `sealed` needs luck, and has none: a few thousand tries, the same ones each time.
    #[test]
    fn b1_an_attacker_gets_no_frame_taken() {
        let mut x = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..3000 {
            let data: Vec<u8> = (0..96)
                .map(|_| {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    (x >> 32) as u8
                })
                .collect();
            super::sealed(&data);
        }
    }

    #[test]
    fn k6_the_corpus_of_the_grant_target_passes() {
        corpus("grant", super::grant);
    }

    #[test]
    fn r2_the_corpus_of_the_control_target_passes() {
        corpus("control", super::control);
    }

    #[test]
    fn b1_the_corpus_of_the_queue_target_passes() {
        corpus("queue", super::queue);
    }

    #[test]
    fn k2_the_corpus_of_the_pair_target_passes() {
        corpus("pair", super::pair);
    }
}
