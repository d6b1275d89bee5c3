//! The program: a gateway, a worker, a demonstration of all of it on loopback, or a load generator. `--help` says more.

use std::io::{IsTerminal, Read};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gateway::gateway::GatewayArgs;
use gateway::load::LoadArgs;
use gateway::protocol::words;
use gateway::worker::WorkerArgs;

mod demo;

/// Disaggregated inference over landfall.
#[derive(Parser, Debug)]
#[command(version, about)]
struct Args {
    #[command(subcommand)]
    command: Command,
    /// End when the standard input closes: with the process that has started this one
    #[arg(long, hide = true)]
    tied: bool,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Everything on loopback, and one prompt answered
    Demo(demo::DemoArgs),
    /// Take requests, and serve them through workers
    Gateway(GatewayArgs),
    /// Compute prompts, and write their KV cache to decode workers
    Prefill(WorkerArgs),
    /// Take KV caches, and generate
    Decode(WorkerArgs),
    /// Send requests, and report
    Load(LoadArgs),
}

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_env("RUST_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    // Colours are for terminals, and for people who want them (no-color.org).
    let colours =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();
    if args.tied {
        std::thread::spawn(|| {
            let mut rest = Vec::new();
            let _ = std::io::stdin().read_to_end(&mut rest);
            std::process::exit(0);
        });
    }
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => return complain(&error),
    };
    let result: Result<(), Box<dyn std::error::Error>> = runtime.block_on(async {
        match args.command {
            Command::Demo(args) => demo::run(args).await,
            Command::Gateway(args) => Ok(gateway::gateway::run(args).await?),
            Command::Prefill(args) => Ok(gateway::worker::prefill::run(args).await?),
            Command::Decode(args) => Ok(gateway::worker::decode::run(args).await?),
            Command::Load(args) => Ok(gateway::load::run(args).await?),
        }
    });
    // An engine's thread may be in the middle of a token: it is not waited for.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(&*error),
    }
}

fn complain(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("gateway: {}", words(error));
    ExitCode::FAILURE
}
