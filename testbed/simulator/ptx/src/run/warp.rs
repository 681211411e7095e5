//! Instructions of a warp. When all lanes of the mask have arrived, each lane gets its result. Lanes that
//! exited, or that the block does not have, count as arrived and give no value.

use super::thread::{Thread, Wait};
use crate::alu::scalar::Scalar;
use crate::code::{Function, Op, Shuffle, Warp, WarpKind};

/// A lane that takes part, with its operands.
#[derive(Clone, Copy)]
struct Lane {
    lane: usize,
    a: u64,
    b: u64,
    c: u64,
}

/// Completes an instruction that can be completed among the threads of one warp. Returns whether there was
/// one.
pub(super) fn resolve(functions: &[Function], threads: &mut [Thread]) -> bool {
    for lane in 0..threads.len() {
        let Some(warp) = waiting(functions, &threads[lane]) else { continue };
        if matches!(warp.kind, WarpKind::ActiveMask) {
            continue;
        }
        if let Some(group) = group(functions, threads, lane, warp) {
            complete(functions, threads, &group);
            return true;
        }
    }
    // All lanes have run as far as they can. The lanes that wait at the same `activemask` are active
    // together.
    let active = |thread: &Thread| {
        waiting(functions, thread).is_some_and(|warp| matches!(warp.kind, WarpKind::ActiveMask))
    };
    let Some(first) = threads.iter().position(active) else { return false };
    let position = threads[first].position();
    let together = |&lane: &usize| threads[lane].wait == Wait::Warp && threads[lane].position() == position;
    let group: Vec<usize> = (0..threads.len()).filter(together).collect();
    complete(functions, threads, &group);
    true
}

/// The warp instruction that a thread waits at.
fn waiting<'m>(functions: &'m [Function], thread: &Thread) -> Option<&'m Warp> {
    if thread.wait != Wait::Warp {
        return None;
    }
    let (function, at) = thread.position();
    match &functions[function as usize].code[at as usize].op {
        Op::Warp(warp) => Some(warp),
        _ => None,
    }
}

/// The lanes that execute `lane`'s instruction with it; `None` if one of them has not arrived.
fn group(functions: &[Function], threads: &[Thread], lane: usize, warp: &Warp) -> Option<Vec<usize>> {
    let mask = u32::of(threads[lane].value(warp.mask)) | 1 << lane;
    let mut lanes = Vec::with_capacity(32);
    for (other, thread) in threads.iter().enumerate() {
        if mask >> other & 1 == 0 || thread.wait == Wait::Ended {
            continue;
        }
        let theirs = waiting(functions, thread)?;
        let same_kind = std::mem::discriminant(&theirs.kind) == std::mem::discriminant(&warp.kind);
        if !same_kind || u32::of(thread.value(theirs.mask)) | 1 << other != mask {
            return None;
        }
        lanes.push(other);
    }
    Some(lanes)
}

fn complete(functions: &[Function], threads: &mut [Thread], group: &[usize]) {
    let operands = |&lane: &usize| {
        let thread = &threads[lane];
        let warp = waiting(functions, thread)?;
        let [a, b, c] = [warp.a, warp.b, warp.c].map(|slot| thread.value(slot));
        Some(Lane { lane, a, b, c })
    };
    let lanes: Vec<Lane> = group.iter().filter_map(operands).collect();
    for own in &lanes {
        let Some(warp) = waiting(functions, &threads[own.lane]) else { continue };
        let (value, predicate) = result(warp.kind, &lanes, own);
        let thread = &mut threads[own.lane];
        thread.set(warp.d, value);
        if let Some(p) = warp.p {
            thread.set(p, u64::from(predicate));
        }
        thread.wait = Wait::Ready;
    }
}

/// Mask of the lanes for which `holds` is true.
fn mask_of(lanes: &[Lane], holds: impl Fn(&Lane) -> bool) -> u64 {
    lanes.iter().filter(|lane| holds(lane)).fold(0, |mask, lane| mask | 1 << lane.lane)
}

fn result(kind: WarpKind, lanes: &[Lane], own: &Lane) -> (u64, bool) {
    let set = |lane: &Lane| lane.a != 0;
    match kind {
        WarpKind::Sync => (0, true),
        WarpKind::Shuffle(shuffle) => shuffled(shuffle, lanes, own),
        WarpKind::Ballot => (mask_of(lanes, set), true),
        WarpKind::All => (u64::from(lanes.iter().all(set)), true),
        WarpKind::Any => (u64::from(lanes.iter().any(set)), true),
        WarpKind::Uniform => (u64::from(lanes.iter().all(|lane| set(lane) == set(own))), true),
        WarpKind::MatchAny => (mask_of(lanes, |lane| lane.a == own.a), true),
        WarpKind::MatchAll => {
            let same = lanes.iter().all(|lane| lane.a == own.a);
            (if same { mask_of(lanes, |_| true) } else { 0 }, same)
        }
        WarpKind::Elect => {
            let leader = lanes.first().map_or(0, |lane| lane.lane);
            (u64::try_from(leader).unwrap_or(0), own.lane == leader)
        }
        WarpKind::Reduce(f) => (lanes.iter().map(|lane| lane.a).reduce(|a, b| f(a, b, 0)).unwrap_or(0), true),
        WarpKind::ActiveMask => (mask_of(lanes, |_| true), true),
    }
}

/// `shfl`: c holds the clamp in its low five bits and the mask of sub-warps in bits 8 to 12.
fn shuffled(shuffle: Shuffle, lanes: &[Lane], own: &Lane) -> (u64, bool) {
    let lane = i64::try_from(own.lane).unwrap_or(0);
    let (distance, clamp, segment) = (own.b & 31, own.c & 31, own.c >> 8 & 31);
    let signed = |value: u64| i64::try_from(value).unwrap_or(0);
    let (distance, clamp, segment) = (signed(distance), signed(clamp), signed(segment));
    let most = lane & segment | clamp & !segment;
    let (source, inside) = match shuffle {
        Shuffle::Up => (lane - distance, lane - distance >= most),
        Shuffle::Down => (lane + distance, lane + distance <= most),
        Shuffle::Butterfly => (lane ^ distance, lane ^ distance <= most),
        Shuffle::Index => {
            let source = lane & segment | distance & !segment;
            (source, source <= most)
        }
    };
    let from = lanes.iter().find(|other| inside && i64::try_from(other.lane) == Ok(source));
    (from.unwrap_or(own).a, inside)
}
