//! `landfall doctor`: whether this host is right for RDMA, with evidence and fixes.

use std::path::PathBuf;

use landfall::doctor::{Check, Doctor, Report, Verdict};

use crate::output::{Error, Outcome, Output, Usage};

/// Check whether this host is right for RDMA: each check with its evidence, and the fix
///
/// Exit status 1 when a check fails; warnings do not fail. Nothing is changed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Of all devices, examine this one; it has to be there and its port has to be up
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// The host is to be ready for GPUDirect: a failure where it is not
    #[arg(long)]
    gpu: bool,
    /// Queue pairs are to be connected so; out of band fails on devices that only RDMA_CM connects
    #[arg(long, value_enum, default_value_t = Bootstrap::Auto)]
    bootstrap: Bootstrap,
    /// A host without an RDMA device is a failure
    #[arg(long)]
    require_rdma: bool,
    /// Look for sys, proc, etc, dev and libraries below this directory, as in a container that has its host's there
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// Print the evidence of what is well too
    #[arg(long, short)]
    verbose: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Bootstrap {
    /// Out of band where the device can be connected so, else by RDMA_CM
    Auto,
    /// Out of band, over TCP
    Oob,
    /// By RDMA_CM
    Cm,
}

pub(crate) fn run(args: &Args, output: &Output) -> Result<Outcome, Error> {
    if !args.root.is_dir() {
        return Err(Usage(format!("--root {}: no such directory", args.root.display())).into());
    }
    let mut doctor = Doctor::new()
        .root(&args.root)
        .gpu(args.gpu)
        .out_of_band(args.bootstrap == Bootstrap::Oob)
        .require_rdma(args.require_rdma);
    if let Some(device) = &args.device {
        doctor = doctor.device(device);
    }
    let report = doctor.examine();
    if output.is_json() {
        output.document(&report)?;
    } else {
        output.print(&text(&report, args.verbose))?;
    }
    Ok(if report.verdict == Verdict::Failure { Outcome::NotWell } else { Outcome::Well })
}

fn text(report: &Report, verbose: bool) -> String {
    let label = |check: &Check| match check.subject() {
        subject if subject.is_empty() => check.name.to_owned(),
        subject => format!("{} ({subject})", check.name),
    };
    let width = report.checks.iter().map(|check| label(check).chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for check in &report.checks {
        text += &format!("{:<7}  {:<width$}  {}\n", check.verdict, label(check), check.summary);
        if verbose || check.verdict != Verdict::Ok {
            for evidence in &check.evidence {
                text += &format!("         read: {evidence}\n");
            }
        }
        if let Some(fix) = &check.fix {
            text += &format!("         fix:  {fix}\n");
        }
    }
    let count = |verdict| report.checks.iter().filter(|check| check.verdict == verdict).count();
    text += &format!(
        "\n{}: {} ok, {} unknown, {} to look at, {} failed\n",
        report.verdict,
        count(Verdict::Ok),
        count(Verdict::Unknown),
        count(Verdict::Warning),
        count(Verdict::Failure),
    );
    text
}
