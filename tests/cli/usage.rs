//! Command lines, right and wrong, and what the exit status says.

use crate::program::{landfall, output, stderr, stdout};

#[test]
fn help_names_each_command() {
    let help = output(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    for command in ["devices", "doctor", "watch"] {
        assert!(stdout(&help).contains(&format!("  {command} ")), "{}", stdout(&help));
    }
}

#[test]
fn a_wrong_command_line_is_status_2_and_says_what_is_wrong() {
    for args in [&["nonsense"][..], &["devices", "--nonsense"], &[]] {
        let wrong = output(args);
        assert_eq!(wrong.status.code(), Some(2), "{args:?}: {}", stderr(&wrong));
        assert_eq!(stdout(&wrong), "");
        assert!(stderr(&wrong).contains("Usage: landfall"), "{}", stderr(&wrong));
    }
}

#[test]
fn a_reader_that_has_gone_is_no_panic() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let ended = landfall(&["devices"]).stdout(writer).output().unwrap();
    assert_eq!((ended.status.code(), stderr(&ended).as_str()), (Some(141), ""));
}
