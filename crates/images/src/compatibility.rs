//! Whether the engine at hand can restore a memory image (BC-092).
//!
//! An image can be restored by the same release of the same engine, on a processor that has every
//! feature that the processor it was taken on had. Programs in the image chose their code by those
//! features (NumPy picks AVX-512 once), so a missing one would end in SIGILL at some later moment.
//!
//! What is done about a mismatch: a template's root file system is complete without its memory
//! image, so its sandboxes are booted instead of restored; the template is shown as cold, with the
//! reason, until it is baked again.

use std::collections::BTreeSet;

use sandhold_engine::EngineIdentity;

/// Why a memory image is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WarmMismatch {
    /// Another engine wrote it.
    #[error("the memory image was written by engine {recorded}; this node runs {present}")]
    Engine {
        /// Who wrote it.
        recorded: String,
        /// What is here.
        present: String,
    },
    /// Another release of the engine wrote it.
    #[error("the memory image was written by {engine} {recorded}; this node runs {present}")]
    Version {
        /// The engine.
        engine: String,
        /// Its release then.
        recorded: String,
        /// Its release now.
        present: String,
    },
    /// The processor lacks what programs in the image may rely on.
    #[error(
        "this processor lacks features of the one that the memory image was taken on: {missing}"
    )]
    CpuFeatures {
        /// The features, separated by spaces.
        missing: String,
    },
}

/// Compares the engine that wrote an image with the one that would read it.
///
/// # Errors
/// The first difference that matters.
pub fn check_warm(recorded: &EngineIdentity, present: &EngineIdentity) -> Result<(), WarmMismatch> {
    if recorded.name != present.name {
        return Err(WarmMismatch::Engine {
            recorded: recorded.name.clone(),
            present: present.name.clone(),
        });
    }
    if recorded.version != present.version {
        return Err(WarmMismatch::Version {
            engine: present.name.clone(),
            recorded: recorded.version.clone(),
            present: present.version.clone(),
        });
    }
    let features = |text: &'_ str| -> BTreeSet<String> {
        let words = text.split(|c: char| c.is_whitespace() || c == ',');
        words.filter(|w| !w.is_empty()).map(str::to_owned).collect()
    };
    let here = features(&present.cpu_features);
    let missing: Vec<String> = features(&recorded.cpu_features)
        .into_iter()
        .filter(|feature| !here.contains(feature))
        .collect();
    if missing.is_empty() {
        Ok(())
    } else {
        Err(WarmMismatch::CpuFeatures {
            missing: missing.join(" "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(name: &str, version: &str, cpu_features: &str) -> EngineIdentity {
        EngineIdentity {
            name: name.to_owned(),
            version: version.to_owned(),
            cpu_features: cpu_features.to_owned(),
        }
    }

    #[test]
    fn an_image_needs_the_same_engine_and_no_fewer_features() {
        // BC-092
        let recorded = identity("gvisor", "1", "avx avx512f sse2");
        assert_eq!(check_warm(&recorded, &recorded), Ok(()));
        let richer = identity("gvisor", "1", "amx avx avx512f sse2");
        assert_eq!(check_warm(&recorded, &richer), Ok(()));
        let poorer = identity("gvisor", "1", "avx sse2");
        let refused = check_warm(&recorded, &poorer).unwrap_err();
        assert!(refused.to_string().ends_with(": avx512f"), "{refused}");
        let newer = identity("gvisor", "2", "avx avx512f sse2");
        assert!(matches!(
            check_warm(&recorded, &newer),
            Err(WarmMismatch::Version { .. })
        ));
        let other = identity("microvm", "1", "avx avx512f sse2");
        assert!(matches!(
            check_warm(&recorded, &other),
            Err(WarmMismatch::Engine { .. })
        ));
    }
}
