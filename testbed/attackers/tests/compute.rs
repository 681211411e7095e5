//! Tests which calls programs may make on channels whose time a supervisor enforces.

use gpushare_attackers::world::{Ground, Performed, World, era, of_bytes, of_device};
use gpushare_schedule::controller::Running;
use gpushare_supervisor::abi::{Status, channel_group, channels, interleave, put, slice};
use gpushare_supervisor::calls::Engines;
use gpushare_supervisor::engine::list;
use gpushare_supervisor::handles::Handles;

const CHANNEL: u32 = 0xc86f;
const GROUP: u32 = 0xa06c;
/// The device and the subdevice of the first GPU.
const DEVICE: u32 = 0x80;
const SUBDEVICE: u32 = 0x2080;
/// A program with a subdevice of its own, and one without.
const PROGRAMS: [u32; 2] = [10, 11];

struct Tested<'g> {
    world: World<'g>,
    engines: Engines<u64>,
    handles: Handles,
}

impl<'g> Tested<'g> {
    fn on(ground: &'g mut Ground) -> Self {
        let (world, engines) = World::with_engines(ground);
        Self { world, engines, handles: Handles::new(7) }
    }

    /// Makes a client with a channel group on a compute or copy engine, and one channel in it.
    fn program(&mut self, pid: u32, engine: u32) -> [u32; 3] {
        let client = self.world.client(pid);
        let mut parameters = [0; 20];
        put(&mut parameters, channel_group::ENGINE, &engine.to_ne_bytes());
        let group = self.world.allocate(pid, GROUP, [client, DEVICE, 0], &parameters).expect("a group");
        [client, group, self.channel(pid, client, group)]
    }

    fn channel(&mut self, pid: u32, client: u32, parent: u32) -> u32 {
        self.world.allocate(pid, CHANNEL, [client, parent, 0], &vec![0; era().channel]).expect("a channel")
    }

    /// Runs or stops all groups, as a timekeeper does. Returns whether RM did all of it.
    fn set(&mut self, runs: bool) -> bool {
        self.let_run(if runs { Running::All } else { Running::Stopped })
    }

    fn let_run(&mut self, running: Running) -> bool {
        let mut manager = Performed::new(&self.world.manager);
        let mut engine = self.engines.on(0);
        let _ = engine.set(&mut manager, era(), &mut self.handles, running);
        engine.is_settled()
    }

    fn runs(&self, client: u32, channel: u32) -> Option<bool> {
        self.world.manager.borrow().runs(client, channel)
    }

    /// Stops or starts channels by a call of their program.
    fn ask(&mut self, pid: u32, client: u32, named: &[u32], runs: bool) -> Option<u32> {
        let parameters = list(named.iter().map(|channel| (client, *channel)), runs);
        self.world.control(pid, [client, SUBDEVICE], channels::STOP.command, &parameters)
    }
}

#[test]
fn channels_run_when_the_schedule_and_the_program_want_it() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    for pid in PROGRAMS {
        let [client, group, channel] = tested.program(pid, 1);
        let [_, _, copies] = tested.program(pid, 9);
        assert_eq!(tested.runs(client, channel), Some(true), "{pid}");
        assert!(tested.set(false));
        assert_eq!(tested.runs(client, channel), Some(false), "{pid}");
        let of_copies = tested.world.manager.borrow().clients_with(copies);
        assert!(of_copies.iter().all(|client| tested.runs(*client, copies) == Some(true)), "copies go on");
        // A channel made now does not run, either.
        let second = tested.channel(pid, client, group);
        assert_eq!(tested.runs(client, second), Some(false), "{pid}");
        assert!(tested.set(true));
        assert_eq!([channel, second].map(|one| tested.runs(client, one)), [Some(true); 2], "{pid}");
        assert_eq!(tested.world.free(pid, client, client), Some(0));
    }
    assert_eq!(tested.engines.on(0).groups(), 0);
}

