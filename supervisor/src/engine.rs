//! The container's channels on a GPU's compute engine, and the calls that stop and start them.
//!
//! A channel runs if both the schedule and the program want it to; programs may stop and restart their own
//! channels. Channels of copy engines run whatever the schedule says, unless the container is paused.

use gpushare_schedule::controller::Running;

use crate::abi::{Era, channels, put, slice};
use crate::handles::Handles;
use crate::manager::{Manager, Subdevice, add_subdevice, class_of, free_object, subdevice_of};

/// The location of channels, and the handles through which RM accepts calls for them.
#[derive(Debug)]
pub struct Seat<F> {
    /// The client.
    pub client: u32,
    /// A descriptor of the process that has the client, readable once it has ended.
    pub watch: Option<F>,
    /// The process that made the client.
    pub maker: Maker<F>,
    /// A copy of the client's file, which keeps the client until it is dropped; `None` if it cannot be
    /// copied.
    pub file: Option<F>,
    /// The client's device.
    pub device: u32,
    /// The subdevice of that device; 0 if none is known.
    pub subdevice: u32,
}

/// The process that made a client. The card's own record has its name for all channels of the client.
#[derive(Debug)]
pub enum Maker<F> {
    /// The client has no memory yet that would reveal its maker.
    Unknown,
    /// A descriptor of the process, readable once it has ended.
    Known(F),
    /// The process has ended, so its name may belong to another one.
    Ended,
}

#[derive(Debug)]
struct Channel {
    handle: u32,
    group: u32,
    /// Whether the program wants it to run.
    is_wanted: bool,
}

#[derive(Debug)]
struct Group {
    handle: u32,
    /// Whether it belongs to a copy engine.
    copies: bool,
    /// The slice set for it, in microseconds; 0: its own.
    slice: u32,
}

#[derive(Debug)]
struct Member<F> {
    seat: Seat<F>,
    /// Whether RM performed the last request.
    is_reached: bool,
    channels: Vec<Channel>,
    groups: Vec<Group>,
    /// Groups and channels that the program let run for the first time.
    begun: Vec<u32>,
}

/// One GPU's compute engine, limited to this container's work.
#[derive(Debug)]
pub struct Engine<F> {
    members: Vec<Member<F>>,
    running: Running,
    /// Whether the channels certainly match `running`.
    is_settled: bool,
    is_disturbed: bool,
    /// Whether channels of copy engines may be stopped.
    has_paused: bool,
}

impl<F> Default for Engine<F> {
    fn default() -> Self {
        Self {
            members: Vec::new(),
            running: Running::All,
            is_settled: true,
            is_disturbed: false,
            has_paused: false,
        }
    }
}

impl<F> Engine<F> {
    /// Whether the container has no channel on it.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Returns the groups that run now, according to the schedule.
    pub fn running(&self) -> Running {
        self.running
    }

    /// Whether the schedule has stopped the group or channel with this handle.
    pub fn has_stopped(&self, client: u32, handle: u32) -> bool {
        let (groups, mut first) = (self.groups(), 0);
        for member in &self.members {
            let numbered = member.numbered(&mut first);
            if member.seat.client == client {
                let is_its = |group: &Group| {
                    let is_it = |one: &Channel| {
                        one.group == group.handle && (one.handle == handle || group.handle == handle)
                    };
                    member.channels.iter().any(is_it)
                };
                let mut its = numbered.into_iter().filter(|(_, group)| is_its(group));
                return its.any(|(at, _)| !runs(self.running, at, groups));
            }
        }
        false
    }

    /// Whether the channels certainly match the schedule.
    pub fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Makes the next [`Self::set`] send its orders to all channels again.
    pub fn doubt(&mut self) {
        self.is_settled = self.is_empty();
    }

    /// Records that a program may be starting channels by itself.
    pub fn disturb(&mut self) {
        self.doubt();
        self.is_disturbed = !self.is_empty();
    }

    /// Returns whether a program may have done so since the last call.
    pub fn take_disturbance(&mut self) -> bool {
        std::mem::take(&mut self.is_disturbed)
    }

    /// Returns how many channel groups the container has on the compute engine.
    pub fn groups(&self) -> u32 {
        let groups = self.members.iter().flat_map(|member| &member.groups);
        u32::try_from(groups.filter(|group| !group.copies).count()).unwrap_or(u32::MAX)
    }

    /// Returns how many calls stop them all.
    pub fn calls(&self) -> u32 {
        let calls = self.members.iter().map(|member| {
            let computes = |one: &&Channel| !member.copies(one.group);
            member.channels.iter().filter(computes).count().div_ceil(channels::MOST)
        });
        u32::try_from(calls.sum::<usize>()).unwrap_or(u32::MAX)
    }

