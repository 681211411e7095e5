//! One attacker. It prints how much memory it got, and holds that until its standard input ends.

use std::io::Read;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use gpushare_manager_calls::{Client, DEVICE, Entry, SUBDEVICE, Way, call, memory_parameters};
use gpushare_supervisor::abi::{Class, Era, alloc, channels, heap, memory, number, put};
use gpushare_supervisor::engine::list;

/// Tries to hold more device memory than it was granted.
#[derive(Parser)]
struct Args {
    /// Folder of RM's files.
    folder: PathBuf,
    /// What to try.
    mode: Mode,
    /// Size of a piece in KiB.
    #[arg(long, default_value_t = 64 << 10)]
    piece: u64,
    /// Most pieces.
    #[arg(long, default_value_t = 200)]
    pieces: u32,
    #[arg(long, default_value = "580.142")]
    driver: String,
    /// Client and handle of the channel that `stop` stops; else its own.
    #[arg(long, num_args = 2)]
    channel: Vec<u32>,
    /// Threads of `crowd`.
    #[arg(long, default_value_t = 32)]
    threads: u32,
    /// Whether `stop` wraps its call into another one.
    #[arg(long)]
    wrapped: bool,
    /// Whether `stop` first names that client in an allocation.
    #[arg(long)]
    planted: bool,
}

/// HOPPER_CHANNEL_GPFIFO_A.
const CHANNEL: Class = Class(0xc86f);

#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    /// Allocations by the long form.
    Long,
    /// By the short form.
    Short,
    /// By VID_HEAP_CONTROL, plain.
    Heap,
    /// By VID_HEAP_CONTROL with height and pitch.
    Pitch,
    /// By VID_HEAP_CONTROL with a range.
    Range,
    /// Another type byte.
    OtherType,
    /// Wrapped into another call.
    Wrapped,
    /// By the entry of x32 programs.
    X32,
    /// Frees each piece while a duplicate of another client's holds it.
    Duplicate,
    /// Frees each piece while an exported file holds it.
    Export,
    /// As `export`, while another thread exports and closes a piece all the time.
    Flip,
    /// Address ranges, whose page tables are device memory.
    Ranges,
    /// Address ranges below a device that RM numbered, under which a channel's name was planted that leads
    /// elsewhere.
    Planted,
    /// Changes the class while the call is looked at.
    Race,
    /// Frees what it allocates, over and over: an honest program.
    Rounds,
    /// Allocates while another thread's call stands in memory that never comes.
    Blocked,
    /// Threads with a client each allocate and free, all at once: an honest program.
    Crowd,
    /// Makes a channel, says which, and stops it, or another program's.
    Stop,
    /// Makes a channel, which could work from then on: an honest program.
    Work,
    /// The same, and starts it again and again, in all ways that there are.
    Start,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let version = args.driver.parse().ok().and_then(Era::for_version);
    let era = version.with_context(|| format!("driver {} is not known", args.driver))?;
    let piece = args.piece << 10;
    if matches!(args.mode, Mode::Crowd) {
        return crowd(&args, piece, era);
    }
    if matches!(args.mode, Mode::Planted) {
        return planted(&args, piece, era);
    }
    let mut client = Client::open(&args.folder, era)?;
    let ways = [
        (Mode::OtherType as u8, b'G', false, Entry::Native),
        (Mode::Wrapped as u8, b'F', true, Entry::Native),
    ];
    for (mode, kind, is_wrapped, entry) in ways {
        if mode == args.mode as u8 {
            client.way = Way { kind, is_wrapped, entry };
        }
    }
    if matches!(args.mode, Mode::X32) {
        client.way.entry = Entry::X32;
    }
    if matches!(args.mode, Mode::Work | Mode::Start) {
        return work(&client, matches!(args.mode, Mode::Start));
    }
    if matches!(args.mode, Mode::Stop) {
        return stop(client, &args);
    }
    let mut held = Vec::new();
    let mut got = 0;
    let mut why = String::from("limit of pieces");
    if matches!(args.mode, Mode::Race) {
        got = race(&client, piece, args.pieces);
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        if matches!(args.mode, Mode::Flip) {
            let flipped = client.memory(piece, 0).ok().context("no memory to flip")?;
            let (client, stop) = (&client, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let _closed = client.export(flipped);
                }
            });
        }
        if matches!(args.mode, Mode::Blocked) {
            let missing = gpushare_manager_calls::missing_page().context("userfaultfd")?;
            let file = client.another_file()?;
            scope.spawn(move || {
                let done = gpushare_manager_calls::call_at(&file, number::FREE, 16, missing);
                eprintln!("the blocked call: {done:?}");
            });
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let other = match args.mode {
            Mode::Duplicate => {
                let other = client.root().ok().context("no second client")?;
                client.add_device(other).ok().context("no second device")?;
                other
            }
            _ => 0,
        };
        for _ in 0..args.pieces {
            if matches!(args.mode, Mode::Race) {
                break;
            }
            let made = match args.mode {
                Mode::Short => client.memory_by_short_form(piece, 0),
                Mode::Heap => client.memory_by_heap(heap::ALLOC_SIZE, piece),
                Mode::Pitch => client.memory_by_heap(heap::ALLOC_TILED_PITCH_HEIGHT, piece),
                Mode::Range => client.memory_by_heap(heap::ALLOC_SIZE_RANGE, piece),
                Mode::Ranges => {
                    let mut parameters = memory_parameters(era, piece);
                    client.allocate(Class::VIRTUAL_RANGE, [client.handle, DEVICE, 0], &mut parameters)
                }
                _ => client.memory(piece, 0),
            };
            let handle = match made {
                Ok(handle) => handle,
                Err(refusal) => {
                    why = format!("{refusal:?}");
                    break;
                }
            };
            got += 1;
            match args.mode {
                Mode::Duplicate => {
                    client.duplicate(other, handle).map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
                    client.free(client.handle, handle).map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
                }
                Mode::Export | Mode::Flip => {
                    held.push(client.export(handle).map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?);
                    client.free(client.handle, handle).map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
                }
                Mode::Rounds => {
                    client.free(client.handle, handle).map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
                }
                _ => {}
            }
        }
        stop.store(true, Ordering::Relaxed);
        Ok(())
    })?;
    if matches!(args.mode, Mode::Rounds) {
        // All memory that was freed must be available again.
        let again = (0..args.pieces).take_while(|_| client.memory(piece, 0).is_ok()).count();
        why = format!("{why}, then {again} at once");
    }
    println!("got {got} pieces: {why}");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    drop(held);
    Ok(())
}