#[test]
fn a_program_starts_nothing_outside_of_its_window_and_what_it_stops_stays_stopped() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let pid = PROGRAMS[0];
    let [client, group, channel] = tested.program(pid, 1);
    let second = tested.channel(pid, client, group);
    assert!(tested.set(false));
    assert_eq!(tested.ask(pid, client, &[channel], true), Some(0), "it is told that it was done");
    assert_eq!(tested.runs(client, channel), Some(false));
    assert_eq!(tested.ask(pid, client, &[channel], false), Some(0));
    assert!(tested.set(true));
    assert_eq!([channel, second].map(|one| tested.runs(client, one)), [Some(false), Some(true)]);
    assert_eq!(tested.ask(pid, client, &[channel, second], true), Some(0));
    assert_eq!([channel, second].map(|one| tested.runs(client, one)), [Some(true); 2]);
    // Other calls may start channels, or become one that does, so the supervisor stops them again.
    assert!(tested.set(false) && tested.engines.on(0).is_settled());
    assert_eq!(tested.world.control(pid, [client, group], channels::SCHEDULE[0], &[1, 0]), Some(0));
    assert_eq!(tested.runs(client, second), Some(false));
    let _ = tested.world.control(pid, [client, SUBDEVICE], 0x2080_014a, &[0; 268]);
    assert!(!tested.engines.on(0).is_settled());
    assert!(tested.set(false));
    // The calls for key rotation would do the same.
    let keys = channels::STOP_FOR_KEYS;
    let refused = tested.world.control(pid, [client, SUBDEVICE], keys.command, &vec![0; keys.size]);
    assert_eq!(refused, Some(0x56));
}

#[test]
fn slices_are_given_by_the_schedule_alone() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let pid = PROGRAMS[0];
    let [client, group, _] = tested.program(pid, 1);
    let asked = 50_000u64.to_ne_bytes();
    assert_eq!(tested.world.control(pid, [client, group], slice::COMMAND, &asked), Some(0));
    assert_eq!(tested.world.control(pid, [client, group], interleave::COMMAND, &[2, 0, 0, 0]), Some(0));
    let given = |tested: &Tested| tested.world.manager.borrow().slice(client, group);
    assert_eq!(given(&tested), None);
    let mut manager = Performed::new(&tested.world.manager);
    tested.engines.on(0).set_slices(&mut manager, 3_000);
    assert_eq!(given(&tested), Some(3_000));
}

#[test]
fn groups_take_turns_and_programs_cannot_start_those_whose_turn_it_is_not() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let made: Vec<(u32, [u32; 3])> =
        PROGRAMS.iter().cycle().take(4).map(|pid| (*pid, tested.program(*pid, 1))).collect();
    let run = |tested: &Tested<'_>| -> Vec<bool> {
        made.iter().map(|(_, [client, _, channel])| tested.runs(*client, *channel) == Some(true)).collect()
    };
    let mut seen = [0; 4];
    for first in 0..4 {
        assert!(tested.let_run(Running::Turn { first, count: 2 }));
        let now = run(&tested);
        assert_eq!(now.iter().filter(|runs| **runs).count(), 2, "{now:?}");
        seen.iter_mut().zip(&now).for_each(|(seen, runs)| *seen += u32::from(*runs));
        for (pid, [client, _, channel]) in &made {
            let _ = tested.ask(*pid, *client, &[*channel], true);
        }
        assert_eq!(run(&tested), now, "a program's own start");
    }
    assert_eq!(seen, [2; 4]);
    assert!(tested.set(true));
    assert_eq!(run(&tested), [true; 4]);
}

