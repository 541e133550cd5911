//! What inotify says, in the words of the contract. Pure.

use rustix::fs::inotify::ReadFlags;
use sandhold_agent_proto::filesystem::EventType;

/// What one kernel event means to a watcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// Tell the client.
    Tell(EventType),
    /// The kernel lost events: the client must look again.
    Overflow,
    /// The watch of a directory is gone.
    Forget,
    /// The watched directory itself is gone or elsewhere.
    RootGone,
    /// Nothing.
    Ignore,
}

/// Reads the flags of an event.
#[must_use]
pub fn meaning(flags: ReadFlags) -> Meaning {
    let has = |flag| flags.contains(flag);
    match () {
        () if has(ReadFlags::QUEUE_OVERFLOW) => Meaning::Overflow,
        () if has(ReadFlags::IGNORED) => Meaning::Forget,
        () if has(ReadFlags::DELETE_SELF) || has(ReadFlags::MOVE_SELF) => Meaning::RootGone,
        () if has(ReadFlags::CREATE) || has(ReadFlags::MOVED_TO) => {
            Meaning::Tell(EventType::EVENT_TYPE_CREATE)
        }
        () if has(ReadFlags::MODIFY) => Meaning::Tell(EventType::EVENT_TYPE_WRITE),
        () if has(ReadFlags::DELETE) => Meaning::Tell(EventType::EVENT_TYPE_REMOVE),
        () if has(ReadFlags::MOVED_FROM) => Meaning::Tell(EventType::EVENT_TYPE_RENAME),
        () if has(ReadFlags::ATTRIB) => Meaning::Tell(EventType::EVENT_TYPE_CHMOD),
        () => Meaning::Ignore,
    }
}

/// Whether a filesystem of this kind delivers events only for changes made on this machine.
#[must_use]
pub fn is_network_filesystem(magic: i64) -> bool {
    /// NFS, SMB, CIFS, SMB2, FUSE.
    const NETWORK: [i64; 5] = [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x6573_5546];
    // The kernel's field is signed on some machines and was filled as 32 bits.
    NETWORK.contains(&(magic & 0xffff_ffff))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rename_is_a_rename_and_a_create() {
        assert_eq!(
            meaning(ReadFlags::MOVED_FROM),
            Meaning::Tell(EventType::EVENT_TYPE_RENAME)
        );
        assert_eq!(
            meaning(ReadFlags::MOVED_TO | ReadFlags::ISDIR),
            Meaning::Tell(EventType::EVENT_TYPE_CREATE)
        );
        assert_eq!(meaning(ReadFlags::QUEUE_OVERFLOW), Meaning::Overflow);
        assert_eq!(meaning(ReadFlags::OPEN), Meaning::Ignore);
    }

    #[test]
    fn network_mounts_are_known_by_their_magic() {
        assert!(is_network_filesystem(0x6969));
        assert!(!is_network_filesystem(0xef53));
        assert!(!is_network_filesystem(0x0102_1997));
    }
}
