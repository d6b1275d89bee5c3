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
    let fleet = Fleet::new(Box::new(ByPrefix), queue, Duration::from_secs(3600));
    fleet.update(workers);
    fleet
}

fn need(tokens: u32, avoid: &[u64]) -> Need {
    let prefix = Prefix::of(&Prompt::Text("x".to_owned()));
    Need { prefix, model: None, tokens, avoid: avoid.to_vec() }
}

type Turn<T> = std::pin::Pin<Box<T>>;

fn ask(
    fleet: &Arc<Fleet>,
    avoid: &[u64],
) -> Result<Turn<impl Future<Output = Option<Pair>> + use<>>, NoSeat> {
    let turn = fleet.acquire(need(2, avoid), Place::Back)?;
    Ok(Box::pin(async { turn.await.ok() }))
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

#[test]
fn a_worker_of_too_small_a_context_is_not_chosen_and_what_none_takes_is_refused_at_once() {
    let prefill = worker(Role::Prefill, 0, 1);
    let (mut small, large) = (worker(Role::Decode, 0, 2), worker(Role::Decode, 1, 3));
    small.context = 100;
    let fleet = fleet(8, &[prefill.clone(), small.clone(), large]);
    let get = |tokens| fleet.acquire(need(tokens, &[]), Place::Back);
    for (tokens, epoch) in [(100, 2), (101, 3), (1024, 3)] {
        let pair = get(tokens).unwrap().now_or_never().unwrap().unwrap();
        assert_eq!(pair.decode.worker.epoch, epoch);
    }
    assert_eq!(get(1025).err(), Some(NoSeat::TooLong { limit: 1024 }));
    // One that took it was there: it may come back.
    fleet.update(&[prefill, small]);
    assert!(get(101).unwrap().now_or_never().is_none());
}

#[test]
fn where_there_is_nobody_a_request_waits_for_the_grace_and_no_longer() {
    let never = Fleet::new(Box::new(ByPrefix), 8, Duration::ZERO);
    let none = never.acquire(need(2, &[]), Place::Back).unwrap().now_or_never();
    assert_eq!(none.unwrap().err(), Some(NoSeat::Nobody { prefill: 0, decode: 0 }));
    // Workers that do not fit each other are as good as none.
    let mut other = worker(Role::Decode, 0, 2);
    other.model = "b".to_owned();
    never.update(&[worker(Role::Prefill, 0, 1), other]);
    let none = never.acquire(need(2, &[]), Place::Back).unwrap().now_or_never();
    assert_eq!(none.unwrap().err(), Some(NoSeat::Nobody { prefill: 1, decode: 1 }));
    // Full ones are waited for; of another model they are not.
    never.update(&[worker(Role::Prefill, 0, 1), worker(Role::Decode, 0, 3)]);
    let held = never.acquire(need(2, &[]), Place::Back).unwrap().now_or_never().unwrap().unwrap();
    assert!(never.acquire(need(2, &[]), Place::Back).unwrap().now_or_never().is_none());
    let b = Need { model: Some("b".to_owned()), ..need(2, &[]) };
    let none = never.acquire(b, Place::Back).unwrap().now_or_never();
    assert!(matches!(none.unwrap(), Err(NoSeat::Nobody { .. })));
    drop(held);
    // With grace, who comes before the worker is served by it.
    let fleet = fleet(8, &[]);
    let mut waits = ask(&fleet, &[]).unwrap();
    assert!((&mut waits).now_or_never().is_none());
    fleet.update(&[worker(Role::Prefill, 0, 1), worker(Role::Decode, 0, 2)]);
    assert!((&mut waits).now_or_never().flatten().is_some());
}

#[test]
fn who_has_had_a_seat_goes_first_and_a_full_worker_is_left_alone_for_a_while() {
    let fleet = fleet(1, &[worker(Role::Prefill, 0, 1), worker(Role::Decode, 0, 2)]);
    let held = ask(&fleet, &[]).unwrap().now_or_never().flatten().unwrap();
    let mut behind = ask(&fleet, &[]).unwrap();
    // The queue is full, and it is let in all the same.
    let mut again = Box::pin(fleet.acquire(need(2, &[]), Place::Front).unwrap());
    drop(held);
    assert!((&mut behind).now_or_never().is_none());
    let pair = (&mut again).now_or_never().unwrap().unwrap();
    let decode = pair.decode.worker.clone();
    let first = fleet.full(&decode);
    over(&fleet);
    assert!(first > Duration::ZERO && fleet.full(&decode) > first);
    drop(pair);
    assert!((&mut behind).now_or_never().is_none());
    fleet.well(&decode);
    over(&fleet);
    assert!(fleet.full(&decode) <= FULL);
}

/// All that are closed are open again: their time is over.
fn over(fleet: &Fleet) {
    for member in fleet.lock().members.values_mut() {
        (member.failed.until, member.full.until) = (None, None);
    }
}

/// What is closed is so for longer than a test takes.
fn lengthen(closed: &mut Closed) {
    closed.until = closed.until.map(|until| until + Duration::from_secs(3600));
}

#[test]
fn what_many_requests_tell_of_one_failure_counts_once_and_a_full_worker_is_no_less_suspect() {
    let decode = worker(Role::Decode, 0, 2);
    let fleet = fleet(8, &[worker(Role::Prefill, 0, 1), decode.clone()]);
    let (mut closed, now) = (Closed::default(), Instant::now());
    let half = SUSPECT / 2;
    for _ in 0..16 {
        assert_eq!(closed.again(now, SUSPECT), SUSPECT);
        assert_eq!(closed.again(now + half, SUSPECT), half);
    }
    // The next failure is another one.
    assert_eq!(closed.again(now + SUSPECT, SUSPECT), 2 * SUSPECT);
    // It says that it is full, and that this is over: it has still failed.
    assert!(fleet.suspect(&decode) > Duration::ZERO);
    fleet.full(&decode);
    for member in fleet.lock().members.values_mut() {
        member.full.until = None;
        lengthen(&mut member.failed);
    }
    let mut waits = ask(&fleet, &[]).unwrap();
    assert!((&mut waits).now_or_never().is_none());
    assert_eq!(fleet.levels().decode_workers, 0);
    over(&fleet);
    fleet.tick();
    assert!((&mut waits).now_or_never().flatten().is_some());
}

#[test]
fn one_to_avoid_is_left_alone_while_another_is_merely_full() {
    let (prefill, broken, good) =
        (worker(Role::Prefill, 0, 1), worker(Role::Decode, 0, 2), worker(Role::Decode, 1, 3));
    let mut second = worker(Role::Prefill, 1, 4);
    second.slots = 8;
    let fleet = fleet(8, &[prefill, second, broken, good.clone()]);
    let held = ask(&fleet, &[2]).unwrap().now_or_never().flatten().unwrap();
    assert_eq!(held.decode.worker.epoch, 3);
    let mut waits = ask(&fleet, &[2]).unwrap();
    assert!((&mut waits).now_or_never().is_none());
    // Full by its own word is full too.
    fleet.full(&good);
    for member in fleet.lock().members.values_mut() {
        lengthen(&mut member.full);
    }
    drop(held);
    assert!((&mut waits).now_or_never().is_none());
    assert_eq!((fleet.levels().decode_workers, fleet.levels().decode_full), (2, 1));
    over(&fleet);
    fleet.tick();
    let pair = (&mut waits).now_or_never().flatten().unwrap();
    assert_eq!(pair.decode.worker.epoch, 3);
    // Where the other goes, there is none but that.
    let mut waits = ask(&fleet, &[2]).unwrap();
    assert!((&mut waits).now_or_never().is_none());
    let mut drains = good;
    drains.draining = true;
    fleet.update(&[
        worker(Role::Prefill, 0, 1),
        worker(Role::Prefill, 1, 4),
        worker(Role::Decode, 0, 2),
        drains,
    ]);
    assert_eq!((&mut waits).now_or_never().flatten().unwrap().decode.worker.epoch, 2);
}

#[test]
fn of_two_workers_of_one_name_the_one_that_is_known_stays_with_its_requests() {
    let prefill = worker(Role::Prefill, 0, 1);
    let known = worker(Role::Decode, 0, 2);
    let mut twin = worker(Role::Decode, 0, 3);
    twin.http.set_port(1);
    let fleet = fleet(8, &[prefill.clone(), known.clone()]);
    let held = ask(&fleet, &[]).unwrap().now_or_never().flatten().unwrap();
    for list in [[prefill.clone(), twin.clone(), known.clone()], [prefill.clone(), known, twin.clone()]] {
        fleet.update(&list);
        assert!(!held.decode.life.is_cancelled());
        assert_eq!(fleet.levels().decode_workers, 1);
    }
    // Alone, it is as good as any.
    fleet.update(&[prefill, twin]);
    assert!(held.decode.life.is_cancelled());
    drop(held);
    let pair = ask(&fleet, &[]).unwrap().now_or_never().flatten().unwrap();
    assert_eq!(pair.decode.worker.epoch, 3);
}
