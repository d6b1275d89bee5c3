//! The command line of `ping_pong`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::Duration;

use crate::common::device::{DeviceArgs, device_usage, number};
use crate::exchange::OpKind;

pub(crate) const USAGE: &str = concat!(
    "\
ping_pong: latency of round trips between two processes, by operation and size

  ping_pong [OPTIONS]                   starts its peer process itself
  ping_pong --listen ADDR [OPTIONS]     the side that answers; it serves one run, and learns the rest from it
  ping_pong --connect ADDR [OPTIONS]    the side that measures

  --op LIST              of: send   SEND and RECV there and back
                             imm    WRITE_WITH_IMM there and back
                             write  WRITE to its completion; the peer's process takes no part
                             kv     a KvChannel write until it has landed
                                       [send, and imm where the device has it]
  --sizes LIST           bytes                                  [2,64,512,4096,16384,65536]
  --iters N              round trips that are measured, for each size                [2000]
  --warmup N             round trips before those                                     [200]
  --spin MICROSECONDS    spin budget of a wait, on both sides; 0 waits for events       [0]
",
    device_usage!(),
    "\
  --deadline SECONDS     the longest that one size may take                            [60]
  --json                 one JSON object on standard output

Times are whole round trips. No thread is pinned.
"
);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Alone,
    Listen(SocketAddr),
    Connect(SocketAddr),
}

#[derive(Clone, Debug)]
pub(crate) struct Args {
    pub(crate) side: Side,
    /// `None`: those that the device has.
    pub(crate) ops: Option<Vec<OpKind>>,
    pub(crate) sizes: Vec<u64>,
    pub(crate) iters: u32,
    pub(crate) warmup: u32,
    pub(crate) spin: Duration,
    pub(crate) device: DeviceArgs,
    pub(crate) deadline: Duration,
    pub(crate) json: bool,
    /// Started by a `ping_pong` that is alone: the address goes to standard output.
    pub(crate) child: bool,
}

/// `Ok(None)` when help was asked for.
pub(crate) fn parse(words: impl Iterator<Item = OsString>) -> Result<Option<Args>, String> {
    let mut a = Args {
        side: Side::Alone,
        ops: None,
        sizes: vec![2, 64, 512, 4096, 16_384, 65_536],
        iters: 2000,
        warmup: 200,
        spin: Duration::ZERO,
        device: DeviceArgs::default(),
        deadline: Duration::from_secs(60),
        json: false,
        child: false,
    };
    let mut words =
        words.map(|word| word.into_string().map_err(|word| format!("argument {word:?} is not UTF-8")));
    while let Some(word) = words.next().transpose()? {
        let (flag, inline) = match word.split_once('=') {
            Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        let mut value = || match &inline {
            Some(value) => Ok(value.clone()),
            None => words.next().transpose()?.ok_or_else(|| format!("{flag} needs a value; see --help")),
        };
        if a.device.take(&flag, &mut value)? {
            continue;
        }
        match flag.as_str() {
            "--help" | "-h" => return Ok(None),
            "--listen" | "--connect" if a.side != Side::Alone => {
                return Err(format!("{flag}: name one of --listen and --connect, once"));
            }
            "--listen" => a.side = Side::Listen(address(&flag, &value()?)?),
            "--connect" => a.side = Side::Connect(address(&flag, &value()?)?),
            "--op" => a.ops = Some(value()?.split(',').map(op).collect::<Result<_, _>>()?),
            "--sizes" => {
                a.sizes =
                    value()?.split(',').map(|s| number(&flag, s, 1, 1 << 30)).collect::<Result<_, _>>()?;
            }
            "--iters" => a.iters = number(&flag, &value()?, 1, 100_000_000)? as u32,
            "--warmup" => a.warmup = number(&flag, &value()?, 0, 100_000_000)? as u32,
            "--spin" => a.spin = Duration::from_micros(number(&flag, &value()?, 0, 60_000_000)?),
            "--deadline" => a.deadline = Duration::from_secs(number(&flag, &value()?, 1, 86_400)?),
            "--json" => a.json = true,
            "--child" => a.child = true,
            _ => return Err(format!("unknown argument {flag:?}; see --help")),
        }
        if inline.is_some() && matches!(flag.as_str(), "--json" | "--child") {
            return Err(format!("{flag} takes no value"));
        }
    }
    a.device.check()?;
    Ok(Some(a))
}

fn op(name: &str) -> Result<OpKind, String> {
    match name {
        "send" => Ok(OpKind::Send),
        "imm" => Ok(OpKind::Imm),
        "write" => Ok(OpKind::Write),
        "kv" => Ok(OpKind::Kv),
        _ => Err(format!("--op {name:?}: one of send, imm, write, kv, or several with commas")),
    }
}

fn address(flag: &str, text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| format!("{flag} {text:?}: IP:PORT is needed, for instance 127.0.0.1:7471 or [::1]:0"))
}
