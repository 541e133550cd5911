//! Copies of a living sandbox, 1 to N in one call (R-T2).
//!
//! ```text
//!   temporary snapshot ─▶ N creates from it, some at a time, each through the door of every create
//!        ├─ all there, or failures are to be told ─▶ the snapshot goes ─▶ answer
//!        └─ one failed, all or nothing ─▶ what was made goes ─▶ the snapshot goes ─▶ that error
//! ```
//!
//! Invariants:
//! - The temporary snapshot goes before anybody is told of a copy. While it is there, its copies count as
//!   unfinished, and a server that begins anew removes them with it.
//! - It goes on to its end though the caller hangs up.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream::FuturesUnordered};
use http::StatusCode;
use sandhold_platform::{
    CreateSandbox, Owner, PauseKeeps, SandboxView, SnapshotKind, SnapshotView, TakeSnapshot,
};
use sandhold_types::{Actor, Deadline, RequestId};

use super::{
    create::{carry_out, to_its_end},
    governor::direct,
    sandboxes::{find, half_way, within},
};
use crate::{
    ApiState,
    auth::Caller,
    error::{ApiError, ErrorBody},
    request::{JsonBody, Meta, Segment},
    wire::{
        sandbox::SandboxBody,
        travel::{ClonesRequest, Copies, CopyBody, ForkRequest, OnFailure},
    },
};

/// What became of each copy.
type Made = Vec<Result<Arc<SandboxView>, ApiError>>;

/// `POST /sandboxes/{id}/fork`
pub(crate) async fn fork(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    JsonBody(body): JsonBody<ForkRequest>,
) -> Result<Response, ApiError> {
    let (source, _) = find(&state, &caller, &id)?;
    let copies = body.copies(&source, &state.settings.limits, state.clock.now())?;
    make(state, &caller, &meta, source, copies).await
}

/// `POST /sandboxes/{id}/clones`: copies of a living sandbox.
#[utoipa::path(
    post,
    path = "/sandboxes/{id}/clones",
    params(("id" = String, Path, description = "The sandbox that is copied")),
    request_body = ClonesRequest,
    responses(
        (status = 201, description = "For each copy `sandbox` as a create answers it, or `error`"),
        (status = 400, description = "More copies than may be made at once", body = ErrorBody),
        (status = 404, description = "No such sandbox of this key", body = ErrorBody),
        (status = 503, description = "No room for all of them; none is left", body = ErrorBody),
    ),
    security(("api_key" = []))
)]
pub(crate) async fn clones(
    State(state): State<ApiState>,
    caller: Caller,
    meta: Meta,
    Segment(id): Segment,
    JsonBody(body): JsonBody<ClonesRequest>,
) -> Result<Response, ApiError> {
    let (source, _) = find(&state, &caller, &id)?;
    let copies = body.copies(&source, &state.settings.limits, state.clock.now())?;
    make(state, &caller, &meta, source, copies).await
}

async fn make(
    state: ApiState,
    caller: &Caller,
    meta: &Meta,
    source: Arc<SandboxView>,
    copies: Copies,
) -> Result<Response, ApiError> {
    let job = Job {
        deadline: meta.deadline(state.settings.budgets.travel),
        owner: caller.owner(),
        request: meta.id.clone(),
        actor: caller.actor(meta),
        state: state.clone(),
        source,
        copies,
    };
    let made = to_its_end(job.run()).await?;
    let body = |copy: &Result<Arc<SandboxView>, ApiError>| match copy {
        Ok(view) => CopyBody::Sandbox(SandboxBody::of(view, &state.settings)),
        Err(error) => CopyBody::Error(error.into()),
    };
    let bodies: Vec<_> = made.iter().map(body).collect();
    Ok((StatusCode::CREATED, Json(bodies)).into_response())
}

/// One call.
struct Job {
    state: ApiState,
    owner: Owner,
    request: RequestId,
    actor: Actor,
    source: Arc<SandboxView>,
    copies: Copies,
    deadline: Deadline,
}