#[test]
fn who_is_paused_copies_nothing_either_and_starts_nothing_by_itself() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let [client, _, channel] = tested.program(10, 1);
    let [of_copies, group, copies] = tested.program(10, 9);
    let run = |tested: &Tested<'_>| {
        [(client, channel), (of_copies, copies)].map(|(client, one)| tested.runs(client, one))
    };
    assert!(tested.set(false));
    assert_eq!(run(&tested), [Some(false), Some(true)]);
    assert!(tested.let_run(Running::Paused));
    assert_eq!(run(&tested), [Some(false); 2]);
    // It runs neither by itself nor through a new channel.
    let _ = tested.ask(10, of_copies, &[copies], true);
    let born = tested.channel(10, of_copies, group);
    assert_eq!((run(&tested), tested.runs(of_copies, born)), ([Some(false); 2], Some(false)));
    assert!(tested.set(false));
    assert_eq!((run(&tested), tested.runs(of_copies, born)), ([Some(false), Some(true)], Some(true)));
    assert!(tested.set(true));
    assert_eq!(run(&tested), [Some(true); 2]);
}

#[test]
fn what_a_program_stopped_stays_stopped_under_the_next_worker() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let [client, group, channel] = tested.program(10, 1);
    let second = tested.channel(10, client, group);
    assert_eq!(tested.ask(10, client, &[channel], false), Some(0));
    let survivors = tested.world.survivors();
    drop(tested);
    let (world, engines) = World::again(&mut ground, survivors).holding_compute();
    let mut tested = Tested { world, engines, handles: Handles::new(8) };
    assert_eq!(tested.engines.on(0).groups(), 1);
    assert!(tested.set(false) && tested.set(true));
    assert_eq!([channel, second].map(|one| tested.runs(client, one)), [Some(false), Some(true)]);
    assert_eq!(tested.ask(10, client, &[channel], true), Some(0));
    assert!(tested.set(false) && tested.set(true));
    assert_eq!([channel, second].map(|one| tested.runs(client, one)), [Some(true); 2]);
}

#[test]
fn channels_can_be_stopped_without_the_programs_subdevice() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let pid = PROGRAMS[0];
    let [client, _, channel] = tested.program(pid, 1);
    assert_eq!(tested.world.free(pid, client, SUBDEVICE), Some(0));
    assert!(tested.set(false));
    assert_eq!(tested.runs(client, channel), Some(false));
    // The program makes its own subdevice, so the supervisor's must go.
    assert_eq!(tested.world.allocate(pid, 0x2080, [client, DEVICE, SUBDEVICE], &[0; 4]), Ok(SUBDEVICE));
    assert!(tested.set(true));
    assert_eq!(tested.runs(client, channel), Some(true));
}

#[test]
fn who_has_the_file_of_a_process_that_ended_has_channels_that_run_no_more() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let [client, group, channel] = tested.program(PROGRAMS[0], 1);
    tested.world.leave(PROGRAMS[0]);
    let mut manager = Performed::new(&tested.world.manager);
    let mut handles = tested.handles.clone();
    tested
        .engines
        .on(0)
        .drop_ended(&mut manager, (era(), &mut handles), |pid| *pid == u64::from(PROGRAMS[0]));
    assert_eq!(tested.runs(client, channel), Some(false));
    assert!(tested.engines.on(0).is_empty());
    // Other processes cannot start them, because no schedule would stop them again.
    tested.world.files.insert(PROGRAMS[1], PROGRAMS[0]);
    assert_eq!(tested.ask(PROGRAMS[1], client, &[channel], true), Some(0));
    for (object, command) in [group, channel].into_iter().zip(channels::SCHEDULE) {
        assert_eq!(tested.world.control(PROGRAMS[1], [client, object], command, &[1, 0, 0]), Some(0));
    }
    assert_eq!(tested.runs(client, channel), Some(false));
}

