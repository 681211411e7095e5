//! Answers HTTP for `gpushare meter --listen`: figures for Prometheus, and a page for people. Read only, and in
//! a thread of its own, so that nobody who asks can delay the meter.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::header::{self, HeaderName, HeaderValue};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{sleep, timeout};

/// How many callers there are at once. For one more, the one that has been there longest is cut off: an answer
/// takes milliseconds, so that is one that does not ask.
const CALLERS: usize = 64;
/// How long a caller may take for its question, and for all of it.
const ASKING: Duration = Duration::from_secs(5);
const TALKING: Duration = Duration::from_secs(30);
/// The pause until a port is tried again that somebody else has.
const TAKEN: Duration = Duration::from_secs(5);
/// The shortest token, in bytes.
const SHORTEST_TOKEN: usize = 16;

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A port of an address of this machine.
    Tcp(SocketAddr),
    /// A socket in the file system, for root alone.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match Path::new(path).is_absolute() {
                true => Ok(Self::Unix(path.into())),
                false => Err("the socket needs an absolute path, as unix:/run/gpushare.sock".to_owned()),
            };
        }
        let text = text.replace("localhost:", "127.0.0.1:");
        text.parse().map(Self::Tcp).map_err(|_| {
            "must be an address with a port, as 127.0.0.1:9836, or a socket as unix:/run/gpushare.sock"
                .to_owned()
        })
    }
}

/// Who may ask.
#[derive(Clone, Debug)]
pub struct Guard {
    /// What a caller has to know; `None`: whoever reaches the address may ask.
    token: Option<Vec<u8>>,
    /// Whether only this machine reaches the address. A browser must then have asked for it by such a name:
    /// else a page from elsewhere could ask through it (DNS rebinding).
    is_local: bool,
}

impl Guard {
    /// The guard of `address`.
    ///
    /// # Errors
    /// When others than this machine could ask without a token, or the token's file cannot be used.
    pub fn of(address: &Address, token_file: Option<&Path>) -> Result<Self> {
        let is_local = match address {
            Address::Tcp(address) => address.ip().is_loopback(),
            Address::Unix(_) => true,
        };
        let token = token_file.map(token).transpose()?;
        if !is_local && token.is_none() {
            bail!(
                "other machines reach this address, and would see the names of all containers: give --token-file, or listen on \
                 127.0.0.1"
            );
        }
        Ok(Self { token, is_local })
    }

    /// Why the caller with these headers gets no answer.
    fn refuses(&self, headers: &HeaderMap) -> Option<StatusCode> {
        let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        if self.is_local && !text(header::HOST).is_none_or(is_local_name) {
            return Some(StatusCode::MISDIRECTED_REQUEST);
        }
        let Some(token) = &self.token else { return None };
        let told = text(header::AUTHORIZATION).and_then(credential).unwrap_or_default();
        if is_same(token, &told) { None } else { Some(StatusCode::UNAUTHORIZED) }
    }
}

fn token(path: &Path) -> Result<Vec<u8>> {
    let data = fs::metadata(path).with_context(|| format!("cannot read the token in {}", path.display()))?;
    if data.permissions().mode() & 0o077 != 0 {
        bail!("others than its owner may read the token in {}: chmod 600 it", path.display());
    }
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read the token in {}", path.display()))?;
    let token = text.trim();
    if token.len() < SHORTEST_TOKEN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        bail!("the token in {} must have {SHORTEST_TOKEN} letters or more and no spaces", path.display());
    }
    Ok(token.as_bytes().to_vec())
}

/// The token in a header: as a bearer's, or as the password of any user, which browsers can ask for.
fn credential(header: &str) -> Option<Vec<u8>> {
    let (scheme, rest) = header.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.trim().as_bytes().to_vec());
    }
    let decoded =
        scheme.eq_ignore_ascii_case("basic").then(|| BASE64_STANDARD.decode(rest.trim()).ok())??;
    let colon = decoded.iter().position(|byte| *byte == b':')?;
    decoded.get(colon + 1..).map(<[u8]>::to_vec)
}

/// Compares without telling by its time how much is right.
fn is_same(token: &[u8], told: &[u8]) -> bool {
    let differs = token.iter().zip(told).fold(0, |sum, (a, b)| sum | (a ^ b));
    token.len() == told.len() && differs == 0
}

fn is_local_name(host: &str) -> bool {
    let name = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()));
    let name = name.map_or(host, |(name, _)| name);
    let ip = name.trim_matches(['[', ']']).parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.is_loopback())
}

/// What a caller gets with status 200.
pub struct Answer {
    /// The type of its body.
    pub kind: &'static str,
    /// Its body.
    pub body: Bytes,
}

/// What a path is answered.
type Answers = RefCell<dyn FnMut(&str) -> Option<Answer>>;

/// A connection of either kind.
trait Connection: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Connection for T {}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    async fn at(address: &Address) -> Result<Self> {
        Ok(match address {
            Address::Tcp(tcp) => {
                let bound = TcpListener::bind(tcp).await;
                Self::Tcp(bound.with_context(|| format!("cannot listen on {tcp}"))?)
            }
            Address::Unix(path) => {
                Self::Unix(unix(path).with_context(|| format!("cannot listen on {}", path.display()))?)
            }
        })
    }

    async fn accept(&self) -> io::Result<Box<dyn Connection>> {
        Ok(match self {
            Self::Tcp(listener) => Box::new(listener.accept().await?.0),
            Self::Unix(listener) => Box::new(listener.accept().await?.0),
        })
    }
}

