//! The host's own calls. The gateway never lets them through from outside, and each needs the
//! control token, so a process in the sandbox cannot make them either.

pub mod init;
pub mod readiness;
pub mod restart;
pub mod routes;
pub mod tunnel;
