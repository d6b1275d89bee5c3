//! Writes of one block over a `KvChannel`, each timed until it has landed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use landfall::connect::Admission;
use landfall::device::Device;
use landfall::kv::{Blocks, Bootstrap, Grant, KvChannel, KvConfig, KvEndpoint, KvPool, Layout, WriteRequest};

use crate::common::Error;
use crate::exchange::Plan;

/// Grants that are asked for at a time. Each serves one write.
const GRANTS: u32 = 32;

pub(crate) async fn endpoint(device: &Device, plan: Plan) -> Result<KvEndpoint, Error> {
    // Twice the grants: the next ones may be made before the last arrival was taken.
    let layout = Layout::contiguous(1, 2 * GRANTS, plan.size)?;
    let pool = KvPool::new(&device.alloc_pd()?, layout).await?;
    let bootstrap = if plan.by_manager { Bootstrap::Cm } else { Bootstrap::Oob };
    // The exchange that has led here lets anybody in, too.
    let config = KvConfig::default()
        .spin(Duration::from_micros(plan.spin_us))
        .bootstrap(bootstrap)
        .admission(Admission::Open);
    Ok(KvEndpoint::new(pool, config)?)
}

/// The measuring side.
pub(crate) async fn measure(channel: &KvChannel, plan: Plan) -> Result<Vec<Duration>, Error> {
    let mut source: Arc<Blocks> = channel.pool().alloc(1).await?.into();
    let mut times = Vec::with_capacity(plan.rounds as usize);
    while times.len() < plan.rounds as usize {
        channel.send_message(Vec::new()).await?;
        let mut grants = Vec::new();
        for _ in 0..GRANTS {
            grants.push(Grant::from_bytes(&channel.recv_message().await?)?);
        }
        for grant in grants.iter().take(plan.rounds as usize - times.len()) {
            let start = Instant::now();
            let (landed, back) = channel.write(WriteRequest::new(grant, source)).await;
            times.push(start.elapsed());
            landed?;
            source = back;
        }
    }
    Ok(times)
}

/// The answering side: grants when asked, and lets arrivals go, until the channel ends.
pub(crate) async fn serve(channel: &KvChannel) -> Result<(), Error> {
    let grants = async {
        while channel.recv_message().await.is_ok() {
            for _ in 0..GRANTS {
                let blocks = channel.pool().alloc(1).await?;
                let grant = channel.grant(blocks).map_err(|refused| refused.why)?;
                channel.send_message(grant.to_bytes()).await?;
            }
        }
        Ok(())
    };
    let arrivals = async { while channel.next_arrival().await.is_ok() {} };
    let (granted, ()) = tokio::join!(grants, arrivals);
    granted
}
