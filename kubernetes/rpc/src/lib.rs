//! gRPC over unix sockets, for the few calls that kubelet and engine make and answer. Messages are written by
//! hand after Kubernetes' .proto files, so that a build needs no protocol compiler.
#![forbid(unsafe_code)]

mod authority;

use std::convert::Infallible;
use std::fs;
use std::future::{Future, Ready, ready};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::uri::PathAndQuery;
use http::{Request, Response};
use prost::Message;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::body::Body;
use tonic::client::Grpc as Client;
use tonic::server::{Grpc, NamedService, ServerStreamingService, UnaryService};
use tonic::service::Routes;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Status, Streaming};
use tonic_prost::ProstCodec;
use tower_service::Service;

use authority::Named;

/// A service whose calls each have one request, and one answer or a stream of them.
pub trait Calls: Clone + Send + Sync + 'static {
    /// The service's name, as in paths: `PACKAGE.SERVICE`.
    const NAME: &'static str;

    /// Answers a call of this method; [`unknown`] for a method that the service does not have.
    fn call(self, method: &str, request: Request<Body>) -> Answer;
}

/// What a call will answer.
pub type Answer = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// Answers with what `handle` makes of the request.
pub fn answer<Q, R, F, A>(request: Request<Body>, handle: F) -> Answer
where
    Q: Message + Default + Send + 'static,
    R: Message + Default + Send + 'static,
    F: FnOnce(Q) -> A + Clone + Send + 'static,
    A: Future<Output = Result<R, Status>> + Send + 'static,
{
    Box::pin(async move { Grpc::new(ProstCodec::<R, Q>::default()).unary(Unary(handle), request).await })
}

/// Answers with each message of the stream that `handle` makes of the request.
pub fn answers<Q, R, F, S>(request: Request<Body>, handle: F) -> Answer
where
    Q: Message + Default + Send + 'static,
    R: Message + Default + Send + 'static,
    F: FnOnce(Q) -> S + Clone + Send + 'static,
    S: Stream<Item = Result<R, Status>> + Send + 'static,
{
    Box::pin(async move {
        Grpc::new(ProstCodec::<R, Q>::default()).server_streaming(Streamed(handle), request).await
    })
}

/// Says that there is no such method.
pub fn unknown() -> Answer {
    Box::pin(async { Status::new(Code::Unimplemented, "no such method").into_http() })
}

/// A function as the service that answers one method.
struct Unary<F>(F);

impl<Q, R, F, A> UnaryService<Q> for Unary<F>
where
    R: Message,
    F: FnOnce(Q) -> A + Clone,
    A: Future<Output = Result<R, Status>> + Send + 'static,
{
    type Response = R;
    type Future = Pin<Box<dyn Future<Output = Result<tonic::Response<R>, Status>> + Send>>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        let answer = self.0.clone()(request.into_inner());
        Box::pin(async move { answer.await.map(tonic::Response::new) })
    }
}

/// A function as the service that answers one method with a stream.
struct Streamed<F>(F);

impl<Q, R, F, S> ServerStreamingService<Q> for Streamed<F>
where
    R: Message,
    F: FnOnce(Q) -> S + Clone,
    S: Stream<Item = Result<R, Status>> + Send + 'static,
{
    type Response = R;
    type ResponseStream = S;
    type Future = Ready<Result<tonic::Response<S>, Status>>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        ready(Ok(tonic::Response::new(self.0.clone()(request.into_inner()))))
    }
}

/// Routes calls by the last part of their path.
#[derive(Clone)]
struct Routed<C>(C);

impl<C: Calls> NamedService for Routed<C> {
    const NAME: &'static str = C::NAME;
}

impl<C: Calls> Service<Request<Body>> for Routed<C> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let answer = self.0.clone().call(&method, request);
        Box::pin(async move { Ok(answer.await) })
    }
}

/// The services of one socket.
#[derive(Default)]
pub struct Services(Routes);

impl Services {
    /// These services and `calls`.
    #[must_use]
    pub fn with<C: Calls>(self, calls: C) -> Self {
        Self(self.0.add_service(Routed(calls)))
    }
}

/// Serves `services` on the socket until `end` is over. Only root may connect. What an earlier process left at
/// the path is removed first. A stream that goes on keeps the server from its end.
///
/// # Errors
/// When the socket cannot be made.
pub async fn serve(
    socket: &Path,
    services: Services,
    end: impl Future<Output = ()> + Send + 'static,
) -> anyhow::Result<()> {
    let listener = listen(socket)?;
    let server = Server::builder().add_routes(services.0);
    let connections = UnixListenerStream::new(listener).map(|connection| connection.map(Named::of));
    Ok(server.serve_with_incoming_shutdown(connections, end).await?)
}

/// Bytes of an answer at most: plugins with an id for each MiB of a GPU make many of them.
const LARGEST: usize = 64 << 20;

/// A client of the service on `socket`, which is connected to at the first call.
///
/// # Errors
/// When the path is no address.
pub fn client(socket: &Path) -> Result<Client<Channel>, Status> {
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()));
    let endpoint = endpoint.map_err(|error| Status::invalid_argument(error.to_string()))?;
    Ok(Client::new(endpoint.connect_lazy()).max_decoding_message_size(LARGEST))
}

/// One call of the method at `path`, as `/PACKAGE.SERVICE/METHOD`.
///
/// # Errors
/// With the other side's answer, or why there was none.
pub async fn call<Q, R>(client: &mut Client<Channel>, path: &str, request: Q) -> Result<R, Status>
where
    Q: Message + 'static,
    R: Message + Default + 'static,
{
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let codec = ProstCodec::<Q, R>::default();
    let path: PathAndQuery = path.parse().map_err(|_| Status::invalid_argument("no such method's name"))?;
    client.unary(tonic::Request::new(request), path, codec).await.map(tonic::Response::into_inner)
}

/// A call of the method at `path` that is answered by a stream.
///
/// # Errors
/// As [`call`].
pub async fn watch<Q, R>(client: &mut Client<Channel>, path: &str, request: Q) -> Result<Streaming<R>, Status>
where
    Q: Message + 'static,
    R: Message + Default + 'static,
{
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let codec = ProstCodec::<Q, R>::default();
    let path: PathAndQuery = path.parse().map_err(|_| Status::invalid_argument("no such method's name"))?;
    client.server_streaming(tonic::Request::new(request), path, codec).await.map(tonic::Response::into_inner)
}

fn listen(socket: &Path) -> io::Result<UnixListener> {
    if let Some(folder) = socket.parent() {
        fs::create_dir_all(folder)?;
    }
    match fs::remove_file(socket) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    fs::set_permissions(socket, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}
