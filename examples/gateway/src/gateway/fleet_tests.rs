//! Admission, without any worker.

use futures_util::FutureExt;

use super::*;
use crate::gateway::route::ByPrefix;
use crate::protocol::Prompt;

fn worker(role: Role, n: u64, epoch: u64) -> Worker {
    Worker {
        name: format!("{role}-{n}"),
        role,
        http: ([127, 0, 0, 1], 9000 + n as u16).into(),
        kv: None,
        epoch,
        model: "a".to_owned(),
        context: 1024,
        slots: 1,
        blocks: 1,
        block_bytes: 1,
        draining: false,
    }
}

fn fleet(queue: usize, workers: &[Worker]) -> Arc<Fleet> {
    let fleet = Fleet::new(Box::new(ByPrefix), queue);
    fleet.update(workers);
    fleet
}

fn ask(
    fleet: &Arc<Fleet>,
    avoid: &[u64],
) -> Result<std::pin::Pin<Box<impl Future<Output = Option<Pair>> + use<>>>, NoSeat> {
    fleet.acquire(Prefix::of(&Prompt::Text("x".to_owned())), avoid.to_vec()).map(Box::pin)
}

#[test]
fn k7_who_waits_is_served_in_order_and_who_is_too_many_is_refused() {
    let fleet = fleet(2, &[worker(Role::Prefill, 0, 1), worker(Role::Decode, 0, 2)]);
    let served = ask(&fleet, &[]).unwrap().now_or_never().flatten().unwrap();
    let (mut first, mut second) = (ask(&fleet, &[]).unwrap(), ask(&fleet, &[]).unwrap());
    assert!(matches!(ask(&fleet, &[]), Err(NoSeat::Full { waiting: 2, .. })));
    // A seat at the prefill worker alone serves nobody.
    let Pair { prefill, decode } = served;
    drop(prefill);
    assert!((&mut first).now_or_never().is_none());
    drop(decode);
    let served = (&mut first).now_or_never().flatten().unwrap();
    assert!((&mut second).now_or_never().is_none());
    // Who gives up does not take a place, nor a seat.
    drop(second);
    let mut third = ask(&fleet, &[]).unwrap();
    drop(served);
    let served = (&mut third).now_or_never().flatten().unwrap();
    drop(served);
    let levels = fleet.levels();
    assert_eq!((levels.waiting, levels.prefilling, levels.decoding), (0, 0, 0));
}

#[test]
fn k6_another_epoch_ends_the_life_and_its_seats_are_not_the_new_ones() {
    let (prefill, old, new) =
        (worker(Role::Prefill, 0, 1), worker(Role::Decode, 0, 2), worker(Role::Decode, 0, 3));
    let fleet = fleet(2, &[prefill.clone(), old]);
    let Pair { prefill: seat, decode } = ask(&fleet, &[]).unwrap().now_or_never().flatten().unwrap();
    drop(seat);
    fleet.update(&[prefill, new]);
    assert!(decode.life.is_cancelled());
    let again = ask(&fleet, &[]).unwrap().now_or_never().flatten().unwrap();
    assert_eq!(again.decode.worker.epoch, 3);
    assert!(!again.decode.life.is_cancelled());
    // The old seat's end gives the new life's seat to nobody.
    drop(decode);
    assert_eq!(fleet.levels().decoding, 1);
}

#[test]
fn a_worker_that_drains_or_is_suspect_gets_nothing_and_one_to_avoid_only_for_want_of_others() {
    let prefill = worker(Role::Prefill, 0, 1);
    let (one, mut two) = (worker(Role::Decode, 0, 2), worker(Role::Decode, 1, 3));
    let fleet = fleet(8, &[prefill.clone(), one.clone(), two.clone()]);
    let epoch = |pair: Option<Pair>| pair.unwrap().decode.worker.epoch;
    assert_eq!(epoch(ask(&fleet, &[2]).unwrap().now_or_never().flatten()), 3);
    assert_eq!(epoch(ask(&fleet, &[3]).unwrap().now_or_never().flatten()), 2);
    // Better than nothing.
    assert_eq!(epoch(ask(&fleet, &[2, 3]).unwrap().now_or_never().flatten()), 2);
    fleet.suspect(&one);
    assert_eq!(epoch(ask(&fleet, &[]).unwrap().now_or_never().flatten()), 3);
    two.draining = true;
    fleet.update(&[prefill, one, two]);
    assert!(ask(&fleet, &[]).unwrap().now_or_never().is_none());
    assert_eq!(fleet.levels().decode_workers, 0);
}

#[test]
fn only_workers_of_one_model_are_put_together() {
    let mut other = worker(Role::Decode, 0, 2);
    other.model = "b".to_owned();
    let fleet = fleet(8, &[worker(Role::Prefill, 0, 1), other.clone()]);
    let mut waits = ask(&fleet, &[]).unwrap();
    assert!((&mut waits).now_or_never().is_none());
    fleet.update(&[worker(Role::Prefill, 0, 1), other, worker(Role::Decode, 1, 3)]);
    assert_eq!((&mut waits).now_or_never().flatten().unwrap().decode.worker.epoch, 3);
}
