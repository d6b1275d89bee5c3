//! Options of the `landed` bench.

use std::time::Duration;

use landfall::device::{Profile, SoftTransport};

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

/// How the two ends wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They sleep until the kernel wakes them.
    Event,
    /// They poll for longer than any case takes.
    Spin,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Spin => "spin",
        }
    }

    pub fn budget(self) -> Duration {
        match self {
            Self::Event => Duration::ZERO,
            Self::Spin => Duration::from_secs(5),
        }
    }
}

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

/// `None`: help was asked for.
pub fn parse(args: impl Iterator<Item = String>) -> Result<Option<Args>, String> {
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
        quick: false,
    };
    // Cargo says `--bench` when it measures. `cargo test --benches` does not: then it is enough that everything works.
    let mut measures = false;
    let mut args = args;
    while let Some(arg) = args.next() {
        let (flag, inline) = match arg.split_once('=') {
            Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
            None => (arg, None),
        };
        let mut value =
            || inline.clone().or_else(|| args.next()).ok_or(format!("{flag} needs a value; see --help"));
        match flag.as_str() {
            "--bench" => measures = true,
            "--help" | "-h" => return Ok(None),
            "--only" => out.only = Some(value()?),
            "--mode" => {
                out.mode = Some(match value()?.as_str() {
                    "event" => Mode::Event,
                    "spin" => Mode::Spin,
                    other => return Err(format!("--mode {other}: event or spin")),
                });
            }
            "--reps" => out.reps = Some(number(&flag, &value()?, 1, 1_000_000)?),
            "--qps" => out.qps = number(&flag, &value()?, 1, 64)?,
            "--profile" => out.profile = value()?.parse().map_err(|e| format!("{e}"))?,
            "--transport" => out.transport = value()?.parse().map_err(|e| format!("--transport: {e}"))?,
            "--device" => out.device = Some(value()?),
            "--no-pin" => out.pin = false,
            "--quick" => out.quick = true,
            "--receiver" => out.side = Side::Receiver(value()?),
            "--floor" => out.side = Side::Floor(value()?),
            "--port" => out.port = number(&flag, &value()?, 1, 65_535)? as u16,
            other => return Err(format!("{other}: no such option; see --help")),
        }
    }
    out.quick |= !measures;
    Ok(Some(out))
}

fn number(flag: &str, text: &str, least: usize, most: usize) -> Result<usize, String> {
    let n = text.parse().ok().filter(|n| (least..=most).contains(n));
    n.ok_or(format!("{flag} {text}: a number from {least} to {most}"))
}
