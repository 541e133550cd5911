//! The methods of `process.Process` (wire contract 2.3).

use std::{sync::Arc, time::Duration};

use connectrpc::{
    ConnectError, RequestContext, Response, Router, ServiceResult, ServiceStream,
    handler::{client_streaming_handler_fn, handler_fn, streaming_handler_fn},
};
use futures::{StreamExt as _, stream};
use rustix::process::Signal;
use sandhold_agent_proto::process::{self as proto, SERVICE};
use tokio::time::Instant;

use crate::{
    activity::{ActivityMeter, StreamGuard},
    paths,
    process::{
        exit::Ending,
        launch::{LaunchError, LaunchPlan, StdioPlan, TerminalSize},
        output::{Reader, Source, Update},
        table::{
            InputError, InputKind, Label, Process, ProcessTable, Selector, StartError, sleep_until,
        },
    },
    rpc::{caller, keepalive_interval},
    state::SandboxState,
};

/// The service and what it works with. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ProcessService {
    /// The sandbox.
    pub state: Arc<SandboxState>,
    /// The processes.
    pub table: ProcessTable,
    /// Who counts open streams.
    pub activity: ActivityMeter,
}

impl ProcessService {
    /// Adds the methods to a router.
    #[must_use]
    pub fn register(&self, router: Router) -> Router {
        macro_rules! unary {
            ($method:ident) => {{
                let service = self.clone();
                handler_fn(move |context, request| {
                    let service = service.clone();
                    async move { service.$method(context, request).await }
                })
            }};
        }
        macro_rules! server_stream {
            ($method:ident) => {{
                let service = self.clone();
                streaming_handler_fn(move |context, request| {
                    let service = service.clone();
                    async move { service.$method(context, request).await }
                })
            }};
        }
        let stream_input = {
            let service = self.clone();
            client_streaming_handler_fn(move |_context, requests| {
                let service = service.clone();
                async move { service.stream_input(requests).await }
            })
        };
        router
            .route::<_, proto::ListRequest, proto::ListResponse>(SERVICE, "List", unary!(list))
            .route::<_, proto::UpdateRequest, proto::UpdateResponse>(
                SERVICE,
                "Update",
                unary!(update),
            )
            .route::<_, proto::SendInputRequest, proto::SendInputResponse>(
                SERVICE,
                "SendInput",
                unary!(send_input),
            )
            .route::<_, proto::SendSignalRequest, proto::SendSignalResponse>(
                SERVICE,
                "SendSignal",
                unary!(send_signal),
            )
            .route::<_, proto::CloseStdinRequest, proto::CloseStdinResponse>(
                SERVICE,
                "CloseStdin",
                unary!(close_stdin),
            )
            .route_server_stream::<_, proto::StartRequest, proto::StartResponse>(
                SERVICE,
                "Start",
                server_stream!(start),
            )
            .route_server_stream::<_, proto::ConnectRequest, proto::ConnectResponse>(
                SERVICE,
                "Connect",
                server_stream!(connect),
            )
            .route_client_stream::<_, proto::StreamInputRequest, proto::StreamInputResponse>(
                SERVICE,
                "StreamInput",
                stream_input,
            )
    }

    async fn start(
        &self,
        context: RequestContext,
        request: proto::StartRequest,
    ) -> ServiceResult<ServiceStream<proto::StartResponse>> {
        let (plan, label) = self.plan(&context, request)?;
        let deadline = context.deadline().map(Instant::from_std);
        let started = self
            .table
            .start(plan, label, deadline)
            .await
            .map_err(start_error)?;
        let events = self.events(
            &context,
            started.process.pid,
            started.reader,
            WhoseDeadline::Process,
        );
        Response::stream_ok(events.map(|event| {
            event.map(|event| proto::StartResponse {
                event: event.into(),
            })
        }))
    }

