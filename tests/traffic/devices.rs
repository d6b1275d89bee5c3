//! A worker's devices, the endpoint over them, and their links, which are cut and mended meanwhile.

use std::time::Duration;

use landfall::connect::{Admission, cm};
use landfall::device::{Device, SoftLink};
use landfall::kv::{KvConfig, KvEndpoint, KvPool, PoolAccess};
use landfall::memory::Memory;

use super::content::Rng;
use super::part::Part;

/// Blocks of a pool, for each of the largest operation's: what all operations of two channels hold at most, at both ends, and
/// a third more.
const POOL: u32 = 32;

/// The endpoint of a part, and the links of its devices.
///
/// Its deadlines are short beside a lap, and long enough that a busy machine does not end every channel; an emulated one has more
/// time. Where no channel may end they are longer than a busy machine is late with anything.
pub async fn endpoint(part: &Part) -> Result<(KvEndpoint, Vec<SoftLink>), String> {
    let text = |e: &dyn std::error::Error| e.to_string();
    let rdma = part.devices.iter().any(|device| !is_soft(device));
    let devices = part.devices.iter().map(|device| match is_soft(device) {
        true => device.parse().and_then(Device::soft),
        false => Device::open(device),
    });
    let devices = devices.collect::<Result<Vec<_>, _>>().map_err(|e| text(&e))?;
    if rdma {
        opened_by_the_manager().await?;
    }
    let pds = devices.iter().map(Device::alloc_pd).collect::<Result<Vec<_>, _>>().map_err(|e| text(&e))?;
    let layout = part.blocks.layout(POOL * part.most as u32).map_err(|e| text(&e))?;
    let memory = Memory::anonymous(layout.required_bytes());
    let pds: Vec<_> = pds.iter().collect();
    let pool = KvPool::on_rails(&pds, layout, memory, PoolAccess::Both).await.map_err(|e| text(&e))?;
    let unit = match (part.steady, rdma) {
        (true, _) => 25,
        (false, true) => 5,
        (false, false) => 1,
    };
    let ms = |n: u64| Duration::from_millis(n * unit);
    let kv = KvConfig::default()
        .qps(part.qps as usize)
        .bootstrap(part.bootstrap)
        .heartbeat(ms(200))
        .peer_timeout(ms(1000))
        .abort_grace(ms(200))
        .connect_timeout(ms(2000))
        .deadline(ms(3000))
        .rail_probe(Duration::from_millis(3), Duration::from_millis(100))
        .strict_rails(part.strict)
        .require_rdma(rdma)
        // The devices of the lab have addresses of their own.
        .admission(if rdma { Admission::Open } else { Admission::Local });
    let endpoint = KvEndpoint::named(pool, kv, &part.life.to_string()).map_err(|e| text(&e))?;
    Ok((endpoint, devices.iter().filter_map(Device::soft_link).collect()))
}

/// Every RDMA device is opened by librdmacm when it is first asked for it, and stays open to the end of the process: here it is
/// asked for all of them, before the levels are first looked at.
async fn opened_by_the_manager() -> Result<(), String> {
    let devices = Device::list().into_iter().filter(|device| device.profile.is_none());
    for device in devices {
        let device = Device::open(&device.name).map_err(|e| e.to_string())?;
        for address in cm::addresses(&device).await.map_err(|e| e.to_string())? {
            cm::CmListener::bind(&device, address).await.map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

fn is_soft(device: &str) -> bool {
    device.contains('=')
}

/// Cuts one link after the other, about every so many milliseconds, and mends it.
pub async fn cut_and_mend(links: Vec<SoftLink>, every: u64, mut rng: Rng) {
    let Some(last) = (links.len() as u64).checked_sub(1) else { return };
    loop {
        tokio::time::sleep(Duration::from_millis(rng.range(0, every * 2))).await;
        let link = &links[rng.range(0, last) as usize];
        link.cut();
        tokio::time::sleep(Duration::from_millis(rng.range(0, every))).await;
        link.mend();
    }
}
