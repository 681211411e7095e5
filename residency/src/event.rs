//! A line of the record.

use gpushare_supervisor::abi::{switches::record, u32_at, u64_at};

/// The process and context that occupy the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Holder {
    /// PID of the process that made the context's client, in the host's namespace. RM's own work has
    /// [`u32::MAX`].
    pub pid: u32,
    /// RM's number of the context. RM never reuses it.
    pub context: u32,
}

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The context has the engine from now on.
    Start(Holder),
    /// The context has left the engine.
    End(Holder),
    /// The engine was reset, so no context has it.
    Reset,
    /// An event that does not change the holder. It has a sequence number like the others.
    Other,
}

/// A line of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Kind of an event.
    pub kind: Kind,
    /// Time of the event, in nanoseconds of the card's clock.
    pub at: u64,
    /// The card's own count of switches. Gaps in it reveal lost lines.
    pub sequence: u16,
}

impl Event {
    /// Parses a line. Returns `None` for a line of another kind.
    pub fn read(line: &[u8; record::SIZE]) -> Option<Self> {
        let [low, high] = *line.first_chunk()?;
        if u16::from_ne_bytes([low, high]) != record::TYPE {
            return None;
        }
        let holder = Holder { pid: u32_at(line, record::PID), context: u32_at(line, record::CONTEXT) };
        let kind = match line[record::TAG] {
            record::START => Kind::Start(holder),
            record::END => Kind::End(holder),
            record::RESET => Kind::Reset,
            _ => Kind::Other,
        };
        let sequence = u16::from_ne_bytes([line[record::SEQUENCE], line[record::SEQUENCE + 1]]);
        Some(Self { kind, at: u64_at(line, record::TIME), sequence })
    }

    /// Formats the event as RM writes it.
    pub fn write(&self) -> [u8; record::SIZE] {
        let mut line = [0; record::SIZE];
        let (tag, holder) = match self.kind {
            Kind::Start(holder) => (record::START, holder),
            Kind::End(holder) => (record::END, holder),
            Kind::Reset => (record::RESET, Holder { pid: 0, context: 0 }),
            Kind::Other => (record::OTHER, Holder { pid: 0, context: 0 }),
        };
        line[..2].copy_from_slice(&record::TYPE.to_ne_bytes());
        line[record::TAG] = tag;
        let words = [(record::CONTEXT, holder.context), (record::PID, holder.pid)];
        words.into_iter().for_each(|(at, word)| line[at..at + 4].copy_from_slice(&word.to_ne_bytes()));
        line[record::SEQUENCE..record::SEQUENCE + 2].copy_from_slice(&self.sequence.to_ne_bytes());
        line[record::TIME..record::TIME + 8].copy_from_slice(&self.at.to_ne_bytes());
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_written_and_another_kind_is_not() {
        let holder = Holder { pid: 4711, context: 99 };
        for kind in [Kind::Start(holder), Kind::End(holder), Kind::Reset] {
            let event = Event { kind, at: 1 << 60, sequence: 65_535 };
            let line = event.write();
            assert_eq!(Event::read(&line), Some(event));
            let mut other = line;
            other[0] = 1; // a record of video engines
            assert_eq!(Event::read(&other), None);
            other = line;
            other[record::TAG] = record::OTHER;
            assert_eq!(Event::read(&other), Some(Event { kind: Kind::Other, ..event }));
        }
    }
}
