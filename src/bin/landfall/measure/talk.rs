//! What the two ends of a measurement say to each other: JSON in messages of a control channel, each an answer to a question.
//!
//! The control channel is a [`KvChannel`] like any other, so it lets in whom the listener lets in. What is measured runs on data
//! channels, each with the layout that it wants. A message has a version and at most [`MOST`] bytes; unknown fields are ignored.
//! Every number of a peer is checked before it is used ([`Shape::check`]).

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use landfall::counters::{CountUnit, Verdict};
use landfall::kv::{KvChannel, PathReport};
use serde::{Deserialize, Serialize};

use super::load::Report;
use crate::output::Error;

/// The name of a measuring endpoint: whoever connects refuses another.
pub(crate) const NAME: &str = "landfall-bench";
/// Another version is another language.
pub(crate) const VERSION: u32 = 1;
/// Most bytes of a control message.
const MOST: usize = 256 << 10;
/// How long an answer may take, beside what was asked for.
const PATIENCE: Duration = Duration::from_secs(30);

/// How the bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Op {
    /// Writes to granted blocks.
    Write,
    /// Reads of granted blocks.
    Read,
    /// Messages, which the peer's program answers.
    Send,
}

impl Op {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Send => "send",
        }
    }

    /// In words.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            Self::Write => "writes",
            Self::Read => "reads",
            Self::Send => "messages",
        }
    }
}

/// How a read is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ReadBy {
    /// As the library chooses.
    #[default]
    Auto,
    /// RDMA READs.
    RdmaRead,
    /// WRITEs of the owner.
    RemoteWrite,
}

/// Where the bytes lie, at both ends: `host`, `cuda` or `cuda:N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) enum Memory {
    /// Anonymous memory of the host, faulted in.
    #[default]
    Host,
    /// Of the GPU of that ordinal.
    Cuda(u32),
}

impl Memory {
    /// As an argument, of which this program must be capable.
    pub(crate) fn here(text: &str) -> Result<Self, String> {
        match text.parse()? {
            Self::Cuda(_) if !cfg!(feature = "cuda") => Err(NO_CUDA.to_owned()),
            memory => Ok(memory),
        }
    }
}

/// A peer may ask for what this program cannot do.
pub(crate) const NO_CUDA: &str = "memory of a GPU: this landfall was built without the feature cuda; build it with --features cli,cuda, at both ends";

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(0) => f.write_str("cuda"),
            Self::Cuda(device) => write!(f, "cuda:{device}"),
        }
    }
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let device = match text {
            "host" => return Ok(Self::Host),
            "cuda" => Some(0),
            _ => text.strip_prefix("cuda:").and_then(|device| device.parse().ok()),
        };
        device.map(Self::Cuda).ok_or_else(|| format!("{text:?} is no memory: host, cuda or cuda:N"))
    }
}

impl From<Memory> for String {
    fn from(memory: Memory) -> Self {
        memory.to_string()
    }
}

impl TryFrom<String> for Memory {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// A transfer, and how many of them: what both ends need to know before they have a channel for it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) op: Op,
    /// Bytes of a descriptor.
    pub(crate) block_bytes: u64,
    /// Blocks of a transfer, no two of which are neighbours in memory.
    pub(crate) descriptors: u32,
    /// Transfers under way at once, at most.
    pub(crate) in_flight: u32,
    /// Both ends do it.
    pub(crate) both: bool,
    pub(crate) read_by: ReadBy,
    #[serde(default)]
    pub(crate) memory: Memory,
    /// How long a waiting end may poll before it sleeps.
    pub(crate) spin_us: u64,
    /// Over TCP, whatever the device.
    pub(crate) tcp: bool,
}

/// More of it than this is a mistake, or no friend.
const MOST_BLOCK: u64 = 1 << 30;
const MOST_DESCRIPTORS: u32 = 1 << 16;
/// Transfers of a channel that have a slot.
pub(crate) const MOST_IN_FLIGHT: u32 = 256;
/// Of a message of a channel.
const MOST_MESSAGE: u64 = 16 << 20;
const MOST_SPIN: u64 = 1_000_000;
/// Between blocks that are to be no neighbours.
const GAP: u64 = 64;

impl Shape {
    /// Whether it can be at all, in words.
    pub(crate) fn check(&self) -> Result<(), String> {
        let within = |what: &str, got: u64, least: u64, most: u64| {
            if (least..=most).contains(&got) {
                return Ok(());
            }
            Err(format!("{what} {got}: {least} to {most} can be measured"))
        };
        within("a block size of", self.block_bytes, 1, MOST_BLOCK)?;
        within("descriptors", self.descriptors.into(), 1, MOST_DESCRIPTORS.into())?;
        within("transfers in flight", self.in_flight.into(), 1, MOST_IN_FLIGHT.into())?;
        within("microseconds of polling", self.spin_us, 0, MOST_SPIN)?;
        if self.op == Op::Send {
            within("a message size of", self.block_bytes, 2, MOST_MESSAGE)?;
            within("descriptors of a message", self.descriptors.into(), 1, 1)?;
        }
        // Cannot overflow: at most 2^30 × 2^16 × 2^10.
        within("a transfer of", self.transfer_bytes(), 1, 1 << 40)
    }

