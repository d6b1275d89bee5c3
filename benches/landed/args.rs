//! Options of the `landed` bench.

use landfall::device::{Profile, SoftTransport};

pub use crate::common::Mode;
use crate::common::Options;

pub const USAGE: &str = "\
cargo bench --bench landed -- [OPTIONS]

  --only NAMES     only the cases and floors whose name contains one of NAMES, separated by commas (4KiB is also a part of
                   64KiB: give =4KiB for one)
  --mode MODE      event or spin; both without it
  --reps N         repetitions a case, instead of each case's own number
  --profile NAME   profile of the soft device: default, erdma-compat, srd, tiny
  --transport NAME what the soft device runs over: tcp, shm or auto (default tcp, whose floors these are)
  --device NAME    this RDMA device instead of the soft one, at both ends
  --qps N          queue pairs of the channel (default 1)
  --no-pin         do not pin the receiver to cpu 0 and the initiator to cpu 1
  --quick          one repetition of the short cases: shows that everything works, measures nothing
";

/// Which of the processes this is.
#[derive(Debug)]
pub enum Side {
    Initiator,
    /// The receiver of the case of that name.
    Receiver(String),
    /// The far end of the floor of that name.
    Floor(String),
}

#[derive(Debug)]
pub struct Args {
    pub side: Side,
    /// Where a floor's peer connects to.
    pub port: u16,
    pub only: Option<String>,
    pub mode: Option<Mode>,
    pub reps: Option<usize>,
    pub profile: Profile,
    pub transport: SoftTransport,
    pub device: Option<String>,
    pub qps: usize,
    pub pin: bool,
    pub quick: bool,
}

impl Args {
    pub fn wants(&self, name: &str) -> bool {
        match &self.only {
            None => true,
            Some(only) => only.split(',').any(|only| match only.strip_prefix('=') {
                Some(exact) => name == exact,
                None => name.contains(only),
            }),
        }
    }

    /// Repetitions that count, after the first, which warms up.
    pub fn reps(&self, own: usize) -> usize {
        if self.quick { 1 } else { self.reps.unwrap_or(own) }
    }

    /// The options that the peer process must share.
    pub fn shared(&self) -> Vec<String> {
        let mut out = vec![
            format!("--profile={}", self.profile),
            format!("--transport={}", self.transport),
            format!("--qps={}", self.qps),
        ];
        out.extend(self.reps.map(|n| format!("--reps={n}")));
        out.extend(self.device.as_ref().map(|name| format!("--device={name}")));
        for (set, flag) in [(!self.pin, "--no-pin"), (self.quick, "--quick")] {
            out.extend(set.then(|| flag.to_owned()));
        }
        // Without it, quick is implied.
        out.push("--bench".to_owned());
        out
    }
}

pub fn parse(options: &mut Options) -> Result<Args, String> {
    let mut out = Args {
        side: Side::Initiator,
        port: 0,
        only: None,
        mode: None,
        reps: None,
        profile: Profile::Default,
        transport: SoftTransport::Tcp,
        device: None,
        qps: 1,
        pin: true,
        quick: !options.measures(),
    };
    while let Some(flag) = options.flag()? {
        match flag.as_str() {
            "--only" => out.only = Some(options.value()?),
            "--mode" => out.mode = Some(options.value()?),
            "--reps" => out.reps = Some(options.number(1, 1_000_000)?),
            "--qps" => out.qps = options.number(1, 64)?,
            "--profile" => out.profile = options.value()?,
            "--transport" => out.transport = options.value()?,
            "--device" => out.device = Some(options.value()?),
            "--no-pin" => out.pin = false,
            "--quick" => out.quick = true,
            "--receiver" => out.side = Side::Receiver(options.value()?),
            "--floor" => out.side = Side::Floor(options.value()?),
            "--port" => out.port = options.number(1, 65_535)?,
            _ => return Err(options.unknown()),
        }
    }
    Ok(out)
}
