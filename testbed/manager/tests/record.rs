//! Tests the reader of a card's record of context switches on the simulated resource manager's files.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use gpushare_residency::event::{Event, Holder, Kind};
use gpushare_residency::reader::{Reader, Unavailable};
use gpushare_residency::time::Engine as Residency;
use gpushare_simulated_manager::{Began, Engine, Gpu, Manager, mount};
use gpushare_supervisor::abi::Era;

const UUIDS: [[u8; 16]; 2] = [[1; 16], [2; 16]];
const MS: u64 = 1_000_000;

/// Engines whose switches the test scripts.
#[derive(Clone, Default)]
struct Script(Arc<Mutex<Vec<(usize, Began)>>>);

impl Script {
    fn say(&self, gpu: usize, context: u32, at: u64) {
        self.0.lock().expect("nobody panics with it").push((gpu, Began { pid: 1000 + context, context, at }));
    }
}

impl Engine for Script {
    fn began(&mut self, gpu: usize) -> Vec<Began> {
        let mut said = self.0.lock().expect("nobody panics with it");
        let (now, rest) = said.drain(..).partition(|(one, _)| *one == gpu);
        *said = rest;
        let now: Vec<(usize, Began)> = now;
        now.into_iter().map(|(_, began)| began).collect()
    }

    fn now(&self) -> u64 {
        77 * MS
    }
}

fn era() -> &'static Era {
    "580.142".parse().ok().and_then(Era::for_version).expect("it is known")
}

fn gpus() -> Vec<Gpu> {
    UUIDS.map(|uuid| Gpu { uuid, memory: 1 << 30 }).to_vec()
}

fn open(folder: &Path, gpu: usize) -> Result<Reader, Unavailable> {
    Reader::open(&folder.join("nvidiactl"), folder.join(format!("nvidia{gpu}")), era(), &UUIDS[gpu])
}

/// Reads until there are `count` lines.
fn lines(reader: &mut Reader, count: usize) -> Vec<Event> {
    let until = Instant::now() + Duration::from_secs(30);
    let mut all = Vec::new();
    while all.len() < count {
        assert!(Instant::now() < until, "{all:?}");
        assert_eq!(reader.read(|event| all.push(event)), 0, "none is dropped");
        sleep(Duration::from_millis(5));
    }
    all
}

#[test]
fn each_reader_gets_the_switches_of_its_own_card_once() {
    let folder = tempfile::tempdir().unwrap();
    let script = Script::default();
    let manager = Manager::new(era(), gpus()).recording(Box::new(script.clone()));
    let _session = mount(manager, 2, folder.path()).unwrap();
    let mut readers = [0, 1].map(|gpu| open(folder.path(), gpu).unwrap());
    assert_eq!(readers[0].time(), Some(77 * MS));
    for round in 0..3 {
        let at = round * 100 * MS;
        script.say(0, 1, at);
        script.say(0, 2, at + 30 * MS);
        script.say(1, 9, at + 40 * MS); // alone on its card, so it appears once
        // The end of the first one is written when the next one starts.
        let read = lines(&mut readers[0], if round == 0 { 3 } else { 4 });
        let holder = |context| Holder { pid: 1000 + context, context };
        let kinds: Vec<Kind> = read.iter().rev().take(3).rev().map(|event| event.kind).collect();
        assert_eq!(kinds, [Kind::Start(holder(1)), Kind::End(holder(1)), Kind::Start(holder(2))]);
        assert_eq!(read.last().unwrap().at, at + 30 * MS);
    }
    assert_eq!(lines(&mut readers[1], 1).len(), 1);
    sleep(Duration::from_millis(100));
    assert_eq!(readers[1].read(|event| panic!("{event:?}")), 0);
}

#[test]
fn a_ring_that_is_full_loses_lines_and_says_how_many() {
    const SWITCHES: u32 = 20_000;
    let folder = tempfile::tempdir().unwrap();
    let script = Script::default();
    let manager = Manager::new(era(), gpus()).recording(Box::new(script.clone()));
    let _session = mount(manager, 2, folder.path()).unwrap();
    let mut reader = open(folder.path(), 0).unwrap();
    (0..SWITCHES).for_each(|at| script.say(0, at % 2, u64::from(at) * MS));
    let (mut residency, mut read, mut dropped) = (Residency::since(0), 0, 0);
    let until = Instant::now() + Duration::from_secs(30);
    while read + dropped < u64::from(SWITCHES) * 2 - 1 {
        assert!(Instant::now() < until, "{read} and {dropped}");
        dropped += reader.read(|event| {
            read += 1;
            residency.note(event);
        });
        sleep(Duration::from_millis(5));
    }
    assert!(read >= 16_000 && dropped > 0, "{read} and {dropped}");
    // Lines after the gap are readable again.
    script.say(0, 7, 30_000 * MS);
    lines(&mut reader, 2).into_iter().for_each(|event| residency.note(event));
    let held = residency.settle(30_001 * MS);
    assert_eq!(held.lost, dropped);
    let by: BTreeMap<u32, u64> = held.by.iter().map(|(holder, time)| (holder.context, *time)).collect();
    let ran = read / 2 * MS;
    assert!(by[&0] + by[&1] <= ran && by[&0] + by[&1] >= ran - 2 * MS && by[&7] == MS, "{by:?} of {ran}");
}

#[test]
fn a_card_without_a_record_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let _session = mount(Manager::new(era(), gpus()), 2, folder.path()).unwrap();
    let refused = open(folder.path(), 0).err().unwrap().to_string();
    assert_eq!(refused, "the card keeps no record of context switches");
    let other =
        Reader::open(&folder.path().join("nvidiactl"), folder.path().join("nvidia0"), era(), &[7; 16]);
    assert_eq!(other.err(), Some(Unavailable::NoCard));
}
