//! The ring by itself: wrap-around, room, and a peer that writes anything into its lines.

use super::*;
use crate::provider::soft::rng::Rng;

fn pair() -> (Rings, Rings) {
    let (map, fd) = SharedMap::create(MAP_BYTES).unwrap();
    let theirs = SharedMap::open(&fd, MAP_BYTES).unwrap();
    (Rings::new(map, Side::Dialling), Rings::new(theirs, Side::Listening))
}

fn put(rings: &Rings, bytes: &[u8]) -> io::Result<(usize, bool)> {
    // SAFETY: the pieces are of a slice that lives for the call.
    unsafe { rings.put(bytes.chunks(7).map(|piece| (piece.as_ptr(), piece.len()))) }
}

#[test]
fn r2_bytes_come_out_in_their_order_over_many_turns_of_the_ring() {
    let (a, b) = pair();
    let mut rng = Rng::new(5);
    for (from, to) in [(&a, &b), (&b, &a)] {
        let (mut sent, mut received) = (0u64, 0u64);
        while received < 5 * RING_BYTES as u64 {
            let wanted = rng.below(2 * RING_BYTES as u64) as usize;
            let bytes: Vec<u8> = (sent..sent + wanted as u64).map(|i| ((i * 31) >> 3) as u8).collect();
            if wanted > 0 {
                match put(from, &bytes) {
                    Ok((n, _)) => sent += n as u64,
                    Err(e) => assert_eq!(
                        (e.kind(), sent - received),
                        (io::ErrorKind::WouldBlock, RING_BYTES as u64)
                    ),
                }
            }
            let mut out = vec![0; rng.below(RING_BYTES as u64) as usize + 1];
            match to.take(&mut out) {
                Ok(n) => {
                    assert!(out[..n].iter().zip(received..).all(|(&b, i)| b == ((i * 31) >> 3) as u8));
                    received += n as u64;
                    to.free_all_but(0);
                }
                Err(e) => assert_eq!((e.kind(), sent), (io::ErrorKind::WouldBlock, received)),
            }
        }
    }
}

#[test]
fn r4_room_comes_back_when_the_bytes_are_done_with_and_not_when_they_are_taken() {
    let (a, b) = pair();
    let full = vec![1; RING_BYTES];
    assert_eq!(put(&a, &full).unwrap().0, RING_BYTES);
    assert!(!a.has_room());
    let mut out = vec![0; RING_BYTES];
    assert_eq!(b.take(&mut out).unwrap(), RING_BYTES);
    assert_eq!(put(&a, &full).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    b.free_all_but(100);
    assert!(a.has_room());
    assert_eq!(put(&a, &full).unwrap().0, RING_BYTES - 100);
}

#[test]
fn r3_a_sleeper_is_told_once_and_of_what_it_waits_for() {
    let (a, b) = pair();
    // A new connection tells the first change, whoever was asleep before it.
    assert!(put(&a, &[1; 9]).unwrap().1);
    assert!(!put(&a, &[1; 9]).unwrap().1, "told already");
    b.set_wants(WANTS_BYTES);
    b.fall_asleep();
    assert!(b.is_ready(), "it looks again and finds what was there");
    let mut out = [0; 100];
    b.take(&mut out).unwrap();
    b.fall_asleep();
    assert!(!b.is_ready() && put(&a, &[1]).unwrap().1);
    b.fall_asleep();
    b.wake_up();
    assert!(!put(&a, &[1]).unwrap().1, "it looks by itself");
    // Of room: not at the first byte, but when there is enough of it.
    b.take(&mut out).unwrap();
    b.free_all_but(0);
    put(&a, &vec![2; RING_BYTES]).unwrap();
    a.set_wants(WANTS_ROOM);
    a.fall_asleep();
    assert!(!a.is_ready());
    let mut all = vec![0; RING_BYTES];
    b.take(&mut all).unwrap();
    assert!(!b.free_all_but(RING_BYTES - 1));
    assert!(b.free_all_but(10), "half of it is free");
    assert!(a.is_ready());
}

#[test]
fn r1_the_end_of_a_side_is_seen_by_the_other() {
    let (a, b) = pair();
    b.set_wants(WANTS_END);
    assert!(b.is_sound() && !b.is_ready());
    put(&a, &[3; 3]).unwrap();
    a.close();
    assert!(!b.is_sound() && b.is_ready() && b.peer_closed() && !b.is_closed());
    // What it has said before is still there.
    assert_eq!(b.take(&mut [0; 10]).unwrap(), 3);
}

/// Every word of the mapping set to anything, by the other side or by a third one with its descriptor: an error or bytes.
#[test]
fn b1_hostile_counts_are_refused_and_never_leave_the_ring() {
    let (map, fd) = SharedMap::create(MAP_BYTES).unwrap();
    let hostile = SharedMap::open(&fd, MAP_BYTES).unwrap();
    let rings = Rings::new(map, Side::Dialling);
    let full = RING_BYTES as u64;
    let mut rng = Rng::new(9);
    let mut refused = 0;
    for round in 0..20_000u64 {
        let value = match round % 5 {
            0 => rng.below(u64::MAX),
            1 => full + 1,
            2 => u64::MAX - rng.below(3),
            3 => rings.put.load(Ordering::Relaxed).wrapping_sub(rng.below(full + 2)),
            _ => rng.below(2 * full),
        };
        // Theirs and ours.
        for lines in [0, SECOND] {
            hostile.word64(lines + HEAD).store(value, Ordering::SeqCst);
            hostile.word64(lines + TAIL).store(value.rotate_left(round as u32), Ordering::SeqCst);
            hostile.word32(lines + SLEEPING).store(value as u32, Ordering::SeqCst);
        }
        let mut out = [0; 300];
        for result in [rings.take(&mut out), put(&rings, &[1; 300]).map(|(n, _)| n)] {
            match result {
                Ok(n) => assert!(n <= 300),
                Err(e) if e.kind() == io::ErrorKind::InvalidData => refused += 1,
                Err(e) => assert_eq!(e.kind(), io::ErrorKind::WouldBlock),
            }
        }
        rings.free_all_but(0);
        rings.set_wants((round % 8) as u8);
        rings.fall_asleep();
        rings.is_ready();
    }
    assert!(refused > 1000, "{refused}");
}