    /// Whether the engine has channels of this client.
    pub fn has_client(&self, client: u32) -> bool {
        self.members.iter().any(|member| member.seat.client == client)
    }

    /// Whether the engine has this channel.
    pub fn has(&self, client: u32, channel: u32) -> bool {
        let of_client = self.members.iter().filter(|member| member.seat.client == client);
        of_client.flat_map(|member| &member.channels).any(|one| one.handle == channel)
    }

    /// Whether the handle is one of its channels or groups.
    pub fn leads(&self, client: u32, handle: u32) -> bool {
        let of_client = self.members.iter().filter(|member| member.seat.client == client);
        of_client.flat_map(|member| &member.channels).any(|one| one.handle == handle || one.group == handle)
    }

    /// Adds a channel of `group` (the channel itself if it has none), which has just been made and runs, on a
    /// copy engine if it `copies`. `seat` is called if the client is new here.
    pub fn add(
        &mut self,
        client: u32,
        (group, channel): (u32, u32),
        copies: bool,
        seat: impl FnOnce() -> Seat<F>,
    ) {
        let at = match self.members.iter().position(|member| member.seat.client == client) {
            Some(at) => at,
            None => {
                self.members.push(Member {
                    seat: seat(),
                    is_reached: true,
                    channels: Vec::new(),
                    groups: Vec::new(),
                    begun: Vec::new(),
                });
                self.members.len() - 1
            }
        };
        let member = &mut self.members[at];
        member.channels.push(Channel { handle: channel, group, is_wanted: true });
        if member.groups.iter().all(|known| known.handle != group) {
            member.groups.push(Group { handle: group, copies, slice: 0 });
        }
        // It shifts the turns of the others.
        self.is_settled &= self.running == Running::All || (copies && self.running != Running::Paused);
    }

    /// Removes a client's channels under this handle, or all of them for the client's own, because RM has
    /// freed it.
    pub fn remove(&mut self, client: u32, handle: u32) {
        for member in self.members.iter_mut().filter(|member| member.seat.client == client) {
            if handle == client || handle == member.seat.device {
                member.channels.clear();
            }
            if handle == member.seat.subdevice {
                member.seat.subdevice = 0;
            }
            member.channels.retain(|one| one.handle != handle && one.group != handle);
            member.begun.retain(|one| *one != handle);
            let Member { channels, groups, .. } = member;
            groups.retain(|group| channels.iter().any(|one| one.group == group.handle));
        }
        self.members.retain(|member| !member.channels.is_empty());
        self.is_settled &= !matches!(self.running, Running::Turn { .. });
        self.is_settled |= self.is_empty();
    }

    /// Returns the subdevice through which a client's channels are stopped.
    pub fn subdevice(&self, client: u32, device: u32) -> Option<u32> {
        let its = |member: &&Member<F>| member.seat.client == client && member.seat.device == device;
        self.members.iter().find(its).map(|member| member.seat.subdevice).filter(|handle| *handle != 0)
    }

    /// Records a subdevice that the program makes.
    pub fn set_subdevice(&mut self, client: u32, device: u32, subdevice: u32) {
        let its = |member: &&mut Member<F>| member.seat.client == client && member.seat.device == device;
        self.members.iter_mut().filter(its).for_each(|member| member.seat.subdevice = subdevice);
    }

    /// Records whether a program wants one of its channels to run.
    pub fn want(&mut self, client: u32, channel: u32, runs: bool) {
        let of_client = self.members.iter_mut().filter(|member| member.seat.client == client);
        let all = of_client.flat_map(|member| &mut member.channels);
        all.filter(|one| one.handle == channel).for_each(|one| one.is_wanted = runs);
    }

    /// Records that a program lets a group or a channel run, and returns whether it had run before.
    pub fn begin(&mut self, client: u32, handle: u32) -> bool {
        let has = |member: &&mut Member<F>| {
            member.seat.client == client
                && member.channels.iter().any(|one| one.handle == handle || one.group == handle)
        };
        let Some(member) = self.members.iter_mut().find(has) else { return false };
        let has_begun = member.begun.contains(&handle);
        if !has_begun {
            member.begun.push(handle);
        }
        has_begun
    }

    /// Lists the descriptors that become readable once a process here has ended.
    pub fn watched(&self) -> impl Iterator<Item = &F> {
        self.members.iter().flat_map(|member| member.seat.watch.iter().chain(member.seat.maker.known()))
    }

    /// Sets the maker of a client.
    pub fn set_maker(&mut self, client: u32, maker: impl FnOnce() -> Maker<F>) {
        if let Some(member) = self.members.iter_mut().find(|member| member.seat.client == client) {
            member.seat.maker = maker();
        }
    }