    /// Bytes of a transfer.
    pub(crate) fn transfer_bytes(&self) -> u64 {
        self.block_bytes * u64::from(self.descriptors)
    }

    /// Bytes from a block to the next.
    pub(crate) fn stride(&self) -> u64 {
        if self.descriptors > 1 { self.block_bytes + GAP } else { self.block_bytes }
    }

    /// Grants that are open: some more than are used, so that nothing waits for the way of a grant; few where they are large.
    pub(crate) fn open(&self) -> u32 {
        let spare = ((16 << 20) / self.transfer_bytes().max(1)).clamp(2, u64::from(self.in_flight.max(2)));
        self.in_flight + spare as u32
    }

    /// Blocks of a pool: of who grants, who starts transfers, or both.
    pub(crate) fn blocks(&self, grants: bool, starts: bool) -> u64 {
        let transfers =
            u64::from(grants) * u64::from(self.open()) + u64::from(starts) * u64::from(self.in_flight);
        match self.op {
            Op::Send => 1,
            Op::Write | Op::Read => transfers * u64::from(self.descriptors),
        }
    }
}

/// From who measures to who serves.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ask {
    /// First.
    Hello,
    /// A data channel for the endpoint of this epoch, in place of the one before.
    Open { shape: Shape, epoch: u64 },
    /// Do it, too: `in_flight` at once, for so long.
    Drive { in_flight: u32, millis: u64 },
    /// What was carried by the data channel, as its device counted it.
    Verify,
}

/// The answer to an [`Ask`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// To `Hello`.
    Hello(About),
    /// To `Open`: the port that its listener has, and the endpoint's epoch.
    Opened { port: u16, epoch: u64 },
    /// To `Drive`, when it is over.
    Drove(Report),
    /// To `Verify`.
    Verified(Counted),
    /// It cannot be had, and why.
    Refused { why: String },
}

/// Who serves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct About {
    /// Version of the program.
    pub(crate) version: String,
    pub(crate) devices: Vec<String>,
    /// How they move data, as `landfall devices` says it.
    pub(crate) transport: String,
    pub(crate) rdma: bool,
    /// Most bytes of memory that it gives to measurements, all together.
    pub(crate) limit: u64,
}

/// What one end's device has counted of a data channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counted {
    /// As the devices of this end are called.
    pub(crate) devices: Vec<String>,
    /// `verified`, `contradicted` or `unknown`.
    pub(crate) verdict: String,
    /// Why, with the numbers.
    pub(crate) reason: String,
    /// Payload of this end, bytes.
    pub(crate) payload: u64,
    /// What the devices have counted, in `unit`.
    pub(crate) counted: Option<u64>,
    pub(crate) unit: Option<String>,
}

impl Counted {
    /// As the path's latest check has it.
    pub(crate) fn of(path: &PathReport) -> Self {
        let mut devices: Vec<_> = path.rails.iter().map(|rail| rail.device.clone()).collect();
        devices.dedup();
        let Some(report) = &path.counters else {
            let reason = format!("{} has no device that counts", path.device);
            let verdict = Verdict::Unknown.to_string();
            return Self { devices, verdict, reason, payload: 0, counted: None, unit: None };
        };
        let direction = if report.sent.payload.bytes >= report.received.payload.bytes {
            &report.sent
        } else {
            &report.received
        };
        Self {
            devices,
            verdict: report.verdict.to_string(),
            reason: direction.reason.clone(),
            payload: direction.payload.bytes,
            counted: direction.counted,
            unit: direction.unit.map(|unit| match unit {
                CountUnit::Packets => "packets".to_owned(),
                _ => "bytes".to_owned(),
            }),
        }
    }
}

#[derive(Serialize)]
struct Outgoing<'a, T> {
    landfall_bench: u32,
    say: &'a T,
}

#[derive(Deserialize)]
struct Version {
    landfall_bench: u32,
}

#[derive(Deserialize)]
struct Incoming<T> {
    say: T,
}

/// A message that is none of ours.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Misspoken {
    #[error("a control message of {got} bytes; at most {MOST} are allowed")]
    TooLong { got: usize },
    #[error(
        "the peer speaks version {theirs} of the measuring protocol, this program version {VERSION}; run the same landfall on both ends"
    )]
    Version { theirs: u32 },
    #[error("the peer sent no control message of landfall's: {0}")]
    NoMessage(String),
}

fn encode<T: Serialize>(say: &T) -> Result<Vec<u8>, Error> {
    Ok(serde_json::to_vec(&Outgoing { landfall_bench: VERSION, say })?)
}

