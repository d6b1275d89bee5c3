//! What holds on a GPU: data, paths, counters, errors and speed, between processes. Started by `tests/gpu`; without a GPU it fails.
//!
//! ```text
//!   main.rs    the tests, in their order, and what they share
//!   peer.rs    the other process
//!   driver.rs  plain CUDA, to compare with     latency.rs  what landing takes     warnings.rs  what the crate warns of
//! ```

mod driver;
mod latency;
mod peer;
mod shuffled;
mod warnings;

use std::fmt;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use landfall::cuda;
use landfall::device::{Device, SoftConfig, SoftTransport};
use landfall::kv::{Blocks, GpuPath, KvChannel, KvConfig, KvEndpoint, KvPool, Layout, PoolAccess};
use landfall::memory::{Access, Exposed, Memory, Region};

use driver::Cuda;
use latency::landed_latency_of_each_path;
use peer::Peer;
use shuffled::shuffled;

pub type Failed = Box<dyn std::error::Error>;

const GIB: f64 = (1u64 << 30) as f64;

/// Layers, blocks and bytes of a block.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub layers: u32,
    pub blocks: u32,
    pub block: u64,
}

impl Shape {
    fn bytes(self) -> u64 {
        u64::from(self.layers) * u64::from(self.blocks) * self.block
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.layers, self.blocks, self.block)
    }
}

impl FromStr for Shape {
    type Err = Failed;

    fn from_str(text: &str) -> Result<Self, Failed> {
        let mut numbers = text.split('x');
        let mut next = || numbers.next().ok_or("a shape is LAYERSxBLOCKSxBYTES");
        Ok(Self { layers: next()?.parse()?, blocks: next()?.parse()?, block: next()?.parse()? })
    }
}

/// Where a pool is, and how its endpoint waits.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    gpu: bool,
    spin: u64,
    qps: usize,
    /// Bytes of a WRITE at most; 0 is what is the default.
    max_write: u32,
    tcp: bool,
    path: GpuPath,
}

const GPU: Place = Place { gpu: true, spin: 0, qps: 1, max_write: 0, tcp: false, path: GpuPath::Ipc };

impl Place {
    fn memory(self, bytes: u64) -> Memory {
        if self.gpu { Memory::cuda(0, bytes) } else { Memory::anonymous(bytes) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (gpu, tcp) = (u8::from(self.gpu), u8::from(self.tcp));
        write!(f, "{gpu},{},{},{},{tcp},{}", self.spin, self.qps, self.max_write, self.path)
    }
}

impl FromStr for Place {
    type Err = Failed;

