//! `landfall`: what a host has, whether it is right, what its devices count, and how fast a path is.
//!
//! Each command is a file: its `Args`, and `run`, which prints through [`output`] and says how it ended. The checks and what
//! they read are the library's.
//!
//! The exit status is the verdict: 0 when all is well, 1 when something is not, 2 for a command line that is not understood, 3 when
//! it cannot be told (`verify`).

mod bench;
mod device;
mod devices;
mod doctor;
mod measure;
mod output;
mod stop;
mod sweep;
mod verify;
mod watch;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use output::{Error, Outcome, Output, Usage};

/// Looks at this host's RDMA devices: what there is, whether it is right, what it counts, how fast it is.
///
/// Exit status: 0 when all is well, 1 when something is not, 2 for a command line that is not understood, 3 when it cannot be told.
#[derive(Debug, Parser)]
#[command(name = "landfall", version, max_term_width = 100)]
struct Cli {
    /// Print JSON instead of text
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Devices(devices::Args),
    Bench(bench::Args),
    Sweep(sweep::Args),
    Verify(verify::Args),
    Doctor(doctor::Args),
    Watch(watch::Args),
}

fn main() -> ExitCode {
    // Ends by itself with status 2, or with 0 after `--help` and `--version`.
    let cli = Cli::parse();
    let output = Output::new(cli.json);
    let ended = match &cli.command {
        Command::Devices(args) => devices::run(args, &output),
        Command::Bench(args) => bench::run(args, &output),
        Command::Sweep(args) => sweep::run(args, &output),
        Command::Verify(args) => verify::run(args, &output),
        Command::Doctor(args) => doctor::run(args, &output),
        Command::Watch(args) => watch::run(args, &output),
    };
    match ended {
        Ok(Outcome::Well) => ExitCode::SUCCESS,
        Ok(Outcome::NotWell) => ExitCode::FAILURE,
        Ok(Outcome::Unknown) => ExitCode::from(3),
        Err(error) => failed(&error),
    }
}

/// Says why on standard error.
fn failed(error: &Error) -> ExitCode {
    if output::reader_has_gone(error) {
        // What a shell says of a program that SIGPIPE has ended.
        return ExitCode::from(141);
    }
    output::complain(&landfall::error::chain(error.as_ref()));
    if error.is::<Usage>() { ExitCode::from(2) } else { ExitCode::FAILURE }
}
