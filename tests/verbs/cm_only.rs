//! Devices that only RDMA_CM connects: an out-of-band connect fails with the reason and the fix.

use std::time::Duration;

use landfall::connect::ConnectError;
use landfall::error::chain;
use landfall::error::{DeviceError, MemoryError, OpError, QpError};
use landfall::kv::{Bootstrap, KvEndpoint, KvPool, Layout};
use landfall::memory::{Access, Memory, RemoteSlice};
use landfall::ring::Role;

use crate::harness::*;

#[test]
#[ignore = "needs RDMA devices"]
fn b2_such_a_device_says_that_it_has_no_out_of_band_connect() {
    for number in [0, 1] {
        let device = device(number);
        assert!(!device.capabilities().oob, "{}: run the modules oob_ instead", device.name());
        if device.name().starts_with("siw") {
            assert!(!device.capabilities().immediate);
            assert_eq!(device.transport(), "verbs-iwarp");
        }
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn b2_connecting_queue_pairs_by_hand_fails_with_the_fix() {
    on_both_runtimes(async || {
        let (a, b) = (Side::new(0, 16, Duration::ZERO), Side::new(1, 16, Duration::ZERO));
        let recv = a.qp.recv(());
        let error = a.qp.connect(&b.qp.endpoint().unwrap(), Role::Active, patient()).await.unwrap_err();
        let text = chain(&error);
        assert!(matches!(error, QpError::ManualConnect { .. }), "{text}");
        assert!(text.contains("RTS") && text.contains("RDMA_CM"), "{text}");
        // Receives that were posted end too.
        a.qp.close().await;
        recv.await.0.unwrap_err();
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn b2_an_endpoint_refuses_the_out_of_band_bootstrap_before_it_dials() {
    run(false, async {
        let layout = Layout::contiguous(1, 4, 4096).unwrap();
        let pool = KvPool::new(&device(0).alloc_pd().unwrap(), layout).await.unwrap();
        let endpoint = KvEndpoint::new(pool, kv().bootstrap(Bootstrap::Oob)).unwrap();
        // Nobody listens there: it does not come to that.
        let errors = [
            endpoint.listen("127.0.0.1:0".parse().unwrap()).await.err().unwrap(),
            endpoint.connect("127.0.0.1:1").await.err().unwrap(),
        ];
        for error in errors {
            let text = chain(&error);
            let ConnectError::Resources { source } = error else { panic!("{text}") };
            let refused = source.downcast_ref::<DeviceError>();
            assert!(matches!(refused, Some(DeviceError::NoManualConnect { .. })), "{text}");
            assert!(text.contains(&name(0)) && text.contains("RDMA_CM"), "{text}");
        }
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn r10_a_device_without_atomics_says_so_with_its_name() {
    run(false, async {
        let side = Side::new(0, 16, Duration::ZERO);
        let device = side.pd.device();
        // eRDMA has them in both modes: there, --skip r10_a_device_without_atomics.
        assert!(!device.capabilities().atomics, "{} has atomics", device.name());
        let registered = side.pd.register_exposed(Memory::anonymous(64), Access::ATOMIC).await.unwrap_err();
        assert!(matches!(registered, MemoryError::Unsupported { .. }), "{registered}");
        let at = RemoteSlice { addr: 8, len: 8, rkey: 1 };
        let posted = side.qp.fetch_add(side.local(8).await, at, 1).await.0.unwrap_err();
        assert!(matches!(posted, OpError::Unsupported { .. }), "{posted}");
        for text in [registered.to_string(), posted.to_string()] {
            assert!(text.contains(device.name()) && text.contains("atomic"), "{text}");
        }
    });
}
