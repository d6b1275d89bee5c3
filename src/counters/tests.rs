//! Made-up trees of sysfs, with what devices say and with what they never should.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// A directory like `/sys`, removed in the end.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("landfall-counters-{}-{number}", std::process::id());
        let root = std::env::temp_dir().join(name);
        std::fs::create_dir_all(root.join("class/infiniband")).unwrap();
        Self { root }
    }

    fn sysfs(&self) -> Sysfs {
        Sysfs::at(&self.root)
    }

    fn path(&self, device: &str, file: &str) -> PathBuf {
        self.root.join(format!("class/infiniband/{device}/ports/1/{file}"))
    }

    fn set(&self, device: &str, file: &str, contents: impl AsRef<[u8]>) {
        let path = self.path(device, file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, contents).unwrap();
    }

    fn snapshot(&self) -> CounterSnapshot {
        CounterSnapshot::take(&self.sysfs(), &self.sysfs().ports())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

fn rail(device: &str) -> CounterPort {
    CounterPort::new(device, 1)
}

fn expected(devices: &[&str], bytes: u64, messages: u64) -> Expected {
    Expected::new(devices.iter().map(|d| rail(d)), 1024).sent(Payload::new(bytes, messages))
}

/// The verdict on `bytes` over `devices`, when `before` is replaced by `after` (device, file, contents).
fn verdict_of(
    before: &[(&str, &str, &str)],
    after: &[(&str, &str, &str)],
    expected: &Expected,
) -> CounterReport {
    let tree = Tree::new();
    before.iter().for_each(|(device, file, contents)| tree.set(device, file, contents));
    let first = tree.snapshot();
    after.iter().for_each(|(device, file, contents)| tree.set(device, file, contents));
    tree.snapshot().since(&first).check(expected)
}

const XMIT: &str = "counters/port_xmit_data";
const PKTS: &str = "hw_counters/sent_pkts";

#[test]
fn k9_port_xmit_data_is_in_units_of_four_bytes() {
    let report = verdict_of(
        &[("mlx5_0", XMIT, "1000\n")],
        &[("mlx5_0", XMIT, "1250\n")],
        &expected(&["mlx5_0"], 1000, 1),
    );
    assert_eq!((report.verdict, report.sent.counted), (Verdict::Verified, Some(1000)), "{report}");
    assert_eq!(report.sent.unit, Some(CountUnit::Bytes));
    let too_few = verdict_of(
        &[("mlx5_0", XMIT, "1000\n")],
        &[("mlx5_0", XMIT, "1249\n")],
        &expected(&["mlx5_0"], 1000, 1),
    );
    assert_eq!((too_few.verdict, too_few.sent.counted), (Verdict::Contradicted, Some(996)), "{too_few}");
}

#[test]
fn k9_what_is_not_offered_is_unknown_and_never_nothing() {
    for (before, after) in [("N/A (no PMA)\n", "N/A (no PMA)\n"), ("7\n", "N/A (no PMA)\n"), ("N/A\n", "7\n")]
    {
        let report = verdict_of(
            &[("mlx5_0", XMIT, before)],
            &[("mlx5_0", XMIT, after)],
            &expected(&["mlx5_0"], 1000, 1),
        );
        assert_eq!((report.verdict, report.sent.counted), (Verdict::Unknown, None), "{report}");
        let text = report.to_string();
        assert!(text.contains("mlx5_0 port 1") && text.contains("N/A"), "{text}");
    }
    // siw has no counters at all; a device that is not there has no directory.
    let tree = Tree::new();
    std::fs::create_dir_all(tree.root.join("class/infiniband/siw0/ports/1/gids")).unwrap();
    let difference = tree.snapshot().since(&tree.snapshot());
    for device in ["siw0", "siw7", "../../etc"] {
        let report = difference.check(&expected(&[device], 1000, 1));
        assert_eq!((report.verdict, report.sent.counted), (Verdict::Unknown, None), "{report}");
    }
}

#[test]
fn k9_rails_are_added_up_and_another_device_is_named() {
    let before = [
        ("erdma_0", "hw_counters/hw_tx_bytes_cnt", "500\n"),
        ("erdma_1", "hw_counters/hw_tx_bytes_cnt", "0\n"),
    ];
    let after = [
        ("erdma_0", "hw_counters/hw_tx_bytes_cnt", "500\n"),
        ("erdma_1", "hw_counters/hw_tx_bytes_cnt", "10400\n"),
    ];
    let first = verdict_of(&before, &after, &expected(&["erdma_0"], 10_000, 4));
    assert_eq!((first.verdict, first.sent.counted), (Verdict::Contradicted, Some(0)), "{first}");
    assert_eq!(first.sent.elsewhere.len(), 1);
    assert_eq!(first.sent.elsewhere[0].port, rail("erdma_1"));
    assert!(first.to_string().contains("erdma_1 port 1 10400 bytes"), "{first}");
    for rails in [&["erdma_1"][..], &["erdma_0", "erdma_1"], &["erdma_1", "erdma_1"]] {
        let report = verdict_of(&before, &after, &expected(rails, 10_000, 4));
        assert_eq!((report.verdict, report.sent.counted), (Verdict::Verified, Some(10_400)), "{report}");
    }
    // Neither has carried it.
    let neither = verdict_of(&before, &before, &expected(&["erdma_0", "erdma_1"], 10_000, 4));
    assert_eq!(neither.verdict, Verdict::Contradicted, "{neither}");
    assert!(neither.sent.elsewhere.is_empty());
}

#[test]
fn k9_a_rail_that_does_not_count_may_have_carried_the_rest() {
    let report = verdict_of(
        &[("erdma_0", "hw_counters/tx_bytes_cnt", "0\n"), ("siw0", "gids/0", "fe80::1\n")],
        &[("erdma_0", "hw_counters/tx_bytes_cnt", "6000\n")],
        &expected(&["erdma_0", "siw0"], 10_000, 4),
    );
    assert_eq!((report.verdict, report.sent.counted), (Verdict::Unknown, Some(6000)), "{report}");
    assert!(report.to_string().contains("siw0 port 1"), "{report}");
}

/// rxe counts packets, acknowledgements among them.
#[test]
fn k9_packets_have_bounds_by_the_mtu() {
    // 10,000 bytes at 1024: 10 packets. As 4 messages with their control data: at most 9 + 4 × 2, and as many.
    for (packets, verdict) in [
        (9, Verdict::Contradicted),
        (10, Verdict::Verified),
        (17, Verdict::Verified),
        (26, Verdict::Verified),
        (27, Verdict::Unknown),
        (1_000_000, Verdict::Unknown),
    ] {
        let now = format!("{}\n", 77 + packets);
        let report =
            verdict_of(&[("rxe0", PKTS, "77\n")], &[("rxe0", PKTS, &now)], &expected(&["rxe0"], 10_000, 4));
        assert_eq!(report.verdict, verdict, "{packets}: {report}");
        assert_eq!((report.sent.unit, report.sent.least), (Some(CountUnit::Packets), Some(10)));
    }
    // Bytes never become packets, nor the other way round.
    let mixed = verdict_of(
        &[("rxe0", PKTS, "0\n"), ("mlx5_0", XMIT, "0\n")],
        &[("rxe0", PKTS, "10\n"), ("mlx5_0", XMIT, "2500\n")],
        &expected(&["rxe0", "mlx5_0"], 10_000, 4),
    );
    assert_eq!(
        (mixed.verdict, mixed.sent.counted, mixed.sent.unit),
        (Verdict::Unknown, None, None),
        "{mixed}"
    );
}

/// The other direction's acknowledgements are in the count of packets.
#[test]
fn k9_a_receiver_sends_acknowledgements() {
    let tree = Tree::new();
    let (sent, received) = ("hw_counters/sent_pkts", "hw_counters/rcvd_pkts");
    tree.set("rxe0", sent, "0\n");
    tree.set("rxe0", received, "0\n");
    let first = tree.snapshot();
    tree.set("rxe0", sent, "64\n");
    tree.set("rxe0", received, "1024\n");
    let difference = tree.snapshot().since(&first);
    let receiver = Expected::new([rail("rxe0")], 1024).received(Payload::new(1 << 20, 64));
    let report = difference.check(&receiver);
    assert_eq!((report.verdict, report.received.verdict), (Verdict::Verified, Verdict::Verified), "{report}");
    assert_eq!(report.sent.verdict, Verdict::Unknown);
    // One direction that is contradicted is enough, and one that is unknown too.
    let both = receiver.clone().sent(Payload::new(1 << 20, 64));
    assert_eq!(difference.check(&both).verdict, Verdict::Contradicted);
    let nothing = difference.check(&Expected::new([rail("rxe0")], 1024));
    assert_eq!(nothing.verdict, Verdict::Unknown, "{nothing}");
}

#[test]
fn k9_efa_adds_up_what_each_kind_of_operation_carried() {
    let tree = Tree::new();
    let files = ["send_bytes", "rdma_write_bytes", "rdma_read_resp_bytes", "tx_bytes"];
    files.iter().for_each(|file| tree.set("rdmap0s31", &format!("hw_counters/{file}"), "100\n"));
    let first = tree.snapshot();
    tree.set("rdmap0s31", "hw_counters/send_bytes", "164\n");
    tree.set("rdmap0s31", "hw_counters/rdma_write_bytes", "8100\n");
    let report = tree.snapshot().since(&first).check(&expected(&["rdmap0s31"], 8000, 2));
    assert_eq!((report.verdict, report.sent.counted), (Verdict::Verified, Some(8064)), "{report}");
    let counter = report.sent.rails[0].counter.as_deref();
    assert_eq!(counter, Some("hw_counters/send_bytes+rdma_write_bytes+rdma_read_resp_bytes"));
    // An older driver has no RDMA writes: the total counts.
    std::fs::remove_file(tree.path("rdmap0s31", "hw_counters/rdma_write_bytes")).unwrap();
    tree.set("rdmap0s31", "hw_counters/tx_bytes", "9100\n");
    let report = tree.snapshot().since(&first).check(&expected(&["rdmap0s31"], 8000, 2));
    assert_eq!((report.verdict, report.sent.counted), (Verdict::Verified, Some(9000)), "{report}");
}

#[test]
fn k9_counters_that_begin_anew_stay_or_go_back() {
    let counted = |before: &str, after: &str, file: &str, bytes| {
        verdict_of(&[("x0", file, before)], &[("x0", file, after)], &expected(&["x0"], bytes, 1))
    };
    let bytes = "hw_counters/tx_bytes";
    let anew = counted("4294967290\n", "994\n", bytes, 1000);
    assert_eq!((anew.verdict, anew.sent.counted), (Verdict::Verified, Some(1000)), "{anew}");
    // It may have begun anew twice.
    let twice = counted("4294967290\n", "994\n", bytes, 5_000_000_000);
    assert_eq!(twice.verdict, Verdict::Unknown, "{twice}");
    let reset = counted("5000\n", "10\n", bytes, 1000);
    assert_eq!((reset.verdict, reset.sent.counted), (Verdict::Unknown, None), "{reset}");
    // The port management agent's counters of 32 bits stay at their end.
    let stuck = counted("4294967200\n", "4294967295\n", XMIT, 1000);
    assert_eq!((stuck.verdict, stuck.sent.counted), (Verdict::Unknown, None), "{stuck}");
    // In units of four, this is beyond 64 bits.
    let large = counted("0\n", "18446744073709551615\n", XMIT, 1000);
    assert_eq!((large.verdict, large.sent.counted), (Verdict::Unknown, None), "{large}");
}

#[test]
fn k9_both_ends_on_one_port_contradict_nothing() {
    let expected = expected(&["mlx5_0"], 10_000, 4).same_port(true);
    let report = verdict_of(&[("mlx5_0", XMIT, "5\n")], &[("mlx5_0", XMIT, "5\n")], &expected);
    assert_eq!(report.verdict, Verdict::Unknown, "{report}");
}

/// Whatever a file or a name is, it makes a counter unknown and nothing else.
#[test]
fn k9_hostile_trees_are_unknown() {
    let huge = vec![b'9'; 1 << 20];
    let contents: [&[u8]; 9] = [
        b"",
        b"\n",
        b"-5\n",
        b"five\n",
        b"18446744073709551616\n",
        b"\x00\xff\xfe\x01",
        b"12 34\n",
        b"1\n2\n",
        &huge,
    ];
    let check = |tree: &Tree, what: &str| {
        let report = tree.snapshot().since(&tree.snapshot()).check(&expected(&["x0"], 1000, 1));
        assert_eq!((report.verdict, report.sent.counted), (Verdict::Unknown, None), "{what}: {report}");
    };
    for contents in contents {
        let tree = Tree::new();
        tree.set("x0", XMIT, contents);
        check(&tree, &String::from_utf8_lossy(&contents[..contents.len().min(30)]));
    }
    let tree = Tree::new();
    std::fs::create_dir_all(tree.path("x0", XMIT)).unwrap();
    check(&tree, "a directory instead of a file");
    let tree = Tree::new();
    tree.set("x0", "counters", "a file instead of a directory\n");
    check(&tree, "a file instead of a directory");
    let tree = Tree::new();
    std::fs::create_dir_all(tree.path("x0", "counters")).unwrap();
    std::os::unix::fs::symlink("port_xmit_data", tree.path("x0", XMIT)).unwrap();
    check(&tree, "a link to itself");
    let tree = Tree::new();
    std::fs::create_dir_all(tree.path("x0", "counters")).unwrap();
    let pipe = std::ffi::CString::new(tree.path("x0", XMIT).into_os_string().into_encoded_bytes()).unwrap();
    // SAFETY: a path that ends in a zero.
    assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
    check(&tree, "a pipe without a writer");
}

#[test]
fn k9_ports_are_found_by_name_and_number() {
    let tree = Tree::new();
    for path in [
        "mlx5_1/ports/1",
        "mlx5_0/ports/1",
        "mlx5_0/ports/2",
        "mlx5_0/ports/256",
        "mlx5_0/ports/x",
        "a b/ports/1",
    ] {
        std::fs::create_dir_all(tree.root.join("class/infiniband").join(path)).unwrap();
    }
    std::fs::write(tree.root.join("class/infiniband/file"), "").unwrap();
    let names: Vec<_> = tree.sysfs().ports().iter().map(ToString::to_string).collect();
    assert_eq!(names, ["mlx5_0 port 1", "mlx5_0 port 2", "mlx5_1 port 1"]);
    assert!(Sysfs::at("/nonexistent").ports().is_empty());
}

#[test]
fn k9_values_are_as_old_as_their_lifespan() {
    for (contents, ms) in [("50\n", 50), ("3\n", 10), ("never\n", 10), ("99999999\n", 1000)] {
        let tree = Tree::new();
        tree.set("rxe0", "hw_counters/lifespan", contents);
        assert_eq!(tree.snapshot().lifespan().as_millis(), ms, "{contents}");
    }
    assert_eq!(Tree::new().snapshot().lifespan().as_millis(), 10);
}
