//! The command line of tests/chaos and tests/soak, and how such a program starts: as a worker, as what it is asked for, or not at all.

use std::future::Future;
use std::process::ExitCode;
use std::str::FromStr;

use landfall::device::{Profile, SoftTransport};

use super::process;
use super::worker;

/// What tests/chaos and tests/soak say first: the rest are options.
const RUN: &str = "run";

/// What both programs can be told.
#[derive(Clone, Debug)]
pub struct Common {
    pub seed: u64,
    pub profile: Option<Profile>,
    pub transport: Option<SoftTransport>,
    pub verbose: bool,
}

/// A program's own options, with what they are without a word.
pub trait Options: Sized {
    const USAGE: &str;

    /// What both programs can be told.
    fn common(&mut self) -> &mut Common;

    /// Takes what `word` and its value say; false when it is none of these options.
    fn set(&mut self, word: &str, value: &mut Value<'_>) -> Result<bool, String>;
}

/// What stands behind an option.
pub struct Value<'a> {
    word: &'a str,
    words: std::slice::Iter<'a, String>,
}

impl Value<'_> {
    pub fn parse<T: FromStr>(&mut self) -> Result<T, String> {
        let text = self.words.next().ok_or_else(|| format!("{} without a value", self.word))?;
        text.parse().map_err(|_| format!("{} {text} is not valid", self.word))
    }

    /// A number above zero.
    pub fn positive(&mut self) -> Result<u64, String> {
        self.parse::<std::num::NonZeroU64>().map(u64::from)
    }
}

impl Common {
    pub fn new() -> Self {
        Self { seed: 1, profile: None, transport: None, verbose: false }
    }

    fn set(&mut self, word: &str, value: &mut Value<'_>) -> Result<bool, String> {
        match word {
            "--seed" => self.seed = value.parse()?,
            "--profile" => self.profile = Some(value.parse()?),
            "--transport" => self.transport = Some(value.parse()?),
            "--verbose" => self.verbose = true,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The options, as they were given, that choose where to run.
    pub fn chosen(&self) -> String {
        let profile = self.profile.map_or(String::new(), |p| format!(" --profile {p}"));
        let transport = self.transport.map_or(String::new(), |t| format!(" --transport {t}"));
        profile + &transport
    }
}

/// The program: without arguments, as `cargo test` starts it, with the options that it has by itself.
pub fn main<O: Options, F: Future<Output = ExitCode>>(own: O, go: impl FnOnce(O) -> F) -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let options = match words.split_first() {
        Some((first, _)) if first == process::ARGUMENT => return process::run(worker::part),
        Some((first, options)) if first == RUN => options,
        None => &[],
        // A test runner's, who wants to list or to choose tests.
        Some(_) => return ExitCode::SUCCESS,
    };
    let options = match parse(own, options) {
        Ok(options) => options,
        Err(what) => {
            eprintln!("{what}\n{}", O::USAGE);
            return ExitCode::from(2);
        }
    };
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(go(options)),
        Err(error) => {
            eprintln!("no runtime: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse<O: Options>(mut own: O, words: &[String]) -> Result<O, String> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = Value { word, words };
        if !own.common().set(word, &mut value)? && !own.set(word, &mut value)? {
            return Err(format!("{word} is no option"));
        }
        words = value.words;
    }
    Ok(own)
}