    /// Whether the card's own record may attribute some of the channels to another process or to none.
    pub fn is_nameless(&self) -> bool {
        self.members.iter().any(|member| !matches!(member.seat.maker, Maker::Known(_)))
    }

    /// Lists the descriptors of processes whose channels could not be reached at the last attempt to run or
    /// stop them.
    pub fn unreached(&self) -> impl Iterator<Item = &F> {
        self.members
            .iter()
            .filter(|member| !member.is_reached)
            .filter_map(|member| member.seat.watch.as_ref())
    }

    /// Stops the channels of processes that have ended, and of clients whose makers have ended, and releases
    /// the clients. If another process has such a file, its channels no longer run.
    pub fn drop_ended<M: Manager<File = F>>(
        &mut self,
        manager: &mut M,
        (era, handles): (&Era, &mut Handles),
        has_ended: impl Fn(&F) -> bool,
    ) {
        for member in &mut self.members {
            let is_left = member.seat.watch.as_ref().is_none_or(&has_ended);
            if !is_left && !member.seat.maker.has_ended(&has_ended) {
                continue;
            }
            let all: Vec<u32> = member.groups.iter().map(|group| group.handle).collect();
            // RM may fail to stop channels that are no longer watched, because another process can have the
            // client.
            let is_over = member.set(manager, era, handles, &all, false).is_some()
                || (is_left && member.seat.free(manager, &all));
            // Retried while the channels exist.
            member.seat.maker = Maker::Ended;
            member.is_reached = is_over;
            if is_over {
                member.channels.clear();
                self.is_settled &= !matches!(self.running, Running::Turn { .. });
            } else {
                self.is_settled = false;
            }
        }
        self.members.retain(|member| !member.channels.is_empty());
        self.is_settled |= self.is_empty();
    }

    /// Runs the channels of these groups and stops the others, and returns the number of calls to RM.
    pub fn set<M: Manager<File = F>>(
        &mut self,
        manager: &mut M,
        era: &Era,
        handles: &mut Handles,
        running: Running,
    ) -> u32 {
        let (mut made, groups) = (0, self.groups());
        let before = self.running;
        self.has_paused |= running == Running::Paused;
        let has_paused = self.has_paused;
        let is_new = |at: Option<u32>| match at {
            None => has_paused,
            _ => !self.is_settled || runs(before, at, groups) != runs(running, at, groups),
        };
        self.members.iter_mut().for_each(|member| member.is_reached = true);
        // Stop channels first, to make room for those that start.
        for starts in [false, true] {
            let mut first = 0;
            for member in &mut self.members {
                // It never starts, and stops are retried until one succeeds.
                let is_over = matches!(member.seat.maker, Maker::Ended);
                let numbered = member.numbered(&mut first);
                let chosen = numbered.into_iter().filter(|(at, _)| match is_over {
                    true => !starts,
                    false => is_new(*at) && runs(running, *at, groups) == starts,
                });
                let chosen: Vec<u32> = chosen.map(|(_, group)| group.handle).collect();
                let calls = member.set(manager, era, handles, &chosen, starts);
                member.is_reached &= calls.is_some();
                made += calls.unwrap_or(0);
            }
        }
        self.running = running;
        self.is_settled = self.members.iter().all(|member| member.is_reached);
        self.has_paused &= running == Running::Paused || !self.is_settled;
        made
    }

    /// Gives each group a slice of this many microseconds, if it has a different one. A group that cannot be
    /// reached keeps its slice.
    pub fn set_slices<M: Manager<File = F>>(&mut self, manager: &mut M, microseconds: u32) {
        for Member { seat, groups, .. } in &mut self.members {
            let Some(file) = &seat.file else { continue };
            for group in groups.iter_mut().filter(|group| !group.copies && group.slice != microseconds) {
                let mut parameters = [0; slice::SIZE];
                put(&mut parameters, slice::MICROSECONDS, &u64::from(microseconds).to_ne_bytes());
                let object = Subdevice { file, client: seat.client, handle: group.handle };
                if object.control(manager, slice::COMMAND, &mut parameters).is_some() {
                    group.slice = microseconds;
                }
            }
        }
    }
}

/// Whether a group runs, given its number among `groups` on the compute engine. A group without a number
/// belongs to a copy engine.
fn runs(running: Running, number: Option<u32>, groups: u32) -> bool {
    number.map_or(running != Running::Paused, |number| running.includes(number, groups))
}

impl<F> Maker<F> {
    fn known(&self) -> Option<&F> {
        match self {
            Self::Known(watch) => Some(watch),
            Self::Unknown | Self::Ended => None,
        }
    }

