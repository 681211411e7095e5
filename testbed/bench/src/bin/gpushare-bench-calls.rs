//! Times system calls, alone or under a supervisor's filter: `gpushare-bench-calls FOLDER CALL [SOCKET]`.
//! FOLDER contains a resource manager's files. If SOCKET is `-`, calls are reported to a thread that lets
//! each through at once, which measures the kernel's part. It prints the picoseconds of a call, one line for
//! each round.
#![forbid(unsafe_code)]

use std::env;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use gpushare_manager_calls::{Client, SUBDEVICE, Way, call as call_manager};
use gpushare_supervisor::abi::{Era, control, number};
use gpushare_supervisor::filter::reported;
use gpushare_supervisor::handover::{connect_to, hand_over};
use gpushare_supervisor::journal::NOTIFICATION_WORDS;
use gpushare_supervisor::sys::{
    install_with_listener, install_without_listener, receive, send, set_synchronous,
};
use nix::libc::{BPF_K, BPF_RET, SECCOMP_RET_ALLOW, sock_filter};
use nix::sys::termios::tcgetattr;
use nix::unistd::getppid;

/// Rounds for calls that take microseconds.
const ROUNDS: usize = 2_000;
/// Faster calls are timed in batches of this many.
const CALLS: usize = 1_000;
const PIECE: u64 = 64 << 10;
/// A command that no resource manager has.
const UNKNOWN: u32 = 0x2080_ffff;

fn main() -> Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [folder, call, rest @ ..] = &words[..] else {
        bail!("usage: gpushare-bench-calls FOLDER CALL [SOCKET]")
    };
    let version = gpushare_tests::node::driver_version().parse().ok().and_then(Era::for_version);
    let era = version.context("the driver is not known")?;
    // A process with a filter of its own, as docker's containers have, pays for it with each call.
    let allows = sock_filter { code: u16::try_from(BPF_RET | BPF_K)?, jt: 0, jf: 0, k: SECCOMP_RET_ALLOW };
    install_without_listener(&mut [allows])?;
    if rest.first().is_some_and(|socket| socket == "-") {
        let (give, take) = channel();
        let _unjoined = thread::spawn(move || take.recv().map(|listener| let_all_through(&listener)));
        give.send(install_with_listener(&mut reported(era))?)?;
    } else if let Some(socket) = rest.first() {
        let supervisor = connect_to(Path::new(socket)).context("the supervisor does not listen")?;
        let listener = install_with_listener(&mut reported(era))?;
        hand_over(&supervisor, listener)?;
    }
    let client = || Client::open(Path::new(folder), era).context("no client");
    match call.as_str() {
        "control" => {
            let client = client()?;
            each(|| {
                let _refused = client.control(SUBDEVICE, UNKNOWN, &mut [0; 8]);
            });
        }
        "alone" => {
            let file = File::open(Path::new(folder).join("nvidiactl"))?;
            let mut structure = [0; control::SIZE];
            each(|| {
                let _no_driver = call_manager(&file, number::CONTROL, &mut structure, Way::default());
            });
        }
        "allocate" => {
            let client = client()?;
            let mut handles = Vec::with_capacity(ROUNDS);
            each(|| handles.extend(client.memory(PIECE, 0)));
            if handles.len() < ROUNDS {
                bail!("{} of {ROUNDS} pieces", handles.len());
            }
        }
        "free" => {
            let client = client()?;
            let mut handles: Vec<u32> = (0..ROUNDS).filter_map(|_| client.memory(PIECE, 0).ok()).collect();
            each(|| {
                let _ = handles.pop().map(|handle| client.free(client.handle, handle));
            });
        }
        "other" => {
            let null = File::open("/dev/null")?;
            many(|| drop(tcgetattr(&null)));
        }
        "getppid" => many(|| {
            let _pid = getppid();
        }),
        "sleep" => {
            println!();
            std::io::stdin().read_to_end(&mut Vec::new())?;
        }
        "hold" => {
            let client = client()?;
            let wanted = rest.get(1).and_then(|word| word.parse().ok()).unwrap_or(0);
            let got = (0..wanted).take_while(|_| client.memory(PIECE, 0).is_ok()).count();
            println!("{got}");
            std::io::stdin().read_to_end(&mut Vec::new())?;
        }
        other => bail!("there is no call {other}"),
    }
    Ok(())
}

/// Lets all reported calls through, for as long as the process lives.
fn let_all_through(listener: &OwnedFd) {
    set_synchronous(listener.as_fd());
    let mut notification = [0; NOTIFICATION_WORDS];
    while receive(listener.as_fd(), &mut notification).is_ok() {
        let _gone = send(listener.as_fd(), notification[0], None, true);
    }
}

fn each(mut call: impl FnMut()) {
    for _ in 0..ROUNDS {
        let began = Instant::now();
        call();
        println!("{}", began.elapsed().as_nanos() * 1000);
    }
}

fn many(mut call: impl FnMut()) {
    for _ in 0..CALLS {
        let began = Instant::now();
        (0..CALLS).for_each(|_| call());
        // Nanoseconds of a thousand calls are picoseconds of one.
        println!("{}", began.elapsed().as_nanos());
    }
}
