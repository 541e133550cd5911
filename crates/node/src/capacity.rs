//! Whether another sandbox fits (R-P11): a pure rule over what the machine says.

use std::{fs, path::Path};

use sandhold_platform::PlatformError;
use sandhold_types::Resources;

const MIB: u64 = 1024 * 1024;

/// How much of the machine sandboxes may take. Shown by `sandhold doctor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapacityPolicy {
    /// The sum of memory limits may be this many times the machine's memory. Most sandboxes use a
    /// fraction of their limit; what is really free is checked as well.
    pub memory_overcommit: u64,
    /// Memory that is kept free for deletes, wake-ups and the machine, in MiB.
    pub memory_reserve_mib: u64,
    /// Disk that is kept free for the same, in MiB.
    pub disk_reserve_mib: u64,
    /// Sandboxes at once.
    pub sandboxes_max: usize,
}

impl Default for CapacityPolicy {
    fn default() -> Self {
        Self {
            memory_overcommit: 8,
            memory_reserve_mib: 512,
            disk_reserve_mib: 1024,
            sandboxes_max: 2000,
        }
    }
}

/// What the machine has, and what was promised of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// All memory, in MiB.
    pub memory_total_mib: u64,
    /// Memory that could be used now, in MiB.
    pub memory_available_mib: u64,
    /// Free disk under the data directory, in MiB.
    pub disk_available_mib: u64,
    /// The sum of the memory limits of all sandboxes, in MiB.
    pub memory_promised_mib: u64,
    /// Sandboxes that are there.
    pub sandboxes: usize,
}

/// What is short.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Shortage {
    /// The limits promised would exceed the overcommit.
    #[error("memory limits of {promised_mib} MiB are promised, {limit_mib} MiB is the most")]
    Promised {
        /// With the new one.
        promised_mib: u64,
        /// The most.
        limit_mib: u64,
    },
    /// Too little memory is free.
    #[error("{available_mib} MiB of memory are free, {needed_mib} MiB are needed with the reserve")]
    Memory {
        /// Free now.
        available_mib: u64,
        /// Needed.
        needed_mib: u64,
    },
    /// Too little disk is free.
    #[error("{available_mib} MiB of disk are free, {needed_mib} MiB is the reserve")]
    Disk {
        /// Free now.
        available_mib: u64,
        /// Needed.
        needed_mib: u64,
    },
    /// Too many sandboxes.
    #[error("{most} sandboxes is the most on this node")]
    Sandboxes {
        /// The most.
        most: usize,
    },
}

impl From<Shortage> for PlatformError {
    fn from(shortage: Shortage) -> Self {
        Self::Capacity {
            what: shortage.to_string(),
        }
    }
}

/// Whether one more sandbox with these limits, of which `image_mib` become resident at once, fits.
pub(crate) fn check(
    room: &Room,
    policy: &CapacityPolicy,
    wanted: &Resources,
    image_mib: u64,
) -> Result<(), Shortage> {
    if room.sandboxes >= policy.sandboxes_max {
        return Err(Shortage::Sandboxes {
            most: policy.sandboxes_max,
        });
    }
    let promised_mib = room.memory_promised_mib + u64::from(wanted.memory_mib);
    let limit_mib = room.memory_total_mib * policy.memory_overcommit;
    if promised_mib > limit_mib {
        return Err(Shortage::Promised {
            promised_mib,
            limit_mib,
        });
    }
    let needed_mib = policy.memory_reserve_mib + image_mib;
    if room.memory_available_mib < needed_mib {
        return Err(Shortage::Memory {
            available_mib: room.memory_available_mib,
            needed_mib,
        });
    }
    let needed_mib = policy.disk_reserve_mib;
    if room.disk_available_mib < needed_mib {
        return Err(Shortage::Disk {
            available_mib: room.disk_available_mib,
            needed_mib,
        });
    }
    Ok(())
}

