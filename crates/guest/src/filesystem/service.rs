//! The methods of `filesystem.Filesystem` (wire contract 2.3).

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use connectrpc::{
    ConnectError, RequestContext, Response, Router, ServiceResult, ServiceStream,
    handler::{handler_fn, streaming_handler_fn},
};
use futures::stream;
use sandhold_agent_proto::filesystem::{self as proto, SERVICE};
use sandhold_types::{Entropy as _, SystemEntropy};
use tokio::{sync::mpsc, time::Instant};

use crate::{
    account::{Account, OwnerNames},
    activity::{ActivityMeter, StreamGuard},
    filesystem::{
        error::connect_error,
        operations::{self, OperationError},
        watch::{self, EVENTS_MAX, WatchError, WatchPlan},
    },
    paths,
    process::table::sleep_until,
    rights::with_rights,
    rpc::{caller, keepalive_interval},
    state::SandboxState,
};

/// Watchers for clients that poll, at once.
pub const WATCHERS_MAX: usize = 256;

/// The service and what it works with. Cheap to clone.
#[derive(Debug, Clone)]
pub struct FilesystemService {
    state: Arc<SandboxState>,
    activity: ActivityMeter,
    watchers: Arc<Mutex<HashMap<String, mpsc::Receiver<proto::FilesystemEvent>>>>,
}

impl FilesystemService {
    /// A service without watchers.
    #[must_use]
    pub fn new(state: Arc<SandboxState>, activity: ActivityMeter) -> Self {
        Self {
            state,
            activity,
            watchers: Arc::default(),
        }
    }

    /// Adds the methods to a router.
    #[must_use]
    pub fn register(&self, router: Router) -> Router {
        macro_rules! unary {
            ($router:expr, $name:literal, $method:ident, $request:ty, $response:ty) => {{
                let service = self.clone();
                $router.route::<_, $request, $response>(
                    SERVICE,
                    $name,
                    handler_fn(move |context: RequestContext, request| {
                        let service = service.clone();
                        async move {
                            Response::ok(service.$method(&context, request).await?)
                                as ServiceResult<$response>
                        }
                    }),
                )
            }};
        }
        use proto as p;
        let router = unary!(router, "Stat", stat, p::StatRequest, p::StatResponse);
        let router = unary!(
            router,
            "MakeDir",
            make_dir,
            p::MakeDirRequest,
            p::MakeDirResponse
        );
        let router = unary!(router, "Move", rename, p::MoveRequest, p::MoveResponse);
        let router = unary!(
            router,
            "ListDir",
            list,
            p::ListDirRequest,
            p::ListDirResponse
        );
        let router = unary!(
            router,
            "Remove",
            remove,
            p::RemoveRequest,
            p::RemoveResponse
        );
        let router = unary!(
            router,
            "CreateWatcher",
            create_watcher,
            p::CreateWatcherRequest,
            p::CreateWatcherResponse
        );
        let router = unary!(
            router,
            "GetWatcherEvents",
            watcher_events,
            p::GetWatcherEventsRequest,
            p::GetWatcherEventsResponse
        );
        let router = unary!(
            router,
            "RemoveWatcher",
            remove_watcher,
            p::RemoveWatcherRequest,
            p::RemoveWatcherResponse
        );
        let service = self.clone();
        router.route_server_stream::<_, p::WatchDirRequest, p::WatchDirResponse>(
            SERVICE,
            "WatchDir",
            streaming_handler_fn(move |context, request| {
                let service = service.clone();
                async move { service.watch(context, request).await }
            }),
        )
    }

    async fn stat(
        &self,
        context: &RequestContext,
        request: proto::StatRequest,
    ) -> Result<proto::StatResponse, ConnectError> {
        let (account, path) = self.subject(context, &request.path)?;
        let entry = self
            .as_user(account, &path, |path, names| {
                Ok(super::entry::describe(path, names)?)
            })
            .await?;
        Ok(proto::StatResponse {
            entry: entry.into(),
        })
    }

    async fn make_dir(
        &self,
        context: &RequestContext,
        request: proto::MakeDirRequest,
    ) -> Result<proto::MakeDirResponse, ConnectError> {
        let (account, path) = self.subject(context, &request.path)?;
        let entry = self.as_user(account, &path, operations::make_dir).await?;
        Ok(proto::MakeDirResponse {
            entry: entry.into(),
        })
    }

