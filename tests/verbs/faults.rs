//! A bad wire below the devices: loss, total loss, delay. In the lab only, whose interfaces carry the devices' names.
//!
//! Uses iproute2's `tc` on the interfaces of both devices, so that acknowledgements get lost as well as data. Channels are
//! connected first, on a good wire. What a `Wire` has spoiled is put right when it is dropped, also by a panic.

use std::process::Command;
use std::time::Duration;

use landfall::error::chain;
use landfall::error::{OpError, WcStatus};
use landfall::kv::{KvChannel, KvConfig, KvEndpoint, KvListener, KvPool, Layout, WriteError, WriteRequest};

use crate::cm_harness::{CmPair, address};
use crate::harness::*;
use crate::oob_kv::transfer;

/// The wire between the two devices, with a fault on it.
struct Wire;

impl Wire {
    /// Puts a fault of netem on both ends: `loss 1%`.
    fn with(fault: &str) -> Self {
        let this = Self;
        for number in [0, 1] {
            let mut words = vec!["qdisc", "add", "dev"];
            let interface = interface(number);
            words.extend([&*interface, "root", "netem"]);
            words.extend(fault.split(' '));
            tc(&words).unwrap_or_else(|e| panic!("tc {words:?}: {e}"));
        }
        this
    }

    /// Packets that both ends have dropped so far.
    fn dropped(&self) -> u64 {
        let of = |number| {
            let said = tc(&["-s", "qdisc", "show", "dev", &interface(number), "root"]).unwrap();
            // `Sent 1234 bytes 5 pkt (dropped 1, overlimits 0 requeues 0)`
            let (_, rest) = said.split_once("(dropped ").unwrap_or_else(|| panic!("{said}"));
            rest.split(',').next().and_then(|n| n.parse::<u64>().ok()).unwrap_or_else(|| panic!("{said}"))
        };
        of(0) + of(1)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        for number in [0, 1] {
            // Nothing to say when there is none, as after a failed `with`.
            let _ = tc(&["qdisc", "del", "dev", &interface(number), "root"]);
        }
    }
}

/// The interface below a device: `rxe_0` is that of `rxe0`.
fn interface(number: usize) -> String {
    let name = name(number);
    let (kind, end) = name.split_at(name.len() - 1);
    format!("{kind}_{end}")
}

