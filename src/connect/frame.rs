//! Frames of the bootstrap, over any byte stream (B1).
//!
//! `{ magic "LFLL", version u16, kind u16, length u32, epoch u64 }`, little-endian, and `length` bytes of fields.
//! The header never changes between versions. The length is bounded, and memory grows with the bytes that have
//! come, never with the length declared.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::deadline::Deadline;
use super::error::{ConnectError, Stage};
use crate::wire::{Reader, Writer};

/// `"LFLL"`.
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"LFLL");
/// The version of the bootstrap that this crate speaks.
pub(crate) const VERSION: u16 = 1;
/// The longest body, sent or received.
pub(crate) const MAX_BODY: u32 = 1 << 20;
/// Bytes of a header.
pub(crate) const HEADER_LEN: usize = 20;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Kind {
    Hello = 1,
    HelloReply = 2,
    Reject = 3,
    Ready = 4,
    ReadyAck = 5,
    // Of admission by a pre-shared key.
    AuthStart = 6,
    AuthChallenge = 7,
    // Of the soft provider's connection manager.
    CmRequest = 16,
    CmReply = 17,
    CmReject = 18,
    CmReady = 19,
}

impl Kind {
    fn of(code: u16) -> Option<Self> {
        Some(match code {
            1 => Self::Hello,
            2 => Self::HelloReply,
            3 => Self::Reject,
            4 => Self::Ready,
            5 => Self::ReadyAck,
            6 => Self::AuthStart,
            7 => Self::AuthChallenge,
            16 => Self::CmRequest,
            17 => Self::CmReply,
            18 => Self::CmReject,
            19 => Self::CmReady,
            _ => return None,
        })
    }
}

/// A header that has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) len: u32,
    pub(crate) epoch: u64,
}

/// Reads the magic and the version that everything of a bootstrap begins with, and refuses other ones.
pub(super) fn check_speaker(r: &mut Reader<'_>, magic: u32, stage: Stage) -> Result<(), ConnectError> {
    let short = |e| ConnectError::malformed(stage, e);
    let got = r.u32().map_err(short)?;
    if got != magic {
        return Err(ConnectError::NotLandfall { got });
    }
    let theirs = r.u16().map_err(short)?;
    if theirs != VERSION {
        return Err(ConnectError::Version { ours: VERSION, theirs });
    }
    Ok(())
}

impl Header {
    pub(crate) fn decode(bytes: &[u8; HEADER_LEN], stage: Stage) -> Result<Self, ConnectError> {
        let mut r = Reader::new(bytes, "frame header");
        let short = |e| ConnectError::malformed(stage, e);
        check_speaker(&mut r, MAGIC, stage)?;
        let code = r.u16().map_err(short)?;
        let len = r.u32().map_err(short)?;
        let epoch = r.u64().map_err(short)?;
        if len > MAX_BODY {
            return Err(ConnectError::TooLarge { stage, declared: len.into(), limit: MAX_BODY.into() });
        }
        let kind = Kind::of(code).ok_or(ConnectError::Unexpected { stage, kind: code })?;
        Ok(Self { kind, len, epoch })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        Writer(out).u32(MAGIC).u16(VERSION).u16(self.kind as u16).u32(self.len).u64(self.epoch);
    }
}

/// A received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    /// The sender's epoch.
    pub(crate) epoch: u64,
    pub(crate) body: Vec<u8>,
}

impl Frame {
    /// Its header, as it was sent: nothing in one is left out by decoding.
    pub(super) fn head(&self) -> [u8; HEADER_LEN] {
        let mut head = Vec::with_capacity(HEADER_LEN);
        // It was declared by 32 bits.
        Header { kind: self.kind, len: self.body.len() as u32, epoch: self.epoch }.encode(&mut head);
        head.try_into().expect("a header has its length")
    }

