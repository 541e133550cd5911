//! Where results go, and in which form.

use std::io::{self, IsTerminal as _, Write};

use comfy_table::{ContentArrangement, Table, presets};
use serde_json::Value;

/// What a command prints, as the caller wants it.
pub(crate) struct Output {
    out: Box<dyn Write + Send>,
    err: Box<dyn Write + Send>,
    form: Form,
}

/// How results are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// For a person at a terminal.
    Terminal,
    /// For a pipe: tab-separated, without headings.
    Plain,
    /// For a program.
    Json,
}

impl Output {
    pub(crate) fn standard(json: bool) -> Self {
        let form = match (json, io::stdout().is_terminal()) {
            (true, _) => Form::Json,
            (false, true) => Form::Terminal,
            (false, false) => Form::Plain,
        };
        Self {
            out: Box::new(io::stdout()),
            err: Box::new(io::stderr()),
            form,
        }
    }

    #[cfg(test)]
    pub(crate) fn new(out: Box<dyn Write + Send>, err: Box<dyn Write + Send>, form: Form) -> Self {
        Self { out, err, form }
    }

    pub(crate) fn form(&self) -> Form {
        self.form
    }

    /// A result in words; left out where a program reads.
    pub(crate) fn say(&mut self, text: &str) -> io::Result<()> {
        if self.form == Form::Json {
            return Ok(());
        }
        writeln!(self.out, "{text}")
    }

    /// Something a person should know that is not the result.
    pub(crate) fn note(&mut self, text: &str) -> io::Result<()> {
        writeln!(self.err, "{text}")
    }

    /// One JSON value on a line.
    pub(crate) fn json(&mut self, value: &Value) -> io::Result<()> {
        writeln!(self.out, "{value}")
    }

    /// Rows under headings, in the caller's form; `json` is what a program gets instead.
    pub(crate) fn rows(
        &mut self,
        headings: &[&str],
        rows: &[Vec<String>],
        json: &Value,
    ) -> io::Result<()> {
        match self.form {
            Form::Json => self.json(json),
            Form::Plain => {
                for row in rows {
                    let fields: Vec<String> = row.iter().map(|field| printable(field)).collect();
                    writeln!(self.out, "{}", fields.join("\t"))?;
                }
                Ok(())
            }
            Form::Terminal => {
                let mut table = Table::new();
                table
                    .load_style(presets::NOTHING)
                    .set_content_arrangement(ContentArrangement::Dynamic)
                    .set_header(headings);
                if let Some(columns) = super::terminal::columns() {
                    table.set_width(columns);
                }
                for row in rows {
                    table.add_row(row.iter().map(|field| printable(field)));
                }
                writeln!(self.out, "{table}")
            }
        }
    }

    /// Bytes of a program in a sandbox, as they are.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.out.flush()
    }

    /// Bytes that a program in a sandbox wrote to its standard error.
    pub(crate) fn raw_error(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.err.write_all(bytes)?;
        self.err.flush()
    }
}

/// Without control characters: names from a sandbox must not steer the reader's terminal.
fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// Bytes as people read them.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    // A figure for people; beyond 2^53 the last digits do not matter.
    #[allow(clippy::cast_precision_loss)]
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    format!("{value:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        assert_eq!(size(999), "999 B");
        assert_eq!(size(1_500), "1.5 kB");
        assert_eq!(size(3_000_000_000), "3.0 GB");
    }

    #[test]
    fn a_hostile_name_cannot_steer_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\tc"), "a\u{fffd}[2Jb\u{fffd}c");
    }
}
