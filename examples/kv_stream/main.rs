//! Two processes stream KV cache: each write resolves when it has landed, and every block is verified.
//!
//! Alone, the program starts its peer by itself. The parent is the prefill side, which fills blocks and writes them;
//! the child is the decode side, which grants blocks, receives and verifies. See `--help`.

mod args;
mod data;
mod decode;
mod file;
mod peer;
mod prefill;
mod report;

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;

use args::{Args, Side};
use landfall::device::{Device, SoftConfig};
use landfall::kv::{Dtype, KvConfig, KvEndpoint, KvPool, Layout, PoolAccess};
use landfall::memory::Memory;
use serde::{Deserialize, Serialize};

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// What the two sides say to each other beside the blocks: in-band messages of the channel, as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Prefill → decode: request `index` of the stream wants blocks, and writes `bytes` that count to them.
    Request { index: u32, blocks: u32, seed: u64, bytes: u64 },
    /// Decode → prefill: here they are.
    Granted { grant: landfall::kv::Grant },
    /// Decode → prefill: request `index` was verified, or what was wrong.
    Verified { index: u32, wrong: u64, first: Option<String> },
    /// Prefill → decode: that was all; `sha256` of a file.
    Finish { sha256: Option<String> },
    /// Decode → prefill: `sha256` of what arrived.
    Finished { sha256: Option<String>, arrivals: u64, landed_bytes: u64 },
}

fn main() -> ExitCode {
    let args = match args::parse(std::env::args_os().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => return ended(print(args::USAGE)),
        Err(why) => {
            complain(&why);
            return ExitCode::from(2);
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(why) => return ended(Err(format!("starting a tokio runtime: {why}").into())),
    };
    ended(runtime.block_on(run(&args)))
}

fn ended(result: Result<(), Error>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            complain(&chain(why.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// One line on standard error. That nobody may be there to read it is no reason to panic, as `eprintln!` does.
fn complain(what: &str) {
    let _ = writeln!(std::io::stderr(), "kv_stream: {}", what.replace('\n', " "));
}

/// Text on standard output. `println!` would panic when the reader has gone.
pub(crate) fn print(text: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| format!("writing to standard output: {e}").into())
}

/// An error and its causes, in one line. A cause that the text above it has told already is left out.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// Streams. An outcome that was not verified is an error too.
async fn run(args: &Args) -> Result<(), Error> {
    match args.side {
        Side::Listen(address) => {
            // Mistakes are found before anybody connects.
            let sink = args.file.as_deref().map(file::Sink::create).transpose()?;
            let endpoint = endpoint(args, PoolAccess::Target).await?;
            let mut listener = endpoint.listen(address).await?;
            if args.child {
                print(&format!("{}\n", listener.local_addr()))?;
            } else {
                complain(&format!("listening on {}", listener.local_addr()));
            }
            decode::serve(args, listener.accept().await?, sink).await
        }
        Side::Connect(address) => {
            let input = args.file.as_deref().map(file::Input::open).transpose()?;
            prefill::stream(args, &endpoint(args, PoolAccess::Source).await?, address, input).await
        }
        Side::Alone => {
            let input = args.file.as_deref().map(file::Input::open).transpose()?;
            let endpoint = endpoint(args, PoolAccess::Source).await?;
            let (peer, address) = peer::Peer::start(args).await?;
            match prefill::stream(args, &endpoint, address, input).await {
                Ok(()) => peer.ended().await,
                // It may be waiting for a connection that will not come; dropping it ends it.
                Err(why) => Err(why),
            }
        }
    }
}

/// A device, a pool that holds one request, and an endpoint.
async fn endpoint(args: &Args, access: PoolAccess) -> Result<KvEndpoint, Error> {
    let device = device(args)?;
    let layout = layout(args)?;
    let memory = Memory::anonymous(layout.required_bytes());
    let pool = KvPool::with_memory(&device.alloc_pd()?, layout, memory, access).await?;
    let config = KvConfig::default().qps(args.qps).spin(args.spin).require_rdma(args.verbs.is_some());
    Ok(KvEndpoint::new(pool, config)?)
}

fn device(args: &Args) -> Result<Device, Error> {
    if let Some(verbs) = &args.verbs {
        return verbs_device(verbs);
    }
    let mut soft = SoftConfig::from_env()?;
    if let Some(profile) = args.profile {
        soft = soft.profile(profile);
    }
    if let Side::Listen(address) | Side::Connect(address) = args.side
        && let Some(ip) = data_address(address, matches!(args.side, Side::Listen(_)))
    {
        soft = soft.address(ip);
    }
    Ok(Device::soft(soft)?)
}

#[cfg(feature = "verbs")]
fn verbs_device(verbs: &args::Verbs) -> Result<Device, Error> {
    let mut config = landfall::device::VerbsConfig::new();
    if let Some(port) = verbs.port {
        config = config.port(port);
    }
    if let Some(index) = verbs.gid_index {
        config = config.gid_index(index);
    }
    Ok(Device::verbs(&verbs.device, config)?)
}

#[cfg(not(feature = "verbs"))]
fn verbs_device(_: &args::Verbs) -> Result<Device, Error> {
    Err("--transport verbs: this build is without it; build with the feature \"verbs\"".into())
}

/// The address on which this side's data connections are made: the one that it listens on, or that its route to the
/// peer starts from. Listening on every address, it is that of the route to anywhere.
fn data_address(address: SocketAddr, listening: bool) -> Option<IpAddr> {
    let towards = match (listening, address.ip()) {
        (false, _) => address,
        (true, ip) if !ip.is_unspecified() => return Some(ip),
        // Addresses for documentation (RFC 5737, RFC 3849).
        (true, IpAddr::V4(_)) => (Ipv4Addr::new(192, 0, 2, 1), 9).into(),
        (true, IpAddr::V6(_)) => (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into(),
    };
    // Connecting a datagram socket sends nothing; it only chooses a route.
    let any: SocketAddr = if towards.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = std::net::UdpSocket::bind(any).ok()?;
    socket.connect(towards).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

pub(crate) fn layout(args: &Args) -> Result<Layout, Error> {
    if args.file.is_some() {
        return file::layout();
    }
    let block_bytes = u64::from(args.page) * args.token_bytes;
    Ok(Layout::contiguous(args.layers, args.tokens / args.page, block_bytes)?.with_dtype(Dtype::new("bf16")?))
}
