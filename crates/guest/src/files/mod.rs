//! `/files`: the contents of files over plain HTTP (wire contract 2.4).
//!
//! ```text
//!   GET   open with the user's rights ──> stream (identity or gzip), ranges, conditions
//!   POST  multipart or octet-stream ──> open with the user's rights ──> write, piece by piece
//!   POST /files/compose   several files into one
//! ```
//!
//! Invariants:
//! - A file is opened, and its parents are made, with the user's rights; contents then flow
//!   through the open file, so memory does not depend on sizes (BC-059).
//! - Overwriting keeps the mode and owner of a file (BC-058); what is new belongs to the user.
//! - Nothing of a path or name reaches a header unescaped (BC-053).

pub mod compose;
pub mod download;
pub mod headers;
pub mod metadata;
pub mod routes;
pub mod signature;
pub mod target;
pub mod upload;