/// Frees a subdevice again and again that the supervisor may take for the parent of the ranges.
fn planted(args: &Args, piece: u64, era: &'static Era) -> Result<()> {
    let client = Client::open(&args.folder, era)?;
    let root = client.root().map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
    let mut parameters = [0; Class::DEVICE_PARAMETERS];
    put(&mut parameters, Class::DEVICE_SHARE, &root.to_ne_bytes());
    let device = client.allocate(Class::DEVICE, [root, root, 0], &mut parameters);
    let device = device.map_err(|refusal| anyhow::anyhow!("device: {refusal:?}"))?;
    let mut got = 0;
    for _ in 0..args.pieces {
        let mut none = [0; Class::SUBDEVICE_PARAMETERS];
        let _ = client.allocate(Class::SUBDEVICE, [root, device, SUBDEVICE], &mut none);
        let _ = client.allocate(CHANNEL, [root, SUBDEVICE, device], &mut []);
        let mut range = memory_parameters(era, piece);
        got += u32::from(client.allocate(Class::VIRTUAL_RANGE, [root, device, 0], &mut range).is_ok());
        let _ = client.free(root, SUBDEVICE);
    }
    println!("got {got} pieces");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Prints how many pieces all threads allocated and freed.
fn crowd(args: &Args, piece: u64, era: &'static Era) -> Result<()> {
    let rounds = || -> Result<u32> {
        let client = Client::open(&args.folder, era)?;
        let mut got = 0;
        for _ in 0..args.pieces {
            // Other threads may hold all of the share for now.
            if let Ok(handle) = client.memory(piece, 0) {
                client.free(client.handle, handle).map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
                got += 1;
            }
        }
        Ok(got)
    };
    let got = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..args.threads).map(|_| scope.spawn(rounds)).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).sum::<Result<u32>>()
    })?;
    println!("got {got} pieces");
    Ok(())
}

