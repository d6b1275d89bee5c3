//! How the tests run the program.

use std::process::{Command, Output, Stdio};

/// Where it is.
pub(crate) fn program() -> &'static str {
    env!("CARGO_BIN_EXE_landfall")
}

/// The program, with the environment of these tests and nothing to read.
pub(crate) fn landfall(args: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(args).env_remove("LANDFALL_SOFT").env("RUST_BACKTRACE", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs it to its end.
pub(crate) fn output(args: &[&str]) -> Output {
    landfall(args).output().expect("the program starts")
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("the output is text")
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("the complaints are text")
}
