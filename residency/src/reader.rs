//! Reads the record of one card, which RM hands out to administrators only.

mod memory;

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use gpushare_supervisor::abi::switches::{bind, buffer, header, host_memory, map, record, time};
use gpushare_supervisor::abi::{Era, Status, memory as parameters_of_memory, put, u32_at, u64_at};
use gpushare_supervisor::kernel::Kernel;
use gpushare_supervisor::manager::{Manager, OwnSubdevice, Subdevice, add_object, own_subdevice};

use self::memory::Mapped;
use crate::event::Event;

/// Lines that RM keeps until they are read: half a second of the fastest switching we have seen.
const LINES: u32 = 1 << 14;
/// Room for the buffer's header, one page.
const HEADER_ROOM: usize = 4096;

/// Handles of the reader's own objects. Its subdevice uses 1 and 2.
const HEADER_MEMORY: u32 = 0x10;
const LINE_MEMORY: u32 = 0x11;
const BUFFER: u32 = 0x12;

/// Delay after which all lines are there, in nanoseconds. RM looks every 33 ms, and the latest line we saw
/// came after 43.
pub const DELAY: u64 = 60_000_000;

/// The reason why a card's record cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// RM made no client for the card, or no subdevice.
    #[error("the driver does not open the card")]
    NoCard,
    /// RM refused an object or a call.
    #[error("the driver refuses {what} (status 0x{status:x})")]
    Refused {
        /// The refused object or call.
        what: &'static str,
        /// RM's status.
        status: u32,
    },
    /// RM gave a reason for not handing the record out.
    #[error("{0}")]
    Reason(&'static str),
    /// The memory that holds the lines cannot be mapped.
    #[error("the record cannot be mapped: {0}")]
    Map(nix::errno::Errno),
}

/// The record of one card.
pub struct Reader {
    kernel: Kernel,
    own: OwnSubdevice<OwnedFd>,
    header: Mapped,
    lines: Mapped,
    /// Index of the next line.
    get: u32,
    /// Lines that RM has dropped so far.
    dropped: u64,
}

impl Reader {
    /// Opens the record of the card with this UUID. `control` is nvidiactl, and `gpu` the card's own file.
    /// Recording ends when this value is dropped.
    ///
    /// # Errors
    /// [`Unavailable`], for a plain user, and on cards and drivers that keep no record.
    pub fn open(control: &Path, gpu: PathBuf, era: &Era, uuid: &[u8; 16]) -> Result<Self, Unavailable> {
        let mut kernel = Kernel::new(control.to_owned(), vec![gpu]);
        let own = own_subdevice(&mut kernel, era, 0, |found| found == uuid).ok_or(Unavailable::NoCard)?;
        let line_room = LINES as usize * record::SIZE;
        let header = share(&mut kernel, &own, era, (HEADER_MEMORY, HEADER_ROOM))?;
        let lines = share(&mut kernel, &own, era, (LINE_MEMORY, line_room))?;
        let mut parameters = [0; buffer::SIZE];
        for (at, word) in [
            (buffer::RECORD_SIZE, u32::try_from(record::SIZE).unwrap_or(0)),
            (buffer::RECORDS, LINES),
            (buffer::SUBDEVICE, own.handle),
            (buffer::HEADER_MEMORY, HEADER_MEMORY),
            (buffer::RECORD_MEMORY, LINE_MEMORY),
        ] {
            put(&mut parameters, at, &word.to_ne_bytes());
        }
        let place = [own.client, own.client, BUFFER];
        add_object(&mut kernel, &own.file, buffer::CLASS, place, &mut parameters, era)
            .map_err(|Status(status)| Unavailable::Refused { what: "a buffer of events", status })?;
        let mut reader = Self { kernel, own, header, lines, get: 0, dropped: 0 };
        reader.bind()?;
        reader.enable()?;
        Ok(reader)
    }

    fn bind(&mut self) -> Result<(), Unavailable> {
        let mut parameters = [0; bind::SIZE];
        put(&mut parameters, 0, &BUFFER.to_ne_bytes());
        let line = u32::try_from(record::SIZE - record::HEADER).unwrap_or(0);
        put(&mut parameters, bind::RECORD_SIZE, &line.to_ne_bytes());
        put(&mut parameters, bind::DETAIL, &bind::SIMPLE.to_ne_bytes());
        put(&mut parameters, bind::ALL_USERS, &[1]);
        let done = self.own.subdevice().control(&mut self.kernel, bind::COMMAND, &mut parameters);
        done.ok_or(Unavailable::Reason(match u32_at(&parameters, bind::REASON) {
            1 => "the card keeps no record of context switches",
            2 | 3 => "the driver keeps no record of context switches (RMCtxswLog)",
            4 | 5 => "the record of context switches is for administrators (CAP_SYS_ADMIN)",
            _ => "the driver does not hand out the record of context switches",
        }))
    }

