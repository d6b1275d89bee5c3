//! The raw escape hatch: the pointers are libibverbs' own, and it takes them.

use std::ffi::{c_int, c_void};

use landfall::device::Device;
use landfall::memory::{Access, Memory};
use landfall::ring::Role;

use crate::harness::*;

/// `struct ibv_qp_attr` and `struct ibv_qp_init_attr` in a size that holds both. The first begins with the state.
#[repr(C, align(8))]
struct Room([u32; 256]);

const STATE: c_int = 1;

/// `ibv_query_qp`, through a declaration of this test's own: its result, and the state.
fn query(qp: *mut c_void) -> (c_int, u32) {
    type Query = unsafe extern "C" fn(*mut c_void, *mut Room, c_int, *mut Room) -> c_int;
    let (mut attr, mut init) = (Room([u32::MAX; 256]), Room([0; 256]));
    // SAFETY: libibverbs is loaded already; the function has this type, the queue pair is live, and both structs are smaller
    // than the room for them.
    let rc = unsafe {
        let lib = libloading::Library::new("libibverbs.so.1").unwrap();
        let query = lib.get::<Query>(b"ibv_query_qp\0").unwrap();
        query(qp, &mut attr, STATE, &mut init)
    };
    (rc, attr.0[0])
}

#[test]
#[ignore = "needs RDMA devices"]
fn r10_raw_pointers_of_a_device_are_those_of_libibverbs() {
    run(false, async {
        let side = Side::new(0, 16, Default::default());
        let region = side.exposed(4096).await;
        let (context, pd) = (side.pd.device().as_raw_context().unwrap(), side.pd.as_raw_pd().unwrap());
        let (mr, cq) = (region.as_raw_mr().unwrap(), side.cq.as_raw_cq().unwrap());
        let qp = side.qp.as_raw_qp().unwrap();
        // SAFETY: each of the four structs begins with a pointer to the context; a queue pair goes on with `qp_context`,
        // and its domain.
        unsafe {
            for object in [pd, mr, cq, qp] {
                assert_eq!(object.cast::<*mut c_void>().read(), context);
            }
            assert_eq!(mr.cast::<*mut c_void>().add(1).read(), pd);
            assert_eq!(qp.cast::<*mut c_void>().add(2).read(), pd);
        }
        assert_eq!(query(qp).0, 0);
        // The same whoever is asked, and gone with the queue pair.
        assert_eq!(side.qp.as_raw_qp(), Some(qp));
        side.qp.close().await;
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn oob_the_driver_is_asked_through_a_raw_pointer() {
    const INIT: u32 = 1;
    const RTS: u32 = 3;
    run(false, async {
        let (a, b) = (Side::new(0, 16, Default::default()), Side::new(1, 16, Default::default()));
        let raw = a.qp.as_raw_qp().unwrap();
        assert_eq!(query(raw), (0, INIT));
        b.qp.connect(&a.qp.endpoint().unwrap(), Role::Passive, patient()).await.unwrap();
        a.qp.connect(&b.qp.endpoint().unwrap(), Role::Active, patient()).await.unwrap();
        assert_eq!(query(raw), (0, RTS));
        let (sent, received) = tokio::join!(a.qp.send(()), b.qp.recv(()));
        assert!(sent.0.is_ok() && received.0.is_ok());
    });
}

#[test]
fn r10_the_soft_provider_has_no_raw_objects() {
    run(false, async {
        let device = Device::open("soft-default").unwrap();
        let side = Side::of(&device, 16, Default::default());
        let region = side.pd.register_exposed(Memory::anonymous(64), Access::READ).await.unwrap();
        assert_eq!((device.as_raw_context(), side.pd.as_raw_pd(), region.as_raw_mr()), (None, None, None));
        assert_eq!((side.cq.as_raw_cq(), side.qp.as_raw_qp()), (None, None));
    });
}
