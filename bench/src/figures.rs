//! Samples and what is said of them.

use std::{fmt::Write, time::Duration};

/// Samples of one thing, in milliseconds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples {
    milliseconds: Vec<f64>,
}

impl Samples {
    pub(crate) fn add(&mut self, sample: Duration) {
        self.milliseconds.push(sample.as_secs_f64() * 1000.0);
    }

    /// Adds all samples of another series of the same thing.
    pub(crate) fn extend(&mut self, more: &Self) {
        self.milliseconds.extend_from_slice(&more.milliseconds);
    }

    /// All of them one after the other.
    pub(crate) fn total(&self) -> Duration {
        Duration::from_secs_f64(self.milliseconds.iter().sum::<f64>() / 1000.0)
    }

    /// The value below which `percent` of the samples lie (nearest rank).
    pub(crate) fn percentile(&self, percent: usize) -> f64 {
        let mut sorted = self.milliseconds.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn median(&self) -> f64 {
        self.percentile(50)
    }

    pub(crate) fn count(&self) -> usize {
        self.milliseconds.len()
    }
}

/// A Markdown table of figures, with the goals that they are held against.
#[derive(Debug, Default)]
pub(crate) struct Report {
    rows: String,
    missed: Vec<String>,
}

impl Report {
    pub(crate) fn samples(&mut self, what: &str, samples: &Samples) {
        self.row(
            what,
            &format!(
                "{:.1} ms | {:.1} ms | n = {}",
                samples.median(),
                samples.percentile(95),
                samples.count()
            ),
        );
    }

    pub(crate) fn value(&mut self, what: &str, value: &str) {
        self.row(what, &format!("{value} | – | –"));
    }

    /// A figure that must not exceed `most`.
    pub(crate) fn goal(&mut self, what: &str, found: f64, most: f64) {
        let kept = found <= most;
        let verdict = if kept { "kept" } else { "MISSED" };
        self.row(what, &format!("{found:.2} | at most {most:.2} | {verdict}"));
        if !kept {
            self.missed
                .push(format!("{what}: {found:.2}, at most {most:.2}"));
        }
    }

    fn row(&mut self, what: &str, rest: &str) {
        eprintln!("{what} | {rest}");
        // Writing to a string cannot fail.
        let _ = writeln!(self.rows, "| {what} | {rest} |");
    }

    pub(crate) fn missed(&self) -> &[String] {
        &self.missed
    }

    pub(crate) fn to_markdown(&self) -> String {
        format!(
            "| what | median or value | p95 or goal | note |\n|---|---|---|---|\n{}",
            self.rows
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let mut samples = Samples::default();
        for ms in [5, 1, 4, 2, 3] {
            samples.add(Duration::from_millis(ms));
        }
        assert!((samples.median() - 3.0).abs() < 1e-9);
        assert!((samples.percentile(95) - 5.0).abs() < 1e-9);
    }

    #[test]
    fn a_missed_goal_is_told() {
        let mut report = Report::default();
        report.goal("x", 1.0, 2.0);
        assert!(report.missed().is_empty());
        report.goal("y", 3.0, 2.0);
        assert_eq!(report.missed().len(), 1);
    }
}