    async fn connect(
        &self,
        context: RequestContext,
        request: proto::ConnectRequest,
    ) -> ServiceResult<ServiceStream<proto::ConnectResponse>> {
        let selector = selector(request.process.into_option())?;
        let process = self.table.find(&selector).ok_or_else(|| gone(&selector))?;
        let events = self.events(
            &context,
            process.pid,
            process.log.subscribe(),
            WhoseDeadline::Call,
        );
        Response::stream_ok(events.map(|event| {
            event.map(|event| proto::ConnectResponse {
                event: event.into(),
            })
        }))
    }

    async fn list(
        &self,
        _context: RequestContext,
        _request: proto::ListRequest,
    ) -> ServiceResult<proto::ListResponse> {
        let processes = self.table.list();
        Response::ok(proto::ListResponse {
            processes: processes.iter().map(|process| info(process)).collect(),
        })
    }

    async fn update(
        &self,
        _context: RequestContext,
        request: proto::UpdateRequest,
    ) -> ServiceResult<proto::UpdateResponse> {
        let process = self.running(request.process.into_option())?;
        let size = request
            .pty
            .into_option()
            .and_then(|pty| pty.size.into_option());
        // A size of zero comes from a hidden window and is ignored (BC-027).
        if let Some(size) = size.and_then(|size| TerminalSize::new(size.cols, size.rows)) {
            process.resize(size).map_err(input_error)?;
        }
        Response::ok(proto::UpdateResponse {})
    }

    async fn send_input(
        &self,
        _context: RequestContext,
        request: proto::SendInputRequest,
    ) -> ServiceResult<proto::SendInputResponse> {
        let process = self.running(request.process.into_option())?;
        write_input(&process, request.input.into_option()).await?;
        Response::ok(proto::SendInputResponse {})
    }

    async fn stream_input(
        &self,
        mut requests: ServiceStream<proto::StreamInputRequest>,
    ) -> ServiceResult<proto::StreamInputResponse> {
        use proto::oneof::stream_input_request::Event;

        let _guard = self.activity.begin_stream();
        let mut process: Option<Arc<Process>> = None;
        while let Some(request) = requests.next().await {
            match request?.event {
                Some(Event::Start(start)) => {
                    process = Some(self.running(start.process.into_option())?);
                }
                Some(Event::Data(data)) => {
                    let process = process.as_ref().ok_or_else(|| {
                        ConnectError::invalid_argument("the first message must be 'start'")
                    })?;
                    write_input(process, data.input.into_option()).await?;
                }
                Some(Event::Keepalive(_)) | None => {}
            }
        }
        Response::ok(proto::StreamInputResponse {})
    }

    async fn send_signal(
        &self,
        _context: RequestContext,
        request: proto::SendSignalRequest,
    ) -> ServiceResult<proto::SendSignalResponse> {
        let selector = selector(request.process.into_option())?;
        let process = self
            .table
            .running(&selector)
            .ok_or_else(|| gone(&selector))?;
        let signal = match request.signal.as_known() {
            Some(proto::Signal::SIGNAL_SIGKILL) => Signal::KILL,
            Some(proto::Signal::SIGNAL_SIGTERM) => Signal::TERM,
            _ => return Err(ConnectError::invalid_argument("unknown signal")),
        };
        if !process.signal(signal) {
            return Err(gone(&selector));
        }
        Response::ok(proto::SendSignalResponse {})
    }

    async fn close_stdin(
        &self,
        _context: RequestContext,
        request: proto::CloseStdinRequest,
    ) -> ServiceResult<proto::CloseStdinResponse> {
        let process = self.running(request.process.into_option())?;
        process.close_input().await.map_err(input_error)?;
        Response::ok(proto::CloseStdinResponse {})
    }

    fn running(
        &self,
        process: Option<proto::ProcessSelector>,
    ) -> Result<Arc<Process>, ConnectError> {
        let selector = selector(process)?;
        self.table.running(&selector).ok_or_else(|| gone(&selector))
    }

