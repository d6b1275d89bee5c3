//! What the fuzz targets `hello` and `sealed` run.

use super::admission::challenge::{AuthStart, challenge};
use super::admission::seal::{self, Seal};
use super::agree::{Role, agree};
use super::codec_rail::{late, put_late};
use super::error::Stage;
use super::frame::{self, Frame, HEADER_LEN, Header, Kind};
use super::hello::Hello;
use super::reject::Reject;

/// A frame from any bytes: what decodes must survive encoding and decoding again.
pub(crate) fn frame(data: &[u8]) {
    let Some((head, rest)) = data.split_first_chunk::<HEADER_LEN>() else { return };
    let Ok(header) = Header::decode(head, Stage::Hello) else { return };
    let body = &rest[..rest.len().min(header.len as usize)];
    let mut again = Vec::new();
    match header.kind {
        Kind::Hello | Kind::HelloReply => {
            let Ok(hello) = Hello::decode(header.epoch, body) else { return };
            hello.encode(&mut again);
            assert_eq!(Hello::decode(header.epoch, &again).as_ref(), Ok(&hello));
            // A hello fits itself, unless it can be notified in no way. With rails it says more of a reply.
            let (as_client, as_server) =
                (agree(&hello, &hello, Role::Client), agree(&hello, &hello, Role::Server));
            assert_eq!(as_client.as_ref().ok(), as_server.as_ref().ok());
            if hello.others.is_none() {
                assert_eq!(as_client.is_ok(), hello.notify.imm || hello.notify.send);
            }
        }
        Kind::Reject => {
            let Ok(reject) = Reject::decode(body) else { return };
            reject.encode(&mut again);
            assert_eq!(Reject::decode(&again).as_ref(), Ok(&reject));
            let _ = (reject.clone().local_error().to_string(), reject.remote_error().to_string());
        }
        Kind::CmRequest | Kind::CmReply | Kind::CmReject => super::cm::fuzz(header.kind, body),
        Kind::Ready => {
            let Ok(rails) = late(body) else { return };
            put_late(&mut again, &rails);
            assert_eq!(late(&again).as_ref(), Ok(&rails));
        }
        Kind::AuthStart => {
            let Ok(start) = AuthStart::decode(body) else { return };
            start.encode(&mut again);
            assert_eq!(AuthStart::decode(&again).as_ref(), Ok(&start));
        }
        Kind::AuthChallenge => _ = challenge(body),
        Kind::ReadyAck | Kind::CmReady => {}
    }
}

/// The frames of an authenticated handshake between two sides that hold a key, with an attacker in the middle. The bytes say who
/// speaks and what the attacker does; it may change, repeat, reflect, cut and make up frames. A side takes the frame that the
/// other has sent next, and nothing else.
pub(crate) fn sealed(data: &[u8]) {
    let mut data = data.iter().copied();
    let start = frame::encode(Kind::AuthStart, 1, |_| {}).expect("it is short");
    let (mut client, mut server) = seal::pair(&start);
    let mut sent: Vec<Vec<u8>> = vec![start];
    while let (Some(op), Some(arg)) = (data.next(), data.next()) {
        let (from, to) = match op & 1 {
            0 => (&mut client, &mut server),
            _ => (&mut server, &mut client),
        };
        let kind = [Kind::Hello, Kind::HelloReply, Kind::Reject, Kind::Ready][usize::from(op >> 1 & 3)];
        let body: Vec<u8> = data.by_ref().take(usize::from(arg & 31)).collect();
        let whole = from.encode(kind, 7, |out| out.extend_from_slice(&body)).expect("it is short");
        let false_one = match op >> 3 & 7 {
            0 => None,
            // A bit, anywhere.
            1 => {
                let mut bent = whole.clone();
                let at = (usize::from(arg) << 3 | usize::from(op >> 6)) % bent.len();
                bent[at] ^= 1 << (arg & 7);
                Some(bent)
            }
            // One of those that were sent, by either side.
            2 => Some(sent[usize::from(arg) % sent.len()].clone()),
            // This one, to the one who has sent it.
            3 => {
                assert!(open(from, &whole).is_none(), "a reflected frame was taken");
                None
            }
            4 => Some(whole[..usize::from(arg) % whole.len()].to_vec()),
            _ => Some(frame::encode(kind, 7, |out| out.extend(data.by_ref().take(64))).expect("it is short")),
        };
        if let Some(frame) = false_one {
            assert!(open(to, &frame).is_none(), "a frame was taken that nobody has sent, or not now");
        }
        assert_eq!(open(to, &whole), Some(body), "the right frame was not taken");
        sent.push(whole);
    }
}

/// What `bytes` say to `seal`, if it takes them.
fn open(seal: &mut Seal, bytes: &[u8]) -> Option<Vec<u8>> {
    let (head, body) = bytes.split_first_chunk::<HEADER_LEN>()?;
    let head = Header::decode(head, Stage::Hello).ok()?;
    let body = body.get(..head.len as usize)?.to_vec();
    seal.open(Frame { kind: head.kind, epoch: head.epoch, body }, Stage::Hello).ok().map(|frame| frame.body)
}