fn tc(words: &[&str]) -> Result<String, String> {
    let output = Command::new("tc").args(words).output().map_err(|e| e.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

struct Channels {
    sender: KvChannel,
    receiver: KvChannel,
    _ends: (KvEndpoint, KvEndpoint, KvListener),
}

/// Connected as the devices can be.
async fn channels(layout: Layout, config: KvConfig) -> Channels {
    let endpoint = async |number: usize| {
        let pool = KvPool::new(&device(number).alloc_pd().unwrap(), layout).await.unwrap();
        KvEndpoint::new(pool, config.clone().require_rdma(true)).unwrap()
    };
    let (sending, receiving) = (endpoint(0).await, endpoint(1).await);
    let mut listener = receiving.listen((address(1), 0).into()).await.unwrap();
    let (sender, receiver) = tokio::join!(sending.connect(listener.local_addr()), listener.accept());
    Channels {
        sender: sender.unwrap_or_else(|e| panic!("{}", chain(&e))),
        receiver: receiver.unwrap(),
        _ends: (sending, receiving, listener),
    }
}

/// Late enough for a wire on which a single lost packet costs a third of a second.
fn patient_config() -> KvConfig {
    kv().deadline(DEADLINE).peer_timeout(DEADLINE)
}

/// Transfers in both directions until the wire has lost some, and 20 at the least.
async fn lands_under_loss(loss: &str) {
    let layout = Layout::contiguous(2, 32, 3000).unwrap();
    let Channels { sender, receiver, .. } = channels(layout, patient_config()).await;
    transfer(&sender, &receiver, 1, 0).await;
    let wire = Wire::with(&format!("loss {loss}"));
    let mut tag = 0;
    while tag < 20 || wire.dropped() < 5 {
        tag += 1;
        transfer(&sender, &receiver, 16, tag).await;
        transfer(&receiver, &sender, 16, 1000 + tag).await;
    }
    eprintln!("{loss}: {tag} rounds, {} packets lost", wire.dropped());
    drop(wire);
    sender.close().await.unwrap();
    assert!(receiver.closed().await.is_graceful());
    assert_eq!((sender.pool().free_blocks(), receiver.pool().free_blocks()), (32, 32));
}

#[test]
#[ignore = "needs RDMA devices"]
fn k1_everything_lands_when_one_packet_in_a_hundred_is_lost() {
    run(true, lands_under_loss("1%"));
}

#[test]
#[ignore = "needs RDMA devices"]
fn k1_everything_lands_when_one_packet_in_twenty_is_lost() {
    run(true, lands_under_loss("5%"));
}

/// The confirmation makes the way back, too: nothing has landed before that.
#[test]
#[ignore = "needs RDMA devices"]
fn k1_a_landing_takes_both_ways_of_a_long_wire() {
    const DELAY: Duration = Duration::from_millis(20);
    run(false, async {
        let layout = Layout::contiguous(2, 32, 3000).unwrap();
        let Channels { sender, receiver, .. } = channels(layout, patient_config()).await;
        let wire = Wire::with("delay 20ms");
        for tag in 0..10 {
            transfer(&sender, &receiver, 16, tag).await;
            transfer(&receiver, &sender, 16, 100 + tag).await;
        }
        let grant = receiver.grant(receiver.pool().try_alloc(1).unwrap()).unwrap();
        let request = WriteRequest::new(&grant, sender.pool().try_alloc(1).unwrap());
        let landed = sender.write(request).await.0.unwrap();
        eprintln!("local after {:?}, landed after {:?}", landed.local, landed.landed);
        // Timers may be a little early, never by half.
        assert!(landed.landed > DELAY * 3 / 2, "{landed:?}: there and back are {:?}", DELAY * 2);
        drop(wire);
        sender.close().await.unwrap();
    });
}

/// A write over a wire that is cut: what the sender learns, within which of the two limits, and its blocks.
async fn cut(config: KvConfig, deadline: Duration) {
    let layout = Layout::contiguous(2, 32, 3000).unwrap();
    let Channels { sender, receiver, .. } = channels(layout, config).await;
    transfer(&sender, &receiver, 16, 1).await;
    let grant = receiver.grant(receiver.pool().try_alloc(16).unwrap()).unwrap();
    let wire = Wire::with("loss 100%");
    let request = WriteRequest::new(&grant, sender.pool().try_alloc(16).unwrap()).deadline(deadline);
    let (ended, source) = sender.write(request).await;
    let error = ended.expect_err("landed over a wire that is cut");
    eprintln!("{}", chain(&error));
    assert!(matches!(error, WriteError::NotDelivered(_) | WriteError::InDoubt { .. }), "{error:?}");
    assert!(wire.dropped() > 0, "nothing was lost");
    drop(source);
    assert_eq!(sender.pool().free_blocks(), 32);
    // Neither side waits for ever: the channel cannot come to rest, and ends.
    for channel in [&sender, &receiver] {
        let closed = channel.closed().await;
        eprintln!("{closed}");
        assert!(!closed.is_graceful(), "{closed}");
    }
    assert!(receiver.next_arrival().await.is_err(), "it arrived all the same");
    assert_eq!(receiver.pool().free_blocks(), 32);
}

/// The write's deadline comes first (also before the device gives up, after two seconds): the queue pairs are killed to give
/// the buffers back.
#[test]
#[ignore = "needs RDMA devices"]
fn k5_on_a_cut_wire_a_write_ends_at_its_deadline() {
    let config = kv().heartbeat(Duration::from_secs(2)).peer_timeout(Duration::from_secs(10));
    run(false, cut(config, Duration::from_secs(1)));
}

/// The peer's silence comes first.
#[test]
#[ignore = "needs RDMA devices"]
fn k5_on_a_cut_wire_the_peer_is_lost() {
    let config = kv().heartbeat(Duration::from_millis(500)).peer_timeout(Duration::from_secs(3));
    run(false, cut(config, DEADLINE));
}

/// What the queue pair says under total loss. iWARP completes a WRITE when TCP has taken it, which is why no completion
/// counts as a landing; InfiniBand's transport waits for an acknowledgement, and gives up.
#[test]
#[ignore = "needs RDMA devices"]
fn k1_a_local_completion_is_no_landing() {
    run(false, async {
        let CmPair { a, b, client: _client, server: _server } = CmPair::new().await;
        let target = b.exposed(4096).await;
        let mut source = a.local(4096).await;
        source.fill(0x5a);
        let wire = Wire::with("loss 100%");
        let ended = a.qp.write(source, target.remote().whole()).await.0;
        assert!(wire.dropped() > 0, "nothing was lost");
        let mut bytes = [0; 4096];
        target.slice(..).unwrap().copy_out(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 4096], "nothing came through");
        match a.pd.device().transport() {
            "verbs-iwarp" => assert_eq!(ended.unwrap().bytes, 4096),
            _ => {
                let error = ended.unwrap_err();
                assert!(
                    matches!(error, OpError::Status { status: WcStatus::RetryExceeded, .. }),
                    "{}",
                    chain(&error)
                );
            }
        }
    });
}
