//! What a kernel says about an execution, whatever kind of kernel it is.

use serde_json::{Map, Value};

use super::message::{Content, Incoming};

/// Traceback lines beyond this are dropped.
const TRACEBACK_LINES_MAX: usize = 2_000;

/// Which of the two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

/// Something that happened in an execution.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum KernelEvent {
    /// It began, as the n-th of this kernel.
    Began { count: u64 },
    /// It printed.
    Printed {
        stream: Stream,
        text: String,
        date: Option<String>,
    },
    /// It showed something; the value of the last expression, or another thing.
    Showed {
        main: bool,
        bundle: Map<String, Value>,
    },
    /// It failed.
    Failed(Failure),
    /// It said something too large to hold.
    TooLarge { kind: String, bytes: u64 },
    /// Everything it said has been sent.
    Idle,
    /// The request was answered; with a failure, if it failed.
    Replied(Option<Failure>),
}

/// An error of the code that ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    /// The kind, such as `KeyError`.
    pub(super) name: String,
    /// What it says.
    pub(super) value: String,
    /// Where it came from, ready to print.
    pub(super) traceback: String,
}

impl KernelEvent {
    /// What the message of a kernel means; `None` if it means nothing to a client.
    pub(super) fn from_message(message: Incoming) -> Option<Self> {
        let mut content = match message.content {
            Content::Held(content) => content,
            Content::TooLarge(bytes) => {
                return Some(Self::TooLarge {
                    kind: message.kind,
                    bytes,
                });
            }
        };
        match message.kind.as_str() {
            "status" => (content.get("execution_state")? == "idle").then_some(Self::Idle),
            "execute_input" => Some(Self::Began {
                count: content.get("execution_count")?.as_u64()?,
            }),
            "stream" => Some(Self::Printed {
                stream: match content.get("name")?.as_str()? {
                    "stderr" => Stream::Stderr,
                    _ => Stream::Stdout,
                },
                text: take_text(&mut content, "text"),
                date: message.date,
            }),
            kind @ ("execute_result" | "display_data") => Some(Self::Showed {
                main: kind == "execute_result",
                bundle: match content.remove("data")? {
                    Value::Object(bundle) => bundle,
                    _ => return None,
                },
            }),
            "error" => Some(Self::Failed(Failure::from_content(&mut content))),
            kind if kind.ends_with("_reply") => Some(Self::Replied(reply(&mut content))),
            _ => None,
        }
    }
}

fn reply(content: &mut Map<String, Value>) -> Option<Failure> {
    match content.get("status").and_then(Value::as_str) {
        Some("error") => Some(Failure::from_content(content)),
        // Jupyter says `aborted`, some kernels `abort`: interrupted, or an earlier one failed.
        Some("aborted" | "abort") => Some(Failure {
            name: String::from("Interrupted"),
            value: String::from("the execution was interrupted"),
            traceback: String::new(),
        }),
        _ => None,
    }
}

impl Failure {
    fn from_content(content: &mut Map<String, Value>) -> Self {
        Self {
            name: take_text(content, "ename"),
            value: take_text(content, "evalue"),
            traceback: match content.remove("traceback") {
                Some(Value::Array(lines)) => lines
                    .iter()
                    .take(TRACEBACK_LINES_MAX)
                    .filter_map(Value::as_str)
                    .collect::<Vec<_>>()
                    .join("\n"),
                Some(Value::String(text)) => text,
                _ => String::new(),
            },
        }
    }
}

fn take_text(content: &mut Map<String, Value>, key: &str) -> String {
    match content.remove(key) {
        Some(Value::String(text)) => text,
        Some(other) if !other.is_null() => other.to_string(),
        _ => String::new(),
    }
}

/// When an execution is over: its request is answered *and* everything it said has arrived.
/// Either of the two may be lost by a kernel that was overrun, so one alone is enough after a
/// while.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Completion {
    idle: bool,
    replied: bool,
}

impl Completion {
    pub(super) fn observe(&mut self, event: &KernelEvent) {
        match event {
            KernelEvent::Idle => self.idle = true,
            KernelEvent::Replied(_) => self.replied = true,
            _ => {}
        }
    }

    /// Nothing more will come.
    pub(super) fn is_complete(self) -> bool {
        self.idle && self.replied
    }

    /// The rest should come at once, if it comes.
    pub(super) fn is_settling(self) -> bool {
        self.idle != self.replied
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(kind: &str, content: Value) -> Option<KernelEvent> {
        let Value::Object(content) = content else {
            panic!("contents are objects")
        };
        KernelEvent::from_message(Incoming {
            kind: kind.into(),
            parent: String::from("1"),
            date: None,
            content: Content::Held(content),
        })
    }

    #[test]
    fn a_failure_has_its_three_parts_whatever_the_kernel_leaves_out() {
        // BC-033
        let failed = event(
            "error",
            json!({"ename": "KeyError", "evalue": "'ключ'", "traceback": ["a", "b"]}),
        );
        assert_eq!(
            failed,
            Some(KernelEvent::Failed(Failure {
                name: String::from("KeyError"),
                value: String::from("'ключ'"),
                traceback: String::from("a\nb"),
            }))
        );
        assert!(matches!(
            event("error", json!({})),
            Some(KernelEvent::Failed(failure)) if failure.name.is_empty()
        ));
    }

    #[test]
    fn an_answer_tells_of_failure_and_interruption() {
        assert_eq!(
            event("execute_reply", json!({"status": "ok"})),
            Some(KernelEvent::Replied(None))
        );
        for status in ["error", "aborted", "abort"] {
            let replied = event("execute_reply", json!({"status": status}));
            assert!(matches!(replied, Some(KernelEvent::Replied(Some(_)))));
        }
    }

    #[test]
    fn only_idle_ends_an_execution() {
        assert_eq!(event("status", json!({"execution_state": "busy"})), None);
        let idle = event("status", json!({"execution_state": "idle"})).unwrap();
        let mut completion = Completion::default();
        completion.observe(&idle);
        assert!(completion.is_settling() && !completion.is_complete());
        completion.observe(&KernelEvent::Replied(None));
        assert!(completion.is_complete() && !completion.is_settling());
    }

    #[test]
    fn messages_of_no_interest_are_dropped() {
        for (kind, content) in [
            ("comm_open", json!({})),
            ("clear_output", json!({"wait": true})),
            ("display_data", json!({"data": 3})),
            ("execute_input", json!({"execution_count": -1})),
            ("stream", json!({"text": "x"})),
        ] {
            assert_eq!(event(kind, content), None, "{kind}");
        }
    }
}
