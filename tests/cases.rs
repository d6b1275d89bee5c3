//! `tests/CASES.md` is true: each test that it names exists, and each case has one, or a reason.

use std::path::Path;

/// The cases, by their numbers. Those between were left out when the list was made.
const CASES: [u32; 37] = [
    4, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 21, 22, 23, 24, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 37, 38,
    39, 40, 43, 44, 45, 46, 47, 48, 49, 50,
];

fn table() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/CASES.md")).unwrap()
}

/// What is between backquotes and looks like `file::function`.
fn named(text: &str) -> Vec<(&str, &str)> {
    text.split('`').skip(1).step_by(2).filter_map(|name| name.split_once(".rs::")).collect()
}

#[test]
fn every_test_that_is_named_exists() {
    let table = table();
    let names = named(&table);
    assert!(names.len() > 60, "{} names: the table is not read", names.len());
    for (file, function) in names {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("{file}.rs"));
        let source = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{file}.rs: {e}"));
        assert!(source.contains(&format!("fn {function}(")), "{file}.rs has no {function}");
        let by_contract = function.starts_with(['r', 'k', 'b'])
            && function[1..].split('_').next().is_some_and(|n| n.parse::<u8>().is_ok());
        // What a command of ours is held to has no contract's number, and is named after its case.
        assert!(
            by_contract || function.starts_with("case_"),
            "{function} is not named after a contract or a case"
        );
    }
}

#[test]
fn every_case_has_a_test_or_a_reason() {
    let table = table();
    for case in CASES {
        let begin = format!("| {case} | ");
        let row =
            table.lines().find(|line| line.starts_with(&begin)).unwrap_or_else(|| panic!("no case {case}"));
        assert!(!named(row).is_empty() || row.contains("later: "), "case {case} has no test");
    }
}
