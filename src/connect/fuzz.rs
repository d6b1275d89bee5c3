//! What the fuzz target `hello` runs.

use super::agree::{Role, agree};
use super::codec_rail::{late, put_late};
use super::error::Stage;
use super::frame::{HEADER_LEN, Header, Kind};
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
        Kind::ReadyAck | Kind::CmReady => {}
    }
}
