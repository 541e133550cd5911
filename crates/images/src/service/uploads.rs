//! Files that tenants send for the steps of their builds, by the hash that they name them by.
//!
//! ```text
//!   <catalogue>/uploads/<tenant>/<hash>       whole
//!   <catalogue>/uploads/<tenant>/.<random>    being received
//! ```
//!
//! A hash is the word of the tenant that sent it, so it is never looked for among another's.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use futures::StreamExt;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW};
use sandhold_platform::{FilesHash, PlatformError, Upload};
use sandhold_types::{BuildId, Entropy, Namespace};
use tokio::{fs::File, io::AsyncWriteExt};

/// How large one archive may be, in bytes.
const UPLOAD_BYTES_MAX: u64 = 4 << 30;
/// How much is kept of one tenant, in bytes; what was not used for the longest goes first.
const TENANT_BYTES_MAX: u64 = 16 << 30;
/// How long an archive is kept that no build uses.
const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long a receipt may take.
const RECEIVE_MAX: Duration = Duration::from_secs(3600);
/// What must stay free of the disk, in bytes.
const DISK_FREE_MIN_BYTES: u64 = 1 << 30;

/// The archives of all tenants.
#[derive(Debug)]
pub(super) struct Uploads {
    directory: PathBuf,
}

fn failed(source: io::Error) -> PlatformError {
    PlatformError::Node {
        step: "keeping the files that were sent",
        source: Box::new(source),
    }
}

impl Uploads {
    pub(super) fn new(catalogue: &Path) -> Self {
        Self {
            directory: catalogue.join("uploads"),
        }
    }

    fn of_tenant(&self, namespace: &Namespace) -> PathBuf {
        self.directory.join(namespace.as_str())
    }

    pub(super) fn path(&self, namespace: &Namespace, files: &FilesHash) -> PathBuf {
        self.of_tenant(namespace).join(files.as_str())
    }

    /// Whether it is there; it is kept for longer then.
    pub(super) fn has(&self, namespace: &Namespace, files: &FilesHash) -> bool {
        let path = self.path(namespace, files);
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        let times = Timestamps {
            last_access: now,
            last_modification: now,
        };
        rustix::fs::utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Receives an archive of exactly `size` bytes.
    pub(super) async fn receive(
        &self,
        namespace: &Namespace,
        files: &FilesHash,
        size: u64,
        body: Upload,
        entropy: &dyn Entropy,
    ) -> Result<(), PlatformError> {
        if size > UPLOAD_BYTES_MAX {
            let text = format!("an archive may be {UPLOAD_BYTES_MAX} bytes, this is {size}");
            return Err(PlatformError::TooLarge(text));
        }
        let folder = self.of_tenant(namespace);
        fs::create_dir_all(&folder).map_err(failed)?;
        let disk = rustix::fs::statvfs(&folder).map_err(|e| failed(e.into()))?;
        if disk.f_bavail * disk.f_frsize < size.saturating_add(DISK_FREE_MIN_BYTES) {
            let what = String::from("the disk has no room for the files");
            return Err(PlatformError::Capacity { what });
        }
        let draft = folder.join(format!(".{}", BuildId::generate(entropy)));
        let received = write_draft(&draft, size, body);
        let received = tokio::time::timeout(RECEIVE_MAX, received)
            .await
            .unwrap_or(Err(PlatformError::Invalid(String::from(
                "the files did not arrive in time",
            ))));
        let place = self.path(namespace, files);
        let kept = received.and_then(|()| fs::rename(&draft, &place).map_err(failed));
        if kept.is_err() {
            // It has no name, so nobody would miss it.
            let _ = fs::remove_file(&draft);
        }
        kept?;
        self.collect(&folder, &place).map_err(failed)
    }

    /// Removes what is old, and the oldest while there is too much; never the newest.
    fn collect(&self, folder: &Path, newest: &Path) -> io::Result<()> {
        let mut kept = Vec::new();
        for entry in folder.read_dir()? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            let age = metadata.modified()?.elapsed().unwrap_or(Duration::ZERO);
            if age > KEPT && entry.path() != newest {
                fs::remove_file(entry.path())?;
            } else {
                kept.push((age, metadata.len(), entry.path()));
            }
        }
        kept.sort();
        let mut total = 0;
        for (_, size, path) in kept {
            total += size;
            if total > TENANT_BYTES_MAX && path != newest {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

async fn write_draft(draft: &Path, size: u64, mut body: Upload) -> Result<(), PlatformError> {
    let wrong = || PlatformError::Invalid(format!("the files are not the {size} bytes announced"));
    let mut file = File::create(draft).await.map_err(failed)?;
    let mut left = size;
    while let Some(chunk) = body.next().await {
        let chunk = chunk.map_err(|_| wrong())?;
        left = left.checked_sub(chunk.len() as u64).ok_or_else(wrong)?;
        file.write_all(&chunk).await.map_err(failed)?;
    }
    if left > 0 {
        return Err(wrong());
    }
    file.flush().await.map_err(failed)
}

#[cfg(test)]
mod tests {
    use sandhold_types::SystemEntropy;

    use super::*;

    fn hash(digit: &str) -> FilesHash {
        FilesHash::read(&digit.repeat(64)).unwrap()
    }

    async fn send(
        uploads: &Uploads,
        size: u64,
        chunks: &[&'static str],
    ) -> Result<(), PlatformError> {
        let chunks: Vec<_> = chunks
            .iter()
            .map(|text| Ok(text.as_bytes().into()))
            .collect();
        let body = Box::pin(futures::stream::iter(chunks));
        let tenant = "t".parse().unwrap();
        uploads
            .receive(&tenant, &hash("a"), size, body, &SystemEntropy)
            .await
    }

    #[tokio::test]
    async fn files_are_whole_or_not_there() {
        // R-P5
        let folder = tempfile::tempdir().unwrap();
        let uploads = Uploads::new(folder.path());
        let (tenant, other) = ("t".parse().unwrap(), "u".parse().unwrap());
        for (size, chunks) in [
            (3, &["ab"][..]),
            (1, &["ab"]),
            (1, &["a", "b"]),
            (0, &["a"]),
        ] {
            assert!(send(&uploads, size, chunks).await.is_err());
            assert!(!uploads.has(&tenant, &hash("a")));
        }
        assert!(matches!(
            send(&uploads, u64::MAX, &[]).await,
            Err(PlatformError::TooLarge(_))
        ));
        send(&uploads, 4, &["ab", "cd"]).await.unwrap();
        assert_eq!(
            fs::read(uploads.path(&tenant, &hash("a"))).unwrap(),
            b"abcd"
        );
        assert!(uploads.has(&tenant, &hash("a")));
        // What one tenant sent is not there for another.
        assert!(!uploads.has(&other, &hash("a")));
        assert_eq!(
            fs::read_dir(folder.path().join("uploads/t"))
                .unwrap()
                .count(),
            1
        );
    }
}