    /// All of it, as it was sent.
    pub(super) fn bytes(&self) -> Vec<u8> {
        [&self.head()[..], &self.body].concat()
    }
}

/// A frame's bytes: the header and what `fill` appends.
pub(crate) fn encode(
    kind: Kind,
    epoch: u64,
    fill: impl FnOnce(&mut Vec<u8>),
) -> Result<Vec<u8>, ConnectError> {
    let mut out = vec![0; HEADER_LEN];
    fill(&mut out);
    let body = out.len() - HEADER_LEN;
    let Some(len) = u32::try_from(body).ok().filter(|&n| n <= MAX_BODY) else {
        return Err(ConnectError::Invalid {
            what: format!("it takes {body} bytes, the limit is {MAX_BODY}: use fewer, larger regions"),
        });
    };
    let mut head = Vec::with_capacity(HEADER_LEN);
    Header { kind, len, epoch }.encode(&mut head);
    out[..HEADER_LEN].copy_from_slice(&head);
    Ok(out)
}

/// Writes a frame made by [`encode`].
pub(crate) async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    bytes: &[u8],
    stage: Stage,
    deadline: Deadline,
) -> Result<(), ConnectError> {
    deadline
        .io(stage, async {
            stream.write_all(bytes).await?;
            stream.flush().await
        })
        .await
}

/// Reads one frame.
#[cfg(test)]
pub(crate) async fn read(
    stream: &mut (impl AsyncRead + Unpin),
    stage: Stage,
    deadline: Deadline,
) -> Result<Frame, ConnectError> {
    read_within(stream, MAX_BODY, stage, deadline).await
}

/// Reads one frame of at most `limit` bytes.
pub(crate) async fn read_within(
    stream: &mut (impl AsyncRead + Unpin),
    limit: u32,
    stage: Stage,
    deadline: Deadline,
) -> Result<Frame, ConnectError> {
    let head = read_head(stream, stage, deadline).await?;
    read_body(stream, head, limit, stage, deadline).await
}

/// Reads a frame's header.
pub(crate) async fn read_head(
    stream: &mut (impl AsyncRead + Unpin),
    stage: Stage,
    deadline: Deadline,
) -> Result<Header, ConnectError> {
    let mut head = [0u8; HEADER_LEN];
    let got = deadline.io(stage, read_up_to(stream, &mut head)).await?;
    if got < head.len() {
        if got == 0 {
            return Err(ConnectError::Closed { stage });
        }
        // Four bytes are enough to see that this is no peer of ours.
        if got >= 4 && head[..4] != MAGIC.to_le_bytes() {
            Header::decode(&head, stage)?;
        }
        return Err(ConnectError::Truncated { stage, got: got as u64, wanted: HEADER_LEN as u64 });
    }
    Header::decode(&head, stage)
}

/// Reads the rest of a frame, of at most `limit` bytes.
pub(crate) async fn read_body(
    stream: &mut (impl AsyncRead + Unpin),
    header: Header,
    limit: u32,
    stage: Stage,
    deadline: Deadline,
) -> Result<Frame, ConnectError> {
    if header.len > limit {
        return Err(ConnectError::TooLarge { stage, declared: header.len.into(), limit: limit.into() });
    }
    let mut body = Vec::new();
    // `read_to_end` grows with what arrives.
    let got = deadline.io(stage, stream.take(header.len.into()).read_to_end(&mut body)).await?;
    if got < header.len as usize {
        return Err(ConnectError::Truncated { stage, got: got as u64, wanted: header.len.into() });
    }
    Ok(Frame { kind: header.kind, epoch: header.epoch, body })
}

