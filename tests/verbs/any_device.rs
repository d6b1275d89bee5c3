//! What holds on every device: listing, opening, asking, registering.

use std::future::Future;

use landfall::device::{Device, VerbsConfig};
use landfall::error::{DeviceError, MemoryError, OpError, QpError};
use landfall::memory::{Access, Memory};
use landfall::ring::{CompletionQueue, CqConfig, QpConfig, QueuePair};

use crate::harness::*;

#[test]
#[ignore = "needs RDMA devices"]
fn k9_devices_are_listed_with_what_they_can_do() {
    let list = Device::list();
    for number in [0, 1] {
        let info = list.iter().find(|d| d.name == name(number)).unwrap();
        assert!(info.transport.starts_with("verbs-") && info.profile.is_none(), "{info:?}");
        let device = device(number);
        assert_eq!((device.name(), device.transport()), (info.name.as_str(), info.transport));
        assert_eq!(device.capabilities(), &info.capabilities);
        assert!(device.is_rdma() && device.port() == Some(1) && device.profile().is_none());
        let caps = device.capabilities();
        assert!(caps.max_qp_wr >= 16 && caps.max_cqe >= 32 && caps.max_send_sge >= 1, "{caps:?}");
        assert!(caps.max_msg_size >= 4096 && caps.max_mr_size >= 4096 && caps.ordered, "{caps:?}");
        eprintln!("{}: {}, {caps:?}", device.name(), device.gid());
    }
    assert!(list.iter().any(|d| d.name == "soft-default"));
}

#[test]
#[ignore = "needs RDMA devices"]
fn b2_what_is_not_there_is_refused_with_the_fix() {
    let refused = |name: &str, config| Device::verbs(name, config).unwrap_err();
    let error = refused("landfall_none", VerbsConfig::new());
    assert!(
        matches!(&error, DeviceError::NotFound { available, .. } if available.contains(&name(0))),
        "{error}"
    );
    assert!(matches!(Device::open("landfall_none"), Err(DeviceError::NotFound { .. })));
    for port in [0, 200] {
        let error = refused(&name(0), VerbsConfig::new().port(port));
        assert!(matches!(error, DeviceError::Limit { asked, .. } if asked == u64::from(port)), "{error}");
    }
    let error = refused(&name(0), VerbsConfig::new().gid_index(250));
    assert!(matches!(&error, DeviceError::Gid { reason, .. } if reason.contains("250")), "{error}");
    assert!(matches!(refused(&name(0), VerbsConfig::new().service_level(16)), DeviceError::Config { .. }));
}

#[test]
#[ignore = "needs RDMA devices"]
fn b2_an_index_overrides_the_rule() {
    let by_rule = device(0).gid();
    let gids: Vec<_> = (0..8)
        .filter_map(|i| Device::verbs(&name(0), VerbsConfig::new().gid_index(i)).ok())
        .map(|d| d.gid())
        .collect();
    assert!(gids.contains(&by_rule), "{by_rule} is not in {gids:?}");
}

#[test]
#[ignore = "needs RDMA devices"]
fn r7_resources_can_be_dropped_in_any_order() {
    on_both_runtimes(async || {
        for order in 0..4 {
            let device = device(0);
            let side = Side::of(&device, 16, Default::default());
            let region = side.exposed(10_000).await;
            let slice = region.slice(100..200).unwrap();
            slice.copy_in(0, &[7; 100]).unwrap();
            let Side { pd, cq, qp } = side;
            match order {
                0 => drop((device, pd, cq, qp, region)),
                1 => drop((region, qp, cq, pd, device)),
                2 => drop((cq, pd, region, device, qp)),
                _ => {
                    qp.close().await;
                    cq.close().await;
                    drop((pd, region, device));
                }
            }
            let mut bytes = [0; 100];
            slice.copy_out(0, &mut bytes).unwrap();
            assert_eq!(bytes, [7; 100]);
        }
    });
}

#[test]
#[ignore = "needs RDMA devices"]
fn r4_a_completion_queue_that_is_too_small_is_refused_with_the_sizes() {
    run(false, async {
        let device = device(0);
        let pd = device.alloc_pd().unwrap();
        let cq = CompletionQueue::new(&device, CqConfig::new(40)).unwrap();
        let first = QueuePair::new(&pd, &cq, &cq, QpConfig::new(16, 16)).unwrap();
        let error = QueuePair::new(&pd, &cq, &cq, QpConfig::new(16, 16)).unwrap_err();
        assert!(matches!(error, QpError::CqTooSmall { needed: 64, .. }), "{error}");
        drop(first);
        let soft = Device::open("soft-default").unwrap();
        let foreign = CompletionQueue::new(&soft, CqConfig::new(32)).unwrap();
        let error = QueuePair::new(&pd, &foreign, &foreign, QpConfig::new(1, 1)).unwrap_err();
        assert!(matches!(error, QpError::ForeignResource { .. }), "{error}");
    });
}

