//! Requests of the peer to be written to whose plans take long: made beside the reactor's task (R9).

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::time::Duration;

use crate::device::{Device, SoftConfig};
use crate::kv::hostile::PATIENCE;
use crate::kv::{
    KvConfig, KvEndpoint, KvPool, Layout, PoolAccess, ReadRequest, ReadStrategy, ServedBy, WriteRequest,
};
use crate::memory::Memory;

const BLOCKS: u32 = 20_000;
/// Pairs of one read: more than fit in a short request.
const READ: u32 = BLOCKS / 2;

async fn endpoint() -> KvEndpoint {
    let pd = Device::soft(SoftConfig::new()).unwrap().alloc_pd().unwrap();
    let layout = Layout::contiguous(1, BLOCKS, 16).unwrap();
    let memory = Memory::anonymous(layout.required_bytes());
    let pool = KvPool::with_memory(&pd, layout, memory, PoolAccess::Both).await.unwrap();
    KvEndpoint::new(pool, KvConfig::default()).unwrap()
}

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("it waits for ever")
}

/// The thread for plans is taken, so that the plan has to wait: the channel does not.
#[test]
fn r9_a_long_request_is_planned_beside_the_reactor_and_its_blocks_come_back() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (reading, owning) = (endpoint().await, endpoint().await);
        let mut listener = owning.listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await.unwrap();
        let (reader, owner) = tokio::join!(reading.connect(listener.local_addr()), listener.accept());
        let (reader, owner) = (reader.unwrap(), owner.unwrap());
        for killed in [false, true] {
            let (release, held) = mpsc::channel::<()>();
            owner.inner.driver.planner.run(move || {
                let _ = held.recv();
            });
            let mut source = owning.pool().alloc(READ).await.unwrap();
            source.copy_in(0, 7, 0, &[7; 16]).unwrap();
            let grant = owner.grant_read(source).unwrap();
            let pairs = (0..READ).map(|n| (n, READ - 1 - n));
            let request = ReadRequest::new(&grant, reading.pool().alloc(READ).await.unwrap()).pairs(pairs);
            let mut read = reader.read(request.strategy(ReadStrategy::RemoteWrite));
            // It has come, and nothing is written yet.
            let has_come = || owner.inner.driver.locked(|inner, _| inner.returning > 0);
            in_time(async {
                while !has_come() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            })
            .await;
            let target = owner.grant(owning.pool().try_alloc(1).unwrap()).unwrap();
            let write = reader.write(WriteRequest::new(&target, reading.pool().try_alloc(1).unwrap()));
            in_time(write).await.0.unwrap();
            assert!(tokio::time::timeout(Duration::ZERO, &mut read).await.is_err(), "planned on the reactor");
            in_time(owner.next_arrival()).await.unwrap();
            if killed {
                owner.kill();
            }
            release.send(()).unwrap();
            let (result, target) = in_time(read).await;
            let served = in_time(owner.next_served()).await.unwrap();
            assert_eq!(result.is_err(), killed, "{result:?}");
            assert_eq!(served.result().ok(), (!killed).then_some(ServedBy::RemoteWrite));
            let mut seen = [0; 16];
            target.copy_out(0, READ - 1 - 7, 0, &mut seen).unwrap();
            assert!(killed || seen == [7; 16]);
            drop((served, target));
            in_time(owning.pool().alloc(BLOCKS)).await.unwrap();
        }
        in_time(owner.closed()).await;
    });
}