    fn from_str(text: &str) -> Result<Self, Failed> {
        let mut numbers = text.split(',');
        let mut next = || numbers.next().ok_or("a place is GPU,SPIN,QPS,BYTES,TCP,PATH");
        let (gpu, spin, qps, max_write) =
            (next()? == "1", next()?.parse()?, next()?.parse()?, next()?.parse()?);
        Ok(Self { gpu, spin, qps, max_write, tcp: next()? == "1", path: next()?.parse()? })
    }
}

/// An endpoint over shared memory alone, or over TCP alone.
pub async fn endpoint(shape: Shape, memory: Memory, place: Place) -> Result<KvEndpoint, Failed> {
    let transport = if place.tcp { SoftTransport::Tcp } else { SoftTransport::Shm };
    let device = Device::soft(SoftConfig::new().transport(transport))?;
    let layout = Layout::contiguous(shape.layers, shape.blocks, shape.block)?;
    let pool = KvPool::with_memory(&device.alloc_pd()?, layout, memory, PoolAccess::Both).await?;
    let path = match (place.gpu, place.tcp) {
        (true, true) => GpuPath::Staged,
        (true, false) => place.path,
        (false, _) => GpuPath::Any,
    };
    let mut config =
        KvConfig::default().gpu_path(path).qps(place.qps).spin(Duration::from_micros(place.spin));
    if place.max_write > 0 {
        config = config.max_write(place.max_write);
    }
    Ok(KvEndpoint::new(pool, config)?)
}

/// The content of a block.
pub fn content(shape: Shape, seed: u64, layer: u32, position: u32) -> Vec<u8> {
    let mut word = seed ^ (u64::from(layer) << 32 | u64::from(position)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut bytes = vec![0; shape.block as usize];
    for eight in bytes.chunks_mut(8) {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let n = eight.len();
        eight.copy_from_slice(&word.to_be_bytes()[..n]);
    }
    bytes
}

fn fill(blocks: &mut Blocks, shape: Shape, seed: u64) -> Result<(), Failed> {
    for layer in 0..shape.layers {
        for position in 0..blocks.len() {
            blocks.copy_in(layer, position, 0, &content(shape, seed, layer, position))?;
        }
    }
    Ok(())
}

pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn in_order(n: u32) -> Vec<u32> {
    (0..n).collect()
}

/// A peer process, and a channel to it from a pool in memory of the GPU.
async fn pair(shape: Shape, place: Place, memory: Memory) -> Result<(Peer, KvChannel), Failed> {
    let peer = Peer::start(shape, place).await?;
    let channel = endpoint(shape, memory, place).await?.connect(peer.address).await?;
    Ok((peer, channel))
}

/// The middle of `times` writes of all blocks, `from` and `to` in these orders.
async fn timed(channel: &KvChannel, from: &[u32], to: &[u32], times: usize) -> Result<f64, Failed> {
    let mut seconds = Vec::new();
    for round in 0..times + 3 {
        let (took, _blocks) = peer::write(channel, channel.pool().claim(from)?, to, None).await?;
        if round >= 3 {
            seconds.push(took);
        }
    }
    Ok(median(&mut seconds))
}

/// K1, K9: real layouts from GPU to GPU between two processes: every block is right, and both ends have counted each byte.
async fn ipc_moves_real_layouts_and_counts_every_byte() -> Result<String, Failed> {
    let mut said = String::new();
    for (name, shape) in [
        ("deepseek page 64", Shape { layers: 27, blocks: 128, block: 64 * 1152 }),
        ("llama page 16", Shape { layers: 32, blocks: 128, block: 65_536 }),
        ("odd blocks", Shape { layers: 3, blocks: 50, block: 12_345 }),
    ] {
        let (peer, channel) = pair(shape, GPU, GPU.memory(shape.bytes())).await?;
        for round in 0..3 {
            let (from, to) = (shuffled(shape.blocks, round + 7), shuffled(shape.blocks, round + 99));
            let mut blocks = channel.pool().claim(&from)?;
            fill(&mut blocks, shape, round)?;
            peer::write(&channel, blocks, &to, Some(round)).await?;
        }
        let (bytes, operations, calls) = peer::counted(&channel).await?;
        let ours = channel.path().gpu.ipc;
        let expected = 3 * shape.bytes();
        if (ours.bytes_out, bytes) != (expected, expected) {
            return Err(format!(
                "{name}: {expected} bytes, {} counted here and {bytes} there",
                ours.bytes_out
            )
            .into());
        }
        said += &format!(
            "\n    {name}: {expected} bytes in {} operations, {bytes} in {operations} there, by {calls} calls of the driver",
            ours.operations_out
        );
        channel.close().await?;
        peer.end().await?;
    }
    Ok(said)
}

/// Case 10: pools that begin at five places of one allocation.
async fn slices_inside_of_an_allocation_are_found() -> Result<String, Failed> {
    let shape = Shape { layers: 2, blocks: 4, block: 4096 };
    let device = Device::soft(SoftConfig::new().transport(SoftTransport::Shm))?;
    let pd = device.alloc_pd()?;
    let whole = pd.register_exposed(Memory::cuda(0, 8 << 20), Access::READ).await?;
    let base = whole.remote().addr;
    let peer = Peer::start(shape, GPU).await?;
    let mut channels = Vec::new();
    for (n, offset) in [64, 16 << 10, 128 << 10, 512 << 10, 4 << 20].into_iter().enumerate() {
        // SAFETY: inside of an allocation that `owner` keeps, and that is used by nothing else.
        let memory = unsafe { Memory::from_cuda(base + offset, shape.bytes(), Box::new(whole.clone()))? };
        let channel = endpoint(shape, memory, GPU).await?.connect(peer.address).await?;
        let mut blocks = channel.pool().claim(&in_order(shape.blocks))?;
        fill(&mut blocks, shape, n as u64)?;
        peer::write(&channel, blocks, &shuffled(shape.blocks, 5), Some(n as u64)).await?;
        channels.push(channel);
    }
    peer.end().await?;
    Ok("5 of 5 equal".to_owned())
}

/// A pool that the GPU writes late: from patterns that are beside it, behind something that keeps the GPU busy.
struct LateSource {
    peer: Peer,
    channel: KvChannel,
    busy: Region<Exposed>,
    patterns: Region<Exposed>,
    pool: u64,
}

impl LateSource {
    async fn new(shape: Shape) -> Result<Self, Failed> {
        let device = Device::soft(SoftConfig::new().transport(SoftTransport::Shm))?;
        let pd = device.alloc_pd()?;
        let gpu = async |bytes| pd.register_exposed(Memory::cuda(0, bytes), Access::READ).await;
        let (busy, pool, patterns) =
            (gpu(2 << 30).await?, gpu(shape.bytes()).await?, gpu(shape.bytes()).await?);
        let at = pool.remote().addr;
        // SAFETY: `owner` keeps it. It is written by the default stream alone, before each write or layer.
        let memory = unsafe { Memory::from_cuda(at, shape.bytes(), Box::new(pool))? };
        let (peer, channel) = pair(shape, GPU, memory).await?;
        Ok(Self { peer, channel, busy, patterns, pool: at })
    }

    /// Queues `bytes` of patterns from `offset` on into the pool, behind `rounds` copies of a GiB, and an event behind all of it. It is an
    /// error where that is over already, before `what`.
    fn written_late(
        &self,
        cuda: &Cuda,
        rounds: usize,
        (offset, bytes): (u64, u64),
        what: &str,
    ) -> Result<cuda::Event, Failed> {
        let busy = self.busy.remote().addr;
        let (to, from) = (self.pool + offset, self.patterns.remote().addr + offset);
        cuda.queue_late_copy((busy, busy + (1 << 30), 1 << 30, rounds), to, from, bytes as usize)?;
        // SAFETY: the default stream of the primary context.
        let event = unsafe { cuda::Event::record(0, std::ptr::null_mut())? };
        match event.is_done()? {
            true => Err(format!("the GPU was done before {what}: nothing was shown").into()),
            false => Ok(event),
        }
    }
}

/// Case 9: the source is still being written by the GPU, for some 100 ms, when the write is called with its event.
async fn a_write_comes_after_its_event(cuda: &Cuda) -> Result<String, Failed> {
    let shape = Shape { layers: 1, blocks: 16, block: 65_536 };
    let source = LateSource::new(shape).await?;
    let (mut waited, rounds) = (Vec::new(), 100);
    for round in 0..rounds {
        for position in 0..shape.blocks {
            let bytes = content(shape, round, 0, position);
            source.patterns.slice(..)?.copy_in(u64::from(position) * shape.block, &bytes)?;
        }
        let event = source.written_late(cuda, 200, (0, shape.bytes()), "the write was called")?;
        let blocks = source.channel.pool().claim(&in_order(shape.blocks))?;
        let (took, ..) =
            peer::write_after(&source.channel, blocks, &in_order(shape.blocks), Some(round), Some(event))
                .await?;
        waited.push(took);
    }
    source.peer.end().await?;
    Ok(format!(
        "{rounds} of {rounds} right; from the call to the landing {:.0} ms",
        median(&mut waited) * 1e3
    ))
}

/// Each layer of a write goes after the copy that makes it, while the next ones are still to be made.
async fn layers_go_after_their_events(cuda: &Cuda) -> Result<String, Failed> {
    let shape = Shape { layers: 4, blocks: 16, block: 65_536 };
    let layer_bytes = u64::from(shape.blocks) * shape.block;
    let source = LateSource::new(shape).await?;
    let (mut tails, rounds) = (Vec::new(), 20);
    for round in 0..rounds {
        for (layer, position) in (0..shape.layers).flat_map(|l| (0..shape.blocks).map(move |p| (l, p))) {
            let bytes = content(shape, round, layer, position);
            let offset = u64::from(layer) * layer_bytes + u64::from(position) * shape.block;
            source.patterns.slice(..)?.copy_in(offset, &bytes)?;
        }
        let blocks = source.channel.pool().claim(&in_order(shape.blocks))?;
        let made = |layer: u32| {
            let span = (u64::from(layer) * layer_bytes, layer_bytes);
            source.written_late(cuda, 20, span, "the layer was pushed")
        };
        tails.push(peer::write_layers(&source.channel, blocks, &in_order(shape.blocks), round, made).await?);
    }
    source.peer.end().await?;
    Ok(format!(
        "{rounds} of {rounds} right; from the look that saw the last event to the landing {:.2} ms",
        median(&mut tails) * 1e3
    ))
}

/// Staged within this host, through slots that both processes have mapped: every block right, every byte counted; and its speed beside
/// copies of pinned memory, alone and both ways at once, which is what one GPU does that is both ends.
async fn staging_on_one_host(cuda: &Cuda) -> Result<String, Failed> {
    let staged = Place { path: GpuPath::Staged, ..GPU };
    let mut said = String::new();
    for (name, shape) in [
        ("llama page 16", Shape { layers: 32, blocks: 128, block: 65_536 }),
        ("odd blocks", Shape { layers: 3, blocks: 50, block: 12_345 }),
    ] {
        let (peer, channel) = pair(shape, staged, staged.memory(shape.bytes())).await?;
        for round in 0..3 {
            let mut blocks = channel.pool().claim(&shuffled(shape.blocks, round + 3))?;
            fill(&mut blocks, shape, round)?;
            peer::write(&channel, blocks, &shuffled(shape.blocks, round), Some(round)).await?;
        }
        let ((bytes, operations, calls), ours) = (peer::counted(&channel).await?, channel.path().gpu);
        let expected = 3 * shape.bytes();
        if (ours.staged.bytes_out, bytes, ours.ipc.bytes_out) != (expected, expected, 0) {
            return Err(format!(
                "{name}: {expected} bytes, {} here and {bytes} there",
                ours.staged.bytes_out
            )
            .into());
        }
        said += &format!(
            "\n    {name}: {expected} bytes right, counted at both ends, {operations} pieces by {calls} calls there"
        );
        peer.end().await?;
    }
    let plain = cuda.pinned_rates(1 << 20, 64)?;
    said += &format!(
        "\n    pinned memory, pieces of 1 MiB: from the GPU {:.1} GiB/s, to it {:.1}, both at once {:.1} each way",
        plain.from / GIB,
        plain.to / GIB,
        plain.both / GIB
    );
    let shape = Shape { layers: 1, blocks: 512, block: 2 << 20 };
    let all = in_order(shape.blocks);
    for spin in [0, 1000] {
        let place = Place { spin, ..staged };
        let (peer, channel) = pair(shape, place, place.memory(shape.bytes())).await?;
        let rate = shape.bytes() as f64 / timed(&channel, &all, &all, 20).await?;
        peer.end().await?;
        said += &format!(
            "\n    1 GiB landed, spin {spin} us: {:.1} GiB/s, {:.2} of the slower way alone, {:.2} of both at once",
            rate / GIB,
            rate / plain.from.min(plain.to),
            rate / plain.both
        );
    }
    let shape = Shape { layers: 1, blocks: 1, block: 4096 };
    for spin in [0, 200] {
        let place = Place { spin, ..staged };
        let (peer, channel) = pair(shape, place, place.memory(shape.bytes())).await?;
        let took = timed(&channel, &[0], &[0], 500).await?;
        said += &format!("\n    4 KiB landed, spin {spin} us: {:.1} us", took * 1e6);
        peer.end().await?;
    }
    Ok(said)
}

/// Stream-ordered memory, and memory that the program has mapped, cannot be exported: it is staged, and taken as a target.
async fn memory_of_every_kind_is_staged(cuda: &Cuda) -> Result<String, Failed> {
    let shape = Shape { layers: 2, blocks: 64, block: 32_768 };
    let bytes = shape.bytes() as usize;
    let mut said = Vec::new();
    let (pooled, mapped) = (cuda.pooled(bytes)?, cuda.mapped(bytes)?);
    // Within a host nobody asks for it.
    for (name, at, tcp) in [
        ("stream-ordered over TCP", pooled, true),
        ("mapped over TCP", mapped, true),
        ("stream-ordered on one host", pooled, false),
        ("mapped on one host", mapped, false),
    ] {
        let place = Place { tcp, path: GpuPath::Any, ..GPU };
        // SAFETY: memory of the driver's, which is never given back.
        let memory = unsafe { Memory::from_cuda(at, shape.bytes(), Box::new(()))? };
        let (peer, channel) = pair(shape, place, memory).await?;
        let mut blocks = channel.pool().claim(&in_order(shape.blocks))?;
        fill(&mut blocks, shape, 11)?;
        peer::write(&channel, blocks, &shuffled(shape.blocks, 3), Some(11)).await?;
        let staged = channel.path().gpu.staged.bytes_out;
        if staged != shape.bytes() {
            return Err(format!("{name}: {staged} bytes counted of {}", shape.bytes()).into());
        }
        said.push(format!("{name}: {staged} bytes right"));
        peer.end().await?;
    }
    Ok(said.join(", "))
}

/// Case 31: eight workers, eight queue pairs, many transfers at once, with every call's context checked in debug builds.
async fn many_workers_make_progress() -> Result<String, Failed> {
    let shape = Shape { layers: 4, blocks: 64, block: 32_768 };
    let place = Place { qps: 8, ..GPU };
    let (peer, channel) = pair(shape, place, place.memory(shape.bytes())).await?;
    for round in 0..100 {
        let to = shuffled(shape.blocks, round);
        let mut blocks = channel.pool().claim(&in_order(shape.blocks))?;
        fill(&mut blocks, shape, round)?;
        peer::write(&channel, blocks, &to, Some(round)).await?;
    }
    let qps = channel.path().qps.iter().filter(|qp| qp.writes > 0).count();
    peer.end().await?;
    Ok(format!("100 of 100 transfers right, over {qps} queue pairs"))
}

/// A path that was required and is not possible is an error before any byte moves.
async fn what_is_not_possible_is_refused_by_name(cuda: &Cuda) -> Result<String, Failed> {
    let shape = Shape { layers: 1, blocks: 4, block: 4096 };
    let layout = || Layout::contiguous(shape.layers, shape.blocks, shape.block);
    let mut said = String::new();
    for (transport, path, words) in [
        (SoftTransport::Auto, GpuPath::Ipc, "SoftTransport::Shm"),
        (SoftTransport::Tcp, GpuPath::Ipc, "SoftTransport::Shm"),
        (SoftTransport::Shm, GpuPath::GpuDirect, "use ipc on one host"),
    ] {
        let device = Device::soft(SoftConfig::new().transport(transport))?;
        let pool = KvPool::with_memory(
            &device.alloc_pd()?,
            layout()?,
            Memory::cuda(0, shape.bytes()),
            PoolAccess::Both,
        )
        .await?;
        match KvEndpoint::new(pool, KvConfig::default().gpu_path(path)) {
            Err(e) if e.to_string().contains(words) => said += &format!("\n    {path} over {transport}: {e}"),
            other => return Err(format!("{path} over {transport}: {other:?}").into()),
        }
    }
    let absent = Memory::cuda(99, shape.bytes());
    let shm = Device::soft(SoftConfig::new().transport(SoftTransport::Shm))?;
    let pool = KvPool::with_memory(&shm.alloc_pd()?, layout()?, absent, PoolAccess::Both).await;
    said += &format!("\n    no such GPU: {}", pool.err().ok_or("there is no GPU 99")?);
    for (name, at, words) in [
        ("stream-ordered", cuda.pooled(1 << 20)?, "stream-ordered pool"),
        ("mapped", cuda.mapped(1 << 20)?, "mapped by the program"),
    ] {
        // SAFETY: memory of the driver's, which is never given back.
        let memory = unsafe { Memory::from_cuda(at, shape.bytes(), Box::new(()))? };
        let (peer, channel) = pair(shape, GPU, memory).await?;
        let blocks = channel.pool().claim(&in_order(4))?;
        match peer::write(&channel, blocks, &in_order(4), None).await {
            Err(e) if e.to_string().contains(words) => said += &format!("\n    {name}: {}", words_of(&*e)),
            Err(e) => return Err(format!("{name} memory: {}", words_of(&*e)).into()),
            Ok(_) => return Err(format!("{name} memory went to another process").into()),
        }
        if channel.path().gpu.ipc.bytes_out != 0 {
            return Err("bytes of it were counted".into());
        }
        peer.end().await?;
    }
    Ok(said)
}

fn words_of(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut source = e.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// GPU to GPU at 1 GiB beside a plain copy on the device, and the landed latency of 4 KiB.
async fn ipc_speed(cuda: &Cuda) -> Result<String, Failed> {
    let device = Device::soft(SoftConfig::new().transport(SoftTransport::Shm))?;
    let two = device.alloc_pd()?.register_exposed(Memory::cuda(0, 2 << 30), Access::READ).await?;
    let at = two.remote().addr;
    let plain = cuda.plain_copy(at + (1 << 30), at, 1 << 30, 20)?;
    drop(two);
    let mut said = format!("\n    plain copy of 1 GiB on the device: {:.0} GiB/s", 1.0 / plain);
    for (name, max_write, spin) in [
        ("writes of 2 MiB", 2 << 20, 0),
        ("the default", 0, 0),
        ("the default, spinning", 0, 1000),
        ("writes of 512 MiB, spinning", 512 << 20, 1000),
    ] {
        let shape = Shape { layers: 1, blocks: 512, block: 2 << 20 };
        let place = Place { max_write, spin, ..GPU };
        let (peer, channel) = pair(shape, place, place.memory(shape.bytes())).await?;
        let all = in_order(shape.blocks);
        let took = timed(&channel, &all, &all, 20).await?;
        said += &format!(
            "\n    1 GiB landed by {name}: {:.0} us, {:.0} GiB/s, {:.2} of plain",
            took * 1e6,
            shape.bytes() as f64 / GIB / took,
            plain / took
        );
        peer.end().await?;
    }
    Ok(said)
}

/// Staged over TCP on this host: every block right, every byte counted; and its speed beside the same between host memory.
async fn staging_over_tcp() -> Result<String, Failed> {
    let shape = Shape { layers: 4, blocks: 64, block: 100_000 };
    let place = Place { tcp: true, ..GPU };
    let (peer, channel) = pair(shape, place, place.memory(shape.bytes())).await?;
    for round in 0..5 {
        let mut blocks = channel.pool().claim(&shuffled(shape.blocks, round + 3))?;
        fill(&mut blocks, shape, round)?;
        peer::write(&channel, blocks, &shuffled(shape.blocks, round), Some(round)).await?;
    }
    let ((bytes, operations, _), ours) = (peer::counted(&channel).await?, channel.path().gpu);
    let expected = 5 * shape.bytes();
    if (ours.staged.bytes_out, bytes, ours.ipc.bytes_out) != (expected, expected, 0) {
        return Err(
            format!("{expected} bytes, {} counted here and {bytes} there", ours.staged.bytes_out).into()
        );
    }
    peer.end().await?;
    let mut said = format!("\n    {expected} bytes right, counted at both ends, {operations} pieces there");
    let shape = Shape { layers: 1, blocks: 256, block: 2 << 20 };
    let all = in_order(shape.blocks);
    let mut rates = Vec::new();
    for gpu in [false, true] {
        let place = Place { gpu, tcp: true, ..GPU };
        let (peer, channel) = pair(shape, place, place.memory(shape.bytes())).await?;
        rates.push(shape.bytes() as f64 / GIB / timed(&channel, &all, &all, 5).await?);
        peer.end().await?;
    }
    said += &format!(
        "\n    512 MiB landed over TCP on this host: host to host {:.2} GiB/s, GPU to GPU {:.2} GiB/s, {:.2} of that",
        rates[0],
        rates[1],
        rates[1] / rates[0]
    );
    let shape = Shape { layers: 1, blocks: 1, block: 4096 };
    let place = Place { spin: 200, ..place };
    let (peer, channel) = pair(shape, place, place.memory(shape.bytes())).await?;
    said +=
        &format!("\n    4 KiB landed, spin 200 us: {:.1} us", timed(&channel, &[0], &[0], 500).await? * 1e6);
    peer.end().await?;
    Ok(said)
}

/// DeepSeek-V2-Lite's cache at page 1, 8,192 tokens: contiguous, and every block elsewhere.
async fn page_one_speed() -> Result<String, Failed> {
    let shape = Shape { layers: 27, blocks: 8192, block: 1152 };
    // A grant of 8,192 blocks is read for more than a millisecond, and the receiver is to spin still.
    let place = Place { spin: 10_000, ..GPU };
    let (peer, channel) = pair(shape, place, place.memory(shape.bytes())).await?;
    let (all, from, to) = (in_order(shape.blocks), shuffled(shape.blocks, 1), shuffled(shape.blocks, 2));
    let flat = timed(&channel, &all, &all, 10).await?;
    let scattered = timed(&channel, &from, &to, 5).await?;
    let (_, _, calls) = peer::counted(&channel).await?;
    peer.end().await?;
    Ok(format!(
        "\n    {} bytes: contiguous landed in {:.0} us, {} scattered pieces in {:.0} us, {:.1} times that; {calls} calls of the driver for all",
        shape.bytes(),
        flat * 1e6,
        u64::from(shape.layers) * u64::from(shape.blocks),
        scattered * 1e6,
        scattered / flat
    ))
}

async fn suite() -> Result<(), Failed> {
    let gpus = tokio::task::spawn_blocking(cuda::devices).await??;
    if gpus.is_empty() {
        return Err("this process sees no GPU; the suite needs one".into());
    }
    for gpu in &gpus {
        println!(
            "GPU {}: {} at {}, driver for CUDA {}.{}",
            gpu.device, gpu.name, gpu.pci, gpu.driver.0, gpu.driver.1
        );
    }
    let cuda = Cuda::load()?;
    let only = std::env::args().nth(1);
    let mut failed = 0;
    macro_rules! run {
        ($($test:ident($($arg:expr)?)),* $(,)?) => { $(
            if only.as_ref().is_none_or(|only| stringify!($test).contains(only.as_str())) {
                match tokio::time::timeout(Duration::from_secs(240), $test($($arg)?)).await {
                    Ok(Ok(said)) => println!("ok      {}: {said}", stringify!($test)),
                    Ok(Err(e)) => {
                        failed += 1;
                        println!("FAILED  {}: {}", stringify!($test), words_of(&*e));
                    }
                    Err(_) => {
                        failed += 1;
                        println!("FAILED  {}: not over after 240 s", stringify!($test));
                    }
                }
            }
        )* };
    }
    run!(
        ipc_moves_real_layouts_and_counts_every_byte(),
        slices_inside_of_an_allocation_are_found(),
        a_write_comes_after_its_event(&cuda),
        layers_go_after_their_events(&cuda),
        many_workers_make_progress(),
        what_is_not_possible_is_refused_by_name(&cuda),
        ipc_speed(&cuda),
        page_one_speed(),
        landed_latency_of_each_path(),
        staging_on_one_host(&cuda),
        staging_over_tcp(),
        memory_of_every_kind_is_staged(&cuda),
    );
    if failed > 0 { Err(format!("{failed} failed").into()) } else { Ok(()) }
}

fn main() -> ExitCode {
    warnings::print();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(8).enable_all().build();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let result = runtime.map_err(Failed::from).and_then(|runtime| match &args[..] {
        [role, shape, place] if role == "peer" => {
            runtime.block_on(peer::serve(shape.parse()?, place.parse()?))
        }
        _ => runtime.block_on(suite()),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            println!("tests/gpu: {}", words_of(&*e));
            ExitCode::FAILURE
        }
    }
}