/// Fills `buf`, or returns how much there was before the end of the stream.
async fn read_up_to(stream: &mut (impl AsyncRead + Unpin), buf: &mut [u8]) -> std::io::Result<usize> {
    let mut got = 0;
    while got < buf.len() {
        match stream.read(&mut buf[got..]).await? {
            0 => break,
            n => got += n,
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn far() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    fn sample() -> Vec<u8> {
        encode(Kind::Hello, 7, |b| b.extend_from_slice(b"body")).unwrap()
    }

    async fn read_all(mut bytes: &[u8]) -> Result<Frame, ConnectError> {
        read(&mut bytes, Stage::Hello, far()).await
    }

    #[tokio::test]
    async fn b1_a_frame_round_trips_and_leaves_the_next_one() {
        let mut two = sample();
        two.extend(encode(Kind::Ready, 8, |_| {}).unwrap());
        let mut rest = &two[..];
        let first = read(&mut rest, Stage::Hello, far()).await.unwrap();
        assert_eq!(first, Frame { kind: Kind::Hello, epoch: 7, body: b"body".to_vec() });
        let second = read(&mut rest, Stage::Ready, far()).await.unwrap();
        assert_eq!(second, Frame { kind: Kind::Ready, epoch: 8, body: vec![] });
        assert!(rest.is_empty());
    }

    #[tokio::test]
    async fn b1_a_frame_cut_at_every_byte_says_how_far_it_came() {
        let whole = sample();
        assert!(matches!(read_all(&[]).await, Err(ConnectError::Closed { stage: Stage::Hello })));
        for cut in 1..whole.len() {
            let (got, wanted) = match read_all(&whole[..cut]).await {
                Err(ConnectError::Truncated { got, wanted, .. }) => (got as usize, wanted as usize),
                other => panic!("cut at {cut}: {other:?}"),
            };
            let expected = if cut < HEADER_LEN { (cut, HEADER_LEN) } else { (cut - HEADER_LEN, 4) };
            assert_eq!((got, wanted), expected);
        }
    }

    #[tokio::test]
    async fn b1_other_protocols_versions_kinds_and_lengths_are_told_apart() {
        let http = read_all(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n").await;
        assert!(matches!(http, Err(ConnectError::NotLandfall { got }) if got.to_le_bytes() == *b"GET "));
        // Shorter than a header, and still recognisable.
        assert!(matches!(read_all(b"PING\r\n").await, Err(ConnectError::NotLandfall { .. })));

        let mut v = sample();
        v[4] = 9;
        assert!(matches!(read_all(&v).await, Err(ConnectError::Version { ours: VERSION, theirs: 9 })));
        let mut v = sample();
        v[6] = 77;
        assert!(matches!(read_all(&v).await, Err(ConnectError::Unexpected { kind: 77, .. })));
        let mut v = sample();
        v[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        match read_all(&v).await {
            Err(ConnectError::TooLarge { declared: 0xffff_ffff, limit, .. }) => {
                assert_eq!(limit, u64::from(MAX_BODY))
            }
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn b1_a_frame_of_the_limit_passes_and_one_byte_more_is_not_sent() {
        let max = MAX_BODY as usize;
        let v = encode(Kind::Hello, 0, |b| b.resize(b.len() + max, 3)).unwrap();
        assert_eq!(read_all(&v).await.unwrap().body.len(), max);
        let e = encode(Kind::Hello, 0, |b| b.resize(b.len() + max + 1, 3)).unwrap_err();
        assert!(matches!(e, ConnectError::Invalid { what } if what.contains("1048577")));
    }

    #[tokio::test]
    async fn b1_a_peer_that_stops_inside_a_frame_meets_the_deadline() {
        for cut in [0, 1, HEADER_LEN, HEADER_LEN + 2] {
            let (mut ours, mut theirs) = tokio::io::duplex(64);
            theirs.write_all(&sample()[..cut]).await.unwrap();
            let after = Duration::from_millis(20);
            let got = read(&mut ours, Stage::Hello, Deadline::after(after)).await;
            assert!(
                matches!(got, Err(ConnectError::Timeout { stage: Stage::Hello, after: a, .. }) if a == after),
                "cut at {cut}: {got:?}"
            );
        }
    }
}
