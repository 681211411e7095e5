//! Runs every reader on the corpus and on many small changes of it. The run is bounded and the same every
//! time; `make fuzz` runs longer.

use std::fs;
use std::path::{Path, PathBuf};

use gpushare_fuzz::TARGETS;

/// Number of changes that are made of each seed.
const CHANGES: usize = 300;

fn folder(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The seeds of a reader. The edit also gets the bundles that engines wrote.
fn seeds(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let mut folders = vec![folder("corpus").join(target)];
    folders.extend((target == "edit").then(|| folder("../../tests/fixtures")));
    let files = folders.iter().flat_map(|folder| fs::read_dir(folder).expect("a folder of seeds"));
    let paths = files.map(|entry| entry.expect("an entry").path()).filter(|path| path.is_file());
    let mut read: Vec<_> =
        paths.map(|path| (path.clone(), fs::read(&path).expect("a seed can be read"))).collect();
    read.sort();
    read
}

#[test]
fn every_reader_keeps_its_promises_on_the_corpus_and_on_changes_of_it() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for (target, reader) in TARGETS {
        let seeds = seeds(target);
        assert!(!seeds.is_empty(), "no seeds for {target}");
        reader(b"");
        for (path, seed) in &seeds {
            println!("{target}: {}", path.display()); // shown when it fails
            reader(seed);
            for _ in 0..CHANGES {
                reader(&changed(seed, &mut random));
            }
        }
    }
}

/// The seed with a few bytes inserted, removed or replaced, as libFuzzer's first steps do it.
fn changed(seed: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..1 + random.below(4) {
        let at = random.below(bytes.len() + 1);
        let length = (1 + random.below(8)).min(bytes.len() - at);
        match random.below(4) {
            0 => drop(bytes.drain(at..at + length)),
            1 => bytes.insert(at, random.byte()),
            2 => {
                let stretch = bytes[at..at + length].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, stretch);
            }
            _ => bytes[at..at + length].iter_mut().for_each(|byte| *byte = random.byte()),
        }
    }
    bytes
}

/// A 64-bit xorshift generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).expect("it is below a usize")
    }

    /// A random byte; in half of the cases one that has a meaning in some format.
    fn byte(&mut self) -> u8 {
        const SPECIAL: &[u8] = b"0129-.,:;=%\"\\[]{}/@\n\0\x01\x7f\xff ";
        match self.next() % 2 {
            0 => SPECIAL[self.below(SPECIAL.len())],
            _ => self.next().to_ne_bytes()[0],
        }
    }
}
