//! Code that gives new seeds to the generators of kernels without a side channel (R-T6). Pure.
//!
//! What each language needs:
//! - JavaScript: V8 seeds `Math.random` once and offers no way to do it again, so it is replaced
//!   by a generator that can be reseeded. `crypto` draws from a generator of Deno's that takes
//!   new entropy from the kernel after 64 KiB, so that much is drawn and thrown away; and
//!   `randomUUID`, of the web and of Node, keeps 128 ids in store.
//! - bash: assigning to `RANDOM` seeds it. `SRANDOM` asks the kernel.
//! - R: `set.seed`.
//! - Java: its shared generators have no seed that can be set; `SecureRandom` mixes one in on
//!   demand only in user code's own instances. Copies of a sandbox share `Math.random`.

use super::language::Family;

/// `xoshiro128**`, in 32-bit arithmetic.
const MATH_RANDOM: &str = r"{
  const state = new Uint32Array(4);
  const rotate = (x, k) => (x << k) | (x >>> (32 - k));
  const next = () => {
    const result = Math.imul(rotate(Math.imul(state[1], 5), 7), 9) >>> 0;
    const t = state[1] << 9;
    state[2] ^= state[0];
    state[3] ^= state[1];
    state[1] ^= state[2];
    state[0] ^= state[3];
    state[2] ^= t;
    state[3] = rotate(state[3], 11);
    return result;
  };
  const random = () => (next() >>> 5) * 67108864 + (next() >>> 6);
  Math.random = function random_() { return random() / 9007199254740992; };
  Object.defineProperty(Math.random, 'name', { value: 'random' });
  Object.defineProperty(globalThis, Symbol.for('sandhold.reseed'), {
    value: (words) => {
      state.set(words);
      const waste = new Uint8Array(65536);
      for (let i = 0; i < 3; i++) crypto.getRandomValues(waste);
      const node = globalThis.process?.getBuiltinModule?.('node:crypto');
      for (let i = 0; i < 256; i++) {
        crypto.randomUUID();
        node?.randomUUID();
      }
    },
  });
}
";

/// What a new kernel runs before anything else.
pub(super) fn preparation(family: &Family, entropy: &[u8]) -> Option<String> {
    match family {
        Family::JavaScript => Some(format!("{MATH_RANDOM}{}", reseeding(family, entropy)?)),
        _ => None,
    }
}

/// What a kernel runs in a sandbox that has become another one.
pub(super) fn reseeding(family: &Family, entropy: &[u8]) -> Option<String> {
    let mut words = entropy.chunks_exact(4).map(|bytes| {
        bytes
            .iter()
            .fold(0_u32, |word, byte| word << 8 | u32::from(*byte))
    });
    match family {
        Family::JavaScript => {
            let mut state: Vec<String> = words.by_ref().take(3).map(|w| w.to_string()).collect();
            // A state of nothing but zeros would stay so.
            state.push((words.next().unwrap_or(0) | 1).to_string());
            Some(format!(
                "globalThis[Symbol.for('sandhold.reseed')]([{}]);",
                state.join(",")
            ))
        }
        Family::Bash => Some(format!("RANDOM={}", words.next()?)),
        Family::R => Some(format!("set.seed({})", words.next()? >> 1)),
        Family::Python => Some(format!(
            "__import__('random').seed(bytes.fromhex('{}'))",
            super::message::hex_of(entropy)
        )),
        Family::Java | Family::Other(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_entropy_gives_different_seeds() {
        // R-T6
        for family in [Family::JavaScript, Family::Bash, Family::R, Family::Python] {
            let one = reseeding(&family, &[1; 64]).unwrap();
            let other = reseeding(&family, &[2; 64]).unwrap();
            assert_ne!(one, other, "{family:?}");
        }
    }

    #[test]
    fn a_state_is_never_all_zeros() {
        let code = reseeding(&Family::JavaScript, &[0; 64]).unwrap();
        assert!(code.ends_with("([0,0,0,1]);"), "{code}");
    }
}
