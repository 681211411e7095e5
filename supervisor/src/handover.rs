//! Sends descriptors and single words over Unix sockets.

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
/// The errors of sendmsg(2).
pub fn send_descriptor(to: impl AsFd, fd: impl AsFd) -> io::Result<()> {
    let fds = [fd.as_fd().as_raw_fd()];
    let message = [ControlMessage::ScmRights(&fds)];
    send(to, &message)
}

/// Sends a word without a descriptor.
///
/// # Errors
/// The errors of sendmsg(2).
pub fn send_word(to: impl AsFd) -> io::Result<()> {
    send(to, &[])
}

fn send(to: impl AsFd, message: &[ControlMessage]) -> io::Result<()> {
    let to = to.as_fd().as_raw_fd();
    let flags = MsgFlags::MSG_NOSIGNAL;
    uninterrupted(|| sendmsg::<UnixAddr>(to, &[IoSlice::new(&WORD)], message, flags, None))?;
    Ok(())
}

/// Repeats an operation until no signal interrupts it. With a timeout on the socket, the kernel does not
/// restart the call by itself, not even after a stop.
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
/// The errors of recvmsg(2); `UnexpectedEof` if the other end is closed.
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
        // Take ownership of all, so that none leaks.
        let mut descriptors: Vec<OwnedFd> = descriptors.flatten().map(owned).collect();
        Ok((message.bytes, descriptors.pop()))
    })?;
    if bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(descriptor)
}

/// Connects to the supervisor that listens at `path`.
///
/// # Errors
/// If no supervisor listens there.
pub fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let connection = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    // The listening process may be stopped, and the engine's call must not block forever.
    setsockopt(&connection, ReceiveTimeout, &PATIENCE)?;
    setsockopt(&connection, SendTimeout, &PATIENCE)?;
    at_path(path, |address| Ok(uninterrupted(|| connect(connection.as_raw_fd(), address))?))?;
    Ok(connection)
}

/// Hands a listener over to a supervisor, and waits until the supervisor serves it.
///
/// # Errors
/// If the supervisor ends before it answers.
pub fn hand_over(connection: &OwnedFd, listener: impl AsFd) -> io::Result<()> {
    send_descriptor(connection, listener)?;
    receive_descriptor(connection).map(drop)
}

/// Calls `what` with the address of a socket at `path`, which may exceed the 107 bytes of an address.
///
/// # Errors
/// If its directory cannot be opened, and those of `what`.
pub fn at_path<T>(path: &Path, what: impl FnOnce(&UnixAddr) -> io::Result<T>) -> io::Result<T> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let flags = (OFlag::O_PATH | OFlag::O_DIRECTORY).bits();
    let folder = File::options().read(true).custom_flags(flags).open(folder)?;
    let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    what(&UnixAddr::new(&short)?)
}
