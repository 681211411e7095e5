//! Descriptors and single words over Unix sockets.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, connect,
    recvmsg, sendmsg, setsockopt, socket,
    sockopt::{ReceiveTimeout, SendTimeout},
};
use nix::sys::time::TimeVal;

use crate::keeper::owned;

const WORD: [u8; 1] = *b"g";
/// How long a supervisor may take to answer.
const PATIENCE: TimeVal = TimeVal::new(30, 0);

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
    uninterrupted(|| sendmsg::<UnixAddr>(to, &[IoSlice::new(&WORD)], message, flags, None))?;
    Ok(())
}

/// Does something until no signal interrupts it: with a time limit on the socket the kernel begins nothing anew by
/// itself, not even after a stop.
fn uninterrupted<T>(mut what: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match what() {
            Err(Errno::EINTR) => {}
            done => return done,
        }
    }
}

/// Receives a word, and the descriptor that came with it.
///
/// # Errors
/// As recvmsg(2); `UnexpectedEof` if the other end is closed.
pub fn receive_descriptor(from: impl AsFd) -> io::Result<Option<OwnedFd>> {
    let from = from.as_fd().as_raw_fd();
    let (bytes, descriptor) = uninterrupted(|| {
        let mut word = [0; 1];
        let mut room = nix::cmsg_space!(RawFd);
        let mut parts = [IoSliceMut::new(&mut word)];
        let message = recvmsg::<UnixAddr>(from, &mut parts, Some(&mut room), MsgFlags::MSG_CMSG_CLOEXEC)?;
        let descriptors = message.cmsgs()?.filter_map(|one| match one {
            ControlMessageOwned::ScmRights(fds) => Some(fds),
            _ => None,
        });
        // All are taken over, so that none stays open by mistake.
        let mut descriptors: Vec<OwnedFd> = descriptors.flatten().map(owned).collect();
        Ok((message.bytes, descriptors.pop()))
    })?;
    if bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(descriptor)
}

/// A connection to the supervisor that listens at `path`.
///
/// # Errors
/// When nobody listens there.
pub fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let connection = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    // Whoever listens may be stopped, and the engine's call must not wait for ever.
    setsockopt(&connection, ReceiveTimeout, &PATIENCE)?;
    setsockopt(&connection, SendTimeout, &PATIENCE)?;
    at_path(path, |address| Ok(uninterrupted(|| connect(connection.as_raw_fd(), address))?))?;
    Ok(connection)
}

/// Hands a listener over to a supervisor, and waits until it serves it.
///
/// # Errors
/// When it ends before it answers.
pub fn hand_over(connection: &OwnedFd, listener: impl AsFd) -> io::Result<()> {
    send_descriptor(connection, listener)?;
    receive_descriptor(connection).map(drop)
}

/// Does something with the address of a socket at `path`, which may be longer than the 107 bytes that an
/// address has room for.
///
/// # Errors
/// When the folder around it cannot be opened, and those of `what`.
pub fn at_path<T>(path: &Path, what: impl FnOnce(&UnixAddr) -> io::Result<T>) -> io::Result<T> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let flags = (OFlag::O_PATH | OFlag::O_DIRECTORY).bits();
    let folder = File::options().read(true).custom_flags(flags).open(folder)?;
    let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    what(&UnixAddr::new(&short)?)
}