/// Makes a channel, stops `channel` or its own, and prints RM's answer.
fn stop(mut client: Client, args: &Args) -> Result<()> {
    let own = client.allocate(CHANNEL, [client.handle, DEVICE, 0], &mut []);
    let own = own.map_err(|refusal| anyhow::anyhow!("channel: {refusal:?}"))?;
    let (named, handle) = match *args.channel {
        [named, handle] => (named, handle),
        _ => (client.handle, own),
    };
    client.way.is_wrapped = args.wrapped;
    if args.planted {
        let _refused = client.add_device(named);
    }
    let mut parameters = [0; channels::STOP.size];
    parameters[0] = 1;
    for (at, word) in [
        (channels::STOP.count, 1),
        (channels::STOP.clients, named),
        (channels::STOP.clients + 4 * channels::MOST, handle),
    ] {
        put(&mut parameters, at, &word.to_ne_bytes());
    }
    let done = client.control(SUBDEVICE, channels::STOP.command, &mut parameters);
    println!("{} {own} {done:?}", client.handle);
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Holds a channel until standard input ends. If it `starts`, it starts the channel continually.
fn work(client: &Client, starts: bool) -> Result<()> {
    let refused = |what| move |refusal| anyhow::anyhow!("{what}: {refusal:?}");
    let era = client.era;
    let place = [client.handle, DEVICE, 0];
    let group = client.allocate(Class(0xa06c), place, &mut [0; 20]).map_err(refused("group"))?;
    let mut parameters = vec![0; era.channel];
    let channel = client.allocate(CHANNEL, [client.handle, group, 0], &mut parameters);
    let channel = channel.map_err(refused("channel"))?;
    println!("works");
    let is_over = AtomicBool::new(!starts);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let mut named = list([(client.handle, channel)], true);
                let _ = client.control(SUBDEVICE, channels::STOP.command, &mut named);
                let _ = client.control(group, channels::SCHEDULE[0], &mut [1, 0]);
                let _ = client.control(channel, channels::SCHEDULE[1], &mut [1, 0]);
            }
        });
        let ended = std::io::stdin().read_to_end(&mut Vec::new());
        is_over.store(true, Ordering::Relaxed);
        ended.map(drop)
    })?;
    Ok(())
}

/// Changes host memory into device memory from another thread while the supervisor checks the call. Returns
/// how many calls made device memory.
fn race(client: &Client, piece: u64, pieces: u32) -> u64 {
    let mut parameters = memory_parameters(client.era, piece);
    let mut structure = vec![0; client.era.long];
    client.fill(&mut structure, Class(0x3e), [client.handle, DEVICE, 0], &mut parameters);
    put(&mut parameters, memory::FLAGS, &0u32.to_ne_bytes());
    let address = structure.as_mut_ptr().expose_provenance();
    let stop = AtomicBool::new(false);
    let mut raced = 0;
    std::thread::scope(|scope| {
        let stop = &stop;
        scope.spawn(move || {
            let class = std::ptr::with_exposed_provenance_mut::<u32>(address + alloc::CLASS);
            while !stop.load(Ordering::Relaxed) {
                for value in [0x40, 0x3e] {
                    // SAFETY: the word is in a buffer that outlives this thread. The race is intended, and
                    // the only other reader is the kernel.
                    unsafe { class.write_volatile(value) };
                    for _ in 0..30 {
                        std::hint::spin_loop();
                    }
                }
            }
        });
        let mut before = client.counted().unwrap_or(0);
        for _ in 0..pieces {
            put(&mut structure, alloc::HANDLE, &0u32.to_ne_bytes());
            let _ = call(&client.file, number::ALLOC, &mut structure, client.way);
            let now = client.counted().unwrap_or(before);
            raced += u64::from(now > before);
            before = now;
        }
        stop.store(true, Ordering::Relaxed);
    });
    raced
}