#[test]
fn who_hides_behind_a_client_of_a_process_that_ended_gets_no_channel_and_keeps_none() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let [maker, user] = PROGRAMS;
    // The card's own record attributes all channels of a client to its maker.
    let client = tested.world.client(maker);
    tested.world.files.insert(user, maker);
    let mut parameters = [0; 20];
    put(&mut parameters, channel_group::ENGINE, &1_u32.to_ne_bytes());
    let group = tested.world.allocate(user, GROUP, [client, DEVICE, 0], &parameters).expect("a group");
    let channel = tested.channel(user, client, group);
    assert!(tested.engines.on(0).is_nameless(), "whose it is can be known by its memory alone");
    assert!(tested.world.memory(user, client, 0, 1 << 20).is_ok());
    assert!(!tested.engines.on(0).is_nameless());
    tested.world.leave(maker);
    let channel_of = |tested: &mut Tested<'_>| {
        tested.world.allocate(user, CHANNEL, [client, group, 0], &vec![0; era().channel])
    };
    assert_eq!(channel_of(&mut tested), Err(0x1b));
    let mut manager = Performed::new(&tested.world.manager);
    let handles = &mut tested.handles;
    tested.engines.on(0).drop_ended(&mut manager, (era(), handles), |pid| *pid == u64::from(maker));
    assert_eq!(tested.runs(client, channel), Some(false));
    assert!(tested.engines.on(0).is_empty());
}

/// A client's file can be closed without notice to the supervisor, and another client can get its handle.
#[test]
fn a_client_is_not_taken_for_an_earlier_one_of_its_handle() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let [former, user] = PROGRAMS;
    let client = tested.world.client(former);
    let memory = tested.world.memory(former, client, 0, 1 << 20).expect("memory by which it is known");
    tested.world.manager.borrow_mut().close(u64::from(former));
    tested.world.manager.borrow_mut().reuse_handles();
    // The card's own record attributes all channels of this client to another container.
    let slip = |tested: &mut Tested<'_>, class: u32, place, parameters: &[u8]| {
        tested.world.slip([900, user], class, place, parameters).expect("an object of another container's")
    };
    assert_eq!(slip(&mut tested, 0x41, [0; 3], &[]), client);
    slip(&mut tested, 0x80, [client, client, DEVICE], &of_device(0));
    slip(&mut tested, 0x40, [client, DEVICE, memory], &of_bytes(1 << 20));
    let channel = tested.channel(user, client, DEVICE);
    assert!(tested.engines.on(0).is_nameless(), "its record counts for nobody");
    assert!(tested.set(false));
    assert_eq!(tested.runs(client, channel), Some(false));
    assert_eq!(tested.world.memory(user, client, 0, 1 << 20), Err(Status::NO_MEMORY.0));
    // The client that it was mistaken for gets memory of its own.
    let honest = tested.world.client(former);
    assert!(tested.world.memory(former, honest, 0, 1 << 20).is_ok());
}

#[test]
fn another_process_of_the_makers_number_is_not_the_maker() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let [maker, user] = PROGRAMS;
    let client = tested.world.client(maker);
    assert!(tested.world.memory(maker, client, 0, 1 << 20).is_ok());
    tested.world.files.insert(user, maker);
    let channel = tested.channel(user, client, DEVICE);
    assert!(!tested.engines.on(0).is_nameless());
    tested.world.replace(maker); // before the next check
    let survivors = tested.world.survivors();
    drop(tested);
    let (world, engines) = World::again(&mut ground, survivors).holding_compute();
    let mut tested = Tested { world, engines, handles: Handles::new(8) };
    assert!(tested.engines.on(0).is_nameless());
    let mut manager = Performed::new(&tested.world.manager);
    let handles = &mut tested.handles;
    tested.engines.on(0).drop_ended(&mut manager, (era(), handles), |_| false);
    assert_eq!(tested.runs(client, channel), Some(false));
    tested.world.files.insert(user, maker);
    let again = tested.world.allocate(user, CHANNEL, [client, DEVICE, 0], &vec![0; era().channel]);
    assert_eq!(again, Err(Status::INSUFFICIENT_PERMISSIONS.0));
}

