//! What holds of every examination. Made-up hosts are in tests/cli, where the program examines them.

use super::*;

#[test]
fn this_host_is_examined_without_a_panic_and_each_fault_has_a_fix() {
    let report = Doctor::new().gpu(true).out_of_band(true).require_rdma(true).examine();
    for check in &report.checks {
        let needs_fix = matches!(check.verdict, Verdict::Warning | Verdict::Failure);
        assert_eq!(check.fix.is_some(), needs_fix, "{check}");
        assert!(!check.evidence.is_empty(), "{check}");
        assert!(
            include_str!("mod.rs").contains(&format!("//! | `{}` |", check.name)),
            "{check} is not in the table"
        );
    }
}

#[test]
fn an_empty_root_is_unknown_and_no_device_is_a_failure_only_where_one_is_required() {
    let root = std::env::temp_dir().join(format!("landfall-doctor-empty-{}", std::process::id()));
    std::fs::create_dir_all(&root).unwrap();
    let (any, required) =
        (Doctor::new().root(&root).examine(), Doctor::new().root(&root).require_rdma(true).examine());
    std::fs::remove_dir_all(&root).unwrap();
    let verdict = |report: &Report, name: &str| {
        report.checks.iter().find(|check| check.name == name).map(|check| check.verdict)
    };
    assert_eq!(any.verdict, Verdict::Warning, "{any:#?}");
    for name in ["memlock", "huge_pages", "fork", "clock"] {
        assert_eq!(verdict(&any, name), Some(Verdict::Unknown), "{name}");
    }
    assert_eq!(
        (verdict(&any, "devices"), verdict(&required, "devices")),
        (Some(Verdict::Warning), Some(Verdict::Failure))
    );
    assert_eq!(required.verdict, Verdict::Failure);
}
