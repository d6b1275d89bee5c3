//! The numbers in the README and in the guide are those of the code.

use std::time::Duration;

use crate::connect;
use crate::device::Profile;
use crate::kv::{KvConfig, proto};

/// A number of bytes as the tables write it: in the largest unit that divides it.
fn bytes(n: u64) -> String {
    match n.trailing_zeros() {
        _ if n == 0 => "0 B".to_owned(),
        40.. => format!("{} TiB", n >> 40),
        30.. => format!("{} GiB", n >> 30),
        20.. => format!("{} MiB", n >> 20),
        10.. => format!("{} KiB", n >> 10),
        _ => format!("{n} B"),
    }
}

fn row(profile: Profile) -> String {
    let c = profile.capabilities();
    format!(
        "| `{profile}` | {} | {} | {} | {} | {}/{} | {} | {} | {} | {} | {} | {} | {} |",
        if c.ordered { "RC" } else { "none" },
        if c.immediate { "yes" } else { "no" },
        if c.atomics { "yes" } else { "no" },
        if c.oob { "yes" } else { "no" },
        c.max_send_sge,
        c.max_recv_sge,
        bytes(c.max_inline.into()),
        c.max_qp_wr,
        c.max_cqe,
        bytes(c.max_msg_size),
        bytes(c.max_mr_size),
        c.max_rd_atomic,
        c.active_mtu,
    )
}

#[test]
fn k8_the_documented_capabilities_are_those_of_the_profiles() {
    for (name, text) in
        [("README.md", include_str!("../../README.md")), ("transports.md", include_str!("transports.md"))]
    {
        let rows: Vec<String> = Profile::ALL.into_iter().map(row).collect();
        for row in &rows {
            assert!(text.contains(row.as_str()), "{name} lacks this row:\n{row}");
        }
        // Nor does it have a row of a profile that does not exist.
        let named = text.lines().filter(|l| l.starts_with("| `") && l.matches('|').count() == 14).count();
        assert_eq!(named, rows.len(), "{name} has other rows");
    }
}

#[test]
fn k8_what_the_documents_say_of_every_profile_is_so() {
    for profile in Profile::ALL {
        let c = profile.capabilities();
        let shared_receives = matches!(profile, Profile::Default | Profile::Siw);
        assert_eq!(c.max_srq > 0, shared_receives, "{profile}");
        assert_eq!(c.all_signaled, !c.ordered, "{profile}");
    }
}

#[test]
fn k8_the_limits_in_the_readme_are_those_of_the_code() {
    let readme = include_str!("../../README.md");
    let says = |row: &str| assert!(readme.contains(row), "the README lacks: {row}");
    let fits = |qps: usize, p: Profile| KvConfig::default().qps(qps).fit(&p.capabilities()).is_ok();
    assert!(fits(64, Profile::Default) && !fits(65, Profile::Default));
    assert!(fits(2, Profile::Tiny) && !fits(3, Profile::Tiny));
    says("| queue pairs of a channel | 1 to 64; 2 on `tiny`");

    let c = KvConfig::default();
    says(&format!("| transfers in progress on a channel | {};", c.max_transfers));
    says(&format!("| one WRITE or READ | {} (`KvConfig::max_write`)", bytes(c.max_write.into())));
    says(&format!("| a message (`send_message`) | {};", bytes(proto::MAX_MESSAGE as u64)));
    says(&format!("| a bootstrap frame | {} |", bytes(connect::MAX_FRAME_BODY.into())));
    let control = u64::from(c.send_depth + c.recv_depth()) * crate::kv::CONTROL_BYTES as u64;
    says(&format!("| memory for control messages | {} a queue pair", bytes(control)));
    let s = Duration::as_secs_f64;
    says(&format!(
        "connect {} s, write {} s, silent peer {} s, abort {} s, close 5 s",
        s(&c.connect_timeout),
        s(&c.deadline),
        s(&c.peer_timeout),
        s(&c.abort_grace)
    ));
}
