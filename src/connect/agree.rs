//! What two hellos make together: the common path, or the refusal that says what does not fit.

use super::hello::{Hello, Notify};
use super::rail::HelloRail;
use super::reject::{LayoutField, Reject};
use crate::device::SoftTransport;

/// The path MTUs that exist, bytes.
const MTUS: [u32; 5] = [256, 512, 1024, 2048, 4096];

/// What both sides use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Agreed {
    /// Longest control message, bytes.
    pub(crate) max_control: u32,
    /// At least one, in the order of the reply.
    pub(crate) rails: Vec<AgreedRail>,
}

/// What both sides use of one rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AgreedRail {
    /// Its place in the reply's list.
    pub(crate) number: usize,
    /// The client's device, by its place in the hello's list.
    pub(crate) client: usize,
    /// It is to come later: one side has no queue pairs for it yet.
    pub(crate) absent: bool,
    /// Queue pairs: those beyond are not used.
    pub(crate) qps: usize,
    /// Bytes.
    pub(crate) path_mtu: u32,
    /// READs outstanding on a queue pair, in each direction.
    pub(crate) rd_atomic: u8,
    pub(crate) notify: Notify,
    /// Both devices deliver the messages of a queue pair in order.
    pub(crate) ordered: bool,
    /// Largest message, bytes.
    pub(crate) max_msg: u64,
}

/// Which side we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Ours is the hello, theirs the reply.
    Client,
    Server,
}

/// Whether `mtu` is a path MTU.
pub(crate) fn is_mtu(mtu: u32) -> bool {
    MTUS.contains(&mtu)
}

/// The path MTU of two ports' active MTUs: the smaller of the two (B2), as the largest MTU that exists and fits.
/// `None` below the smallest.
pub(crate) fn path_mtu(ours: u32, theirs: u32) -> Option<u32> {
    let most = ours.min(theirs);
    MTUS.into_iter().rev().find(|&m| m <= most)
}

/// Whether two transports, as hellos name them, have one in common: they are the same, or of soft devices of which one takes
/// either (and both keep order, or neither).
pub(crate) fn meet(ours: &str, theirs: &str) -> bool {
    fn soft(name: &str) -> Option<(SoftTransport, &str)> {
        let rest = name.strip_prefix("soft-")?;
        let (transport, order) = rest.split_once('-').unwrap_or((rest, ""));
        Some((transport.parse().ok()?, order))
    }
    match (soft(ours), soft(theirs)) {
        (Some((ours, order)), Some((theirs, their_order))) => ours.meets(theirs) && order == their_order,
        _ => ours == theirs,
    }
}

/// Compares our hello with the peer's. Both sides come to the same answer: a rail that one of them cannot use is left out by
/// both, and the first refusal is the answer where none is left.
pub(crate) fn agree(ours: &Hello, theirs: &Hello, role: Role) -> Result<Agreed, Reject> {
    if let (Some(o), Some(t)) = (&ours.layout, &theirs.layout) {
        // The number of blocks and the strides are each side's own; what a block is must be the same.
        let differ = |field, ours, theirs| {
            if ours == theirs { Ok(()) } else { Err(Reject::Layout { field, ours, theirs }) }
        };
        match (&o.shape, &t.shape) {
            // Where both say what is in a block, one is mapped to the other; what a head is must be the same.
            (Some(o), Some(t)) => {
                differ(LayoutField::Planes, o.planes.into(), t.planes.into())?;
                differ(LayoutField::HeadBytes, o.head_bytes.into(), t.head_bytes.into())?;
                differ(LayoutField::Heads, o.total_heads.into(), t.total_heads.into())?;
            }
            _ => differ(LayoutField::BlockBytes, o.block_bytes, t.block_bytes)?,
        }
        differ(LayoutField::Layers, o.layers.into(), t.layers.into())?;
        if o.dtype != t.dtype {
            return Err(Reject::Dtype { ours: o.dtype.clone(), theirs: t.dtype.clone() });
        }
    }
    let (hello, reply) = match role {
        Role::Client => (ours, theirs),
        Role::Server => (theirs, ours),
    };
    let (asked, answered) = (hello.rail_list(), reply.rail_list());
    // A server that knows of one rail has answered to the one that it saw.
    let alone = reply.others.is_none().then(|| hello.place());
    let later = ours.knows_later() && theirs.knows_later();
    let keyless = ours.knows_keyless() && theirs.knows_keyless();
    let comes = |rail: &HelloRail| later && rail.later > 0 && (keyless || !rail.keyless);
    let (mut rails, mut refused) = (Vec::new(), None);
    for (number, server) in answered.iter().enumerate() {
        let client = alone.unwrap_or(usize::from(server.with));
        let Some(peer) = asked.get(client) else {
            return Err(Reject::Malformed {
                what: "a rail is joined to a device that is not there".to_owned(),
            });
        };
        let (ours, theirs) = match role {
            Role::Client => (peer, server),
            Role::Server => (server, peer),
        };
        match agree_rail(ours, theirs, comes) {
            Ok(rail) => rails.push(AgreedRail { number, client, ..rail }),
            Err(reject) => _ = refused.get_or_insert(reject),
        }
    }
    if rails.iter().all(|rail| rail.absent) {
        let none = || Reject::Unsupported { what: "no rail could be set up at both ends".to_owned() };
        refused.get_or_insert_with(none);
        rails.clear();
    }
    match refused {
        Some(reject) if rails.is_empty() => Err(reject),
        _ => Ok(Agreed { max_control: ours.max_control.min(theirs.max_control), rails }),
    }
}

