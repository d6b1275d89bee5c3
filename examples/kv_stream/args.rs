//! The command line of `kv_stream`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use landfall::kv::{GpuPath, UnknownGpuPath};
use serde::{Deserialize, Serialize};

use crate::admission::{AdmissionArgs, admission_usage};
use crate::common::device::{DeviceArgs, device_usage, number};

pub(crate) const USAGE: &str = concat!(
    "\
kv_stream: stream KV cache, block by block, from a prefill to a decode process; each write resolves when it has landed

  kv_stream [OPTIONS]                   starts its peer process itself
  kv_stream --listen ADDR [OPTIONS]     decode side: grants blocks, receives, verifies
  kv_stream --connect ADDR [OPTIONS]    prefill side: fills blocks and writes them

Both sides must name the same layout (--page, --tokens, --requests, --run, --layers, --token-bytes), or the same kind of --file.

",
    device_usage!(),
    admission_usage!(),
    "\
  --memory WHERE         where blocks are, on both sides: host, or cuda[:N] for a GPU (feature cuda)  [host]
  --gpu-path WAY         how they have to travel from a GPU: any, ipc, staged, gpudirect; one that is not possible is an error
                         before anything is sent                         [any]
  --rails N              rails of the channel, 1 to 16: so many devices   [1, or as many as --device names]
  --strict-rails         every rail has to be there, and to live
  --qps N                queue pairs of each rail, 1 to 64 in all         [1]
  --spin MICROSECONDS    spin budget of a wait; 0 sleeps at once         [0]
  --requests N           requests to stream                              [3]
  --tokens N             tokens a request                                [8192]
  --layers N             layers                                          [27]
  --token-bytes N        bytes a token and layer                         [1152]
  --page N               tokens a block                                  [64]
  --run N                mean number of contiguous pages                 [16]
  --seed N               seed of data and placement                      [random]
  --file PATH            stream this file instead, and compare SHA-256 at the far end
                         (with --listen: where to store it; /dev/null discards)
  --layerwise            write each request once more, layer by layer as a timer makes them, and report the tail
  --layer-time MICROS    time in which a layer is made                   [1000]
  --read [WAY]           the decode side pulls instead: it reads what the prefill side grants it. WAY is auto, rdma,
                         remote-write or measured                        [auto]
  --deadline SECONDS     deadline of a write or read                     [60]
  --json                 one JSON object on standard output
  --quiet                no progress bar
"
);

/// Where the blocks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Where {
    Host,
    Cuda(u32),
}

impl std::fmt::Display for Where {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(device) => write!(f, "cuda:{device}"),
        }
    }
}

impl Where {
    fn from_word(word: &str) -> Option<Self> {
        match word.split_once(':') {
            None if word == "host" => Some(Self::Host),
            None if word == "cuda" => Some(Self::Cuda(0)),
            Some(("cuda", device)) => device.parse().ok().map(Self::Cuda),
            _ => None,
        }
    }
}

/// Which side of the stream this process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Starts the receiver itself and sends.
    Alone,
    Listen(SocketAddr),
    Connect(SocketAddr),
}

/// How the decode side is to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Pull {
    Auto,
    Rdma,
    RemoteWrite,
    Measured,
}

