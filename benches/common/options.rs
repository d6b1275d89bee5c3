//! The command line of a bench program: `--flag value`, or `--flag=value`. What the flags mean is each program's own.

use std::fmt::Display;
use std::process::ExitCode;
use std::str::FromStr;

use super::Error;

/// The words of a command line, from the left.
pub struct Options {
    words: std::vec::IntoIter<String>,
    /// The flag that was read last, and its value where that was in the same word.
    flag: String,
    inline: Option<String>,
    measures: bool,
}

impl Options {
    pub fn new(words: Vec<String>) -> Self {
        // Cargo says `--bench` when it measures. `cargo test --benches` does not: then it is enough that everything works.
        let measures = words.iter().any(|word| word == "--bench");
        Self { words: words.into_iter(), flag: String::new(), inline: None, measures }
    }

    /// Whether this run is to measure, and not only to show that everything works.
    pub fn measures(&self) -> bool {
        self.measures
    }

    /// The next flag, or word.
    pub fn flag(&mut self) -> Result<Option<String>, String> {
        if let Some(value) = self.inline.take() {
            return Err(format!("{}={value}: it takes no value; see --help", self.flag));
        }
        let Some(word) = self.words.find(|word| word != "--bench") else { return Ok(None) };
        (self.flag, self.inline) = match word.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => (flag.to_owned(), Some(value.to_owned())),
            _ => (word, None),
        };
        Ok(Some(self.flag.clone()))
    }

    /// The value of the flag that was read last.
    pub fn value<T: FromStr<Err: Display>>(&mut self) -> Result<T, String> {
        let text = self.inline.take().or_else(|| self.words.next());
        let text = text.ok_or(format!("{} needs a value; see --help", self.flag))?;
        text.parse().map_err(|why| format!("{} {text}: {why}", self.flag))
    }

    /// The same, a number in a range.
    pub fn number<T>(&mut self, least: T, most: T) -> Result<T, String>
    where
        T: FromStr<Err: Display> + PartialOrd + Display,
    {
        let n = self.value()?;
        let fits = least <= n && n <= most;
        if fits { Ok(n) } else { Err(format!("{} {n}: a number from {least} to {most}", self.flag)) }
    }

    /// The flag that was read last is none of the program's.
    pub fn unknown(&self) -> String {
        format!("{}: no such option; see --help", self.flag)
    }
}

/// A bench program from its command line to its exit: 2 for a command line that it does not take.
pub fn program<A>(
    name: &str,
    usage: &str,
    parse: impl FnOnce(&mut Options) -> Result<A, String>,
    run: impl FnOnce(A) -> Result<(), Error>,
) -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    if words.iter().any(|word| word == "--help" || word == "-h") {
        print!("{usage}");
        return ExitCode::SUCCESS;
    }
    let args = match parse(&mut Options::new(words)) {
        Ok(args) => args,
        Err(why) => {
            eprintln!("{name}: {why}");
            return ExitCode::from(2);
        }
    };
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{name}: {why}");
            ExitCode::FAILURE
        }
    }
}

/// How the two ends wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They sleep until the kernel wakes them.
    Event,
    /// They poll for longer than any case takes.
    Spin,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Spin => "spin",
        }
    }

    pub fn budget(self) -> std::time::Duration {
        match self {
            Self::Event => std::time::Duration::ZERO,
            Self::Spin => std::time::Duration::from_secs(5),
        }
    }
}

impl FromStr for Mode {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "event" => Ok(Self::Event),
            "spin" => Ok(Self::Spin),
            _ => Err("event or spin"),
        }
    }
}
