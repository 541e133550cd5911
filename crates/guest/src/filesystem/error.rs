//! Failures of the kernel, as Connect and HTTP say them.

use std::io;

use connectrpc::ConnectError;
use http::StatusCode;

use crate::http_error::HttpError;

/// What kind of failure it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    NotFound,
    NoAccess,
    Exists,
    Invalid,
    Refused,
    NoSpace,
    Other,
}

fn kind(error: &io::Error) -> Kind {
    match error.raw_os_error() {
        Some(libc::ENOENT) => Kind::NotFound,
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => Kind::NoAccess,
        Some(libc::EEXIST) => Kind::Exists,
        Some(
            libc::ENOTDIR
            | libc::EISDIR
            | libc::ELOOP
            | libc::ENAMETOOLONG
            | libc::EINVAL
            | libc::ENXIO,
        ) => Kind::Invalid,
        Some(libc::ENOTEMPTY | libc::EBUSY | libc::EXDEV | libc::ETXTBSY) => Kind::Refused,
        Some(libc::ENOSPC | libc::EDQUOT | libc::EMFILE | libc::ENFILE | libc::ENOMEM) => {
            Kind::NoSpace
        }
        _ if error.kind() == io::ErrorKind::InvalidInput => Kind::Invalid,
        _ => Kind::Other,
    }
}

/// The Connect error for a failed operation on this subject.
#[must_use]
pub fn connect_error(subject: &str, error: &io::Error) -> ConnectError {
    let message = format!("{subject}: {error}");
    match kind(error) {
        Kind::NotFound => ConnectError::not_found(message),
        Kind::NoAccess => ConnectError::permission_denied(message),
        Kind::Exists => ConnectError::already_exists(message),
        Kind::Invalid => ConnectError::invalid_argument(message),
        Kind::Refused => ConnectError::failed_precondition(message),
        Kind::NoSpace => ConnectError::resource_exhausted(message),
        Kind::Other => ConnectError::internal(message),
    }
}

/// The HTTP error for a failed operation on this subject.
#[must_use]
pub fn http_error(subject: &str, error: &io::Error) -> HttpError {
    let status = match kind(error) {
        Kind::NotFound => StatusCode::NOT_FOUND,
        Kind::NoAccess => StatusCode::FORBIDDEN,
        Kind::Exists | Kind::Refused => StatusCode::CONFLICT,
        Kind::Invalid => StatusCode::BAD_REQUEST,
        Kind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
        Kind::Other => StatusCode::INTERNAL_SERVER_ERROR,
    };
    HttpError::new(status, format!("{subject}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_the_kernel_have_their_status() {
        for (errno, status) in [
            (libc::ENOENT, 404),
            (libc::EACCES, 403),
            (libc::EISDIR, 400),
            (libc::ENOSPC, 507),
            (libc::EDQUOT, 507),
            (libc::EIO, 500),
        ] {
            let error = io::Error::from_raw_os_error(errno);
            assert_eq!(http_error("x", &error).status.as_u16(), status, "{error}");
        }
    }
}
