//! Running and stopped channels, their slices, and the GPU work that follows from them.

use std::time::{Duration, Instant};

use super::Manager;

/// Steers a GPU's work: receives the GPU's number, a process, whether the process runs, and its slice in
/// microseconds, 0 for none of its own.
pub type Steer = Box<dyn FnMut(usize, u32, bool, u64) + Send>;

pub(super) struct Steered(Steer);

impl std::fmt::Debug for Steered {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Steered")
    }
}

/// The run time of a channel.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) born: Instant,
    /// Start of the current run; `None` while it is stopped.
    pub(super) since: Option<Instant>,
    /// Run time before that.
    ran: Duration,
}

impl Channel {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { born: now, since: Some(now), ran: Duration::ZERO }
    }

    pub(super) fn ran(&self) -> Duration {
        self.ran + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl Manager {
    /// Adds a function that steers the GPUs' work.
    #[must_use]
    pub fn steering(self, steer: Steer) -> Self {
        Self { steered: Some(Steered(steer)), ..self }
    }

    /// Reports whether a client's process runs, and its slice. It runs while any of its channels does, and
    /// has the slice of its first group.
    pub(super) fn steer(&mut self, client: u32) {
        let Some(pid) = self.clients.get(&client).map(|client| client.pid) else { return };
        let Some(steered) = &mut self.steered else { return };
        for gpu in 0..self.gpus.len() {
            let is_here = |(client, handle): &(u32, u32)| {
                let client = self.clients.get(client).filter(|client| client.pid == pid);
                client
                    .and_then(|client| client.objects.get(handle))
                    .is_some_and(|object| object.gpu == Some(gpu))
            };
            let mut channels =
                self.channels.iter().filter(|(at, _)| is_here(at)).map(|(_, channel)| channel).peekable();
            let is_stopped = channels.peek().is_some() && channels.all(|channel| channel.since.is_none());
            let slice = self.slices.iter().find(|(at, _)| is_here(at)).map_or(0, |(_, slice)| *slice);
            (steered.0)(gpu, pid, !is_stopped, slice);
        }
    }

    pub(super) fn set_running(&mut self, (client, channel): (u32, u32), runs: bool) {
        let Some(channel) = self.channels.get_mut(&(client, channel)) else { return };
        channel.ran = channel.ran();
        channel.since = runs.then(Instant::now);
        self.steer(client);
    }

    /// Starts a channel, or all channels of a group. Whether a real card does so on these calls is unknown.
    pub(super) fn start_below(&mut self, client: u32, handle: u32) {
        let objects = self.clients.get(&client).into_iter().flat_map(|client| &client.objects);
        let below = objects.filter(|(at, object)| **at == handle || object.parent == handle);
        let channels: Vec<u32> = below.map(|(at, _)| *at).collect();
        channels.into_iter().for_each(|channel| self.set_running((client, channel), true));
    }

    pub(super) fn set_slice(&mut self, group: (u32, u32), microseconds: u64) {
        let _ = self.slices.insert(group, microseconds);
        self.steer(group.0);
    }

    /// Whether a channel runs; `None` if there is none.
    pub fn runs(&self, client: u32, channel: u32) -> Option<bool> {
        self.channels.get(&(client, channel)).map(|channel| channel.since.is_some())
    }

    /// Returns the slice that was set for a channel group, in microseconds.
    pub fn slice(&self, client: u32, group: u32) -> Option<u64> {
        self.slices.get(&(client, group)).copied()
    }
}
