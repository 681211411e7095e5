//! A mount namespace for a part of a test: what is mounted there is seen by the programs that are started
//! there, and by nobody else.

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// Runs `body` in a thread whose mounts are its own.
///
/// # Panics
/// When the namespace cannot be made, and when `body` panics.
pub fn private<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    let enter = || {
        unshare(CloneFlags::CLONE_NEWNS).expect("root can make a mount namespace");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .expect("mounts can be made private");
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(name()).spawn_scoped(scope, || {
            enter();
            body()
        });
        let ended = thread.expect("a thread can be started").join();
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The test's name, which stands in its messages.
fn name() -> String {
    std::thread::current().name().unwrap_or("a test").to_owned()
}
