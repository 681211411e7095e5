//! Descriptors and single words over Unix sockets.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, connect,
    recvmsg, sendmsg, socket,
};

use crate::keeper::owned;

const WORD: [u8; 1] = *b"g";

/// Sends a descriptor.
///
/// # Errors
/// As sendmsg(2).
pub fn send_descriptor(to: impl AsFd, fd: impl AsFd) -> io::Result<()> {
    let fds = [fd.as_fd().as_raw_fd()];
    let message = [ControlMessage::ScmRights(&fds)];
    send(to, &message)
}

/// Sends a word without a descriptor.
///
/// # Errors
/// As sendmsg(2).
pub fn send_word(to: impl AsFd) -> io::Result<()> {
    send(to, &[])
}

fn send(to: impl AsFd, message: &[ControlMessage]) -> io::Result<()> {
    let to = to.as_fd().as_raw_fd();
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<UnixAddr>(to, &[IoSlice::new(&WORD)], message, flags, None)?;
    Ok(())
}

/// Receives a word, and the descriptor that came with it.
///
/// # Errors
/// As recvmsg(2); `UnexpectedEof` if the other end is closed.
pub fn receive_descriptor(from: impl AsFd) -> io::Result<Option<OwnedFd>> {
    let mut word = [0; 1];
    let mut room = nix::cmsg_space!(RawFd);
    let mut parts = [IoSliceMut::new(&mut word)];
    let from = from.as_fd().as_raw_fd();
    let message = recvmsg::<UnixAddr>(from, &mut parts, Some(&mut room), MsgFlags::MSG_CMSG_CLOEXEC)?;
    if message.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let descriptors = message.cmsgs()?.filter_map(|one| match one {
        ControlMessageOwned::ScmRights(fds) => Some(fds),
        _ => None,
    });
    // All are taken over, so that none stays open by mistake.
    let mut descriptors: Vec<OwnedFd> = descriptors.flatten().map(owned).collect();
    Ok(descriptors.pop())
}

/// Hands a listener over to the supervisor at `path`, and waits until it serves it.
///
/// # Errors
/// When nobody listens there, or it ends before it answers.
pub fn hand_over(path: &Path, listener: impl AsFd) -> io::Result<()> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let connection = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    connect(connection.as_raw_fd(), &UnixAddr::new(path)?)?;
    send_descriptor(&connection, listener)?;
    receive_descriptor(&connection).map(drop)
}