    async fn rename(
        &self,
        context: &RequestContext,
        request: proto::MoveRequest,
    ) -> Result<proto::MoveResponse, ConnectError> {
        let (account, source) = self.subject(context, &request.source)?;
        let (_, destination) = self.subject(context, &request.destination)?;
        let entry = self
            .as_user(account, &source, move |source, names| {
                operations::rename(source, &destination, names)
            })
            .await?;
        Ok(proto::MoveResponse {
            entry: entry.into(),
        })
    }

    async fn list(
        &self,
        context: &RequestContext,
        request: proto::ListDirRequest,
    ) -> Result<proto::ListDirResponse, ConnectError> {
        let (account, path) = self.subject(context, &request.path)?;
        let depth = request.depth;
        let entries = self
            .as_user(account, &path, move |path, names| {
                operations::list(path, depth, names)
            })
            .await?;
        Ok(proto::ListDirResponse { entries })
    }

    async fn remove(
        &self,
        context: &RequestContext,
        request: proto::RemoveRequest,
    ) -> Result<proto::RemoveResponse, ConnectError> {
        let (account, path) = self.subject(context, &request.path)?;
        self.as_user(account, &path, |path, _| operations::remove(path))
            .await?;
        Ok(proto::RemoveResponse {})
    }

    async fn watch(
        &self,
        context: RequestContext,
        request: proto::WatchDirRequest,
    ) -> ServiceResult<ServiceStream<proto::WatchDirResponse>> {
        let (account, path) = self.subject(&context, &request.path)?;
        let plan = WatchPlan {
            path,
            recursive: request.recursive,
            include_entry: request.include_entry,
            allow_network_mounts: request.allow_network_mounts,
            account,
        };
        let watching = Watching {
            events: self.begin_watch(plan).await?,
            phase: Phase::Start,
            keepalive: keepalive_interval(context.headers()),
            deadline: context.deadline().map(Instant::from_std),
            _guard: self.activity.begin_stream(),
        };
        Response::stream_ok(stream::unfold(watching, Watching::step))
    }

    async fn create_watcher(
        &self,
        context: &RequestContext,
        request: proto::CreateWatcherRequest,
    ) -> Result<proto::CreateWatcherResponse, ConnectError> {
        let (account, path) = self.subject(context, &request.path)?;
        let plan = WatchPlan {
            path,
            recursive: request.recursive,
            include_entry: request.include_entry,
            allow_network_mounts: request.allow_network_mounts,
            account,
        };
        if self.watchers().len() >= WATCHERS_MAX {
            return Err(too_many_watchers());
        }
        let events = self.begin_watch(plan).await?;
        let watcher_id = fresh_id();
        let mut watchers = self.watchers();
        if watchers.len() >= WATCHERS_MAX {
            return Err(too_many_watchers());
        }
        watchers.insert(watcher_id.clone(), events);
        Ok(proto::CreateWatcherResponse { watcher_id })
    }

    async fn watcher_events(
        &self,
        _context: &RequestContext,
        request: proto::GetWatcherEventsRequest,
    ) -> Result<proto::GetWatcherEventsResponse, ConnectError> {
        let mut watchers = self.watchers();
        let watcher = watchers
            .get_mut(&request.watcher_id)
            .ok_or_else(|| no_watcher(&request.watcher_id))?;
        let events = std::iter::from_fn(|| watcher.try_recv().ok())
            .take(EVENTS_MAX)
            .collect();
        Ok(proto::GetWatcherEventsResponse { events })
    }

    async fn remove_watcher(
        &self,
        _context: &RequestContext,
        request: proto::RemoveWatcherRequest,
    ) -> Result<proto::RemoveWatcherResponse, ConnectError> {
        self.watchers()
            .remove(&request.watcher_id)
            .ok_or_else(|| no_watcher(&request.watcher_id))?;
        Ok(proto::RemoveWatcherResponse {})
    }

    async fn begin_watch(
        &self,
        plan: WatchPlan,
    ) -> Result<mpsc::Receiver<proto::FilesystemEvent>, ConnectError> {
        let subject = plan.path.to_string_lossy().into_owned();
        watch::start(plan, Arc::clone(&self.state))
            .await
            .map_err(|error| watch_error(&subject, error))
    }

