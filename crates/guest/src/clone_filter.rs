//! Keeps every process of the sandbox from one way to make a process that hangs gVisor (BC-029).
//!
//! In the releases that Debian has, `setsid` deadlocks the kernel of the sandbox while a child
//! shares the caller's signal handlers without being a thread of it: `clone` with
//! `CLONE_SIGHAND` and without `CLONE_THREAD`. Nothing has made such children since the threads
//! of Linux 2.4, so they are refused as a kernel refuses flags that do not go together.
//!
//! ```text
//!  clone, SIGHAND without THREAD -> EINVAL
//!  clone3                        -> ENOSYS: its flags lie in memory, where a filter cannot look;
//!                                   every C library falls back to clone
//!  anything else                 -> as ever
//! ```
//!
//! Invariants:
//! - The filter is installed once, by the agent before its first thread, and inherited by
//!   everything that it starts. Installing it costs gVisor milliseconds (it works out the answer
//!   for every system call beforehand), inheriting it and being filtered cost nothing to speak of.
//! - It needs `CAP_SYS_ADMIN` and does not set `no_new_privs`, so programs with the set-user-id
//!   bit work as before.

use std::io;

/// `seccomp_data.nr`, `.arch`, and the lower half of `.args[0]`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const FIRST_ARGUMENT: u32 = 16;

/// Numbers and flags fit 32 bits; `libc` has them in wider, signed types.
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const CLONE: u32 = 56;
const CLONE3: u32 = 435;
const SHARED_HANDLERS: u32 = 0x0000_0800;
const THREAD: u32 = 0x0001_0000;

const LOAD: u16 = 0x20;
const IF_EQUAL: u16 = 0x15;
const IF_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const INVALID: u32 = libc::SECCOMP_RET_ERRNO | libc::EINVAL.cast_unsigned();
const UNKNOWN: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned();

/// The filter. A jump counts from the instruction behind it.
const PROGRAM: [libc::sock_filter; 11] = [
    step(LOAD, 0, 0, ARCHITECTURE),
    step(IF_EQUAL, 0, 6, AUDIT_ARCH_X86_64),
    step(LOAD, 0, 0, NUMBER),
    step(IF_EQUAL, 6, 0, CLONE3),
    step(IF_EQUAL, 0, 3, CLONE),
    step(LOAD, 0, 0, FIRST_ARGUMENT),
    step(IF_ANY_BIT, 0, 1, SHARED_HANDLERS),
    step(IF_ANY_BIT, 0, 1, THREAD),
    step(RETURN, 0, 0, ALLOW),
    step(RETURN, 0, 0, INVALID),
    step(RETURN, 0, 0, UNKNOWN),
];

const fn step(code: u16, if_true: u8, if_false: u8, operand: u32) -> libc::sock_filter {
    libc::sock_filter {
        code,
        jt: if_true,
        jf: if_false,
        k: operand,
    }
}

/// Installs the filter in the calling thread, and so in everything that this will start.
///
/// # Errors
/// The kernel has no filters, or the caller lacks `CAP_SYS_ADMIN`.
pub fn install() -> io::Result<()> {
    let mut program = PROGRAM;
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the kernel copies `len` instructions from an array of that length before the call
    // returns, and writes nothing.
    let status = unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const filter,
            0,
            0,
        )
    };
    if status < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would answer: the four instructions that the filter is written in.
    fn verdict(architecture: u32, number: u32, first_argument: u32) -> u32 {
        let (mut at, mut loaded) = (0, 0);
        loop {
            let step = PROGRAM[at];
            at += 1;
            let jump = |holds: bool| usize::from(if holds { step.jt } else { step.jf });
            match (step.code, step.k) {
                (LOAD, ARCHITECTURE) => loaded = architecture,
                (LOAD, NUMBER) => loaded = number,
                (LOAD, FIRST_ARGUMENT) => loaded = first_argument,
                (IF_EQUAL, operand) => at += jump(loaded == operand),
                (IF_ANY_BIT, operand) => at += jump(loaded & operand != 0),
                (RETURN, answer) => return answer,
                other => panic!("no such instruction: {other:?}"),
            }
        }
    }

    #[test]
    fn only_a_process_that_shares_signal_handlers_is_refused() {
        // BC-029
        let clone = |flags: i32| verdict(AUDIT_ARCH_X86_64, CLONE, flags.cast_unsigned());
        let (memory, handlers, thread) = (libc::CLONE_VM, libc::CLONE_SIGHAND, libc::CLONE_THREAD);
        assert_eq!(clone(memory | handlers | libc::SIGCHLD), INVALID);
        assert_eq!(clone(memory | handlers), INVALID);
        // fork, vfork and posix_spawn, a thread.
        assert_eq!(clone(libc::SIGCHLD), ALLOW);
        assert_eq!(clone(memory | libc::CLONE_VFORK | libc::SIGCHLD), ALLOW);
        assert_eq!(clone(memory | handlers | thread), ALLOW);
        assert_eq!(verdict(AUDIT_ARCH_X86_64, CLONE3, 0), UNKNOWN);
    }

    #[test]
    fn other_system_calls_pass_whatever_their_arguments() {
        let flags = SHARED_HANDLERS;
        for number in (0..500).filter(|number| ![CLONE, CLONE3].contains(number)) {
            assert_eq!(verdict(AUDIT_ARCH_X86_64, number, flags), ALLOW, "{number}");
        }
        assert_eq!(verdict(0x4000_0003, CLONE, flags), ALLOW);
    }

    #[test]
    fn the_numbers_are_those_of_the_kernel() {
        assert_eq!(i64::from(CLONE), libc::SYS_clone);
        assert_eq!(i64::from(CLONE3), libc::SYS_clone3);
        assert_eq!(SHARED_HANDLERS, libc::CLONE_SIGHAND.cast_unsigned());
        assert_eq!(THREAD, libc::CLONE_THREAD.cast_unsigned());
    }
}
