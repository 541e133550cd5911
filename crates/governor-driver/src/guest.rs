//! One request to the agent inside a sandbox, and as much of its answer as is wanted.
//!
//! What a guest says is hostile: heads and bodies are bounded, and what breaks off is no answer.

use bytes::{Bytes, BytesMut};
use http::{HeaderName, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use sandhold_governor::CallError;
use sandhold_types::{Generation, SandboxId, Timestamp};
use tokio::io::{AsyncRead, AsyncWrite};

/// The bytes before each message of a Connect stream: flags and length.
pub(crate) const PREFIX_BYTES: usize = 5;

/// How much of an answer is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// All of it; more than this is no answer.
    Whole {
        /// The most bytes.
        bytes_max: usize,
    },
    /// The first message of a stream that goes on.
    FirstMessage,
}

/// A request to the agent.
#[derive(Debug, Clone)]
pub struct GuestRequest {
    /// The method.
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// Headers beside those that open the agent's door.
    pub headers: Vec<(HeaderName, String)>,
    /// What is sent.
    pub body: Bytes,
    /// What is read.
    pub reading: Reading,
}

/// An answer of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestAnswer {
    /// Its status.
    pub status: StatusCode,
    /// What was read of its body.
    pub body: Bytes,
}

/// A platform whose sandboxes can be talked to.
pub trait Guests: Send + Sync {
    /// Makes one request in the name of a generation; refused if a later one was seen (R-G8). A
    /// sandbox that sleeps is woken for it.
    ///
    /// # Errors
    /// As for any call. It ends with the caller's patience, not by itself.
    fn exchange(
        &self,
        sandbox: &SandboxId,
        generation: Generation,
        request: GuestRequest,
    ) -> impl Future<Output = Result<GuestAnswer, CallError>> + Send;

    /// Why a sandbox that is gone has ended, in words, if that is known here (R-L12).
    fn ending(&self, _sandbox: &SandboxId) -> Option<String> {
        None
    }

    /// Its holder is alive: where a sandbox's life is a clock, the clock is moved, and where it ends
    /// then is answered. `None` where its life is its lease's.
    ///
    /// # Errors
    /// As for any call.
    fn extend(
        &self,
        _sandbox: &SandboxId,
        _generation: Generation,
    ) -> impl Future<Output = Result<Option<Timestamp>, CallError>> + Send {
        async { Ok(None) }
    }
}

/// Sends the request over a fresh connection.
pub(crate) async fn send<S>(
    stream: S,
    host: &str,
    request: GuestRequest,
) -> Result<GuestAnswer, CallError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let reading = request.reading;
    let mut head = Request::builder()
        .method(request.method)
        .uri(request.path)
        .header(http::header::HOST, host);
    for (name, value) in request.headers {
        head = head.header(name, value);
    }
    // A path or a value that HTTP cannot carry: it was never sent.
    let request = head
        .body(Full::new(request.body))
        .map_err(|_| CallError::Refused)?;
    let no_answer = |_: hyper::Error| CallError::NoAnswer;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(no_answer)?;
    let answer = async {
        let response = sender.send_request(request).await.map_err(no_answer)?;
        let (head, body) = response.into_parts();
        Ok(GuestAnswer {
            status: head.status,
            body: read(body, reading).await?,
        })
    };
    // The connection is driven beside the exchange and ends with it.
    tokio::pin!(answer, connection);
    tokio::select! {
        answer = &mut answer => answer,
        ended = &mut connection => {
            ended.map_err(no_answer)?;
            answer.await
        }
    }
}

/// Reads of a body what is wanted.
pub(crate) async fn read<B>(mut body: B, reading: Reading) -> Result<Bytes, CallError>
where
    B: hyper::body::Body<Data = Bytes> + Unpin,
{
    let mut kept = BytesMut::new();
    loop {
        if reading == Reading::FirstMessage && has_message(&kept) {
            return Ok(kept.freeze());
        }
        let Some(frame) = body.frame().await else {
            return Ok(kept.freeze());
        };
        let frame = frame.map_err(|_| CallError::NoAnswer)?;
        let data = frame.data_ref().map_or(&[][..], |data| &data[..]);
        let bytes_max = match reading {
            Reading::Whole { bytes_max } => bytes_max,
            Reading::FirstMessage => FIRST_MESSAGE_BYTES_MAX,
        };
        if kept.len() + data.len() > bytes_max {
            return Err(CallError::NoAnswer);
        }
        kept.extend_from_slice(data);
    }
}

/// The most that is read while waiting for the first message of a stream.
const FIRST_MESSAGE_BYTES_MAX: usize = 64 * 1024;

fn has_message(bytes: &[u8]) -> bool {
    messages(bytes).next().is_some()
}

/// The whole messages of a Connect stream.
pub(crate) fn messages(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let prefix = bytes.get(..PREFIX_BYTES)?;
        let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
        let length = usize::try_from(length).ok()?;
        let message = bytes.get(PREFIX_BYTES..PREFIX_BYTES.checked_add(length)?)?;
        bytes = &bytes[PREFIX_BYTES + length..];
        Some(message)
    })
}

/// A request's only message, with its prefix.
pub(crate) fn enveloped(message: &serde_json::Value) -> Bytes {
    let text = message.to_string();
    let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
    let mut envelope = Vec::with_capacity(PREFIX_BYTES + text.len());
    envelope.push(0);
    envelope.extend(length.to_be_bytes());
    envelope.extend(text.as_bytes());
    Bytes::from(envelope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_more_is_read_than_is_wanted() {
        let body = || Full::new(Bytes::from(vec![0; 100]));
        let whole = |bytes_max| Reading::Whole { bytes_max };
        assert_eq!(read(body(), whole(100)).await.unwrap().len(), 100);
        assert_eq!(read(body(), whole(99)).await, Err(CallError::NoAnswer));
    }

    #[test]
    fn hostile_streams_have_no_messages_that_are_not_whole() {
        let message = serde_json::json!({"a": 1});
        let stream = [&enveloped(&message)[..], &[0, 255, 255, 255, 255, 1]].concat();
        assert_eq!(messages(&stream).collect::<Vec<_>>(), [b"{\"a\":1}"]);
        for length in 0..stream.len() {
            assert!(messages(&stream[..length]).count() <= 1);
        }
    }
}
