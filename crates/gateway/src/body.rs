//! Bodies on their way through, frame by frame, never collected.
//!
//! ```text
//!   client ── UploadBody ──▶ sandbox       each frame: note use, pass on
//!   client ◀── ReplyBody ─── sandbox       at the end: give the connection back
//! ```
//!
//! Backpressure is hyper's own: a frame is taken from one side when the other has room, so memory
//! per request is a few buffers whatever is sent (BC-011, BC-013, BC-059). Trailers are frames too.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::{activity::Usage, metered::Meter, pool::Lease, serve::UnderWay};

/// Why a body ended before its end.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, thiserror::Error)]
#[error("neither side sent anything for too long")]
struct WentIdle;

#[derive(Debug, thiserror::Error)]
#[error("the sandbox was put to sleep or ended")]
struct Cut;

/// What a client sends, on its way into a sandbox.
#[derive(Debug)]
pub(crate) struct UploadBody {
    /// Nothing, for requests without a body and for upgrades.
    incoming: Option<Incoming>,
    usage: Arc<Usage>,
}

impl UploadBody {
    pub(crate) fn new(incoming: Incoming, usage: Arc<Usage>) -> Self {
        if incoming.is_end_stream() {
            return Self::empty(usage);
        }
        Self {
            incoming: Some(incoming),
            usage,
        }
    }

    pub(crate) fn empty(usage: Arc<Usage>) -> Self {
        usage.upload_completed();
        Self {
            incoming: None,
            usage,
        }
    }

    /// Another body just like this one, if it has no bytes.
    pub(crate) fn replay(&self) -> Option<Self> {
        match self.incoming {
            Some(_) => None,
            None => Some(Self::empty(Arc::clone(&self.usage))),
        }
    }
}

impl Body for UploadBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(incoming) = self.incoming.as_mut() else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(&mut *incoming).poll_frame(cx));
        let is_last = match &frame {
            None => true,
            Some(Ok(_)) => incoming.is_end_stream(),
            Some(Err(_)) => false,
        };
        self.usage.moved();
        if is_last {
            self.usage.upload_completed();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

/// What a client is answered: by the gateway, by a sandbox, or by the API.
#[derive(Debug)]
pub struct ReplyBody {
    source: Source,
    /// Says that the request has ended when the body is dropped.
    under_way: Option<UnderWay>,
}

#[derive(Debug)]
enum Source {
    Whole(Option<Bytes>),
    Sandbox(Box<Relayed>),
    Api(axum::body::Body),
}

#[derive(Debug)]
struct Relayed {
    incoming: Incoming,
    usage: Arc<Usage>,
    /// Goes back to the pool at the end of the body; dropped before it, it closes.
    lease: Option<Lease>,
    /// Made when the sandbox first keeps us waiting.
    idle: Option<Pin<Box<Sleep>>>,
    /// Likewise.
    cut: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

impl From<Source> for ReplyBody {
    fn from(source: Source) -> Self {
        Self {
            source,
            under_way: None,
        }
    }
}

impl ReplyBody {
    /// The same body; `under_way` lives as long as it does.
    pub(crate) fn until_dropped(mut self, under_way: UnderWay) -> Self {
        self.under_way = Some(under_way);
        self
    }

    pub(crate) fn full(bytes: Bytes) -> Self {
        Source::Whole(Some(bytes)).into()
    }

    pub(crate) fn empty() -> Self {
        Source::Whole(None).into()
    }

    pub(crate) fn api(body: axum::body::Body) -> Self {
        Source::Api(body).into()
    }

    pub(crate) fn relayed(incoming: Incoming, usage: Arc<Usage>, lease: Lease) -> Self {
        let mut relayed = Relayed {
            incoming,
            usage,
            lease: Some(lease),
            idle: None,
            cut: None,
        };
        if relayed.incoming.is_end_stream() {
            relayed.finish();
        } else if let Some(lease) = &mut relayed.lease
            && !relayed.usage.is_upload_complete()
        {
            lease.connection().detach();
        }
        Source::Sandbox(Box::new(relayed)).into()
    }
}

impl Relayed {
    fn finish(&mut self) {
        if let Some(lease) = self.lease.take() {
            // While the upload still goes on, the connection is not free.
            if self.usage.is_upload_complete() {
                lease.give_back();
            }
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.poll_incoming(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                self.usage.moved();
                if self.incoming.is_end_stream() {
                    self.finish();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error.into()))),
            Poll::Ready(None) => {
                self.finish();
                Poll::Ready(None)
            }
            Poll::Pending => {
                if self.poll_cut(cx).is_ready() {
                    return Poll::Ready(Some(Err(Cut.into())));
                }
                self.poll_idle(cx).map(|()| Some(Err(WentIdle.into())))
            }
        }
    }

    fn poll_incoming(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Self {
            incoming, lease, ..
        } = self;
        match lease {
            Some(lease) => lease
                .connection()
                .poll(cx, |cx| Pin::new(&mut *incoming).poll_frame(cx)),
            None => Pin::new(incoming).poll_frame(cx),
        }
    }

    /// Ready when the life of the sandbox is over from which the answer comes.
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(lease) = &mut self.lease else {
            return Poll::Pending;
        };
        let cut = self.cut.get_or_insert_with(|| {
            let life = lease.connection().life().clone();
            Box::pin(life.cancelled_owned())
        });
        cut.as_mut().poll(cx)
    }

    /// Ready when nothing has moved for too long.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let idle_at = self.usage.idle_at();
        let idle = self
            .idle
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(idle_at)));
        while idle.as_mut().poll(cx).is_ready() {
            let idle_at = self.usage.idle_at();
            if Instant::now() >= idle_at {
                return Poll::Ready(());
            }
            idle.as_mut().reset(idle_at);
        }
        Poll::Pending
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut self.source {
            Source::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Source::Sandbox(relayed) => relayed.poll(cx),
            Source::Api(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Whole(bytes) => bytes.is_none(),
            Source::Sandbox(relayed) => relayed.incoming.is_end_stream(),
            Source::Api(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Whole(bytes) => {
                let length = bytes.as_ref().map_or(0, Bytes::len);
                SizeHint::with_exact(u64::try_from(length).unwrap_or(u64::MAX))
            }
            Source::Sandbox(relayed) => relayed.incoming.size_hint(),
            Source::Api(body) => body.size_hint(),
        }
    }
}
