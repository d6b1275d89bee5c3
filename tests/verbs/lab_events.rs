//! What happens to a device, on all devices of the lab: its port goes down, or it is taken away.

use landfall::device::DeviceEvent;
use landfall::error::{DeviceError, MemoryError, OpError, QpError};
use landfall::memory::{Access, Memory};
use landfall::ring::{CompletionQueue, CqConfig, QpConfig, QueuePair};

use crate::harness::*;

/// A device of the lab, which is put right again at the end, however that comes.
pub(crate) struct Lab;

impl Lab {
    /// The interface below a device.
    fn interface(number: usize) -> String {
        let name = name(number);
        let (kind, at) = name.split_at(name.len() - 1);
        format!("{kind}_{at}")
    }

    /// Starts a command of iproute2.
    pub(crate) fn command(words: &str) -> std::process::Child {
        let mut words = words.split(' ');
        std::process::Command::new(words.next().unwrap()).args(words).spawn().unwrap()
    }

    /// Starts to take the device away. The kernel's drivers here wait until it is closed.
    pub(crate) fn remove(number: usize) -> std::process::Child {
        Self::command(&format!("rdma link del {}", name(number)))
    }

    fn put_right() {
        let devices = std::env::var("LAB_DEVICES").expect("these tests run in the lab");
        assert!(Self::command(&format!("{devices} up")).wait().unwrap().success());
    }

    /// The end of a removal, which is the proof that nothing of the device is left.
    pub(crate) async fn removed(mut removal: std::process::Child) {
        let done = tokio::task::spawn_blocking(move || removal.wait().unwrap().success());
        assert!(within(done).await.unwrap());
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        Self::put_right();
    }
}

pub(crate) fn is_gone(error: &OpError) -> bool {
    matches!(error, OpError::DeviceGone { .. })
}

#[test]
#[ignore = "needs the lab"]
fn r3_a_port_that_goes_down_is_told_and_one_that_comes_back() {
    run(true, async {
        let _lab = Lab;
        let device = device(0);
        let mut events = device.events();
        let interface = Lab::interface(0);
        let mut told = async |wanted: DeviceEvent| {
            while within(events.next()).await.unwrap() != wanted {}
        };
        for (word, wanted) in [
            ("down", DeviceEvent::PortDown { port: 1 }),
            ("up", DeviceEvent::PortActive { port: 1 }),
            ("down", DeviceEvent::PortDown { port: 1 }),
            ("up", DeviceEvent::PortActive { port: 1 }),
        ] {
            assert!(Lab::command(&format!("ip link set {interface} {word}")).wait().unwrap().success());
            told(wanted).await;
        }
        // It is still the same device. (siw flushes the queue pairs that it finds some time after a port went down.)
        let side = Side::of(&device, 16, Default::default());
        let recv = side.qp.recv(());
        side.qp.close().await;
        let error = recv.await.0.unwrap_err();
        assert!(!is_gone(&error), "{error}");
    });
}

#[test]
#[ignore = "needs the lab"]
fn r7_removal_ends_operations_and_lets_go() {
    on_both_runtimes(async || {
        let _lab = Lab;
        let device = device(0);
        let mut events = device.events();
        let side = Side::of(&device, 16, Default::default());
        let region = side.exposed(4096).await;
        // Posted, and waiting for room.
        let recvs: Vec<_> = (0..40).map(|_| side.qp.recv(region.slice(..64).unwrap())).collect();
        let removal = Lab::remove(0);
        for recv in recvs {
            let (result, slice) = recv.await;
            let error = result.unwrap_err();
            assert!(is_gone(&error), "{error:?}");
            assert_eq!(slice.len(), 64);
        }
        while let Some(event) = events.next().await {
            eprintln!("{event:?}");
        }
        let error = side.qp.recv(()).await.0.unwrap_err();
        assert!(is_gone(&error), "{error:?}");
        let error = QueuePair::new(&side.pd, &side.cq, &side.cq, QpConfig::new(1, 1)).unwrap_err();
        assert!(matches!(error, QpError::DeviceGone { .. }), "{error}");
        let error = CompletionQueue::new(&device, CqConfig::new(1)).unwrap_err();
        assert!(matches!(error, DeviceError::DeviceGone { .. }), "{error}");
        let error = side.pd.register_exposed(Memory::anonymous(64), Access::READ).await.unwrap_err();
        assert!(matches!(error, MemoryError::DeviceGone { .. }), "{error}");
        side.qp.close().await;
        side.cq.close().await;
        drop((region, side.pd, side.cq, device));
        Lab::removed(removal).await;
    });
}

/// The driver waits for everything, also for what is dropped with the removal under way.
#[test]
#[ignore = "needs the lab"]
fn r7_removal_while_everything_is_dropped_returns() {
    run(true, async {
        let _lab = Lab;
        let removal = {
            let sides: Vec<_> = (0..4).map(|_| Side::new(0, 16, Default::default())).collect();
            let recvs: Vec<_> = sides.iter().flat_map(|s| (0..8).map(|_| s.qp.recv(()))).collect();
            let removal = Lab::remove(0);
            drop((sides, recvs));
            removal
        };
        Lab::removed(removal).await;
    });
}
