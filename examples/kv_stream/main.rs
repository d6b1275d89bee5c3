//! Two processes stream KV cache: each write resolves when it has landed, and every block is verified.
//!
//! Alone, the program starts its peer by itself. The parent is the prefill side, which fills blocks and writes them;
//! the child is the decode side, which grants blocks, receives and verifies. See `--help`.

mod args;
mod data;
mod decode;
mod file;
mod prefill;
mod report;

use std::net::SocketAddr;
use std::process::{ExitCode, Stdio};

use args::{Args, Side};
use landfall::device::{Device, SoftConfig};
use landfall::kv::{Dtype, KvConfig, KvEndpoint, KvPool, Layout, PoolAccess};
use landfall::memory::Memory;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// What the two sides say to each other beside the blocks: in-band messages of the channel, as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// Prefill → decode: request `index` of the stream wants blocks. `last` bytes of the last block count.
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
    let args = match args::parse(std::env::args().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            print!("{}", args::USAGE);
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("kv_stream: {why}");
            return ExitCode::from(2);
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(why) => {
            eprintln!("kv_stream: starting a tokio runtime: {why}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run(&args)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("kv_stream: {}", chain(why.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, in one line.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

async fn run(args: &Args) -> Result<bool, Error> {
    match args.side {
        Side::Listen(address) => {
            let endpoint = endpoint(args, PoolAccess::Target).await?;
            let mut listener = endpoint.listen(address).await?;
            if args.child {
                println!("{}", listener.local_addr());
            } else {
                eprintln!("kv_stream: listening on {}", listener.local_addr());
            }
            decode::serve(args, listener.accept().await?).await
        }
        Side::Connect(address) => {
            prefill::stream(args, &endpoint(args, PoolAccess::Source).await?, address).await
        }
        Side::Alone => {
            let endpoint = endpoint(args, PoolAccess::Source).await?;
            let (mut child, address) = start_peer(args).await?;
            let verified = prefill::stream(args, &endpoint, address).await;
            if verified.is_err() {
                // The peer may be waiting for a connection that will not come.
                let _ = child.start_kill();
            }
            let status = child.wait().await?;
            Ok(verified? && status.success())
        }
    }
}

/// A device, a pool that holds one request, and an endpoint.
async fn endpoint(args: &Args, access: PoolAccess) -> Result<KvEndpoint, Error> {
    let mut soft = SoftConfig::from_env()?;
    if let Some(profile) = args.profile {
        soft = soft.profile(profile);
    }
    if let Side::Listen(address) | Side::Connect(address) = args.side
        && let Some(ip) = data_address(address, matches!(args.side, Side::Listen(_)))
    {
        soft = soft.address(ip);
    }
    let device = Device::soft(soft)?;
    let layout = layout(args)?;
    let memory = Memory::anonymous(layout.required_bytes());
    let pool = KvPool::with_memory(&device.alloc_pd()?, layout, memory, access).await?;
    let config = KvConfig::default().qps(args.qps).spin(args.spin);
    Ok(KvEndpoint::new(pool, config)?)
}

/// The address on which this side's data connections are made: the one that it listens on, or that its route to the
/// peer starts from.
fn data_address(address: SocketAddr, listening: bool) -> Option<std::net::IpAddr> {
    if listening {
        return (!address.ip().is_unspecified()).then_some(address.ip());
    }
    // Connecting a datagram socket sends nothing; it only chooses a route.
    let any: SocketAddr = if address.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = std::net::UdpSocket::bind(any).ok()?;
    socket.connect(address).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

pub fn layout(args: &Args) -> Result<Layout, Error> {
    if args.file.is_some() {
        return file::layout();
    }
    let block_bytes = u64::from(args.page) * args.token_bytes;
    Ok(Layout::contiguous(args.layers, args.tokens / args.page, block_bytes)?.with_dtype(Dtype::new("bf16")?))
}

/// Starts this program again as the decode side, on an address of its own choice.
async fn start_peer(args: &Args) -> Result<(Child, SocketAddr), Error> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--child", "--quiet", "--listen", "127.0.0.1:0"]);
    let mut option = |flag: &str, value: String| {
        command.arg(format!("{flag}={value}"));
    };
    option("--qps", args.qps.to_string());
    option("--spin", args.spin.as_micros().to_string());
    option("--requests", args.requests.to_string());
    option("--tokens", args.tokens.to_string());
    option("--layers", args.layers.to_string());
    option("--token-bytes", args.token_bytes.to_string());
    option("--page", args.page.to_string());
    option("--run", args.run.to_string());
    option("--deadline", args.deadline.as_secs().to_string());
    if let Some(profile) = args.profile {
        option("--profile", profile.to_string());
    }
    if args.file.is_some() {
        option("--file", "/dev/null".to_owned());
    }
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
    let stdout = child.stdout.take().ok_or("the peer process has no standard output")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).await?;
    match line.trim().parse() {
        Ok(address) => Ok((child, address)),
        Err(_) => {
            let status = child.wait().await?;
            Err(format!("the peer process ended before it listened ({status}); its message is above").into())
        }
    }
}
