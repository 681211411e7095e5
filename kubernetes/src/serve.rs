//! Answers HTTP calls, over TLS where it is not for this machine alone.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;

/// By which certificates callers and this program know each other.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Certificates {
    /// The certificate by which callers know it, with those that it is signed by, as PEM.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,
    /// The key of the certificate, as PEM.
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// Certificates as PEM of which one has to have signed that of each caller. Not the cluster's own: it
    /// signs those of kubelets and users, too.
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    client_ca: Option<PathBuf>,
}

/// Who may call from other machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Callers {
    /// Anyone, also without TLS: the answers are figures.
    AlsoPlain,
    /// Anyone: the answers change nothing.
    Anyone,
    /// Those with a certificate alone.
    Known,
}

/// The answer to an HTTP call.
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// The type of its body.
    pub kind: &'static str,
    /// Its body.
    pub body: Vec<u8>,
}

impl Answer {
    /// JSON.
    pub fn json(status: StatusCode, value: &impl serde::Serialize) -> Self {
        let body = serde_json::to_vec(value).unwrap_or_default();
        Self { status, kind: "application/json", body }
    }

    /// Plain text.
    pub fn text(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, kind: "text/plain; charset=utf-8", body: text.into().into_bytes() }
    }
}

/// The type of Prometheus' figures, as the OpenMetrics specification names it.
pub const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// How long a caller may take for its request or TLS's greeting.
const ASKING: Duration = Duration::from_secs(10);
/// How many connections there are at once.
const CONNECTIONS: usize = 1024;
/// The time between two looks at the files of certificates.
const LOOK: Duration = Duration::from_secs(30);

/// Answers calls at `address` until `end` is over. Certificates are read again when they change.
///
/// # Errors
/// When nothing can listen there, a certificate cannot be read, or others than this machine could call unknown.
pub async fn serve<A: Future<Output = Answer> + Send + 'static>(
    address: SocketAddr,
    options: &Certificates,
    callers: Callers,
    most: usize,
    answer: impl Fn(Method, String, Bytes) -> A + Clone + Send + 'static,
    end: impl Future<Output = ()>,
) -> Result<()> {
    if !address.ip().is_loopback() && callers != Callers::AlsoPlain {
        match (&options.tls_certificate, &options.client_ca) {
            (None, _) => {
                bail!("{address} is reached from other machines: give --tls-certificate and --tls-key")
            }
            (Some(_), None) if callers == Callers::Known => bail!(
                "who reaches {address} could bind pods by it: give --client-ca, a certificate that has signed kube-scheduler's \
                 (tlsConfig.certFile there) and nobody else's, or an address as 127.0.0.1:{}",
                address.port()
            ),
            _ => {}
        }
    }
    let mut tls = Tls::of(options)?;
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
    tracing::info!(%address, tls = tls.is_some(), "answering");
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    tokio::pin!(end);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut end => return Ok(()),
        };
        let Ok((connection, _)) = accepted else {
            sleep(Duration::from_millis(100)).await; // out of descriptors
            continue;
        };
        let Ok(place) = Arc::clone(&room).try_acquire_owned() else { continue };
        if let Some(tls) = &mut tls {
            tls.look();
        }
        let (acceptor, answer) = (tls.as_ref().map(|tls| tls.acceptor.clone()), answer.clone());
        // Who asks for figures asks seldom, and nobody who is not known keeps others away for long.
        let idle = match callers {
            Callers::AlsoPlain => None,
            Callers::Anyone => Some(ASKING),
            Callers::Known => Some(ASKING * 6),
        };
        tokio::spawn(async move {
            let _place = place;
            let _ = connection.set_nodelay(true);
            match acceptor {
                None => converse(connection, idle, most, answer).await,
                Some(acceptor) => {
                    if let Ok(Ok(connection)) = timeout(ASKING, acceptor.accept(connection)).await {
                        converse(connection, idle, most, answer).await;
                    }
                }
            }
        });
    }
}

async fn converse<A: Future<Output = Answer> + Send + 'static>(
    connection: impl AsyncRead + AsyncWrite + Unpin,
    idle: Option<Duration>,
    most: usize,
    answer: impl Fn(Method, String, Bytes) -> A + Clone + Send + 'static,
) {
    let answers = service_fn(move |request: Request<Incoming>| {
        let answer = answer.clone();
        async move { Ok::<_, Infallible>(respond(request, most, answer).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(idle.unwrap_or(ASKING)).keep_alive(idle.is_some());
    let _ = builder.serve_connection(TokioIo::new(connection), answers).await;
}

async fn respond<A: Future<Output = Answer>>(
    request: Request<Incoming>,
    most: usize,
    answer: impl Fn(Method, String, Bytes) -> A,
) -> Response<Full<Bytes>> {
    let (head, body) = request.into_parts();
    let body = timeout(ASKING, Limited::new(body, most).collect()).await;
    let answer = match body {
        Ok(Ok(body)) => answer(head.method, head.uri.path().to_owned(), body.to_bytes()).await,
        Ok(Err(_)) => Answer::text(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the body cannot be read, or has more than {most} bytes"),
        ),
        Err(_) => Answer::text(StatusCode::REQUEST_TIMEOUT, "the body came too slowly"),
    };
    let mut response = Response::new(Full::from(answer.body));
    *response.status_mut() = answer.status;
    response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static(answer.kind));
    response
}

/// TLS, as the files say.
struct Tls {
    options: Certificates,
    read: Vec<Vec<u8>>,
    acceptor: TlsAcceptor,
    looked: Instant,
}

impl Tls {
    fn of(options: &Certificates) -> Result<Option<Self>> {
        if options.tls_certificate.is_none() {
            return Ok(None);
        }
        let read = files(options)?;
        let acceptor = acceptor(options)?;
        Ok(Some(Self { options: options.clone(), read, acceptor, looked: Instant::now() }))
    }

    /// Reads the files again where they are others. Those that cannot be used change nothing.
    fn look(&mut self) {
        if self.looked.elapsed() < LOOK {
            return;
        }
        self.looked = Instant::now();
        let changed = files(&self.options).ok().filter(|read| *read != self.read);
        let Some(read) = changed else { return };
        match acceptor(&self.options) {
            Ok(acceptor) => (self.acceptor, self.read) = (acceptor, read),
            Err(error) => {
                tracing::error!(error = format!("{error:#}"), "the certificate stays the one of before")
            }
        }
    }
}

fn files(options: &Certificates) -> Result<Vec<Vec<u8>>> {
    let paths = [&options.tls_certificate, &options.tls_key, &options.client_ca];
    let read =
        |path: &PathBuf| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    paths.into_iter().flatten().map(read).collect()
}

fn acceptor(options: &Certificates) -> Result<TlsAcceptor> {
    let (Some(certificate), Some(key)) = (&options.tls_certificate, &options.tls_key) else {
        bail!("a certificate needs its key");
    };
    let chain = certificates(certificate)?;
    let key = PrivateKeyDer::from_pem_file(key)
        .with_context(|| format!("{} is no private key as PEM", key.display()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
    let builder = match &options.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).with_context(|| format!("in {}", path.display()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let config =
        builder.with_single_cert(chain, key).context("certificate and key do not belong together")?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let read = read.with_context(|| format!("{} holds no certificates as PEM", path.display()))?;
    if read.is_empty() {
        bail!("{} holds no certificate", path.display());
    }
    Ok(read)
}
