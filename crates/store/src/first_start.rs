//! The first key, without which nobody could make another.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use sandhold_types::{Clock, Entropy, IdError, KeyId, Token};

use crate::{Bucket, CreateKeyOutcome, KeyDigest, NewKey, Role, Store, StoreError};

/// The namespace of the first tenant.
pub const DEFAULT_NAMESPACE: &str = "default";
/// The environment of the first tenant.
pub const DEFAULT_ENV: &str = "dev";
/// The file in the data directory that holds the first key.
pub const DEFAULT_KEY_FILE: &str = "default.key";

/// The most bytes of a key file that are read.
const KEY_FILE_BYTES_MAX: u64 = 1_024;

/// What the first start found or made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FirstStart {
    /// The store had no key: one was made, and its file holds it.
    Created {
        /// Where the key is.
        key_file: PathBuf,
    },
    /// The store has keys, and the key file was empty: another key was made for it.
    Mended {
        /// Where the key is.
        key_file: PathBuf,
    },
    /// The store has keys.
    AlreadyDone,
}

/// Why there is no first key.
#[derive(Debug, thiserror::Error)]
pub enum FirstStartError {
    /// The key file could not be written or read.
    #[error("the key file {} cannot be {action}", path.display())]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// What was being done to it.
        action: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A built-in name is not a name.
    #[error(transparent)]
    Name(#[from] IdError),
    /// The store failed.
    #[error("the first key cannot be stored")]
    Store(#[from] StoreError),
}

/// Makes tenant `default`, environment `dev` and an administrator's key in `<data_dir>/default.key`
/// (mode 0600), if the store has no key at all. The file is on disk before the store knows the key,
/// so a start that is cut short is finished by the next one, with the same key.
///
/// A file that is there and empty, as a full disk leaves it, opens nothing. It gets another key,
/// also when the store has keys; one that somebody took away stays away.
///
/// # Errors
/// The file cannot be written, or the store failed.
pub async fn first_start(
    store: &dyn Store,
    data_dir: &Path,
    clock: &dyn Clock,
    entropy: &dyn Entropy,
) -> Result<FirstStart, FirstStartError> {
    let is_first = store.list_keys(&crate::KeyScope::All).await?.is_empty();
    let key_file = data_dir.join(DEFAULT_KEY_FILE);
    let (found, is_empty) = match read_key(&key_file)? {
        KeyFile::Absent => (None, false),
        KeyFile::Empty => (None, true),
        KeyFile::Holds(key) => (Some(key), false),
    };
    if !is_first && !is_empty {
        return Ok(FirstStart::AlreadyDone);
    }
    let key = found.unwrap_or_else(|| Token::generate_api_key(entropy));
    let new_key = NewKey {
        id: KeyId::generate(entropy),
        digest: KeyDigest::of(&key),
        bucket: Bucket {
            namespace: DEFAULT_NAMESPACE.parse()?,
            env: DEFAULT_ENV.parse()?,
        },
        role: Role::Admin,
        name: DEFAULT_NAMESPACE.to_owned(),
        hint: NewKey::hint_of(&key),
        created_at: clock.now(),
    };
    if !is_first {
        // The other way round, a start that is cut short would leave a key that nobody knows.
        store.create_key(new_key).await?;
        write_key(data_dir, &key_file, &key)?;
        return Ok(FirstStart::Mended { key_file });
    }
    write_key(data_dir, &key_file, &key)?;
    // The store is asked again, atomically: another process may have been quicker.
    Ok(match store.create_first_key(new_key).await? {
        CreateKeyOutcome::Created(_) => FirstStart::Created { key_file },
        CreateKeyOutcome::Exists | CreateKeyOutcome::Full => FirstStart::AlreadyDone,
    })
}

impl NewKey {
    /// The characters of `key` that are kept for its owner to know it by: 8 in front, 4 behind.
    #[must_use]
    pub fn hint_of(key: &Token) -> String {
        let text = key.expose();
        match (text.get(..8), text.get(text.len().saturating_sub(4)..)) {
            (Some(front), Some(behind)) if text.len() >= 24 => format!("{front}…{behind}"),
            _ => String::from("…"),
        }
    }
}

/// What is known of the key file.
enum KeyFile {
    Absent,
    Empty,
    Holds(Token),
}

fn read_key(path: &Path) -> Result<KeyFile, FirstStartError> {
    let failed = |source| FirstStartError::KeyFile {
        path: path.to_owned(),
        action: "read",
        source,
    };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => return Ok(KeyFile::Absent),
        Err(source) => return Err(failed(source)),
    };
    let mut text = String::new();
    file.take(KEY_FILE_BYTES_MAX)
        .read_to_string(&mut text)
        .map_err(failed)?;
    let key = text.trim();
    Ok(if key.is_empty() {
        KeyFile::Empty
    } else {
        KeyFile::Holds(Token::new(key.to_owned()))
    })
}

fn write_key(data_dir: &Path, path: &Path, key: &Token) -> Result<(), FirstStartError> {
    let write = || -> io::Result<()> {
        let fresh = path.with_extension("key.new");
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&fresh)?;
        // A file left by an earlier attempt keeps its mode, so it is set and not only asked for.
        rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o600))?;
        writeln!(file, "{}", key.expose())?;
        file.sync_all()?;
        fs::rename(&fresh, path)?;
        File::open(data_dir)?.sync_all()
    };
    write().map_err(|source| FirstStartError::KeyFile {
        path: path.to_owned(),
        action: "written",
        source,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use sandhold_types::{SeededEntropy, SystemClock};

    use super::*;
    use crate::MemoryStore;

    #[tokio::test]
    async fn the_first_start_leaves_one_admin_key_in_a_private_file() {
        // R-P8
        let dir = tempfile::tempdir().unwrap();
        let (store, entropy) = (MemoryStore::new(), SeededEntropy::new(1));
        let made = first_start(&store, dir.path(), &SystemClock, &entropy)
            .await
            .unwrap();
        let key_file = dir.path().join(DEFAULT_KEY_FILE);
        assert_eq!(
            made,
            FirstStart::Created {
                key_file: key_file.clone()
            }
        );
        let mode = fs::metadata(&key_file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let key = Token::new(fs::read_to_string(&key_file).unwrap().trim().to_owned());
        let found = store.find_key(&KeyDigest::of(&key)).await.unwrap().unwrap();
        assert_eq!(found.role, Role::Admin);
        assert_eq!(found.bucket.to_string(), "default:dev");
        let again = first_start(&store, dir.path(), &SystemClock, &entropy)
            .await
            .unwrap();
        assert_eq!(again, FirstStart::AlreadyDone);
    }

    #[tokio::test]
    async fn a_start_cut_short_is_finished_with_the_same_key() {
        let dir = tempfile::tempdir().unwrap();
        let entropy = SeededEntropy::new(1);
        let cut_short = MemoryStore::new();
        first_start(&cut_short, dir.path(), &SystemClock, &entropy)
            .await
            .unwrap();
        let key_file = dir.path().join(DEFAULT_KEY_FILE);
        let key = Token::new(fs::read_to_string(&key_file).unwrap().trim().to_owned());
        // The file is there, and the store knows nothing: as after a crash between the two.
        let store = MemoryStore::new();
        first_start(&store, dir.path(), &SystemClock, &entropy)
            .await
            .unwrap();
        assert!(
            store
                .find_key(&KeyDigest::of(&key))
                .await
                .unwrap()
                .is_some()
        );
    }

    #[tokio::test]
    async fn an_empty_key_file_gets_a_key_that_works() {
        for (is_first, left) in [(true, ""), (false, ""), (false, "\n")] {
            let dir = tempfile::tempdir().unwrap();
            let key_file = dir.path().join(DEFAULT_KEY_FILE);
            let (store, entropy) = (MemoryStore::new(), SeededEntropy::new(1));
            let start = async || {
                let started = first_start(&store, dir.path(), &SystemClock, &entropy);
                started.await.unwrap()
            };
            if !is_first {
                start().await;
            }
            fs::write(&key_file, left).unwrap();
            assert_ne!(start().await, FirstStart::AlreadyDone);
            let key = Token::new(fs::read_to_string(&key_file).unwrap().trim().to_owned());
            let found = store.find_key(&KeyDigest::of(&key)).await.unwrap();
            assert_eq!(found.unwrap().role, Role::Admin);
            assert_eq!(start().await, FirstStart::AlreadyDone);
            fs::remove_file(&key_file).unwrap();
            assert_eq!(start().await, FirstStart::AlreadyDone);
            assert!(!key_file.exists(), "taken away on purpose");
        }
    }
}
