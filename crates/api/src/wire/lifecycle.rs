//! What a sandbox does when its time is over and when traffic comes while it sleeps, as the two
//! kinds of clients write it (wire contract 1.2).
//!
//! E2B's clients have three fields beside the others, CubeSandbox's a nested `lifecycle`. A body may
//! have both, as long as they do not contradict each other. `backgroundCommandsCount` is our own.

use sandhold_platform::{AutoResume, BusyWith, PauseKeeps, SandboxView};
use sandhold_types::OnTimeout;
use serde::{Deserialize, Serialize};

use crate::error::ApiError;

/// E2B's fields, each of which is left out when the caller did not choose.
#[derive(Debug, Default)]
pub(crate) struct AutoFields {
    pub(crate) auto_pause: Option<bool>,
    pub(crate) auto_pause_memory: Option<bool>,
    pub(crate) auto_resume: Option<AutoResumeBody>,
}

/// E2B's nested switch.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(crate) struct AutoResumeBody {
    enabled: Option<bool>,
}

/// CubeSandbox's nested policy, and our own switch.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LifecycleBody {
    on_timeout: Option<OnTimeoutBody>,
    auto_resume: Option<bool>,
    background_commands_count: Option<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum OnTimeoutBody {
    Kill,
    Pause,
}

impl From<OnTimeoutBody> for OnTimeout {
    fn from(body: OnTimeoutBody) -> Self {
        match body {
            OnTimeoutBody::Kill => Self::Kill,
            OnTimeoutBody::Pause => Self::Pause,
        }
    }
}

impl From<OnTimeout> for OnTimeoutBody {
    fn from(on_timeout: OnTimeout) -> Self {
        match on_timeout {
            OnTimeout::Kill => Self::Kill,
            OnTimeout::Pause => Self::Pause,
        }
    }
}

impl AutoFields {
    /// Whether the caller wrote any of them; that decides the clock (wire contract 1.4).
    pub(crate) fn is_any_given(&self) -> bool {
        self.auto_pause.is_some() || self.auto_pause_memory.is_some() || self.auto_resume.is_some()
    }

    fn resumes(&self) -> Option<bool> {
        self.auto_resume.and_then(|body| body.enabled)
    }
}

/// What `autoPause` means.
pub(crate) fn on_timeout(auto_pause: bool) -> OnTimeout {
    if auto_pause {
        OnTimeout::Pause
    } else {
        OnTimeout::Kill
    }
}

/// What a new sandbox does at the end of its time and when traffic comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Policy {
    pub(crate) on_timeout: OnTimeout,
    pub(crate) auto_resume: AutoResume,
    pub(crate) busy_with: BusyWith,
    pub(crate) timeout_keeps: PauseKeeps,
}

/// One wish out of two that may have been written; both must not say different things.
fn agreed<T: PartialEq>(
    field: &'static str,
    other: &str,
    nested: Option<T>,
    beside: Option<T>,
) -> Result<Option<T>, ApiError> {
    match (nested, beside) {
        (Some(nested), Some(beside)) if nested != beside => {
            Err(ApiError::invalid(field, format!("contradicts {other}")))
        }
        (nested, beside) => Ok(nested.or(beside)),
    }
}

impl Policy {
    /// Reads both spellings and checks them as E2B does.
    pub(crate) fn of(auto: &AutoFields, nested: Option<&LifecycleBody>) -> Result<Self, ApiError> {
        let nested = nested.copied().unwrap_or_default();
        let on_timeout = agreed(
            "lifecycle.onTimeout",
            "autoPause",
            nested.on_timeout.map(OnTimeout::from),
            auto.auto_pause.map(on_timeout),
        )?
        .unwrap_or(OnTimeout::Kill);
        let resumes = agreed(
            "lifecycle.autoResume",
            "autoResume",
            nested.auto_resume,
            auto.resumes(),
        )?
        .unwrap_or(false);
        let files_only = auto.auto_pause_memory == Some(false);
        if files_only && on_timeout != OnTimeout::Pause {
            return Err(ApiError::invalid("autoPauseMemory", "needs autoPause"));
        }
        if files_only && resumes {
            // Traffic must not start a sandbox's processes anew without its owner knowing.
            let problem = "cannot be false together with autoResume";
            return Err(ApiError::invalid("autoPauseMemory", problem));
        }
        Ok(Self {
            on_timeout,
            auto_resume: if resumes {
                AutoResume::On
            } else {
                AutoResume::Off
            },
            busy_with: if nested.background_commands_count == Some(false) {
                BusyWith::AttachedCommands
            } else {
                BusyWith::AnyCommand
            },
            timeout_keeps: if files_only {
                PauseKeeps::Files
            } else {
                PauseKeeps::Everything
            },
        })
    }
}

