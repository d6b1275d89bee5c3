//! How the commands print and end: text or JSON on standard output, complaints on standard error, tables.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use serde::Serialize;

/// Why a command could not do what it is for.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// How a command ended that did what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Exit status 0.
    Well,
    /// It found something wrong: exit status 1.
    NotWell,
    /// It cannot be told: exit status 3.
    Unknown,
}

/// Arguments that cannot be meant so, which clap could not know: exit status 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

/// Standard output, as the user wants it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    json: bool,
    terminal: bool,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Self { json, terminal: io::stdout().is_terminal() }
    }

    /// JSON was asked for: nothing else goes to standard output.
    pub(crate) fn is_json(self) -> bool {
        self.json
    }

    /// Somebody watches, so that a table may be drawn over itself.
    pub(crate) fn is_live(self) -> bool {
        self.terminal && !self.json
    }

    /// Text as it is. `println!` would panic when the reader has gone.
    pub(crate) fn print(self, text: &str) -> Result<(), Error> {
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush())?;
        Ok(())
    }

    /// One document, over several lines.
    pub(crate) fn document(self, value: &impl Serialize) -> Result<(), Error> {
        self.print(&(serde_json::to_string_pretty(value)? + "\n"))
    }

    /// One of several documents, each on a line.
    pub(crate) fn line(self, value: &impl Serialize) -> Result<(), Error> {
        self.print(&(serde_json::to_string(value)? + "\n"))
    }
}

/// One line on standard error. That nobody may be there to read it is no reason to panic, as `eprintln!` does.
pub(crate) fn complain(what: &str) {
    let _ = writeln!(io::stderr(), "landfall: {}", what.replace('\n', " "));
}

/// `landfall … | head` is no failure to complain about.
pub(crate) fn reader_has_gone(error: &Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Which way a column is aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Rows under a heading, each column as wide as its widest cell.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// With its heading.
    pub(crate) fn new<const N: usize>(columns: [(&str, Align); N]) -> Self {
        Self {
            columns: columns.iter().map(|(_, align)| *align).collect(),
            rows: vec![columns.iter().map(|(name, _)| (*name).to_owned()).collect()],
        }
    }

    /// Adds a row: as many cells as there are columns.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.columns.len());
        self.rows.push(cells.into());
    }

    /// The text, each row on a line, each line after `indent` spaces.
    pub(crate) fn text(&self, indent: usize) -> String {
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|c| self.rows.iter().map(|row| row[c].chars().count()).max().unwrap_or(0))
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = " ".repeat(indent);
            for (c, cell) in row.iter().enumerate() {
                let gap = if c == 0 { "" } else { "  " };
                let width = widths[c];
                let _ = match self.columns[c] {
                    Align::Left => write!(line, "{gap}{cell:<width$}"),
                    Align::Right => write!(line, "{gap}{cell:>width$}"),
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_as_wide_as_its_cells() {
        let mut table = Table::new([("name", Align::Left), ("rate", Align::Right)]);
        table.row(["mlx5_0".into(), "12".into()]);
        table.row(["é".into(), "1234567".into()]);
        assert_eq!(table.text(2), "  name       rate\n  mlx5_0       12\n  é       1234567\n");
    }
}
