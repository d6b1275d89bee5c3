//! A worker's registered memory: a pool in which a sequence's state lies in blocks of one layer, one after the other, and the
//! endpoint on it.

use landfall::connect::{Admission, Psk, PskError};
use landfall::device::{Device, SoftConfig, SoftTransport};
use landfall::error::{DeviceError, MemoryError};
use landfall::kv::layout::{Dtype, Layout, LayoutError};
use landfall::kv::{Blocks, KvConfig, KvEndpoint, KvPool, PoolAccess, PoolError};
use landfall::memory::Memory;

use super::WorkerArgs;

/// Bytes of a block. A state is a stream of bytes to us: any size would do that wastes little of the last block.
pub const BLOCK_BYTES: u64 = 64 << 10;

/// What carries the KV cache.
#[derive(Clone, Debug)]
pub enum Transport {
    /// landfall's soft provider.
    Soft(SoftTransport),
    /// An RDMA device, by its name.
    Verbs(String),
}

/// A word that names no transport.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no transport; auto, shm, tcp or verbs:DEVICE is")]
pub struct UnknownTransport(String);

impl std::str::FromStr for Transport {
    type Err = UnknownTransport;

    fn from_str(word: &str) -> Result<Self, UnknownTransport> {
        match word.strip_prefix("verbs:") {
            Some(device) if !device.is_empty() => Ok(Self::Verbs(device.to_owned())),
            _ => word.parse().map(Self::Soft).map_err(|_| UnknownTransport(word.to_owned())),
        }
    }
}

impl std::fmt::Display for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Soft(transport) => write!(f, "{transport}"),
            Self::Verbs(device) => write!(f, "verbs:{device}"),
        }
    }
}

/// Why there is no endpoint.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("the pool cannot be registered")]
    Memory(#[from] MemoryError),
    #[error("--pool-mib: {0}")]
    Layout(#[from] LayoutError),
    #[error("--psk: {0}")]
    Key(#[from] PskError),
    #[error(
        "--pool-mib {mib} holds no sequence of --context {context} tokens, which takes {needed} MiB; raise the one, or lower the other"
    )]
    Small { mib: u32, context: u32, needed: u64 },
}

/// A pool on what the options name, and an endpoint on it. Prefill workers are written to by nobody.
///
/// # Errors
/// [`SetupError`].
pub async fn endpoint(args: &WorkerArgs, access: PoolAccess) -> Result<KvEndpoint, SetupError> {
    let device = match &args.transport {
        // Where peers find a worker, they find its queue pairs too.
        Transport::Soft(transport) => {
            Device::soft(SoftConfig::from_env()?.transport(*transport).address(args.listen.ip()))?
        }
        Transport::Verbs(device) => Device::verbs(device, landfall::device::VerbsConfig::new())?,
    };
    let blocks = (u64::from(args.pool_mib) << 20) / BLOCK_BYTES;
    let layout = Layout::contiguous(1, u32::try_from(blocks).unwrap_or(u32::MAX), BLOCK_BYTES)?
        // Of the same name at both ends, or they do not connect.
        .with_dtype(Dtype::new("llama.cpp state")?);
    let memory = Memory::anonymous(layout.required_bytes());
    let pool = KvPool::with_memory(&device.alloc_pd()?, layout, memory, access).await?;
    let admission = match &args.psk {
        Some(file) => Admission::Psk(Psk::from_file(file)?),
        None if args.insecure => Admission::Open,
        None => Admission::Local,
    };
    Ok(KvEndpoint::named(pool, KvConfig::default().admission(admission), &args.name)?)
}

/// Whether the longest sequence, of so many bytes, fits into the pool when nothing else is in it.
///
/// # Errors
/// [`SetupError::Small`].
pub fn fits(args: &WorkerArgs, pool: &KvPool, longest: u64) -> Result<(), SetupError> {
    if blocks_for(longest) <= pool.layout().blocks() {
        return Ok(());
    }
    Err(SetupError::Small { mib: args.pool_mib, context: args.context, needed: longest.div_ceil(1 << 20) })
}

/// Blocks that `bytes` bytes take.
pub fn blocks_for(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(BLOCK_BYTES)).unwrap_or(u32::MAX)
}

/// Copies `state` into the first blocks, and gives the others back.
///
/// # Errors
/// [`PoolError::OutOfRange`] when it is longer than they are.
pub fn fill(blocks: &mut Blocks, state: &[u8]) -> Result<(), PoolError> {
    for (position, part) in state.chunks(BLOCK_BYTES as usize).enumerate() {
        blocks.copy_in(0, position as u32, 0, part)?;
    }
    blocks.truncate(blocks_for(state.len() as u64));
    Ok(())
}

/// Copies `bytes` bytes out of the first blocks to `into`, which becomes as long.
///
/// # Errors
/// [`PoolError::OutOfRange`] when there are not so many.
pub fn drain(blocks: &Blocks, bytes: u64, into: &mut Vec<u8>) -> Result<(), PoolError> {
    let room = u64::from(blocks.len()) * BLOCK_BYTES;
    if bytes > room {
        return Err(PoolError::OutOfRange { what: "byte", index: bytes, limit: room });
    }
    into.clear();
    into.resize(bytes as usize, 0);
    for (position, part) in into.chunks_mut(BLOCK_BYTES as usize).enumerate() {
        blocks.copy_out(0, position as u32, 0, part)?;
    }
    Ok(())
}