/// Large regions are unpinned in the background, and do not stand in the way of the next.
#[test]
#[ignore = "needs RDMA devices"]
fn r9_large_regions_come_and_go() {
    run(false, async {
        let pd = device(0).alloc_pd().unwrap();
        for _ in 0..4 {
            let region = pd.register_exposed(Memory::anonymous(80 << 20), Access::READ_WRITE).await.unwrap();
            let slice = region.slice(..8).unwrap();
            drop(region);
            slice.copy_in(0, &[1; 8]).unwrap();
        }
    });
}

/// Devices and drivers that do not know the flag ignore it.
#[test]
#[ignore = "needs RDMA devices"]
fn k1_memory_with_relaxed_ordering_is_registered_on_every_device() {
    run(false, async {
        let pd = device(0).alloc_pd().unwrap();
        let memory = || Memory::anonymous(10_000).relaxed_ordering(true);
        pd.register_exposed(memory(), Access::READ_WRITE).await.unwrap();
        pd.register_local(memory()).await.unwrap();
    });
}

/// Memory that tells which thread has let go of it last.
struct Owner(std::sync::mpsc::Sender<Option<String>>);

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.0.send(std::thread::current().name().map(str::to_owned));
    }
}

/// The same of who wakes.
struct Woken(std::sync::mpsc::Sender<Option<String>>);

impl std::task::Wake for Woken {
    fn wake(self: std::sync::Arc<Self>) {
        let _ = self.0.send(std::thread::current().name().map(str::to_owned));
    }
}

/// What a driver may wait for is waited for by a thread that is no worker: the end of a region, and the destruction of a queue
/// pair, after which its operations end.
#[test]
#[ignore = "needs RDMA devices"]
fn r9_regions_and_queue_pairs_end_off_the_workers() {
    let elsewhere = Some("landfall-destroy".to_owned());
    let (tell, told) = std::sync::mpsc::channel();
    run(false, async {
        let side = Side::new(0, 16, Default::default());
        let at = Box::leak(Box::new([0; 4096])).as_mut_ptr();
        let owner = Box::new(Owner(tell.clone()));
        // SAFETY: leaked bytes, which nobody else uses.
        let memory = unsafe { Memory::from_raw(at, 4096, owner) };
        drop(side.pd.register_local(memory).await.unwrap());
        assert_eq!(told.recv_timeout(DEADLINE).unwrap(), elsewhere);

        let mut recv = Box::pin(side.qp.recv(side.exposed(64).await.slice(..).unwrap()));
        let waker = std::task::Waker::from(std::sync::Arc::new(Woken(tell)));
        let pending = recv.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending();
        assert!(pending);
        side.qp.kill();
        assert_eq!(told.recv_timeout(DEADLINE).unwrap(), elsewhere);
        assert!(matches!(recv.await.0, Err(OpError::Closed { .. })));
    });
}

/// CASES 45, in a process of its own, whose limit it is.
#[test]
#[ignore = "needs RDMA devices"]
fn r10_the_locked_memory_limit_is_named() {
    const CHILD: &str = "LANDFALL_TEST_MEMLOCK";
    if std::env::var_os(CHILD).is_none() {
        let this = std::env::current_exe().unwrap();
        let test = "any_device::r10_the_locked_memory_limit_is_named";
        // Root may lock any amount, unless it has lost that capability.
        let script = format!(
            "ulimit -l 64 && exec setpriv --bounding-set=-ipc_lock {} --exact {test} --ignored --nocapture",
            this.display()
        );
        let child = std::process::Command::new("sh").args(["-c", &script]).env(CHILD, "1").output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
        assert!(child.status.success() && out.contains("1 passed"), "{out}{err}");
        return;
    }
    run(false, async {
        let pd = device(0).alloc_pd().unwrap();
        let error = pd.register_exposed(Memory::anonymous(1 << 20), Access::READ_WRITE).await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, MemoryError::Register { .. }), "{text}");
        assert!(text.contains("1048576") && text.contains("64 KiB") && text.contains("ulimit -l"), "{text}");
        // The library works on.
        pd.register_local(Memory::anonymous(4096)).await.unwrap();
    });
}
