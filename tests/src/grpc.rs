//! A client of gRPC services on unix sockets, with messages written by hand.

use std::cell::RefCell;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use gpushare_rpc as rpc;
use prost::Message;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use tonic::Status;
use tonic::client::Grpc;
use tonic::transport::Channel;

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
        let grpc = runtime.block_on(async { rpc::client(socket) }).expect("a path is an address");
        Self { runtime, grpc: RefCell::new(grpc) }
    }

    /// One call of the method at `path`, as `/PACKAGE.SERVICE/METHOD`.
    ///
    /// # Errors
    /// With the other side's answer, or why there was none.
    pub fn call<Q, A>(&self, path: &str, request: Q) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = self.grpc.borrow_mut();
        let late = |_| Status::deadline_exceeded("no answer within a minute");
        self.runtime.block_on(async {
            let call = rpc::call(&mut grpc, path, request);
            timeout(Duration::from_secs(60), call).await.map_err(late)?
        })
    }

    /// Calls the method at `path`, and shows `look` each message of its answer until that says enough, or the
    /// other side ends the stream.
    ///
    /// # Errors
    /// As [`Client::call`], and when a minute passes without a message.
    pub fn watch<Q, A>(&self, path: &str, request: Q, mut look: impl FnMut(A) -> bool) -> Result<(), Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = self.grpc.borrow_mut();
        let late = |_| Status::deadline_exceeded("no answer within a minute");
        let minute = Duration::from_secs(60);
        self.runtime.block_on(async {
            let call = rpc::watch::<Q, A>(&mut grpc, path, request);
            let mut stream = timeout(minute, call).await.map_err(late)??;
            while let Some(message) = timeout(minute, stream.message()).await.map_err(late)?? {
                if look(message) {
                    break;
                }
            }
            Ok(())
        })
    }
}
