//! R6: the first cause is kept. R10: what can be checked is checked before the post.

use landfall::device::Profile;
use landfall::error::{OpError, QpError, WcStatus};
use landfall::memory::RemoteSlice;
use landfall::ring::{CompletionQueue, ConnectOptions, CqConfig, Op, QpConfig, QueuePair, Role};

use crate::harness::*;

on_every_profile!(
    r6_flushed_operations_carry_the_first_failure,
    r6_an_operation_that_was_closed_says_so,
    r10_what_cannot_work_is_refused_alone,
);

fn is_cause(error: &OpError) -> bool {
    let OpError::Flushed { cause: Some(cause), .. } = error else { return false };
    matches!(**cause, OpError::Status { status: WcStatus::RemoteAccess, .. })
}

async fn r6_flushed_operations_carry_the_first_failure(on: On) {
    if !on.acknowledges() {
        return;
    }
    let Pair { a, b } = Pair::new(on, 16).await;
    let target = b.exposed(64).await;
    let source = a.exposed(64).await;
    let bad = RemoteSlice { rkey: !target.remote().rkey, ..target.remote().whole() };
    let recv = a.qp.recv(());
    let failed = a.qp.write(source.slice(..).unwrap(), bad);
    // 15 behind it in the queue, 10 that wait for room.
    let behind: Vec<_> =
        (0..25).map(|_| a.qp.write(source.slice(..).unwrap(), target.remote().whole())).collect();
    let error = failed.await.0.unwrap_err();
    assert!(matches!(error, OpError::Status { status: WcStatus::RemoteAccess, .. }), "{error:?}");
    for op in behind {
        // Without order some may have been through before.
        if let Err(error) = op.await.0 {
            assert!(is_cause(&error), "{error:?}");
        } else {
            assert_eq!(on.profile(), Some(Profile::Srd));
        }
    }
    let error = recv.await.0.unwrap_err();
    assert!(is_cause(&error), "{error:?}");
    let late = a.qp.write(source.slice(..).unwrap(), target.remote().whole()).await.0.unwrap_err();
    assert!(is_cause(&late), "{late:?}");
    assert!(matches!(a.qp.failure(), Some(OpError::Status { .. })));
}

async fn r6_an_operation_that_was_closed_says_so(on: On) {
    let Pair { a, b } = Pair::new(on, 16).await;
    let recvs: Vec<_> = (0..40).map(|_| b.qp.recv(())).collect();
    b.qp.close().await;
    for recv in recvs {
        assert!(matches!(recv.await.0, Err(OpError::Closed { .. })));
    }
    assert!(!b.pd.device().name().is_empty());
    a.qp.close().await;
}

async fn r10_what_cannot_work_is_refused_alone(on: On) {
    let Pair { a, b } = Pair::new(on, 16).await;
    let caps = a.pd.device().capabilities().clone();
    let target = b.exposed(4096).await;
    let remote = target.remote();
    let source = a.exposed(4096).await;
    let whole = || source.slice(..).unwrap();
    let wild = RemoteSlice { addr: u64::MAX - 10, len: 4096, rkey: remote.rkey };
    let refused = [
        Op::write(whole(), remote.slice(0, 4095).unwrap()),
        Op::read(source.slice(..4095).unwrap(), remote.whole()),
        Op::read(whole(), remote.whole()).imm(1),
        Op::recv(whole()).imm(1),
        Op::write(whole(), wild),
    ];
    let mut batch = a.qp.batch();
    batch.push(Op::write(whole(), remote.whole()).user_data(1)).unwrap();
    for op in refused {
        let rejected = batch.push(op).unwrap_err();
        assert!(matches!(rejected.error, OpError::Refused { .. }), "{}", rejected.error);
        assert!(rejected.op.into_buf().is_some());
    }
    let foreign = b.exposed(64).await.slice(..).unwrap();
    let rejected = batch.push(Op::send(foreign)).unwrap_err();
    assert!(matches!(rejected.error, OpError::ForeignBuffer), "{}", rejected.error);
    batch.push(Op::write(whole(), remote.whole()).user_data(2)).unwrap();
    assert_eq!(batch.submit(), 2);
    for _ in 0..2 {
        a.cq.next().await.unwrap().result.unwrap();
    }
    // One byte more than a message may have.
    let above = caps.max_msg_size.min(u32::MAX.into()) + 1;
    if above <= 1 << 20 {
        let (big, into) = (a.exposed(above).await, b.exposed(above).await);
        let (result, _) = a.qp.write(big.slice(..).unwrap(), into.remote().whole()).await;
        assert!(matches!(result, Err(OpError::Refused { .. })), "{result:?}");
        let (result, _) = a.qp.write(big.slice(1..).unwrap(), into.remote().whole()).await;
        assert_eq!(result.unwrap().bytes, above - 1);
    }
    assert!(a.qp.failure().is_none());
}

#[test]
fn r10_states_and_options_are_checked() {
    run(false, async {
        let device = device(Profile::Default);
        let (a, b) = (Side::new(&device, 4, Default::default()), Side::new(&device, 4, Default::default()));
        assert!(matches!(a.qp.send(()).await.0, Err(OpError::NotConnected { .. })));
        let to = b.qp.endpoint().unwrap();
        let mut forever = ConnectOptions::default();
        forever.rnr_retry = 7;
        let error = a.qp.connect(&to, Role::Active, forever).await.unwrap_err();
        assert!(matches!(error, QpError::Limit { what: "rnr_retry", asked: 7, limit: 6, .. }), "{error}");
        let other = crate::harness::device(Profile::Default);
        let foreign = CompletionQueue::new(&other, CqConfig::new(8)).unwrap();
        let error = QueuePair::new(&a.pd, &foreign, &foreign, QpConfig::new(4, 4)).unwrap_err();
        assert!(matches!(error, QpError::ForeignResource { .. }), "{error}");
        let json = serde_json::to_string(&to).unwrap();
        assert_eq!(serde_json::from_str::<landfall::ring::QpEndpoint>(&json).unwrap(), to);
        a.cq.close().await;
        let error = QueuePair::new(&a.pd, &a.cq, &a.cq, QpConfig::new(1, 1)).unwrap_err();
        assert!(matches!(error, QpError::CqClosed), "{error}");
        assert!(a.cq.next().await.is_none());
    });
}
