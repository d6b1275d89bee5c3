//! What the bench programs share: the command line, pinning, output lines, the peer process. No measuring in here.
#![allow(dead_code)] // Each bench program uses its part.
#![allow(unused_imports)] // So it is with what is named here.

#[path = "far.rs"]
mod far;
#[path = "options.rs"]
mod options;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

pub use far::{asked, hello, listen};
pub use options::{Mode, Options, program};

pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// Where the two processes run: as the peers that we compare with, the receiver on cpu 0 and the initiator on cpu 1.
pub const RECEIVER_CPU: usize = 0;
/// See [`RECEIVER_CPU`].
pub const INITIATOR_CPU: usize = 1;

/// Pins this thread, and those that it starts from now on, to one cpu.
pub fn pin(cpu: usize) -> Result<(), Error> {
    // SAFETY: a cpu_set_t is a plain bit set, for which all zeroes is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a live cpu_set_t, and both cpus are far below CPU_SETSIZE.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the pointer and the size are those of `set`; the kernel only reads it.
    let result = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) };
    if result != 0 {
        let why = std::io::Error::last_os_error();
        return Err(format!("pinning to cpu {cpu}: {why}; use --no-pin where there is no such cpu").into());
    }
    Ok(())
}

/// Pins this process as one of the two, unless `--no-pin` was given.
pub fn pin_as(far: bool, pin: bool) -> Result<(), Error> {
    if pin { self::pin(if far { RECEIVER_CPU } else { INITIATOR_CPU }) } else { Ok(()) }
}

/// As many descriptors as the system lets this process have.
pub fn allow_descriptors() -> Result<(), Error> {
    const MANY: u64 = 1 << 20;
    let mut limit = libc::rlimit { rlim_cur: MANY, rlim_max: MANY };
    // SAFETY: the pointer is to a live rlimit, which the call only reads. Root may go above the present limit.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } == 0 {
        return Ok(());
    }
    // SAFETY: the pointer is to a live rlimit, for the call to write.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the pointer is to a live rlimit, which the call only reads.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(())
}

pub fn runtime() -> Result<tokio::runtime::Runtime, Error> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Prints one result in the form that the peers use, so that one program groups them all.
pub fn line(name: &str, value: f64, unit: &str) {
    println!("{name} {value:.3} {unit}");
}

/// This program, started again as the other side. Killed when dropped.
pub struct Peer {
    child: Child,
    /// The first line that it printed.
    pub hello: String,
}

impl Peer {
    /// Starts the peer and waits for its first line, which says where it listens.
    pub fn start(args: impl IntoIterator<Item = String>) -> Result<Self, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped());
        let child = command.spawn()?;
        let mut peer = Self { child, hello: String::new() };
        let stdout = peer.child.stdout.take().ok_or("the peer has no standard output")?;
        BufReader::new(stdout).read_line(&mut peer.hello)?;
        if peer.hello.trim().is_empty() {
            let status = peer.child.wait()?;
            return Err(format!("the peer process ended before it listened ({status})").into());
        }
        Ok(peer)
    }

    /// Waits for its end, which must be a success.
    pub fn finish(mut self) -> Result<(), Error> {
        let status = self.child.wait()?;
        if status.success() { Ok(()) } else { Err(format!("the peer process failed: {status}").into()) }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Both fail only when it has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Samples of one quantity.
#[derive(Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// The value below which `part` of the samples lie: the median for 0.5. Not a number when there are none.
    pub fn quantile(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().saturating_sub(1);
        let at = ((sorted.len() as f64 * part) as usize).min(last);
        sorted.get(at).copied().unwrap_or(f64::NAN)
    }

    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Prints the median times `scale` as a result, and the least and the greatest as a remark.
    pub fn spread(&self, name: &str, scale: f64, unit: &str) {
        println!("# {name} from {:.3} to {:.3}", self.quantile(0.0) * scale, self.quantile(1.0) * scale);
        line(name, self.median() * scale, unit);
    }
}