    fn enable(&mut self) -> Result<(), Unavailable> {
        let mut parameters = [0; buffer::ENABLE_SIZE];
        put(&mut parameters, 0, &[1]);
        put(&mut parameters, buffer::ENABLE_FLAGS, &buffer::KEEP_OLDEST.to_ne_bytes());
        let done = self.on_buffer(buffer::ENABLE, &mut parameters);
        done.ok_or(Unavailable::Reason("the driver does not begin the record of context switches"))
    }

    fn on_buffer(&mut self, command: u32, parameters: &mut [u8]) -> Option<()> {
        let buffer = Subdevice { file: &self.own.file, client: self.own.client, handle: BUFFER };
        buffer.control(&mut self.kernel, command, parameters)
    }

    /// Passes each new line to `each`, and returns how many lines were dropped before they were read.
    pub fn read(&mut self, mut each: impl FnMut(Event)) -> u64 {
        let put_at = self.header.word(header::PUT);
        let is_new = put_at < LINES && put_at != self.get;
        while is_new && self.get != put_at {
            let line = self.lines.line(self.get as usize * record::SIZE);
            if let Some(event) = Event::read(&line) {
                each(event);
            }
            self.get = (self.get + 1) % LINES;
        }
        if is_new {
            let mut parameters = [0; buffer::UPDATE_GET_SIZE];
            put(&mut parameters, 0, &self.get.to_ne_bytes());
            let _ = self.on_buffer(buffer::UPDATE_GET, &mut parameters); // otherwise RM drops lines, and counts them
        }
        let all = self.header.long(header::DROPPED);
        let new = all.saturating_sub(self.dropped);
        self.dropped = all;
        new
    }

    /// Returns the card's clock in nanoseconds, or `None` if RM does not report it.
    pub fn time(&mut self) -> Option<u64> {
        let mut parameters = [0; time::SIZE];
        self.own.subdevice().control(&mut self.kernel, time::COMMAND, &mut parameters)?;
        Some(u64_at(&parameters, 0))
    }
}

/// Allocates memory that RM writes and this process reads.
fn share(
    kernel: &mut Kernel,
    own: &OwnSubdevice<OwnedFd>,
    era: &Era,
    (handle, size): (u32, usize),
) -> Result<Mapped, Unavailable> {
    let length = u64::try_from(size).unwrap_or(0);
    let mut parameters = vec![0; era.memory];
    put(&mut parameters, host_memory::ATTRIBUTES, &host_memory::CACHED.to_ne_bytes());
    put(&mut parameters, host_memory::MORE_ATTRIBUTES, &host_memory::READ_ONLY.to_ne_bytes());
    put(&mut parameters, parameters_of_memory::LENGTH, &length.to_ne_bytes());
    let place = [own.client, own.client, handle];
    add_object(kernel, &own.file, host_memory::CLASS, place, &mut parameters, era)
        .map_err(|Status(status)| Unavailable::Refused { what: "memory for the record", status })?;
    // Each mapping needs an open file of its own.
    let file = kernel.open().ok_or(Unavailable::NoCard)?;
    let mut call = [0; map::SIZE];
    for (at, word) in [
        (map::CLIENT, own.client),
        (map::DEVICE, own.client),
        (map::MEMORY, handle),
        (map::FLAGS, map::READ_ONLY),
        (map::FD, file.as_raw_fd().cast_unsigned()),
    ] {
        put(&mut call, at, &word.to_ne_bytes());
    }
    put(&mut call, map::LENGTH, &length.to_ne_bytes());
    let done = kernel.call(&own.file, map::NUMBER, &mut call, &mut []);
    let status = done.map_or(u32::MAX, |()| u32_at(&call, map::STATUS));
    if status != Status::OK.0 {
        return Err(Unavailable::Refused { what: "a mapping of the record", status });
    }
    Mapped::new(&file, size).map_err(Unavailable::Map)
}
