//! How long 4 KiB take to land, by each path on one host.

use std::time::Instant;

use landfall::kv::{KvChannel, WriteRequest};

use crate::peer::{self, Peer};
use crate::{Failed, GPU, Place, Shape, endpoint, median, timed};

const SHAPE: Shape = Shape { layers: 1, blocks: 1, block: 4096 };
const TIMES: usize = 500;

/// Between the two ends of one process: nothing is opened.
async fn same_process(place: Place) -> Result<f64, Failed> {
    let (a, b) = (
        endpoint(SHAPE, place.memory(SHAPE.bytes()), place).await?,
        endpoint(SHAPE, place.memory(SHAPE.bytes()), place).await?,
    );
    let mut listener = b.listen("127.0.0.1:0".parse()?).await?;
    let (tx, rx): (KvChannel, KvChannel) =
        tokio::try_join!(a.connect(listener.local_addr()), listener.accept())?;
    let mut seconds = Vec::new();
    for round in 0..TIMES + 3 {
        let grant = rx.grant(rx.pool().claim(&[0])?)?;
        let request = WriteRequest::new(&grant, tx.pool().claim(&[0])?);
        let start = Instant::now();
        let ((result, _blocks), arrival) = tokio::join!(
            async {
                let landed = tx.write(request).await;
                (landed.0.map(|_| start.elapsed().as_secs_f64()), landed.1)
            },
            rx.next_arrival()
        );
        arrival?;
        if round >= 3 {
            seconds.push(result?);
        }
    }
    let (ours, theirs) = (tx.path().gpu.same_process.bytes_out, rx.path().gpu.same_process.bytes_in);
    let expected = (TIMES as u64 + 3) * SHAPE.bytes();
    if (ours, theirs) != (expected, expected) {
        return Err(format!("{expected} bytes within the process, {ours} and {theirs} counted").into());
    }
    Ok(median(&mut seconds))
}

pub async fn landed_latency_of_each_path() -> Result<String, Failed> {
    let mut said = String::new();
    for spin in [0, 200] {
        let gpu = Place { spin, ..GPU };
        let host = Place { gpu: false, ..gpu };
        for (name, ours, theirs) in [
            ("GPU to GPU, ipc", gpu, gpu),
            ("GPU to host memory of the peer", gpu, host),
            ("host memory to the peer's GPU", host, gpu),
            ("host to host, shared memory", host, host),
        ] {
            let peer = Peer::start(SHAPE, theirs).await?;
            let channel =
                endpoint(SHAPE, ours.memory(SHAPE.bytes()), ours).await?.connect(peer.address).await?;
            let took = timed(&channel, &[0], &[0], TIMES).await?;
            said += &format!("\n    4 KiB landed, spin {spin} us, {name}: {:.1} us", took * 1e6);
            peer::counted(&channel).await?;
            peer.end().await?;
        }
        let took = same_process(gpu).await?;
        said += &format!("\n    4 KiB landed, spin {spin} us, GPU to GPU, one process: {:.1} us", took * 1e6);
    }
    Ok(said)
}