    /// Whether the maker is known to have ended.
    pub fn has_ended(&self, has_ended: impl Fn(&F) -> bool) -> bool {
        match self {
            Self::Unknown => false,
            Self::Known(watch) => has_ended(watch),
            Self::Ended => true,
        }
    }
}

impl<F> Member<F> {
    /// Lists its groups with their numbers, starting from `first`.
    fn numbered(&self, first: &mut u32) -> Vec<(Option<u32>, &Group)> {
        let number = |group: &Group| {
            let number = (!group.copies).then_some(*first);
            *first = first.saturating_add(u32::from(!group.copies));
            number
        };
        let numbers: Vec<Option<u32>> = self.groups.iter().map(number).collect();
        numbers.into_iter().zip(&self.groups).collect()
    }

    fn copies(&self, group: u32) -> bool {
        self.groups.iter().any(|one| one.handle == group && one.copies)
    }

    /// Stops or starts the channels of these groups, and returns the number of calls; `None` if RM did not
    /// perform all of them.
    fn set<M: Manager<File = F>>(
        &mut self,
        manager: &mut M,
        era: &Era,
        handles: &mut Handles,
        groups: &[u32],
        runs: bool,
    ) -> Option<u32> {
        let chosen =
            self.channels.iter().filter(|one| groups.contains(&one.group) && (!runs || one.is_wanted));
        let named: Vec<u32> = chosen.map(|one| one.handle).collect();
        let mut calls = 0;
        for part in named.chunks(channels::MOST) {
            calls += 1;
            if self.seat.call(manager, part, runs) {
                continue;
            }
            // The subdevice has changed or is gone, or a channel is: RM performs a list completely or not at
            // all.
            if let Some(there) = self.seat.find_subdevice(manager, era, handles) {
                self.seat.subdevice = there;
            }
            let (alive, gone): (Vec<u32>, Vec<u32>) =
                part.iter().partition(|channel| self.seat.has(manager, **channel));
            if !alive.is_empty() && !self.seat.call(manager, &alive, runs) {
                return None;
            }
            self.channels.retain(|one| !gone.contains(&one.handle));
        }
        Some(calls)
    }
}

impl<F> Seat<F> {
    /// Stops or starts these channels, and returns whether RM did.
    fn call<M: Manager<File = F>>(&self, manager: &mut M, named: &[u32], runs: bool) -> bool {
        let Some(file) = self.file.as_ref().filter(|_| self.subdevice != 0) else { return false };
        let subdevice = Subdevice { file, client: self.client, handle: self.subdevice };
        let mut parameters = list(named.iter().map(|channel| (self.client, *channel)), runs);
        subdevice.control(manager, channels::STOP.command, &mut parameters).is_some()
    }

    /// Whether RM has this channel, or does not say.
    fn has<M: Manager<File = F>>(&self, manager: &mut M, channel: u32) -> bool {
        let Some(file) = &self.file else { return true };
        let mut knows = |handle| class_of(manager, file, self.client, handle).is_some();
        knows(channel) || !knows(self.client)
    }

    /// Frees these groups, and returns whether they are gone.
    fn free<M: Manager<File = F>>(&self, manager: &mut M, groups: &[u32]) -> bool {
        let Some(file) = &self.file else { return true };
        groups.iter().all(|group| {
            free_object(manager, file, self.client, *group).is_ok()
                || class_of(manager, file, self.client, *group).is_none()
        })
    }

    /// Finds the device's subdevice. RM has one per device: the program's, or else one made for it here.
    fn find_subdevice<M: Manager<File = F>>(
        &self,
        manager: &mut M,
        era: &Era,
        handles: &mut Handles,
    ) -> Option<u32> {
        let (file, client, device) = (self.file.as_ref()?, self.client, self.device);
        if let Some(there) = subdevice_of(manager, file, client, device) {
            return Some(there);
        }
        handles.first_free(|handle| add_subdevice(manager, file, [client, device, handle], era)).ok()
    }
}

/// Returns the parameters of a call that stops or starts these channels, at most [`channels::MOST`].
pub fn list(named: impl IntoIterator<Item = (u32, u32)>, runs: bool) -> [u8; channels::STOP.size] {
    let mut parameters = [0; channels::STOP.size];
    parameters[channels::STOPS] = u8::from(!runs);
    let mut count = 0u32;
    for ((client, channel), at) in
        named.into_iter().zip((channels::STOP.clients..).step_by(4)).take(channels::MOST)
    {
        put(&mut parameters, at, &client.to_ne_bytes());
        put(&mut parameters, at + 4 * channels::MOST, &channel.to_ne_bytes());
        count += 1;
    }
    put(&mut parameters, channels::STOP.count, &count.to_ne_bytes());
    parameters
}
