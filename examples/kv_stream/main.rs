//! Two processes stream KV cache: each write resolves when it has landed, and every block is verified.
//!
//! Alone, the program starts its peer by itself. The parent is the prefill side, which fills blocks and writes them;
//! the child is the decode side, which grants blocks, receives and verifies. With `--read` the decode side pulls instead. See
//! `--help`.

mod admission;
mod args;
#[path = "../common/mod.rs"]
mod common;
mod data;
mod decode;
mod file;
mod layerwise;
mod prefill;
mod report;

use std::net::SocketAddr;
use std::process::ExitCode;

use args::{Args, Side, Where};
use common::device::managed_address;
use common::peer::Peer;
pub(crate) use common::{Error, print};
use common::{complain, program};
use landfall::kv::{Dtype, KvConfig, KvEndpoint, KvPool, Layout, PoolAccess};
use landfall::memory::Memory;
use serde::{Deserialize, Serialize};

/// What the two sides say to each other beside the blocks: in-band messages of the channel, as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Prefill → decode: request `index` of the stream wants blocks, and writes `bytes` that count to them.
    Request { index: u32, blocks: u32, seed: u64, bytes: u64 },
    /// Prefill → decode: the same, to be written layer by layer.
    LayerRequest { index: u32, blocks: u32, seed: u64 },
    /// Decode → prefill: here they are.
    Granted { grant: landfall::kv::Grant },
    /// Prefill → decode: request `index` of the stream can be read, in this way and in so many seconds.
    Readable { index: u32, seed: u64, grant: landfall::kv::Grant, way: args::Pull, seconds: u64 },
    /// Decode → prefill: request `index` was read.
    Pulled { index: u32, pulled: report::Pulled },
    /// Decode → prefill: request `index` was verified, or what was wrong.
    Verified { index: u32, wrong: u64, first: Option<String> },
    /// Prefill → decode: that was all; `sha256` of a file.
    Finish { sha256: Option<String> },
    /// Decode → prefill: `sha256` of what arrived.
    Finished { sha256: Option<String>, arrivals: u64, landed_bytes: u64 },
}

fn main() -> ExitCode {
    program(args::parse(std::env::args_os().skip(1)), args::USAGE, run)
}

/// Streams. An outcome that was not verified is an error too.
async fn run(args: &Args) -> Result<(), Error> {
    match args.side {
        Side::Listen(address) => {
            // Mistakes are found before anybody connects.
            let sink = args.file.as_deref().map(file::Sink::create).transpose()?;
            let endpoint = endpoint(args, PoolAccess::Target).await?;
            let mut listener = endpoint.listen(listen_address(args, &endpoint, address).await?).await?;
            if args.child {
                print(&format!("{}\n", listener.local_addr()))?;
            } else {
                complain(&format!("listening on {}", listener.local_addr()));
            }
            decode::serve(args, listener.accept().await?, sink).await
        }
        Side::Connect(address) => {
            let input = args.file.as_deref().map(file::Input::open).transpose()?;
            prefill::stream(args, &endpoint(args, source(args)).await?, address, input).await
        }
        Side::Alone => {
            let input = args.file.as_deref().map(file::Input::open).transpose()?;
            let endpoint = endpoint(args, source(args)).await?;
            let (peer, address) = Peer::start(peer_args(args)).await?;
            match prefill::stream(args, &endpoint, address, input).await {
                Ok(()) => peer.ended().await,
                // It may be waiting for a connection that will not come; dropping it ends it.
                Err(why) => Err(why),
            }
        }
    }
}

/// What the decode side may do with the prefill side's pool.
fn source(args: &Args) -> PoolAccess {
    if args.read.is_some() { PoolAccess::Readable } else { PoolAccess::Source }
}

/// A peer process listens where its parent reaches it: a connection manager wants an address of the device.
async fn listen_address(args: &Args, endpoint: &KvEndpoint, given: SocketAddr) -> Result<SocketAddr, Error> {
    if args.child && args.device.is_verbs() && args.device.by_manager(endpoint.device()) {
        let mut at = managed_address(endpoint.device()).await?;
        at.set_port(given.port());
        return Ok(at);
    }
    Ok(given)
}

/// A device for each rail, a pool that holds one request, and an endpoint.
async fn endpoint(args: &Args, access: PoolAccess) -> Result<KvEndpoint, Error> {
    let devices = args.device.open(side(args), args.rails)?;
    let layout = layout(args)?;
    let memory = memory(args, layout.required_bytes())?;
    let domains = devices.iter().map(|device| device.alloc_pd()).collect::<Result<Vec<_>, _>>()?;
    let pool = KvPool::on_rails(&domains.iter().collect::<Vec<_>>(), layout, memory, access).await?;
    let config = KvConfig::default()
        .qps(args.qps)
        .strict_rails(args.strict_rails)
        .spin(args.spin)
        .require_rdma(args.device.is_verbs())
        .gpu_path(args.gpu_path)
        .bootstrap(args.device.bootstrap)
        .admission(args.admission.admission()?);
    Ok(KvEndpoint::new(pool, config)?)
}

fn memory(args: &Args, bytes: u64) -> Result<Memory, Error> {
    match args.memory {
        Where::Host => Ok(Memory::anonymous(bytes)),
        #[cfg(feature = "cuda")]
        Where::Cuda(device) => Ok(Memory::cuda(device, bytes)),
        #[cfg(not(feature = "cuda"))]
        Where::Cuda(_) => {
            Err("--memory cuda: this build is without it; build with the feature \"cuda\"".into())
        }
    }
}

/// The address of this process, and whether it is the one that listens.
fn side(args: &Args) -> Option<(SocketAddr, bool)> {
    match args.side {
        Side::Alone => None,
        Side::Listen(address) => Some((address, true)),
        Side::Connect(address) => Some((address, false)),
    }
}

pub(crate) fn layout(args: &Args) -> Result<Layout, Error> {
    if args.file.is_some() {
        return file::layout();
    }
    let block_bytes = u64::from(args.page) * args.token_bytes;
    Ok(Layout::contiguous(args.layers, args.tokens / args.page, block_bytes)?.with_dtype(Dtype::new("bf16")?))
}

/// The command line of the peer process: the decode side, on an address of its own choice.
fn peer_args(args: &Args) -> Vec<String> {
    let mut line = vec!["--child".to_owned(), "--quiet".to_owned(), "--listen=127.0.0.1:0".to_owned()];
    let mut option = |flag: &str, value: &dyn std::fmt::Display| line.push(format!("{flag}={value}"));
    option("--qps", &args.qps);
    if args.rails > 0 {
        option("--rails", &args.rails);
    }
    option("--memory", &args.memory);
    option("--gpu-path", &args.gpu_path);
    option("--spin", &args.spin.as_micros());
    option("--tokens", &args.tokens);
    option("--layers", &args.layers);
    option("--token-bytes", &args.token_bytes);
    option("--page", &args.page);
    option("--run", &args.run);
    if args.file.is_some() {
        option("--file", &"/dev/null");
    }
    if args.strict_rails {
        line.push("--strict-rails".to_owned());
    }
    line.extend(args.device.peer());
    line.extend(args.admission.peer());
    line
}
