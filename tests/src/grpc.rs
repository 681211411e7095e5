//! A client of gRPC services on unix sockets, with messages written by hand.

use std::cell::RefCell;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use prost::Message;
use tokio::runtime::{Builder, Runtime};
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

/// A connection to a socket, for one thread.
pub struct Client {
    runtime: Runtime,
    grpc: RefCell<Grpc<Channel>>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    /// Connects to `socket` at the first call, and again after the other side was restarted.
    ///
    /// # Panics
    /// When the path is no address.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
        let address = format!("unix://{}", socket.display());
        let endpoint =
            Endpoint::from_shared(address).expect("a path is an address").timeout(Duration::from_secs(60));
        let channel = runtime.block_on(async { endpoint.connect_lazy() });
        Self { runtime, grpc: RefCell::new(Grpc::new(channel)) }
    }

    /// One call of the method at `path`, as `/PACKAGE.SERVICE/METHOD`.
    ///
    /// # Errors
    /// With the other side's answer, or why there was none.
    ///
    /// # Panics
    /// When `path` is none.
    pub fn call<Q, A>(&self, path: &str, request: Q) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let path = path.parse().expect("a method's name is a path");
        let mut grpc = self.grpc.borrow_mut();
        self.runtime.block_on(async {
            grpc.ready().await.map_err(|error| Status::unavailable(format!("{error:?}")))?;
            let codec: ProstCodec<Q, A> = ProstCodec::default();
            grpc.unary(Request::new(request), path, codec).await.map(tonic::Response::into_inner)
        })
    }
}