impl Job {
    async fn run(self) -> Result<Made, ApiError> {
        let snapshot = self.snapshot().await?;
        let mut made = self.make_all(&snapshot).await;
        let failed = made.iter().any(Result::is_err);
        if failed && self.copies.on_failure == OnFailure::RemoveAll {
            self.remove(&made).await;
            let failure = made.drain(..).find_map(Result::err);
            self.forget(&snapshot).await?;
            return Err(failure.unwrap_or(ApiError::Panicked));
        }
        if let Err(error) = self.forget(&snapshot).await {
            // They would be taken for unfinished after a restart.
            self.remove(&made).await;
            return Err(error);
        }
        Ok(made)
    }

    async fn snapshot(&self) -> Result<Arc<SnapshotView>, ApiError> {
        let wanted = TakeSnapshot {
            name: None,
            kind: SnapshotKind::Temporary,
            keeps: PauseKeeps::Everything,
        };
        let (id, actor) = (&self.source.id, self.actor.clone());
        let travel = &self.state.travel;
        let taking = travel.take_snapshot(id, wanted, actor, self.deadline);
        within(self.deadline, "capturing the sandbox", taking).await
    }

    async fn forget(&self, snapshot: &SnapshotView) -> Result<(), ApiError> {
        Ok(self.state.travel.delete_snapshot(&snapshot.id).await?)
    }

    /// Makes the copies, some at a time. After a failure that takes all with it no further one is
    /// begun.
    async fn make_all(&self, snapshot: &SnapshotView) -> Made {
        let mut under_way = FuturesUnordered::new();
        let mut made = Vec::with_capacity(self.copies.count);
        let mut left = self.copies.count;
        loop {
            while left > 0 && under_way.len() < self.copies.concurrency {
                under_way.push(self.make_one(snapshot));
                left -= 1;
            }
            let Some(copy) = under_way.next().await else {
                return made;
            };
            if copy.is_err() && self.copies.on_failure == OnFailure::RemoveAll {
                left = 0;
            }
            made.push(copy);
        }
    }

    async fn make_one(&self, snapshot: &SnapshotView) -> Result<Arc<SandboxView>, ApiError> {
        let bucket = sandhold_store::Bucket {
            namespace: self.owner.namespace.clone(),
            env: self.owner.env.clone(),
        };
        let turn = self
            .state
            .gate
            .enter(&bucket, half_way(self.deadline))
            .await?;
        let asked = self.state.clock.now();
        let wanted = self.copy_of(snapshot);
        carry_out(self.state.clone(), wanted, asked, self.deadline, turn).await
    }

    /// The source again, with a life of its own.
    fn copy_of(&self, snapshot: &SnapshotView) -> CreateSandbox {
        let source = &self.source;
        CreateSandbox {
            owner: self.owner.clone(),
            request: self.request.clone(),
            template: snapshot.id.to_string(),
            lifetime: self.copies.lifetime,
            auto_resume: source.auto_resume,
            busy_with: source.busy_with,
            timeout_keeps: source.timeout_keeps,
            metadata: source.metadata.clone(),
            // Those of the source are in the snapshot.
            env_vars: std::collections::BTreeMap::new(),
            egress: source.egress.clone(),
            public_traffic: source.public_traffic,
            mask_request_host: source.mask_request_host.clone(),
            domain: source.domain.clone(),
        }
    }

    /// Removes the copies that were made. One that cannot be removed now is on its way, and the node
    /// goes on with it.
    async fn remove(&self, made: &Made) {
        let removals = made.iter().flatten().map(|view| async move {
            let deadline = Deadline::after(
                tokio::time::Instant::now().into_std(),
                self.state.settings.budgets.other,
            );
            let kill = self
                .state
                .platform
                .kill(&view.id, self.actor.clone(), deadline);
            match within(deadline, "removing a copy", kill).await {
                Ok(()) => direct::gone(&self.state, &view.id).await,
                Err(error) => tracing::warn!(sandbox = %view.id, %error, "a copy is left"),
            }
        });
        futures::future::join_all(removals).await;
    }
}
