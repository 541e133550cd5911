//! How a command tells that it failed: in words to a person, as one line of JSON with `--json`.
//! Either goes to standard error, since standard output is for results.

use serde_json::{Value, json};

use super::server::ServerError;

/// What stands for a cause that the server gave no name.
const UNNAMED: &str = "failed";
/// Between what happened and what to do about it, in the text of an error.
const ADVICE_MARK: &str = "\n  ";

/// The text of a failure, without the end of the line.
pub(crate) fn told(error: &anyhow::Error, as_json: bool) -> String {
    if as_json {
        object(error).to_string()
    } else {
        format!("sandhold: {error:#}")
    }
}

/// `{code, message}`, with the `status` of a server's answer and `advice` where there are any.
fn object(error: &anyhow::Error) -> Value {
    let text = format!("{error:#}");
    let (message, advice) = match text.split_once(ADVICE_MARK) {
        Some((message, advice)) => (message, Some(advice.replace(ADVICE_MARK, " "))),
        None => (text.as_str(), None),
    };
    let (code, status) = match error.downcast_ref::<ServerError>() {
        Some(ServerError::Refused { code, status, .. }) => (code.as_str(), Some(*status)),
        Some(ServerError::Unreachable { .. }) => ("unreachable", None),
        None => (UNNAMED, None),
    };
    let code = if code.is_empty() { UNNAMED } else { code };
    let mut object = json!({ "code": code, "message": message });
    if let Some(status) = status {
        object["status"] = json!(status);
    }
    if let Some(advice) = advice {
        object["advice"] = json!(advice);
    }
    object
}

/// Whether `--json` stands behind the command or one of its subcommands.
pub(crate) fn wants_json(matches: &clap::ArgMatches) -> bool {
    let given = matches.try_get_one::<bool>("json").ok().flatten();
    given == Some(&true)
        || matches
            .subcommand()
            .is_some_and(|(_, matches)| wants_json(matches))
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;

    #[test]
    fn a_program_gets_code_and_message_apart() {
        let refused = ServerError::Refused {
            status: 404,
            code: String::from("sandbox_not_found"),
            message: String::from("sandbox x was not found"),
        };
        let refused = anyhow::Error::from(refused);
        let told_json: Value = serde_json::from_str(&told(&refused, true)).unwrap();
        assert_eq!(told_json["code"], "sandbox_not_found");
        assert_eq!(told_json["message"], "sandbox x was not found");
        assert_eq!(told_json["status"], 404);
        assert!(told_json["advice"].as_str().unwrap().contains("sandbox ls"));
        assert!(told(&refused, false).starts_with("sandhold: sandbox x was not found\n  "));

        let nameless = ServerError::Refused {
            status: 502,
            code: String::new(),
            message: String::from("the server answered 502"),
        };
        let nameless = Err::<(), _>(nameless).context("looking").unwrap_err();
        let expected = json!({
            "code": "failed", "message": "looking: the server answered 502", "status": 502,
        });
        assert_eq!(object(&nameless), expected);
        let own = object(&anyhow!("no such file"));
        assert_eq!(own, json!({ "code": "failed", "message": "no such file" }));
    }
}
