//! The `srd` profile: everything arrives once, whole, and not in order.

use super::*;

over_both_transports! {
    k3_a_message_is_whole_when_its_immediate_arrives_and_order_is_not_kept,
    k3_small_messages_overtake_too_and_a_lone_one_is_not_kept,
    r6_a_refused_message_fails_alone_and_the_others_are_flushed,
    r2_an_unsignalled_request_is_refused_where_all_must_be_signalled,
}

fn k3_a_message_is_whole_when_its_immediate_arrives_and_order_is_not_kept(on: SoftTransport) {
    const N: u64 = 1000;
    const LEN: u64 = 20_000;
    let mut p = Pair::new(on, Profile::Srd);
    let (from, to) = (p.a.region(N * LEN, ALL), p.b.region(N * LEN, ALL));
    for i in 0..N {
        fill(&from, i * LEN, &pattern(LEN as usize, i));
        recv(p.qb(), i, None);
    }
    let mut chain = WrChain::default();
    for i in 0..N {
        chain.push(i, write_to(&to, i * LEN, Some(i as u32)), &[sge(&from, i * LEN, LEN)], true, false);
    }
    p.qa().post_send(&chain).unwrap();
    let mut order = Vec::new();
    p.until("arrivals", |p| {
        for cqe in p.b.take() {
            let i = u64::from(cqe.imm.unwrap());
            assert_eq!((cqe.status, cqe.byte_len), (WcStatus::Success, LEN as u32));
            assert!(contents(&to, i * LEN, LEN as usize) == pattern(LEN as usize, i), "message {i} is torn");
            order.push(i);
        }
        order.len() == N as usize
    });
    p.until("completions", |p| p.a.seen.len() == N as usize);
    let done: Vec<u64> = p.a.take().iter().map(|c| c.wr_id).collect();
    for seen in [order, done] {
        let late = seen.windows(2).filter(|w| w[0] > w[1]).count();
        assert!(late > N as usize / 10, "only {late} of {N} came after a later one");
        let mut sorted = seen;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..N).collect::<Vec<_>>(), "each exactly once");
    }
    p.quiet();
}

fn k3_small_messages_overtake_too_and_a_lone_one_is_not_kept(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Srd);
    let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ALL));
    let mut overtaken = 0;
    for round in 0..50 {
        for i in 0..4 {
            recv(p.qb(), i, Some(sge(&to, i * 64, 64)));
        }
        for i in 0..4 {
            post(p.qa(), i, SendOp::Send { imm: Some(i as u32) }, &[sge(&from, 0, 64)]);
        }
        let (_, b) = p.wait(4, 4);
        overtaken += usize::from(b.windows(2).any(|w| w[0].imm > w[1].imm));
        recv(p.qb(), 9, None);
        post(p.qa(), round, write_to(&to, 0, Some(7)), &[sge(&from, 0, 8)]);
        p.wait(1, 1);
    }
    assert!(overtaken > 5, "{overtaken} of 50");
}

fn r6_a_refused_message_fails_alone_and_the_others_are_flushed(on: SoftTransport) {
    let mut p = Pair::new(on, Profile::Srd);
    let (from, to) = (p.a.region(4096, ALL), p.b.region(4096, ALL));
    for i in 0..8 {
        let op = if i == 3 {
            SendOp::Write { remote_addr: 4096, rkey: 1, imm: None }
        } else {
            write_to(&to, 0, None)
        };
        post(p.qa(), i, op, &[sge(&from, 0, 4096)]);
    }
    let (a, _) = p.wait(8, 0);
    for c in a {
        let allowed = if c.wr_id == 3 {
            &[WcStatus::RemoteAccess][..]
        } else {
            &[WcStatus::Success, WcStatus::Flushed]
        };
        assert!(allowed.contains(&c.status), "{c:?}");
    }
}

fn r2_an_unsignalled_request_is_refused_where_all_must_be_signalled(on: SoftTransport) {
    let p = Pair::new(on, Profile::Srd);
    let mut chain = WrChain::default();
    chain.push(1, SendOp::Send { imm: None }, &[], false, false);
    assert_eq!(p.qa().post_send(&chain).unwrap_err().source.raw_os_error(), Some(libc::EINVAL));
}

#[test]
fn k3_the_same_seed_makes_the_same_choices() {
    let choices = |seed| {
        let mut q = super::super::sq::SendQueue::new(false, 64, seed);
        for i in 0..64 {
            q.push(i, SendOp::Send { imm: None }, true, 0, &[], None);
        }
        let mut order = Vec::new();
        while order.len() < 64 {
            match q.pick() {
                Some(msn) => {
                    q.advance(msn, 0);
                    order.push(msn);
                }
                None => q.begin_slice(),
            }
        }
        order
    };
    assert_eq!(choices(7), choices(7));
    assert_ne!(choices(7), choices(8));
}
