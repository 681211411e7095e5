//! Connections whose clients name the socket's path as the host that they call.
//!
//! kubelet dials a plugin by the bare path of its socket. Go's gRPC library then sends that path as the
//! header `:authority`, with each slash as `%2F`. That is no host name, and the HTTP/2 library of this server
//! ends such a call before anybody sees it (PROTOCOL_ERROR). Nothing here depends on the name: header blocks
//! are read and written anew with `localhost`, and all else passes as it came.

use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use loona_hpack::Decoder;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

/// What a client says first (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The head of a frame: length, kind, flags and stream (RFC 9113, 4.1).
const HEAD: usize = 9;
/// The longest frame that a peer sends to whoever asks for no other length.
const LONGEST: usize = 16_384;
/// Bytes of a header block at most: kubelet's have some two hundred.
const LARGEST_BLOCK: usize = 64 << 10;

const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// A connection whose client calls `localhost`.
pub struct Named {
    stream: UnixStream,
    translation: Translation,
}

impl Named {
    /// This connection, of which nothing has been read.
    pub fn of(stream: UnixStream) -> Self {
        Self { stream, translation: Translation::default() }
    }
}

impl Connected for Named {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Named {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { stream, translation } = self.get_mut();
        let mut room = [0; 4096];
        while translation.done.is_empty() {
            let mut room = ReadBuf::new(&mut room);
            ready!(Pin::new(&mut *stream).poll_read(context, &mut room))?;
            if room.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            translation.take(room.filled())?;
        }
        let count = translation.done.len().min(out.remaining());
        out.put_slice(&translation.done[..count]);
        translation.done.drain(..count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Named {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

/// What came from a client, and what the server reads of it.
#[derive(Default)]
struct Translation {
    is_greeted: bool,
    /// What came and is no whole frame yet.
    pending: Vec<u8>,
    /// A header block whose end has not come.
    block: Option<Block>,
    /// Knows what earlier blocks have put into the connection's table.
    decoder: Decoder<'static>,
    /// What can be read.
    done: Vec<u8>,
}

struct Block {
    stream: [u8; 4],
    ends_stream: bool,
    fragments: Vec<u8>,
}

impl Translation {
    /// Takes what came.
    ///
    /// # Errors
    /// When it is no HTTP/2, or longer than anything that kubelet sends.
    fn take(&mut self, came: &[u8]) -> io::Result<()> {
        self.pending.extend_from_slice(came);
        if !self.is_greeted {
            let known = self.pending.len().min(PREFACE.len());
            if self.pending[..known] != PREFACE[..known] {
                return Err(broken("it begins as no HTTP/2 connection does"));
            }
            if known < PREFACE.len() {
                return Ok(());
            }
            self.done.extend(self.pending.drain(..known));
            self.is_greeted = true;
        }
        while let Some(length) = whole_frame(&self.pending)? {
            let frame: Vec<u8> = self.pending.drain(..length).collect();
            self.frame(&frame)?;
        }
        Ok(())
    }

    fn frame(&mut self, frame: &[u8]) -> io::Result<()> {
        let (head, payload) = frame.split_at(HEAD);
        let (kind, flags, stream) = (head[3], head[4], [head[5], head[6], head[7], head[8]]);
        let block = match (kind, self.block.take()) {
            (HEADERS, None) => {
                let fragments = fragment(flags, payload)?.to_vec();
                Block { stream, ends_stream: flags & END_STREAM != 0, fragments }
            }
            (CONTINUATION, Some(mut block)) if block.stream == stream => {
                block.fragments.extend_from_slice(payload);
                block
            }
            (CONTINUATION, _) | (_, Some(_)) => return Err(broken("a header block has no end")),
            (_, None) => {
                self.done.extend_from_slice(frame);
                return Ok(());
            }
        };
        if block.fragments.len() > LARGEST_BLOCK {
            return Err(broken("a header block is too large"));
        }
        match flags & END_HEADERS {
            0 => self.block = Some(block),
            _ => self.written_anew(&block)?,
        }
        Ok(())
    }

    /// The block with another authority. Its fields are literals, so that the server's own table stays empty
    /// (RFC 7541, 6.2.2).
    fn written_anew(&mut self, block: &Block) -> io::Result<()> {
        let fields = self.decoder.decode(&block.fragments);
        let fields = fields.map_err(|error| broken(&format!("a header block cannot be read: {error}")))?;
        let mut written = Vec::new();
        for (name, value) in &fields {
            let value = if name == b":authority" { b"localhost" } else { &value[..] };
            written.push(0);
            for text in [&name[..], value] {
                length(text.len(), &mut written);
                written.extend_from_slice(text);
            }
        }
        let mut rest = &written[..];
        let mut kind = HEADERS;
        // A block may have no field, and its frame still ends the stream.
        loop {
            let (chunk, more) = rest.split_at(rest.len().min(LONGEST));
            rest = more;
            let end = if rest.is_empty() { END_HEADERS } else { 0 };
            let stream_end = if kind == HEADERS && block.ends_stream { END_STREAM } else { 0 };
            let [.., high, middle, low] = chunk.len().to_be_bytes();
            self.done.extend([high, middle, low, kind, end | stream_end]);
            self.done.extend(block.stream);
            self.done.extend_from_slice(chunk);
            if rest.is_empty() {
                return Ok(());
            }
            kind = CONTINUATION;
        }
    }
}

/// How long the first frame is, with its head; `None` before all of it has come.
fn whole_frame(pending: &[u8]) -> io::Result<Option<usize>> {
    let Some(length) = pending.get(..3) else { return Ok(None) };
    let length = usize::from(length[0]) << 16 | usize::from(length[1]) << 8 | usize::from(length[2]);
    if length > LONGEST {
        return Err(broken("a frame is longer than this server takes"));
    }
    Ok(Some(HEAD + length).filter(|whole| pending.len() >= *whole))
}

/// The part of a header block in a frame HEADERS, without padding and priority (RFC 9113, 6.2).
fn fragment(flags: u8, payload: &[u8]) -> io::Result<&[u8]> {
    let short = || broken("a frame with headers is too short");
    let mut part = payload;
    let mut padding = 0;
    if flags & PADDED != 0 {
        let (count, rest) = part.split_first().ok_or_else(short)?;
        (padding, part) = (usize::from(*count), rest);
    }
    if flags & PRIORITY != 0 {
        part = part.get(5..).ok_or_else(short)?;
    }
    part.len().checked_sub(padding).map(|end| &part[..end]).ok_or_else(short)
}

/// The length of a text that is not compressed (RFC 7541, 5.1 and 5.2).
fn length(count: usize, out: &mut Vec<u8>) {
    let low = |bits: usize| u8::try_from(bits & 0x7f).unwrap_or_default();
    if count < 0x7f {
        return out.push(low(count));
    }
    out.push(0x7f);
    let mut rest = count - 0x7f;
    while rest >= 0x80 {
        out.push(low(rest) | 0x80);
        rest >>= 7;
    }
    out.push(low(rest));
}

fn broken(why: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All that kubelet 1.36 sends when it asks a plugin for its name (GetInfo), as it was recorded.
    const KUBELETS: &[u8] = include_bytes!("../fixtures/get-info-of-kubelet-1.36.bin");

    fn translated(pieces: &[&[u8]]) -> io::Result<Vec<u8>> {
        let mut translation = Translation::default();
        pieces.iter().try_for_each(|piece| translation.take(piece))?;
        Ok(translation.done)
    }

    /// Kinds, flags and payloads of the frames behind the preface.
    fn frames(mut bytes: &[u8]) -> Vec<(u8, u8, Vec<u8>)> {
        let mut frames = Vec::new();
        bytes = bytes.strip_prefix(PREFACE).unwrap();
        while let Some(length) = whole_frame(bytes).unwrap() {
            frames.push((bytes[3], bytes[4], bytes[HEAD..length].to_vec()));
            bytes = &bytes[length..];
        }
        assert_eq!(bytes, b"");
        frames
    }

    fn fields(block: &[u8]) -> Vec<(String, String)> {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let fields = Decoder::new().decode(block).unwrap();
        fields.iter().map(|(name, value)| (text(name), text(value))).collect()
    }

    #[test]
    fn what_kubelet_sends_arrives_with_another_authority_and_else_as_it_came() {
        let (sent, got) = (frames(KUBELETS), frames(&translated(&[KUBELETS]).unwrap()));
        assert_eq!(sent.len(), got.len());
        let mut blocks = 0;
        for (sent, got) in sent.iter().zip(&got) {
            if sent.0 != HEADERS {
                assert_eq!(sent, got);
                continue;
            }
            blocks += 1;
            let (mut sent, got) = (fields(&sent.2), fields(&got.2));
            let authority = sent.iter_mut().find(|(name, _)| name == ":authority").unwrap();
            assert!(authority.1.starts_with("%2F") && authority.1.ends_with("-reg.sock"), "{authority:?}");
            authority.1 = "localhost".to_owned();
            assert_eq!(sent, got);
        }
        assert_eq!(blocks, 1);
    }

    #[test]
    fn it_may_come_in_pieces_of_any_length() {
        let whole = translated(&[KUBELETS]).unwrap();
        for size in [1, 2, 7, 24, 100] {
            let pieces: Vec<&[u8]> = KUBELETS.chunks(size).collect();
            assert_eq!(translated(&pieces).unwrap(), whole, "{size}");
        }
    }

    /// One frame, with its head.
    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let [.., high, middle, low] = payload.len().to_be_bytes();
        [&[high, middle, low, kind, flags, 0, 0, 0, 1], payload].concat()
    }

    #[test]
    fn padding_priority_and_continuations_are_understood() {
        // `:authority: %2F` and `a: b`, as literals.
        let block = b"\x00\x0a:authority\x03%2F\x00\x01a\x01b";
        let padded = [&[2, 0, 0, 0, 0, 9][..], block, &[0, 0]].concat();
        let long = [&block[..], &[0, 1, b'c', 0x7f, 0xa1, 0x9b, 0x01], &[b'd'; 20_000]].concat();
        let (first, last) = block.split_at(9);
        let wanted = [(":authority", "localhost"), ("a", "b")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()));
        for (frames_sent, more) in [
            (vec![frame(HEADERS, END_HEADERS | END_STREAM | PADDED | PRIORITY, &padded)], None),
            (vec![frame(HEADERS, END_STREAM, first), frame(CONTINUATION, END_HEADERS, last)], None),
            (
                vec![
                    frame(HEADERS, END_STREAM, &long[..15_000]),
                    frame(CONTINUATION, END_HEADERS, &long[15_000..]),
                ],
                Some(("c".to_owned(), "d".repeat(20_000))),
            ),
        ] {
            let sent = [PREFACE.to_vec(), frames_sent.concat()].concat();
            let got = frames(&translated(&[&sent]).unwrap());
            let flags: Vec<(u8, u8)> = got.iter().map(|(kind, flags, _)| (*kind, *flags)).collect();
            let split = [(HEADERS, END_STREAM), (CONTINUATION, END_HEADERS)];
            let whole = [(HEADERS, END_HEADERS | END_STREAM)];
            assert_eq!(flags, if more.is_some() { &split[..] } else { &whole });
            let block: Vec<u8> = got.into_iter().flat_map(|(_, _, block)| block).collect();
            assert_eq!(fields(&block), wanted.iter().cloned().chain(more).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_block_without_fields_still_ends_its_stream() {
        let sent = [PREFACE.to_vec(), frame(HEADERS, END_HEADERS | END_STREAM, b"")].concat();
        assert_eq!(translated(&[&sent]).unwrap(), sent);
    }

    #[test]
    fn whatever_comes_is_read_or_refused() {
        let mut random = fastrand::Rng::with_seed(5);
        let (mut read, mut refused) = (0, 0);
        for _ in 0..3_000 {
            let mut bytes = KUBELETS.to_vec();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(PREFACE.len()..bytes.len());
                match random.u8(..3) {
                    0 => bytes[at] = random.u8(..),
                    1 => bytes.truncate(at.max(PREFACE.len() + 1)),
                    _ => bytes.insert(at, random.u8(..)),
                }
            }
            match translated(&[&bytes]) {
                Ok(done) => {
                    read += 1;
                    assert!(done.len() < 64 << 10, "{bytes:?}");
                }
                Err(_) => refused += 1,
            }
        }
        assert!(read > 100 && refused > 100, "{read} {refused}");
    }

    #[test]
    fn what_is_no_http2_ends_the_connection() {
        let greeted = |frame: &[u8]| [PREFACE, frame].concat();
        for bytes in [
            b"GET / HTTP/1.1\r\n".to_vec(),
            greeted(&[1, 0, 0, 0, 0, 0, 0, 0, 0]),
            greeted(&frame(CONTINUATION, END_HEADERS, b"")),
            greeted(&[frame(HEADERS, 0, b""), frame(0, 0, b"")].concat()),
            greeted(&frame(HEADERS, END_HEADERS | PADDED, &[9, 1])),
            greeted(&frame(HEADERS, END_HEADERS | PRIORITY, &[0; 4])),
            greeted(&frame(HEADERS, END_HEADERS, &[0xff, 0xff, 0xff])),
        ] {
            assert!(translated(&[&bytes]).is_err(), "{bytes:?}");
        }
    }
}
