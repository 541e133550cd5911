//! Whose file, and which.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    account::{Account, AccountError},
    filesystem::error::http_error,
    http_error::HttpError,
    paths,
    rights::with_rights,
    state::SandboxState,
};

/// A user, and how the user's paths are read.
#[derive(Debug, Clone)]
pub struct Owner {
    account: Account,
    workdir: PathBuf,
}

impl Owner {
    /// The named user, or the default one.
    ///
    /// # Errors
    /// Nobody has that name: 401.
    pub fn find(state: &SandboxState, name: Option<&str>) -> Result<Self, HttpError> {
        let account = state
            .account(name.filter(|name| !name.is_empty()))
            .map_err(|error| match error {
                AccountError::Unknown(_) => HttpError::unauthorized(error.to_string()),
                AccountError::Read { .. } => HttpError::internal(error.to_string()),
            })?;
        let workdir = state.workdir(&account);
        Ok(Self { account, workdir })
    }

    /// What a path of this user means.
    ///
    /// # Errors
    /// It cannot be a path: 400.
    pub fn resolve(&self, path: &str) -> Result<PathBuf, HttpError> {
        paths::resolve(path, &self.account.home, &self.workdir)
            .map_err(|error| HttpError::bad_request(error.to_string()))
    }

    /// Does file work with the user's rights, on a blocking thread.
    ///
    /// # Errors
    /// As the work fails, in the words of HTTP.
    pub async fn work<T: Send + 'static>(
        self: &Arc<Self>,
        path: &Path,
        work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T, HttpError> {
        let owner = Arc::clone(self);
        let owned_path = path.to_path_buf();
        tokio::task::spawn_blocking(move || with_rights(&owner.account, || work(&owned_path))?)
            .await
            .map_err(|error| HttpError::internal(error.to_string()))?
            .map_err(|error| http_error(&path.to_string_lossy(), &error))
    }
}

/// Opens a file for reading. Only regular files: a FIFO or device could keep a thread for ever.
///
/// # Errors
/// As the kernel says; EISDIR for a directory, EINVAL for what is neither.
pub fn open_to_read(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    require_regular(&file)?;
    Ok(file)
}

/// A file that is open for writing, empty.
#[derive(Debug)]
pub struct WriteTarget {
    /// The file.
    pub file: File,
    /// Whether it was made just now.
    pub is_new: bool,
}

/// Opens a file for writing and empties it; parents are made. An existing file keeps its mode
/// and owner.
///
/// # Errors
/// As the kernel says; EISDIR for a directory, EINVAL for what is no regular file.
pub fn open_to_write(path: &Path) -> io::Result<WriteTarget> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut options = OpenOptions::new();
    options
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    match options.clone().create_new(true).open(path) {
        Ok(file) => return Ok(WriteTarget { file, is_new: true }),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    // Not created by exclusive open: it exists, or is a dangling link to a place that does not.
    let is_new = fs::metadata(path).is_err();
    let file = options.create(true).open(path)?;
    require_regular(&file)?;
    file.set_len(0)?;
    Ok(WriteTarget { file, is_new })
}

fn require_regular(file: &File) -> io::Result<()> {
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        return Ok(());
    }
    let errno = if kind.is_dir() {
        libc::EISDIR
    } else {
        libc::EINVAL
    };
    Err(io::Error::from_raw_os_error(errno))
}