    fn plan(
        &self,
        context: &RequestContext,
        request: proto::StartRequest,
    ) -> Result<(LaunchPlan, Label), ConnectError> {
        let account = caller(context.headers(), &self.state)?;
        let config = request
            .process
            .into_option()
            .ok_or_else(|| ConnectError::invalid_argument("'process' is missing"))?;
        if config.cmd.is_empty() {
            return Err(ConnectError::invalid_argument("'process.cmd' is empty"));
        }
        let workdir = self.state.workdir(&account);
        let directory =
            paths::resolve(config.cwd.as_deref().unwrap_or(""), &account.home, &workdir)
                .map_err(|error| ConnectError::invalid_argument(error.to_string()))?;
        let label = Label {
            command: config.cmd,
            arguments: config.args,
            variables: config.envs.into_iter().collect(),
            directory: config.cwd,
            tag: request.tag,
            of_template: false,
        };
        let mut environment = self.state.process_environment(&account);
        environment.extend(label.variables.clone());
        let stdio = match request.pty.into_option() {
            Some(pty) => StdioPlan::Terminal(
                pty.size
                    .into_option()
                    .and_then(|size| TerminalSize::new(size.cols, size.rows))
                    .unwrap_or(TerminalSize::DEFAULT),
            ),
            None if request.stdin == Some(false) => StdioPlan::NoInput,
            None => StdioPlan::Pipes,
        };
        let plan = LaunchPlan {
            program: label.command.clone(),
            arguments: label.arguments.clone(),
            environment,
            directory,
            account,
            stdio,
        };
        Ok((plan, label))
    }

    /// The events of a process: its start, its output, its end, and a sign of life in between.
    fn events(
        &self,
        context: &RequestContext,
        pid: u32,
        reader: Reader,
        whose: WhoseDeadline,
    ) -> impl futures::Stream<Item = Result<proto::ProcessEvent, ConnectError>> + Send + use<> {
        let call_deadline = context.deadline().map(Instant::from_std);
        let cursor = Cursor {
            pid,
            reader,
            phase: Phase::Start,
            keepalive: keepalive_interval(context.headers()),
            deadline: match whose {
                WhoseDeadline::Call => call_deadline,
                WhoseDeadline::Process => None,
            },
            whose,
            _guard: self.activity.begin_stream(),
        };
        stream::unfold(cursor, Cursor::step)
    }
}

/// Whose life the timeout of a call limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WhoseDeadline {
    /// The process dies at it (Start).
    Process,
    /// Only the stream ends at it (Connect).
    Call,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Start,
    Live,
    Over,
}

/// Where one stream of events is.
struct Cursor {
    pid: u32,
    reader: Reader,
    phase: Phase,
    keepalive: Duration,
    deadline: Option<Instant>,
    whose: WhoseDeadline,
    _guard: StreamGuard,
}

impl Cursor {
    async fn step(mut self) -> Option<(Result<proto::ProcessEvent, ConnectError>, Self)> {
        let event = match self.phase {
            Phase::Over => return None,
            Phase::Start => {
                self.phase = Phase::Live;
                Ok(start_event(self.pid))
            }
            Phase::Live => self.next_event().await,
        };
        Some((event, self))
    }

    async fn next_event(&mut self) -> Result<proto::ProcessEvent, ConnectError> {
        tokio::select! {
            biased;
            () = sleep_until(self.deadline) => {
                self.phase = Phase::Over;
                Err(ConnectError::deadline_exceeded("the timeout of the call has passed"))
            }
            update = self.reader.next() => self.event_of(update),
            () = tokio::time::sleep(self.keepalive) => Ok(keepalive_event()),
        }
    }

    fn event_of(&mut self, update: Update) -> Result<proto::ProcessEvent, ConnectError> {
        match update {
            Update::Data(source, bytes) => Ok(data_event(source, &bytes)),
            Update::End(ending) => {
                self.phase = Phase::Over;
                if ending.deadline_passed && self.whose == WhoseDeadline::Process {
                    return Err(ConnectError::deadline_exceeded(
                        "the timeout of the command has passed; the process was killed",
                    ));
                }
                Ok(end_event(ending))
            }
            Update::CutOff => {
                self.phase = Phase::Over;
                Err(ConnectError::resource_exhausted(
                    "this stream was not read for too long while another one was",
                ))
            }
        }
    }
}