/// A socket at `path` that root alone may use, in place of one that an earlier process has left.
fn unix(path: &Path) -> io::Result<UnixListener> {
    match fs::symlink_metadata(path) {
        Ok(data) if data.file_type().is_socket() => match std::os::unix::net::UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path)?,
            _ => return Err(io::ErrorKind::AddrInUse.into()),
        },
        Ok(_) => return Err(io::Error::other("something else than a socket is there")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Answers at `address` what `answer` says to a path; `None` is not found. It has to run in a
/// [`tokio::task::LocalSet`], and never ends: an address that somebody else has is tried again.
pub async fn serve(
    address: &Address,
    guard: Guard,
    answer: impl FnMut(&str) -> Option<Answer> + 'static,
) -> Infallible {
    let answer: Rc<Answers> = Rc::new(RefCell::new(answer));
    let guard = Rc::new(guard);
    let listener = loop {
        match Listener::at(address).await {
            Ok(listener) => break listener,
            Err(error) => {
                tracing::error!(error = format!("{error:#}"), "nobody is answered; it is tried again");
                sleep(TAKEN).await;
            }
        }
    };
    tracing::info!(?address, "answering");
    let mut callers: VecDeque<JoinHandle<()>> = VecDeque::new();
    loop {
        let Ok(connection) = listener.accept().await else {
            sleep(Duration::from_millis(100)).await; // out of descriptors
            continue;
        };
        let (guard, answer) = (Rc::clone(&guard), Rc::clone(&answer));
        callers.retain(|caller| !caller.is_finished());
        if callers.len() >= CALLERS
            && let Some(oldest) = callers.pop_front()
        {
            oldest.abort();
        }
        callers.push_back(spawn_local(async move {
            let answers = service_fn(move |request: Request<Incoming>| {
                let response = respond(&guard, &answer, &request);
                async move { Ok::<_, Infallible>(response) }
            });
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(ASKING).keep_alive(false);
            let _ = timeout(TALKING, builder.serve_connection(TokioIo::new(connection), answers)).await;
        }));
    }
}

fn respond(guard: &Guard, answer: &Answers, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    if let Some(status) = guard.refuses(request.headers()) {
        return plain(status);
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return plain(StatusCode::METHOD_NOT_ALLOWED);
    }
    let answer = (answer.borrow_mut())(request.uri().path());
    let Some(answer) = answer else { return plain(StatusCode::NOT_FOUND) };
    let mut response = Response::new(Full::new(answer.body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(answer.kind));
    hardened(response)
}

fn plain(status: StatusCode) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(format!("{status}\n")));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    if status == StatusCode::UNAUTHORIZED {
        let asks = HeaderValue::from_static("Basic realm=\"gpushare: any user, the token as password\"");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, asks);
    }
    hardened(response)
}

/// A page of ours loads its own style and script, and nothing else, and stands in no frame.
fn hardened(mut response: Response<Full<Bytes>>) -> Response<Full<Bytes>> {
    const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; \
                          frame-ancestors 'none'; base-uri 'none'; form-action 'none'";
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn only_who_knows_the_token_gets_an_answer() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let everywhere: Address = "0.0.0.0:9836".parse().unwrap();
        assert!(Guard::of(&everywhere, None).is_err());
        for (text, mode, is_good) in
            [("0123456789abcdef\n", 0o600, true), ("short", 0o600, false), ("0123456789abcdef", 0o644, false)]
        {
            fs::write(&file, text).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(Guard::of(&everywhere, Some(&file)).is_ok(), is_good, "{text:?}");
        }
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let guard = Guard::of(&everywhere, Some(&file)).unwrap();
        let basic = format!("Basic {}", BASE64_STANDARD.encode("anyone:0123456789abcdef"));
        for (told, is_let_in) in [
            ("Bearer 0123456789abcdef", true),
            (&*basic, true),
            ("Bearer 0123456789abcde", false),
            ("Bearer 0123456789abcdef0", false),
            ("Basic 0123456789abcdef", false),
            ("0123456789abcdef", false),
        ] {
            let refused = guard.refuses(&headers(&[(header::AUTHORIZATION, told)]));
            assert_eq!(refused.is_none(), is_let_in, "{told}");
        }
        assert_eq!(guard.refuses(&HeaderMap::new()), Some(StatusCode::UNAUTHORIZED));
    }

    #[test]
    fn a_page_from_elsewhere_cannot_ask_by_a_name_of_its_own() {
        let guard = Guard::of(&"127.0.0.1:9836".parse().unwrap(), None).unwrap();
        for (host, is_let_in) in [
            ("localhost:9836", true),
            ("127.0.0.1:9836", true),
            ("[::1]:9836", true),
            ("LocalHost", true),
            ("evil.example:9836", false),
            ("localhost.evil.example", false),
            ("10.0.0.1:9836", false),
        ] {
            assert_eq!(guard.refuses(&headers(&[(header::HOST, host)])).is_none(), is_let_in, "{host}");
        }
    }

    #[test]
    fn an_address_is_a_port_or_a_socket() {
        assert_eq!("localhost:80".parse(), Ok(Address::Tcp(([127, 0, 0, 1], 80).into())));
        assert_eq!("unix:/run/a".parse(), Ok(Address::Unix("/run/a".into())));
        for wrong in ["", "9836", "unix:a", "example.org:80", "127.0.0.1"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }
}