/// What two devices make together. Where they stand is for the caller to say, and whether one that is not there yet `comes`.
fn agree_rail(
    ours: &HelloRail,
    theirs: &HelloRail,
    comes: impl Fn(&HelloRail) -> bool,
) -> Result<AgreedRail, Reject> {
    if !meet(&ours.transport, &theirs.transport) {
        let (ours, theirs) = (ours.transport.clone(), theirs.transport.clone());
        return Err(Reject::Transport { ours, theirs });
    }
    for rail in [ours, theirs] {
        if rail.qps.is_empty() && !comes(rail) {
            return Err(Reject::Unsupported { what: format!("{} could not be set up", rail.device) });
        }
    }
    let notify = if ours.notify.imm && theirs.notify.imm {
        Notify::Imm
    } else if ours.notify.send && theirs.notify.send {
        Notify::Send
    } else {
        return Err(Reject::Unsupported {
            what: format!("no notification in common: {:?} and {:?}", ours.notify, theirs.notify),
        });
    };
    let path_mtu = path_mtu(ours.mtu, theirs.mtu).ok_or_else(|| Reject::Unsupported {
        what: format!(
            "the active MTUs are {} and {}, the smallest path MTU is {}",
            ours.mtu, theirs.mtu, MTUS[0]
        ),
    })?;
    Ok(AgreedRail {
        number: 0,
        client: 0,
        absent: ours.qps.is_empty() || theirs.qps.is_empty(),
        qps: ours.places().min(theirs.places()),
        path_mtu,
        rd_atomic: ours.rd_atomic.min(theirs.rd_atomic),
        notify,
        ordered: ours.caps.ordered && theirs.caps.ordered,
        max_msg: ours.caps.max_msg.min(theirs.caps.max_msg),
    })
}

#[cfg(test)]
mod tests {
    use super::super::hello::tests::{sample, shaped};
    use super::super::hello::{HelloShape, NotifyModes};
    use super::*;

    /// Both sides come to the same answer.
    fn agree(client: &Hello, server: &Hello) -> Result<Agreed, Reject> {
        let agreed = super::agree(client, server, Role::Client);
        let other = super::agree(server, client, Role::Server);
        assert_eq!(agreed.as_ref().ok(), other.as_ref().ok());
        agreed
    }

    #[test]
    fn b2_path_mtu_is_the_smaller_of_the_two() {
        assert_eq!(path_mtu(1024, 4096), Some(1024));
        assert_eq!(path_mtu(4096, 1024), Some(1024));
        assert_eq!(path_mtu(4096, 4096), Some(4096));
        // A soft device may report an Ethernet or loopback MTU.
        assert_eq!(path_mtu(1500, 65536), Some(1024));
        assert_eq!(path_mtu(65536, 9000), Some(4096));
        assert_eq!(path_mtu(255, 4096), None);
    }