/// The policy as clients read it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LifecycleDetail {
    on_timeout: OnTimeoutBody,
    auto_resume: bool,
    background_commands_count: bool,
}

impl LifecycleDetail {
    pub(crate) fn of(view: &SandboxView) -> Self {
        Self {
            on_timeout: view.lifetime.on_timeout.into(),
            auto_resume: view.auto_resume == AutoResume::On,
            background_commands_count: view.busy_with == BusyWith::AnyCommand,
        }
    }
}

/// What a pause kept, as clients read it.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PauseMode {
    Full,
    Filesystem,
}

impl From<PauseKeeps> for PauseMode {
    fn from(keeps: PauseKeeps) -> Self {
        match keeps {
            PauseKeeps::Everything => Self::Full,
            PauseKeeps::Files => Self::Filesystem,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(
        auto: (Option<bool>, Option<bool>, Option<bool>),
        lifecycle: Option<&str>,
    ) -> Result<Policy, String> {
        let fields = AutoFields {
            auto_pause: auto.0,
            auto_pause_memory: auto.1,
            auto_resume: auto.2.map(|enabled| AutoResumeBody {
                enabled: Some(enabled),
            }),
        };
        let nested = lifecycle.map(|text| serde_json::from_str(text).unwrap());
        Policy::of(&fields, nested.as_ref()).map_err(|refused| refused.to_string())
    }

    const NONE: (Option<bool>, Option<bool>, Option<bool>) = (None, None, None);

    #[test]
    fn both_spellings_mean_the_same() {
        // R-L6, wire contract 1.2
        let plain = policy(NONE, None).unwrap();
        assert_eq!(plain.on_timeout, OnTimeout::Kill);
        assert_eq!(plain.auto_resume, AutoResume::Off);
        assert_eq!(plain.busy_with, BusyWith::AnyCommand);
        assert_eq!(plain.timeout_keeps, PauseKeeps::Everything);
        let beside = policy((Some(true), None, Some(true)), None).unwrap();
        let nested = r#"{"onTimeout":"pause","autoResume":true}"#;
        assert_eq!(beside, policy(NONE, Some(nested)).unwrap());
        assert_eq!(
            beside,
            policy((Some(true), None, Some(true)), Some(nested)).unwrap()
        );
        assert_eq!(beside.on_timeout, OnTimeout::Pause);
        assert_eq!(beside.auto_resume, AutoResume::On);
    }

    #[test]
    fn a_background_command_counts_unless_the_caller_says_otherwise() {
        // R-L5
        let busy_with = |text| policy(NONE, Some(text)).unwrap().busy_with;
        assert_eq!(
            busy_with(r#"{"backgroundCommandsCount":true}"#),
            BusyWith::AnyCommand
        );
        assert_eq!(
            busy_with(r#"{"backgroundCommandsCount":false}"#),
            BusyWith::AttachedCommands
        );
    }

    #[test]
    fn a_pause_of_files_only_is_chosen_knowingly() {
        let files = policy((Some(true), Some(false), None), None).unwrap();
        assert_eq!(files.timeout_keeps, PauseKeeps::Files);
        for wrong in [
            (None, Some(false), None),
            (Some(false), Some(false), None),
            (Some(true), Some(false), Some(true)),
        ] {
            let refused = policy(wrong, None).unwrap_err();
            assert!(refused.starts_with("autoPauseMemory: "), "{refused}");
        }
        assert!(policy((Some(true), Some(false), Some(false)), None).is_ok());
    }

    #[test]
    fn contradictions_are_refused() {
        let kill = r#"{"onTimeout":"kill"}"#;
        assert!(policy((Some(true), None, None), Some(kill)).is_err());
        assert!(policy((None, None, Some(true)), Some(r#"{"autoResume":false}"#)).is_err());
    }
}