impl Pull {
    fn from_word(word: &str) -> Option<Self> {
        match word {
            "auto" => Some(Self::Auto),
            "rdma" => Some(Self::Rdma),
            "remote-write" => Some(Self::RemoteWrite),
            "measured" => Some(Self::Measured),
            _ => None,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Args {
    pub(crate) side: Side,
    pub(crate) device: DeviceArgs,
    pub(crate) memory: Where,
    pub(crate) gpu_path: GpuPath,
    pub(crate) admission: AdmissionArgs,
    /// 0: as many as devices are named.
    pub(crate) rails: usize,
    pub(crate) strict_rails: bool,
    pub(crate) qps: usize,
    pub(crate) spin: Duration,
    pub(crate) requests: u32,
    pub(crate) tokens: u32,
    pub(crate) layers: u32,
    pub(crate) token_bytes: u64,
    pub(crate) page: u32,
    pub(crate) run: u32,
    pub(crate) seed: Option<u64>,
    pub(crate) file: Option<PathBuf>,
    /// The decode side reads, in this way.
    pub(crate) read: Option<Pull>,
    pub(crate) layerwise: bool,
    pub(crate) layer_time: Duration,
    pub(crate) deadline: Duration,
    pub(crate) json: bool,
    pub(crate) quiet: bool,
    /// Started by a `kv_stream` that is alone: the address goes to standard output as the only line.
    pub(crate) child: bool,
}

impl Default for Args {
    fn default() -> Self {
        Self {
            side: Side::Alone,
            device: DeviceArgs::default(),
            memory: Where::Host,
            gpu_path: GpuPath::Any,
            admission: AdmissionArgs::default(),
            rails: 0,
            strict_rails: false,
            qps: 1,
            spin: Duration::ZERO,
            requests: 3,
            tokens: 8192,
            layers: 27,
            token_bytes: 1152,
            page: 64,
            run: 16,
            seed: None,
            file: None,
            read: None,
            layerwise: false,
            layer_time: Duration::from_millis(1),
            deadline: Duration::from_secs(60),
            json: false,
            quiet: false,
            child: false,
        }
    }
}

/// `Ok(None)` when help was asked for.
pub(crate) fn parse(words: impl Iterator<Item = OsString>) -> Result<Option<Args>, String> {
    let mut a = Args::default();
    let words = words.map(|word| {
        word.into_string().map_err(|word| format!("argument {word:?} is not UTF-8; rename the file"))
    });
    let mut words = words.peekable();
    while let Some(word) = words.next().transpose()? {
        let (flag, inline) = match word.split_once('=') {
            Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        if flag == "--read" {
            let word = match &inline {
                Some(word) => word.clone(),
                // The word is optional, and others may follow.
                None => words.next_if(is_pull).transpose()?.unwrap_or("auto".to_owned()),
            };
            let way = Pull::from_word(&word);
            a.read = Some(way.ok_or(format!("--read {word}: one of auto, rdma, remote-write, measured"))?);
            continue;
        }
        let mut value = || match &inline {
            Some(value) => Ok(value.clone()),
            None => words.next().transpose()?.ok_or_else(|| format!("{flag} needs a value; see --help")),
        };
        if a.device.take(&flag, &mut value)? {
            continue;
        }
        if a.admission.take(&flag, &mut value)? {
            if flag == "--insecure" && inline.is_some() {
                return Err(format!("{flag} takes no value"));
            }
            continue;
        }
        match flag.as_str() {
            "--help" | "-h" => return Ok(None),
            "--listen" | "--connect" if a.side != Side::Alone => {
                return Err(format!(
                    "{flag}: this process has an address already; name one of --listen and --connect"
                ));
            }
            "--listen" => a.side = Side::Listen(address(&flag, &value()?)?),
            "--connect" => a.side = Side::Connect(address(&flag, &value()?)?),
            "--memory" => {
                let word = value()?;
                let place = Where::from_word(&word);
                a.memory = place.ok_or(format!("--memory {word}: one of host, cuda and cuda:N"))?;
            }
            "--gpu-path" => {
                a.gpu_path = value()?.parse().map_err(|e: UnknownGpuPath| format!("--gpu-path: {e}"))?;
            }
            "--rails" => a.rails = number(&flag, &value()?, 1, 16)? as usize,
            "--strict-rails" => a.strict_rails = true,
            "--qps" => a.qps = number(&flag, &value()?, 1, 64)? as usize,
            "--spin" => a.spin = Duration::from_micros(number(&flag, &value()?, 0, 60_000_000)?),
            "--requests" => a.requests = number(&flag, &value()?, 1, 1 << 20)? as u32,
            "--tokens" => a.tokens = number(&flag, &value()?, 1, 1 << 24)? as u32,
            "--layers" => a.layers = number(&flag, &value()?, 1, 4096)? as u32,
            "--token-bytes" => a.token_bytes = number(&flag, &value()?, 1, 1 << 24)?,
            "--page" => a.page = number(&flag, &value()?, 1, 1 << 20)? as u32,
            "--run" => a.run = number(&flag, &value()?, 1, 1 << 24)? as u32,
            "--seed" => a.seed = Some(number(&flag, &value()?, 0, u64::MAX)?),
            "--file" => a.file = Some(value()?.into()),
            "--layerwise" => a.layerwise = true,
            "--layer-time" => a.layer_time = Duration::from_micros(number(&flag, &value()?, 1, 60_000_000)?),
            "--deadline" => a.deadline = Duration::from_secs(number(&flag, &value()?, 1, 86_400)?),
            "--json" => a.json = true,
            "--quiet" => a.quiet = true,
            "--child" => a.child = true,
            _ => return Err(format!("unknown argument {flag:?}; see --help")),
        }
        let bare = ["--json", "--quiet", "--child", "--strict-rails", "--layerwise"];
        if inline.is_some() && bare.contains(&flag.as_str()) {
            return Err(format!("{flag} takes no value"));
        }
    }
    a.device.check()?;
    if a.gpu_path != GpuPath::Any && a.memory == Where::Host {
        return Err(format!("--gpu-path {}: blocks in host memory take none; add --memory cuda", a.gpu_path));
    }
    a.admission.check()?;
    if a.read.is_some() && a.file.is_some() {
        return Err("--read and --file: a file is pushed; leave one of them out".to_owned());
    }
    if a.layerwise && (a.file.is_some() || a.read.is_some()) {
        return Err("--layerwise: a file has no layers, and layers are pushed; leave --file and --read out"
            .to_owned());
    }
    if a.tokens % a.page != 0 {
        return Err(format!(
            "--tokens {} is not a multiple of --page {}; choose a page that divides it",
            a.tokens, a.page
        ));
    }
    Ok(Some(a))
}

fn is_pull(word: &Result<String, String>) -> bool {
    word.as_ref().is_ok_and(|word| Pull::from_word(word).is_some())
}

fn address(flag: &str, text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| format!("{flag} {text:?}: IP:PORT is needed, for instance 127.0.0.1:7471 or [::1]:0"))
}