    #[test]
    fn b1_layouts_that_differ_are_refused_naming_both_values() {
        let ours = sample();
        // CASES 16: where only one side says what is in its blocks, their size decides.
        let mut theirs = shaped();
        theirs.layout.as_mut().unwrap().block_bytes = 16384;
        let r = agree(&ours, &theirs).unwrap_err();
        assert_eq!(r, Reject::Layout { field: LayoutField::BlockBytes, ours: 1152, theirs: 16384 });
        let mut theirs = sample();
        theirs.layout.as_mut().unwrap().dtype = "fp8".into();
        let r = agree(&ours, &theirs).unwrap_err();
        assert_eq!(r, Reject::Dtype { ours: "bf16".into(), theirs: "fp8".into() });
        let mut theirs = sample();
        theirs.layout.as_mut().unwrap().layers = 28;
        assert!(agree(&ours, &theirs).is_err());
        // Each side's own affair.
        let mut theirs = sample();
        let l = theirs.layout.as_mut().unwrap();
        (l.blocks, l.block_stride, l.layer_stride) = (7, 4096, 1 << 20);
        assert!(agree(&ours, &theirs).is_ok());
    }

    #[test]
    fn b1_pools_that_say_what_is_in_their_blocks_must_agree_on_the_model_only() {
        let ours = shaped();
        let mut theirs = shaped();
        let l = theirs.layout.as_mut().unwrap();
        l.block_bytes = 16384;
        let shape = l.shape.as_mut().unwrap();
        (shape.tokens, shape.first_head, shape.heads, shape.token_stride) = (64, 0, 2, 100);
        assert!(agree(&ours, &theirs).is_ok());
        for (field, ours_value, change) in [
            (LayoutField::Planes, 2, (|s| s.planes = 1) as fn(&mut HelloShape)),
            (LayoutField::HeadBytes, 9, |s| s.head_bytes = 1),
            (LayoutField::Heads, 8, |s| s.total_heads = 1),
        ] {
            let mut other = theirs.clone();
            change(other.layout.as_mut().unwrap().shape.as_mut().unwrap());
            let refused = agree(&ours, &other).unwrap_err();
            assert_eq!(refused, Reject::Layout { field, ours: ours_value, theirs: 1 });
        }
    }

    #[test]
    fn b2_both_sides_come_to_the_same_answer() {
        let a = sample();
        let mut b = sample();
        (b.mtu, b.rd_atomic, b.max_control) = (512, 1, 300);
        b.qps.truncate(2);
        b.caps.ordered = false;
        let agreed = agree(&a, &b).unwrap();
        assert_eq!(agreed, agree(&b, &a).unwrap());
        let rail = agreed.rails[0];
        assert_eq!((rail.path_mtu, rail.rd_atomic, rail.qps, agreed.max_control), (512, 1, 2, 300));
        assert!(!rail.ordered && agreed.rails.len() == 1);
    }

    #[test]
    fn b1_notifications_and_transports_must_have_something_in_common() {
        let a = sample();
        let mut b = sample();
        b.notify = NotifyModes { imm: false, send: true };
        assert_eq!(agree(&a, &b).unwrap().rails[0].notify, Notify::Send);
        let mut a = a;
        a.notify = NotifyModes { imm: true, send: false };
        assert!(matches!(agree(&a, &b), Err(Reject::Unsupported { .. })));
        let mut b = sample();
        b.transport = "verbs".into();
        let e = agree(&sample(), &b).unwrap_err().local_error().to_string();
        assert!(e.contains("soft-tcp") && e.contains("verbs"), "{e}");
    }

    #[test]
    fn k9_transports_meet_by_name() {
        for (a, b, fit) in [
            ("soft-tcp", "soft-tcp", true),
            ("soft-auto", "soft-tcp", true),
            ("soft-auto", "soft-shm", true),
            ("soft-auto-unordered", "soft-shm-unordered", true),
            ("soft-tcp", "soft-shm", false),
            ("soft-auto", "soft-auto-unordered", false),
            ("soft-tcp", "soft-pipe", false),
            ("soft-auto", "verbs-roce", false),
            ("verbs-roce", "verbs-roce", true),
            ("verbs-roce", "verbs-ib", false),
        ] {
            assert_eq!((meet(a, b), meet(b, a)), (fit, fit), "{a} and {b}");
        }
    }

    fn rail(device: &str, transport: &str, with: u8) -> HelloRail {
        let own = sample().rail_list().remove(0);
        HelloRail { device: device.into(), transport: transport.into(), with, ..own }
    }