fn decode<T: for<'d> Deserialize<'d>>(bytes: &[u8]) -> Result<T, Misspoken> {
    if bytes.len() > MOST {
        return Err(Misspoken::TooLong { got: bytes.len() });
    }
    let no = |error: serde_json::Error| Misspoken::NoMessage(error.to_string());
    // By itself first: another version may say other things.
    let Version { landfall_bench: theirs } = serde_json::from_slice(bytes).map_err(no)?;
    if theirs != VERSION {
        return Err(Misspoken::Version { theirs });
    }
    Ok(serde_json::from_slice::<Incoming<T>>(bytes).map_err(no)?.say)
}

/// Asks, and waits for the answer: `beside` longer than answers usually take.
pub(crate) async fn ask(channel: &KvChannel, ask: &Ask, beside: Duration) -> Result<Answer, Error> {
    channel.send_message(encode(ask)?).await?;
    let limit = PATIENCE + beside;
    let answer = tokio::time::timeout(limit, channel.recv_message()).await;
    let answer =
        answer.map_err(|_| format!("the peer has not answered within {limit:?}; is it overloaded?"))??;
    match decode(&answer)? {
        Answer::Refused { why } => Err(format!("the peer refused: {why}").into()),
        answer => Ok(answer),
    }
}

/// Answers what was asked.
pub(crate) async fn answer(channel: &KvChannel, answer: &Answer) -> Result<(), Error> {
    Ok(channel.send_message(encode(answer)?).await?)
}

/// What the peer asks next. `None` when it has closed the channel, or is gone.
pub(crate) async fn asked(channel: &KvChannel) -> Option<Result<Ask, Misspoken>> {
    Some(decode(&channel.recv_message().await.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        Shape {
            op: Op::Write,
            block_bytes: 4096,
            descriptors: 4,
            in_flight: 16,
            both: true,
            read_by: ReadBy::Auto,
            memory: Memory::Host,
            spin_us: 0,
            tcp: false,
        }
    }

    #[test]
    fn b1_control_messages_have_a_version_and_a_bound() {
        let bytes = encode(&Ask::Open { shape: shape(), epoch: u64::MAX }).unwrap();
        assert!(
            matches!(decode::<Ask>(&bytes), Ok(Ask::Open { shape: got, epoch: u64::MAX }) if got == shape())
        );
        let text = String::from_utf8(bytes.clone()).unwrap();
        let other = text.replace("\"landfall_bench\":1", "\"landfall_bench\":2");
        assert_ne!(other, text);
        assert!(matches!(decode::<Ask>(other.as_bytes()), Err(Misspoken::Version { theirs: 2 })));
        // Fields of a later version are ignored; what another version says need not be understood to be told.
        let more = text.replace("\"op\"", "\"later\":[1],\"op\"");
        assert!(decode::<Ask>(more.as_bytes()).is_ok());
        assert!(matches!(
            decode::<Ask>(br#"{"landfall_bench":9,"say":"what"}"#),
            Err(Misspoken::Version { theirs: 9 })
        ));
        let long = vec![b' '; MOST + 1];
        assert!(matches!(decode::<Ask>(&long), Err(Misspoken::TooLong { .. })));
        for wrong in
            [&b""[..], b"{}", b"\xff\xfe", b"[[[[[[", br#"{"landfall_bench":1}"#, &bytes[..bytes.len() - 1]]
        {
            assert!(matches!(decode::<Ask>(wrong), Err(Misspoken::NoMessage(_))), "{wrong:?}");
        }
    }

    #[test]
    fn b1_a_peer_s_numbers_are_checked() {
        assert_eq!(shape().check(), Ok(()));
        let wrong = [
            Shape { block_bytes: 0, ..shape() },
            Shape { block_bytes: u64::MAX, ..shape() },
            Shape { descriptors: 0, ..shape() },
            Shape { descriptors: u32::MAX, ..shape() },
            Shape { in_flight: 0, ..shape() },
            Shape { in_flight: 257, ..shape() },
            Shape { spin_us: u64::MAX, ..shape() },
            Shape { block_bytes: 1 << 30, descriptors: 1 << 16, ..shape() },
            Shape { op: Op::Send, ..shape() },
            Shape { op: Op::Send, descriptors: 1, block_bytes: 1, ..shape() },
            Shape { op: Op::Send, descriptors: 1, block_bytes: (16 << 20) + 1, ..shape() },
        ];
        for shape in wrong {
            assert!(shape.check().is_err(), "{shape:?}");
        }
    }

    #[test]
    fn grants_are_a_few_more_than_transfers() {
        let open =
            |block_bytes, in_flight| Shape { block_bytes, descriptors: 1, in_flight, ..shape() }.open();
        assert_eq!(open(2, 1), 3);
        assert_eq!(open(4096, 16), 32);
        assert_eq!(open(8 << 20, 8), 10);
        let both = Shape { descriptors: 1, ..shape() };
        assert_eq!(both.blocks(true, true), u64::from(both.open() + both.in_flight));
        assert_eq!(both.blocks(false, true), 16);
    }
}