/// Whether the sandboxes that are awake, one that is just being woken among them, fit.
pub(crate) fn check_awake(room: &Room, policy: &CapacityPolicy) -> Result<(), Shortage> {
    let others = Room {
        sandboxes: room.sandboxes.saturating_sub(1),
        ..*room
    };
    let counted = Resources {
        memory_mib: 0,
        ..Resources::default()
    };
    // A wake-up may use the reserve: it is what the reserve is for.
    let policy = CapacityPolicy {
        memory_reserve_mib: policy.memory_reserve_mib / 2,
        disk_reserve_mib: 0,
        ..*policy
    };
    check(&others, &policy, &counted, 0)
}

/// Whether the memory of a second life of a sandbox, restored from an image of `image_bytes`, fits
/// beside the first for as long as it takes to prove it.
pub(crate) fn check_second_life(
    room: &Room,
    policy: &CapacityPolicy,
    image_bytes: u64,
) -> Result<(), Shortage> {
    let needed_mib = policy.memory_reserve_mib / 2 + image_bytes.div_ceil(MIB);
    if room.memory_available_mib < needed_mib {
        return Err(Shortage::Memory {
            available_mib: room.memory_available_mib,
            needed_mib,
        });
    }
    Ok(())
}

/// Whether an image of `image_bytes` fits on the disk beside the reserve for deletes.
pub(crate) fn check_image(
    room: &Room,
    policy: &CapacityPolicy,
    image_bytes: u64,
) -> Result<(), Shortage> {
    let needed_mib = policy.disk_reserve_mib / 2 + image_bytes.div_ceil(MIB);
    if room.disk_available_mib < needed_mib {
        return Err(Shortage::Disk {
            available_mib: room.disk_available_mib,
            needed_mib,
        });
    }
    Ok(())
}

/// Reads what the machine has. A figure that cannot be read counts as nothing free, so that a
/// create is refused rather than tried blindly.
pub(crate) fn measure(data: &Path, memory_promised_mib: u64, sandboxes: usize) -> Room {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field_mib = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
        number.unwrap_or(0) / 1024
    };
    let disk = rustix::fs::statvfs(data).map_or(0, |s| s.f_bavail.saturating_mul(s.f_frsize));
    Room {
        memory_total_mib: field_mib("MemTotal:"),
        memory_available_mib: field_mib("MemAvailable:"),
        disk_available_mib: disk / MIB,
        memory_promised_mib,
        sandboxes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Room = Room {
        memory_total_mib: 1000,
        memory_available_mib: 900,
        disk_available_mib: 5000,
        memory_promised_mib: 0,
        sandboxes: 0,
    };

    #[test]
    fn what_does_not_fit_is_refused_before_anything_is_made() {
        // R-P11
        let policy = CapacityPolicy {
            memory_overcommit: 2,
            ..CapacityPolicy::default()
        };
        let wanted = Resources {
            memory_mib: 1000,
            ..Resources::default()
        };
        let refused = |room: Room| check(&room, &policy, &wanted, 100).unwrap_err();
        assert_eq!(check(&ROOM, &policy, &wanted, 100), Ok(()));
        let promised = Room {
            memory_promised_mib: 1001,
            ..ROOM
        };
        assert!(matches!(refused(promised), Shortage::Promised { .. }));
        let little = Room {
            memory_available_mib: 611,
            ..ROOM
        };
        assert!(matches!(
            refused(little),
            Shortage::Memory {
                needed_mib: 612,
                ..
            }
        ));
        let full = Room {
            disk_available_mib: 1023,
            ..ROOM
        };
        assert!(matches!(refused(full), Shortage::Disk { .. }));
        let crowded = Room {
            sandboxes: 2000,
            ..ROOM
        };
        assert!(matches!(refused(crowded), Shortage::Sandboxes { .. }));
    }

    #[test]
    fn the_machine_can_be_measured() {
        let room = measure(Path::new("/"), 0, 0);
        assert!(room.memory_total_mib >= room.memory_available_mib);
        assert!(room.memory_available_mib > 0 && room.disk_available_mib > 0);
    }
}