    fn with(rails: Vec<HelloRail>, place: usize) -> Hello {
        let mut hello = sample();
        hello.set_rails(rails, place);
        hello
    }

    #[test]
    fn k10_a_rail_that_one_side_cannot_use_is_left_out_by_both() {
        let mut failed = rail("c1", "soft-tcp", 0);
        failed.qps.clear();
        let client = with(vec![rail("c0", "verbs-roce", 0), failed, rail("c2", "soft-tcp", 0)], 0);
        // The fourth is of a kind that the client has not: a server does not join such devices.
        let server = with(
            vec![
                rail("s0", "soft-tcp", 2),
                rail("s1", "soft-tcp", 1),
                rail("s2", "verbs-roce", 0),
                rail("s3", "verbs-ib", 0),
            ],
            0,
        );
        let rails = agree(&client, &server).unwrap().rails;
        let places: Vec<_> = rails.iter().map(|r| (r.number, r.client)).collect();
        assert_eq!(places, [(0, 2), (2, 0)]);
        // One that names a device beyond the list.
        let server = with(vec![rail("s0", "soft-tcp", 3)], 0);
        assert!(matches!(agree(&client, &server), Err(Reject::Malformed { .. })));
        // None is left.
        let server = with(vec![rail("s1", "soft-tcp", 1)], 0);
        let error = agree(&client, &server).unwrap_err().local_error().to_string();
        assert!(error.contains("c1 could not be set up"), "{error}");
    }

    /// A place is kept where one side, or both, mean to have queue pairs later; at least one rail is there from the beginning.
    #[test]
    fn k10_a_rail_that_comes_later_has_its_place() {
        let later = |device: &str, with, qps| {
            let mut rail = rail(device, "soft-tcp", with);
            rail.leave_out(qps);
            rail
        };
        let there = |device: &str, with| rail(device, "soft-tcp", with);
        let client = with(vec![there("c0", 0), later("c1", 0, 2), there("c2", 0), later("c3", 0, 0)], 0);
        let rails = vec![there("s0", 0), there("s1", 1), later("s2", 2, 3), there("s3", 3)];
        let server = with(rails, 0);
        let rails = agree(&client, &server).unwrap().rails;
        let places: Vec<_> = rails.iter().map(|r| (r.number, r.absent, r.qps)).collect();
        assert_eq!(places, [(0, false, 4), (1, true, 2), (2, true, 3)]);
        assert_eq!(server.rail_list()[2].regions.len(), 2, "its keys are known from the beginning");
        assert!(client.rail_list()[3].regions.is_empty(), "of one that never comes nothing is said");
        // A peer that knows of no such rails leaves them out.
        let mut older = server.clone();
        older.others.as_mut().unwrap().later = false;
        let rails = agree(&client, &older).unwrap().rails;
        assert_eq!(rails.iter().map(|r| (r.number, r.absent)).collect::<Vec<_>>(), [(0, false)]);
        // One whose regions come with it: for peers that know of such.
        let mut keyless = later("s1", 1, 2);
        (keyless.keyless, keyless.regions) = (true, vec![]);
        let server = with(vec![there("s0", 0), keyless], 0);
        let rails = |server: &Hello| agree(&client, server).unwrap().rails.len();
        assert_eq!(rails(&server), 2);
        let mut older = server;
        older.others.as_mut().unwrap().keyless = false;
        assert_eq!(rails(&older), 1);
        // Each side has one, and no rail has both.
        let client = with(vec![there("c0", 0), later("c1", 0, 2)], 0);
        let server = with(vec![later("s0", 0, 2), there("s1", 1)], 1);
        let error = agree(&client, &server).unwrap_err().local_error().to_string();
        assert!(error.contains("no rail could be set up at both ends"), "{error}");
    }

    #[test]
    fn k10_a_peer_without_rails_is_joined_to_what_it_saw() {
        let client = with(vec![rail("c0", "verbs-roce", 0), rail("c1", "soft-tcp", 0)], 1);
        let rails = agree(&client, &sample()).unwrap().rails;
        assert_eq!(rails.iter().map(|r| (r.number, r.client)).collect::<Vec<_>>(), [(0, 1)]);
        let server = with(vec![rail("s0", "soft-tcp", 0)], 0);
        assert_eq!(agree(&sample(), &server).unwrap().rails.len(), 1);
    }
}
