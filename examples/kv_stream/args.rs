//! The command line of `kv_stream`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use landfall::device::Profile;

pub(crate) const USAGE: &str = "\
kv_stream: stream KV cache, block by block, from a prefill to a decode process; each write resolves when it has landed

  kv_stream [OPTIONS]                   starts its peer process itself
  kv_stream --listen ADDR [OPTIONS]     decode side: grants blocks, receives, verifies
  kv_stream --connect ADDR [OPTIONS]    prefill side: fills blocks and writes them

Both sides must name the same layout (--page, --tokens, --requests, --run, --layers, --token-bytes), or the same kind of --file.

  --transport NAME       tcp (no device needed) or verbs (an RDMA device) [tcp]
  --device NAME          the RDMA device of --transport verbs, as `rdma link` or ibv_devices name it
  --peer-device NAME     that of the peer process which is started here  [as --device]
  --port N               port of the RDMA device                         [1]
  --gid-index N          index in its GID table                          [by rule]
  --profile NAME         soft profile: default, erdma-compat, erdma-standard, siw, srd, tiny  [default]
  --qps N                queue pairs of the channel, 1 to 64             [1]
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
  --deadline SECONDS     deadline of a write                             [60]
  --json                 one JSON object on standard output
  --quiet                no progress bar
";

/// Which side of the stream this process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Starts the receiver itself and sends.
    Alone,
    Listen(SocketAddr),
    Connect(SocketAddr),
}

/// The RDMA devices of `--transport verbs`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Verbs {
    pub(crate) device: String,
    pub(crate) peer_device: Option<String>,
    pub(crate) port: Option<u8>,
    pub(crate) gid_index: Option<u32>,
}

#[derive(Clone, Debug)]
pub(crate) struct Args {
    pub(crate) side: Side,
    pub(crate) profile: Option<Profile>,
    /// `Some` with `--transport verbs`.
    pub(crate) verbs: Option<Verbs>,
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
            profile: None,
            verbs: None,
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
    let (mut transport, mut verbs, mut verbs_option) = ("tcp".to_owned(), Verbs::default(), None);
    let mut words = words.map(|word| {
        word.into_string().map_err(|word| format!("argument {word:?} is not UTF-8; rename the file"))
    });
    while let Some(word) = words.next().transpose()? {
        let (flag, inline) = match word.split_once('=') {
            Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        let mut value = || match &inline {
            Some(value) => Ok(value.clone()),
            None => words.next().transpose()?.ok_or_else(|| format!("{flag} needs a value; see --help")),
        };
        match flag.as_str() {
            "--help" | "-h" => return Ok(None),
            "--listen" | "--connect" if a.side != Side::Alone => {
                return Err(format!(
                    "{flag}: this process has an address already; name one of --listen and --connect"
                ));
            }
            "--listen" => a.side = Side::Listen(address(&flag, &value()?)?),
            "--connect" => a.side = Side::Connect(address(&flag, &value()?)?),
            "--transport" => transport = value()?,
            "--device" => verbs.device = value()?,
            "--peer-device" => verbs.peer_device = Some(value()?),
            "--port" => verbs.port = Some(number(&flag, &value()?, 1, 255)? as u8),
            "--gid-index" => verbs.gid_index = Some(number(&flag, &value()?, 0, 255)? as u32),
            "--profile" => {
                a.profile = Some(value()?.parse().map_err(|e: landfall::error::DeviceError| e.to_string())?);
            }
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
            "--deadline" => a.deadline = Duration::from_secs(number(&flag, &value()?, 1, 86_400)?),
            "--json" => a.json = true,
            "--quiet" => a.quiet = true,
            "--child" => a.child = true,
            _ => return Err(format!("unknown argument {flag:?}; see --help")),
        }
        if matches!(flag.as_str(), "--device" | "--peer-device" | "--port" | "--gid-index") {
            verbs_option = Some(flag.clone());
        }
        if inline.is_some() && matches!(flag.as_str(), "--json" | "--quiet" | "--child") {
            return Err(format!("{flag} takes no value"));
        }
    }
    match (transport.as_str(), verbs_option) {
        ("tcp", None) => {}
        ("tcp", Some(option)) => return Err(format!("{option} is of --transport verbs; add that")),
        ("verbs", _) if verbs.device.is_empty() => {
            return Err("--transport verbs needs --device NAME; ibv_devices lists the names".to_owned());
        }
        ("verbs", _) if a.profile.is_some() => {
            return Err("--profile is of --transport tcp; a device is what it is".to_owned());
        }
        ("verbs", _) => a.verbs = Some(verbs),
        (name, _) => return Err(format!("--transport {name:?}: the transports are tcp and verbs")),
    }
    if a.tokens % a.page != 0 {
        return Err(format!(
            "--tokens {} is not a multiple of --page {}; choose a page that divides it",
            a.tokens, a.page
        ));
    }
    Ok(Some(a))
}

fn number(flag: &str, text: &str, least: u64, most: u64) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(n) if (least..=most).contains(&n) => Ok(n),
        _ => Err(format!("{flag} {text:?}: a whole number from {least} to {most} is needed")),
    }
}

fn address(flag: &str, text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| format!("{flag} {text:?}: IP:PORT is needed, for instance 127.0.0.1:7471 or [::1]:0"))
}