    /// Who asks, and for which path.
    fn subject(
        &self,
        context: &RequestContext,
        path: &str,
    ) -> Result<(Account, PathBuf), ConnectError> {
        let account = caller(context.headers(), &self.state)?;
        let workdir = self.state.workdir(&account);
        let path = paths::resolve(path, &account.home, &workdir)
            .map_err(|error| ConnectError::invalid_argument(error.to_string()))?;
        Ok((account, path))
    }

    /// Does the work on a blocking thread, with the user's rights.
    async fn as_user<T, F>(&self, account: Account, path: &Path, work: F) -> Result<T, ConnectError>
    where
        T: Send + 'static,
        F: FnOnce(&Path, &OwnerNames) -> Result<T, OperationError> + Send + 'static,
    {
        let state = Arc::clone(&self.state);
        let owned_path = path.to_path_buf();
        let result = tokio::task::spawn_blocking(move || {
            let names = state.accounts.names();
            with_rights(&account, || work(&owned_path, &names)).map_err(OperationError::Kernel)?
        })
        .await
        .map_err(|_| ConnectError::unavailable("the agent is stopping"))?;
        result.map_err(|error| operation_error(&path.to_string_lossy(), error))
    }

    fn watchers(&self) -> MutexGuard<'_, HashMap<String, mpsc::Receiver<proto::FilesystemEvent>>> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Start,
    Live,
    Over,
}

/// Where one stream of events is.
struct Watching {
    events: mpsc::Receiver<proto::FilesystemEvent>,
    phase: Phase,
    keepalive: std::time::Duration,
    deadline: Option<Instant>,
    _guard: StreamGuard,
}

impl Watching {
    async fn step(mut self) -> Option<(Result<proto::WatchDirResponse, ConnectError>, Self)> {
        let event = match self.phase {
            Phase::Over => return None,
            Phase::Start => {
                self.phase = Phase::Live;
                Ok(response(proto::watch_dir_response::StartEvent {}))
            }
            Phase::Live => self.next_event().await?,
        };
        Some((event, self))
    }

    async fn next_event(&mut self) -> Option<Result<proto::WatchDirResponse, ConnectError>> {
        tokio::select! {
            biased;
            () = sleep_until(self.deadline) => {
                self.phase = Phase::Over;
                Some(Err(ConnectError::deadline_exceeded("the timeout of the call has passed")))
            }
            event = self.events.recv() => event.map(|event| Ok(response(event))),
            () = tokio::time::sleep(self.keepalive) => {
                Some(Ok(response(proto::watch_dir_response::KeepAlive {})))
            }
        }
    }
}

fn response(event: impl Into<proto::oneof::watch_dir_response::Event>) -> proto::WatchDirResponse {
    proto::WatchDirResponse {
        event: Some(event.into()),
    }
}

fn fresh_id() -> String {
    let mut bytes = [0u8; 12];
    SystemEntropy.fill(&mut bytes);
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("w{digits}")
}

fn no_watcher(id: &str) -> ConnectError {
    let id: String = id.chars().take(80).collect();
    ConnectError::not_found(format!("watcher with id {id} not found"))
}

fn too_many_watchers() -> ConnectError {
    ConnectError::resource_exhausted(format!("{WATCHERS_MAX} watchers exist already"))
}

fn operation_error(subject: &str, error: OperationError) -> ConnectError {
    let message = format!("{subject}: {error}");
    match error {
        OperationError::Kernel(error) => connect_error(subject, &error),
        OperationError::Exists => ConnectError::already_exists(message),
        OperationError::NotADirectory | OperationError::ExistsOtherwise | OperationError::Root => {
            ConnectError::invalid_argument(message)
        }
        OperationError::TooMany => ConnectError::resource_exhausted(message),
    }
}

fn watch_error(subject: &str, error: WatchError) -> ConnectError {
    let message = format!("{subject}: {error}");
    match error {
        WatchError::Kernel(error) => connect_error(subject, &error),
        WatchError::NotADirectory | WatchError::NetworkMount => {
            ConnectError::invalid_argument(message)
        }
        WatchError::TooManyDirectories => ConnectError::resource_exhausted(message),
        WatchError::Stopping => ConnectError::unavailable(message),
    }
}
