//! What a sandbox may use.

/// The limits of one sandbox. All of them are enforced, none is a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Resources {
    /// Processor time, in thousandths of a core.
    pub cpu_milli: u32,
    /// Memory, in MiB.
    pub memory_mib: u32,
    /// What may be written to its disk, in MiB.
    pub disk_mib: u32,
    /// Processes and threads of the engine that carries the sandbox.
    pub pids_max: u32,
}

impl Resources {
    /// Whole cores, rounded up: what a guest sees and an API reports.
    #[must_use]
    pub fn cpu_count(&self) -> u32 {
        self.cpu_milli.div_ceil(1000).max(1)
    }
}

impl Default for Resources {
    fn default() -> Self {
        Self {
            cpu_milli: 2000,
            memory_mib: 1024,
            disk_mib: 4096,
            pids_max: 1024,
        }
    }
}
