//! The caller's terminal, for programs in a sandbox that want one.

use anyhow::Context as _;
use rustix::{
    stdio::{stdin, stdout},
    termios::{self, OptionalActions, Termios},
};
use serde_json::{Value, json};

/// Standard input in raw mode; as it was before when dropped.
#[derive(Debug)]
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    /// # Errors
    /// Standard input is no terminal.
    pub(crate) fn enter() -> anyhow::Result<Self> {
        let before = termios::tcgetattr(stdin())
            .context("--tty needs a terminal as standard input; leave it out here")?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(stdin(), OptionalActions::Now, &raw)
            .context("the terminal cannot be set to raw mode")?;
        Ok(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // The terminal may be gone; there is nothing else to do then.
        let _ = termios::tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}

/// The terminal's size as the agent reads it.
pub(crate) fn size() -> Value {
    let (columns, rows) = match termios::tcgetwinsize(stdin()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col, size.ws_row),
        _ => (80, 24),
    };
    json!({ "cols": columns, "rows": rows })
}

/// How many columns standard output has, if it is a terminal.
pub(crate) fn columns() -> Option<u16> {
    let size = termios::tcgetwinsize(stdout()).ok()?;
    (size.ws_col > 0).then_some(size.ws_col)
}
