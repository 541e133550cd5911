//! Reads the rest of a refused upload before the refusal is sent.
//!
//! A client that sends a large body reads the answer only afterwards. If the server answers early
//! and closes, the rest of the body meets a closed connection, the reset overtakes the answer, and
//! the client sees a broken connection instead of "no space". So the rest is read and thrown away,
//! within bounds.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use axum::{body::Body, extract::Request, middleware::Next, response::Response};
use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};

/// More than this is not read for the sake of an error.
const DRAIN_BYTES_MAX: usize = 512 << 20;
/// Nor longer.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(30);

/// Answers a request; if the answer is an error, after its body.
pub async fn drain_refused(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let body = SharedBody(Arc::new(Mutex::new(body)));
    let forwarded = Request::from_parts(parts, Body::new(body.clone()));
    let response = next.run(forwarded).await;
    let status = response.status();
    if (status.is_client_error() || status.is_server_error()) && !body.is_end_stream() {
        // If the client takes longer, it may well miss the answer.
        let _ = tokio::time::timeout(DRAIN_TIME_MAX, body.drain()).await;
    }
    response
}

/// A body that can be read on after its reader has given up.
#[derive(Debug, Clone)]
struct SharedBody(Arc<Mutex<Body>>);

impl SharedBody {
    fn lock(&self) -> MutexGuard<'_, Body> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn drain(mut self) {
        let mut drained = 0usize;
        while drained < DRAIN_BYTES_MAX {
            let frame = std::future::poll_fn(|context| Pin::new(&mut self).poll_frame(context));
            match frame.await {
                Some(Ok(frame)) => drained += frame.data_ref().map_or(0, Bytes::len),
                Some(Err(_)) | None => return,
            }
        }
    }
}

impl http_body::Body for SharedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut *self.lock()).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.lock().is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.lock().size_hint()
    }
}
