//! Threads that wait for each other: barriers, warp instructions, the whole grid.

mod support;

use gpushare_simulator_ptx::{Fault, PtxError};
use support::{Loaded, Params, launch, launch_with, module};

/// A kernel that stores `%s`, or `%p` as 0 or 1, of each thread of one block; `%t` is the thread's number.
fn per_thread(instructions: &str, threads: u32) -> Vec<u32> {
    let module = module(&format!(
        ".extern .shared .align 16 .b8 sh[];
         .entry k(.param .u64 p) {{ .reg .b32 %t, %s, %u, %v; .reg .b64 %d<4>; .reg .pred %p, %q;
            ld.param.u64 %d1, [p]; mov.u32 %t, %tid.x; mul.wide.u32 %d2, %t, 4; add.u64 %d1, %d1, %d2; mov.u32 %s, 0;
            {instructions}
            st.global.u32 [%d1], %s; ret; }}"
    ));
    let mut out = vec![0_u32; threads as usize];
    let shape = ([1; 3], [threads, 1, 1], 4096);
    launch_with(&module, "k", shape, Params::new().to(&mut out), &Loaded::default())
        .unwrap_or_else(|error| panic!("{instructions}: {error}"));
    out
}

#[test]
fn a_barrier_separates_writes_from_reads() {
    let reversed = per_thread(
        "mul.wide.u32 %d2, %t, 4; mov.u64 %d3, sh; add.u64 %d3, %d3, %d2; st.shared.u32 [%d3], %t; bar.sync 0;
         sub.u32 %u, 99, %t; mul.wide.u32 %d2, %u, 4; mov.u64 %d3, sh; add.u64 %d3, %d3, %d2; ld.shared.u32 %s, [%d3];",
        100,
    );
    assert_eq!(reversed, (0..100).rev().collect::<Vec<_>>());
}

#[test]
fn barriers_reduce_and_count_only_those_who_are_there() {
    let odd = "and.b32 %u, %t, 1; setp.eq.u32 %p, %u, 1;";
    assert_eq!(per_thread(&format!("{odd} bar.red.popc.u32 %s, 0, %p;"), 50), [25; 50]);
    assert_eq!(
        per_thread(&format!("{odd} barrier.cta.red.or.pred %q, 0, %p; selp.u32 %s, 1, 0, %q;"), 50),
        [1; 50]
    );
    assert_eq!(per_thread(&format!("{odd} bar.red.and.pred %q, 1, %p; selp.u32 %s, 1, 0, %q;"), 50), [0; 50]);
    // Barriers do not wait for threads that have ended.
    let rest = per_thread(
        "setp.ge.u32 %p, %t, 40; @%p exit; setp.lt.u32 %p, %t, 3; bar.red.popc.u32 %s, 0, %p;",
        64,
    );
    assert_eq!(rest[..40], [3; 40]);
    assert_eq!(rest[40..], [0; 24]);
    // The first warp arrives; the second one waits for it.
    let handed = "setp.lt.u32 %p, %t, 32; @%p bra $first; bar.sync 1, 64; ld.shared.u32 %s, [sh]; bra $end;
        $first: st.shared.u32 [sh], 77; bar.arrive 1, 64; $end:";
    assert_eq!(per_thread(handed, 64)[32..], [77; 32]);
}

#[test]
fn shuffles_follow_their_definition() {
    type OfLane = fn(u32) -> u32;
    let rows: &[(&str, OfLane)] = &[
        ("shfl.sync.down.b32 %s|%p, %t, 4, 31, -1;", |t| if t < 28 { t + 4 } else { t }),
        ("shfl.sync.up.b32 %s, %t, 4, 0, -1;", |t| if t >= 4 { t - 4 } else { t }),
        ("shfl.sync.bfly.b32 %s, %t, 5, 31, -1;", |t| t ^ 5),
        ("shfl.sync.idx.b32 %s, %t, 9, 31, -1;", |_| 9),
        // Sub-warps of eight lanes.
        ("shfl.sync.idx.b32 %s, %t, 1, 0x181f, -1;", |t| t / 8 * 8 + 1),
        ("shfl.sync.down.b32 %s, %t, 4, 0x181f, -1;", |t| if t % 8 < 4 { t + 4 } else { t }),
        ("shfl.sync.down.b32 %u|%p, %t, 4, 31, -1; selp.u32 %s, 1, 0, %p;", |t| u32::from(t < 28)),
        ("shfl.down.b32 %s, %t, 4, 31;", |t| if t < 28 { t + 4 } else { t }),
    ];
    for (instruction, want) in rows {
        assert_eq!(per_thread(instruction, 32), (0..32).map(want).collect::<Vec<_>>(), "{instruction}");
    }
}

#[test]
fn votes_matches_and_reductions_see_all_lanes_of_the_mask() {
    let below = "setp.lt.u32 %p, %t, 5;";
    assert_eq!(per_thread(&format!("{below} vote.sync.ballot.b32 %s, %p, -1;"), 32), [31; 32]);
    assert_eq!(
        per_thread(&format!("{below} vote.sync.any.pred %q, %p, -1; selp.u32 %s, 1, 0, %q;"), 32),
        [1; 32]
    );
    assert_eq!(
        per_thread(&format!("{below} vote.sync.all.pred %q, !%p, -1; selp.u32 %s, 1, 0, %q;"), 32),
        [0; 32]
    );
    // The last warp of 40 threads has eight lanes.
    assert_eq!(per_thread(&format!("{below} vote.sync.ballot.b32 %s, !%p, -1;"), 40)[32..], [255; 8]);
    assert_eq!(
        per_thread("and.b32 %u, %t, 1; match.any.sync.b32 %s, %u, -1;", 32)[..2],
        [0x5555_5555, 0xaaaa_aaaa]
    );
    assert_eq!(per_thread("match.all.sync.b32 %s|%p, 3, -1;", 32), [u32::MAX; 32]);
    assert_eq!(per_thread("redux.sync.add.u32 %s, %t, -1;", 32), [496; 32]);
    assert_eq!(per_thread("redux.sync.max.s32 %s, %t, -1;", 32), [31; 32]);
    assert_eq!(per_thread("elect.sync %u|%p, -1; selp.u32 %s, 1, 0, %p;", 32).iter().sum::<u32>(), 1);
    assert_eq!(per_thread("mov.u32 %s, %lanemask_lt; popc.b32 %s, %s;", 32), (0..32).collect::<Vec<_>>());
}