async fn write_input(
    process: &Process,
    input: Option<proto::ProcessInput>,
) -> Result<(), ConnectError> {
    use proto::oneof::process_input::Input;

    let (kind, bytes) = match input.and_then(|input| input.input) {
        Some(Input::Stdin(bytes)) => (InputKind::Stdin, bytes),
        Some(Input::Pty(bytes)) => (InputKind::Pty, bytes),
        None => return Err(ConnectError::invalid_argument("'input' is missing")),
    };
    process.write(kind, &bytes).await.map_err(input_error)
}

fn selector(process: Option<proto::ProcessSelector>) -> Result<Selector, ConnectError> {
    use proto::oneof::process_selector::Selector as Choice;

    match process.and_then(|process| process.selector) {
        Some(Choice::Pid(pid)) => Ok(Selector::Pid(pid)),
        Some(Choice::Tag(tag)) => Ok(Selector::Tag(tag)),
        None => Err(ConnectError::invalid_argument(
            "'process' must name a pid or a tag",
        )),
    }
}

fn gone(selector: &Selector) -> ConnectError {
    ConnectError::not_found(match selector {
        Selector::Pid(pid) => format!("process with pid {pid} not found"),
        Selector::Tag(tag) => format!("process with tag '{tag}' not found"),
    })
}

fn start_error(error: StartError) -> ConnectError {
    let message = error.to_string();
    match error {
        StartError::TooMany => ConnectError::resource_exhausted(message),
        StartError::Launch(LaunchError::Terminal(_)) | StartError::Watch(_) => {
            ConnectError::internal(message)
        }
        StartError::Launch(LaunchError::Spawn { source, .. }) => match source.raw_os_error() {
            Some(libc::EAGAIN | libc::ENOMEM) => ConnectError::resource_exhausted(message),
            _ => ConnectError::invalid_argument(message),
        },
        StartError::Launch(_) => ConnectError::invalid_argument(message),
        StartError::Stopping => ConnectError::unavailable(message),
    }
}

fn input_error(error: InputError) -> ConnectError {
    ConnectError::failed_precondition(error.to_string())
}

fn info(process: &Process) -> proto::ProcessInfo {
    let label = &process.label;
    proto::ProcessInfo {
        config: proto::ProcessConfig {
            cmd: label.command.clone(),
            args: label.arguments.clone(),
            envs: label.variables.clone().into_iter().collect(),
            cwd: label.directory.clone(),
        }
        .into(),
        pid: process.pid,
        tag: label.tag.clone(),
    }
}

fn event(event: impl Into<proto::oneof::process_event::Event>) -> proto::ProcessEvent {
    proto::ProcessEvent {
        event: Some(event.into()),
    }
}

fn start_event(pid: u32) -> proto::ProcessEvent {
    event(proto::process_event::StartEvent { pid })
}

fn keepalive_event() -> proto::ProcessEvent {
    event(proto::process_event::KeepAlive {})
}

fn data_event(source: Source, bytes: &[u8]) -> proto::ProcessEvent {
    use proto::oneof::process_event::data_event::Output;

    let bytes = bytes.to_vec();
    let output = match source {
        Source::Stdout => Output::Stdout(bytes),
        Source::Stderr => Output::Stderr(bytes),
        Source::Pty => Output::Pty(bytes),
    };
    event(proto::process_event::DataEvent {
        output: Some(output),
    })
}

fn end_event(ending: Ending) -> proto::ProcessEvent {
    event(proto::process_event::EndEvent {
        exit_code: ending.exit_code,
        exited: ending.exited,
        status: ending.status,
        error: ending.error,
    })
}
