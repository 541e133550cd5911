//! Layers of images: archives from anywhere, laid one over the other into a root directory (R-P5).
//!
//! ```text
//!   bytes ─▶ Checked (digest, length) ─▶ decompressed ─▶ archive ─▶ entry ─▶ Confined root
//!                                        gzip, zstd      (headers)  (rules)   openat2, in root
//! ```
//!
//! Invariants:
//! - Every byte is hostile. What an entry may be called and be is decided by pure rules (`entry`);
//!   every path is resolved by the kernel inside the root (`confined`), so that no link of the
//!   archive or of a layer below leads out of it.
//! - What is laid down is bounded in entries and bytes before it is read ([`Budget`]).
//! - A layer whose digest is wrong fails as a whole; its caller throws the root away.
//!
//! Owner, mode with its set-user-ID bits, times of files, hard links and file capabilities are
//! kept: inside a sandbox they are what the image's author meant. Devices, pipes and sockets are
//! refused. It knows nothing of registries or of templates.

mod archive;
pub(crate) mod confined;
mod content;
mod entry;
pub mod fuzzing;
#[cfg(test)]
mod reference_tests;
mod unpack;

pub(crate) use confined::Confined;
pub(crate) use content::{Checked, Digest, decompressed};
pub(crate) use entry::path_in_root;
pub(crate) use unpack::{Budget, Owners, UnpackError, Whiteouts, unpack};