#[test]
fn diverged_lanes_meet_only_those_of_their_mask() {
    // Each half of the warp shuffles among its own lanes, on its own side of a branch.
    let halves =
        "setp.lt.u32 %p, %t, 16; @%p bra $low; shfl.sync.bfly.b32 %s, %t, 1, 31, 0xffff0000; bra $end;
        $low: shfl.sync.bfly.b32 %s, %t, 2, 31, 0x0000ffff; $end: bar.warp.sync -1;";
    let want = (0..32).map(|t| if t < 16 { t ^ 2 } else { t ^ 1 }).collect::<Vec<_>>();
    assert_eq!(per_thread(halves, 32), want);
    let active =
        "setp.lt.u32 %p, %t, 10; @%p bra $low; activemask.b32 %s; bra $end; $low: activemask.b32 %s; $end:";
    let want = (0..32).map(|t| if t < 10 { 0x3ff } else { !0x3ff }).collect::<Vec<_>>();
    assert_eq!(per_thread(active, 32), want);
}

#[test]
fn waiting_for_nobody_is_a_deadlock() {
    let module = module(
        ".entry k() { .reg .b32 %t; .reg .pred %p; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0;
            @%p bra $a; bar.sync 1; $a: bar.sync 0; ret; }
         .entry far() { bar.sync 16; ret; }",
    );
    let fault = |kernel| match launch(&module, kernel, [1; 3], [2, 1, 1], Params::new()) {
        Err(PtxError::Fault { fault, .. }) => fault,
        other => panic!("{other:?}"),
    };
    assert_eq!(fault("k"), Fault::Deadlock);
    assert_eq!(fault("far"), Fault::NoBarrier(16));
}

#[test]
fn threads_may_spin_for_one_another() {
    // A lock in global memory that every thread of every block takes. The sum under it is not atomic.
    let module = module(
        ".entry k(.param .u64 p) { .reg .b32 %r<5>; .reg .b64 %d<2>; .reg .pred %p; ld.param.u64 %d1, [p];
            $try: atom.global.cas.b32 %r1, [%d1], 0, 1; setp.ne.u32 %p, %r1, 0; @%p bra $try;
            ld.volatile.global.u32 %r2, [%d1+4]; nanosleep.u32 10; add.u32 %r2, %r2, 1;
            st.volatile.global.u32 [%d1+4], %r2; membar.gl; atom.global.exch.b32 %r1, [%d1], 0; ret; }",
    );
    let mut out = [0_u32; 2];
    launch(&module, "k", [3, 1, 1], [40, 1, 1], Params::new().to(&mut out)).unwrap();
    assert_eq!(out, [0, 120]);
}

#[test]
fn every_launch_brings_zeros_for_the_barrier_of_cooperative_groups() {
    let arrive = "mov.u32 %s, %envreg2; mov.u32 %u, %envreg1; mov.b64 %d2, {%s, %u}; atom.add.release.gpu.u32 %u, [%d2+4], 5;
        bar.sync 0; ld.acquire.gpu.u32 %s, [%d2+4];";
    for _ in 0..2 {
        assert_eq!(per_thread(arrive, 3), [15; 3]);
    }
}

#[test]
fn blocks_may_wait_for_later_blocks() {
    // Every block counts itself and waits until all are there, as cooperative groups do.
    let text = |wait: &str| {
        module(&format!(
            ".extern .func (.param .b64 r) cudaCGGetIntrinsicHandle(.param .b32 scope);
             .extern .func (.param .b32 r) cudaCGSynchronize(.param .b64 handle, .param .b32 flags);
             .entry k(.param .u64 p) {{ .reg .b32 %r<5>; .reg .b64 %d<4>; .reg .pred %p; ld.param.u64 %d1, [p];
                atom.global.add.u32 %r1, [%d1], 1;
                {wait}
                ld.volatile.global.u32 %r3, [%d1]; atom.global.max.u32 %r1, [%d1+4], %r3;
                atom.global.min.u32 %r1, [%d1+8], %r3; ret; }}"
        ))
    };
    let spin = "$l: ld.volatile.global.u32 %r2, [%d1]; setp.lt.u32 %p, %r2, 40; @%p bra $l;";
    let grid = "{ .param .b32 s; .param .b64 h; st.param.b32 [s], 1; call (h), cudaCGGetIntrinsicHandle, (s);
            ld.param.b64 %d2, [h]; }
        { .param .b64 h; .param .b32 f; .param .b32 r; st.param.b64 [h], %d2; st.param.b32 [f], 0;
            call (r), cudaCGSynchronize, (h, f); ld.param.b32 %r4, [r]; }";
    for wait in [spin, grid] {
        let mut out = [0_u32, 0, u32::MAX];
        launch(&text(wait), "k", [4, 1, 1], [10, 1, 1], Params::new().to(&mut out)).unwrap();
        assert_eq!(out, [40, 40, 40], "{wait}");
    }
}