#[test]
fn no_channel_outlives_its_process_by_another_subdevice_or_a_call_that_rm_does_not_do() {
    for refuses in [false, true] {
        let mut ground = Ground::new(1 << 10);
        let mut tested = Tested::on(&mut ground);
        let pid = PROGRAMS[0];
        let [client, _, channel] = tested.program(pid, 1);
        assert_eq!(tested.world.slip_free(pid, client, SUBDEVICE), 0);
        let other = tested.world.slip([pid, pid], 0x2080, [client, DEVICE, 0x7777], &[0; 4]);
        assert_eq!(other, Ok(0x7777), "made without a word");
        tested.world.leave(pid);
        let manager = Performed::new(&tested.world.manager);
        let mut manager = if refuses { manager.refusing(channels::STOP.command) } else { manager };
        let handles = &mut tested.handles;
        tested.engines.on(0).drop_ended(&mut manager, (era(), handles), |one| *one == u64::from(pid));
        assert!(tested.engines.on(0).is_empty());
        assert_eq!(tested.runs(client, channel), if refuses { None } else { Some(false) });
    }
}

#[test]
fn who_works_with_a_client_stays_in_the_schedule_when_another_who_had_it_ends() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let [other, user] = PROGRAMS;
    let client = tested.world.client(other);
    tested.world.files.insert(user, other);
    let mut parameters = [0; 20];
    put(&mut parameters, channel_group::ENGINE, &1_u32.to_ne_bytes());
    let group = tested.world.allocate(user, GROUP, [client, DEVICE, 0], &parameters).expect("a group");
    let channel = tested.channel(user, client, group);
    tested.world.leave(other);
    let _ = tested.world.supervisor.look();
    assert_eq!(tested.engines.on(0).groups(), 1);
    assert!(tested.set(false));
    assert_eq!(tested.runs(client, channel), Some(false));
}

#[test]
fn a_channel_without_a_group_is_charged_the_group_that_rm_makes_for_it() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let client = tested.world.client(PROGRAMS[0]);
    let before = tested.world.used();
    let _ = tested.channel(PROGRAMS[0], client, DEVICE);
    assert!(tested.world.used() - before > 4 << 20, "what RM takes");
    tested.world.check("a channel without a group");
}

#[test]
fn what_is_freed_is_stopped_no_more() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let pid = PROGRAMS[0];
    let [client, group, channel] = tested.program(pid, 1);
    let second = tested.channel(pid, client, group);
    assert_eq!(tested.world.free(pid, client, channel), Some(0));
    assert!(tested.set(false));
    assert_eq!(tested.runs(client, second), Some(false));
    assert_eq!(tested.engines.on(0).groups(), 1);
    assert_eq!(tested.engines.on(0).calls(), 1);
    assert_eq!(tested.world.free(pid, client, group), Some(0));
    assert!(tested.engines.on(0).is_empty());
    assert!(tested.set(true), "nothing is left to be started");
}

/// RM performs a list of channels completely or not at all.
#[test]
fn a_channel_that_is_gone_unseen_leaves_the_others_to_be_stopped() {
    for pid in PROGRAMS {
        let mut ground = Ground::new(1 << 10);
        let mut tested = Tested::on(&mut ground);
        let [client, group, channel] = tested.program(pid, 1);
        let second = tested.channel(pid, client, group);
        assert_eq!(tested.world.slip_free(pid, client, channel), 0);
        assert!(tested.set(false));
        assert_eq!(tested.runs(client, second), Some(false));
        assert_eq!(tested.world.slip_free(pid, client, second), 0);
        assert!(tested.set(true), "nothing is left to be started");
    }
}

#[test]
fn two_hundred_channels_are_stopped_by_four_calls() {
    let mut ground = Ground::new(1 << 10);
    let mut tested = Tested::on(&mut ground);
    let pid = PROGRAMS[0];
    let [client, group, first] = tested.program(pid, 1);
    let all: Vec<u32> = (1..200).map(|_| tested.channel(pid, client, group)).chain([first]).collect();
    assert_eq!(tested.engines.on(0).calls(), 4);
    assert!(tested.set(false));
    assert!(all.iter().all(|channel| tested.runs(client, *channel) == Some(false)));
}
