//! Branches, calls, and the ways in which a thread can end.

mod support;

use gpushare_simulator_ptx::{Fault, PtxError};
use support::{Params, evaluate, launch, module};

fn fault(result: Result<(), PtxError>) -> Fault {
    match result {
        Err(PtxError::Fault { fault, .. }) => fault,
        other => panic!("a fault expected, {other:?} found"),
    }
}

#[test]
fn loops_and_jump_tables_go_where_they_should() {
    let sum = "mov.u64 %o2, 0; $top: setp.ge.u64 %p, %o2, %a; @%p bra.uni $end; add.u64 %o, %o, %o2;
        add.u64 %o2, %o2, 1; bra $top; $end:";
    assert_eq!(evaluate(sum, &[10]), 45);
    let table =
        "ts: .branchtargets $a, $b, $c; brx.idx %w, ts; $a: mov.u64 %o, 10; bra $e; $b: mov.u64 %o, 20;
        bra $e; $c: mov.u64 %o, 30; $e:";
    for (index, want) in [(0, 10), (1, 20), (2, 30)] {
        assert_eq!(evaluate(table, &[index]), want);
    }
}

#[test]
fn names_in_braces_hide_those_outside() {
    // Inlined assembly repeats labels and registers, each time in braces of its own.
    let twice = "{ .reg .b64 %t1; mov.u64 %t1, %a; bra $l; mov.u64 %t1, 0; $l: add.u64 %o, %o, %t1; }
        { .reg .b64 %t1; mov.u64 %t1, %b; bra $l; mov.u64 %t1, 0; $l: add.u64 %o, %o, %t1; }";
    assert_eq!(evaluate(twice, &[3, 4]), 7);
}

#[test]
fn functions_take_and_return_memory_or_registers() {
    let module = module(
        ".func (.reg .u32 r) by_register(.reg .u32 a, .reg .u32 b) { sub.u32 r, a, b; ret; }
         .func (.param .align 4 .b8 r[8]) swap(.param .align 4 .b8 a[8]) {
            .reg .b32 %r<3>; ld.param.v2.u32 {%r1, %r2}, [a]; st.param.v2.u32 [r], {%r2, %r1}; ret; }
         .func (.param .b32 r) fibonacci(.param .b32 n) {
            .reg .b32 %r<6>; .reg .pred %p;
            ld.param.u32 %r1, [n]; mov.u32 %r5, %r1; setp.lt.u32 %p, %r1, 2; @%p bra $out;
            sub.u32 %r2, %r1, 1; sub.u32 %r3, %r1, 2;
            { .param .b32 a; .param .b32 b; st.param.b32 [a], %r2; call.uni (b), fibonacci, (a); ld.param.b32 %r4, [b]; }
            { .param .b32 a; .param .b32 b; st.param.b32 [a], %r3; call.uni (b), fibonacci, (a); ld.param.b32 %r5, [b]; }
            add.u32 %r5, %r5, %r4;
            $out: st.param.b32 [r], %r5; ret; }
         .entry k(.param .u64 p) {
            .reg .b32 %r<9>; .reg .b64 %d<2>; ld.param.u64 %d1, [p];
            call (%r1), by_register, (50, 8);
            { .param .align 4 .b8 a[8]; .param .align 4 .b8 b[8]; st.param.b32 [a], 1; st.param.b32 [a+4], 2;
              call (b), swap, (a); ld.param.b32 %r2, [b]; ld.param.b32 %r3, [b+4]; }
            { .param .b32 a; .param .b32 b; st.param.b32 [a], 15; call (b), fibonacci, (a); ld.param.b32 %r4, [b]; }
            st.global.v4.u32 [%d1], {%r1, %r2, %r3, %r4}; ret; }",
    );
    #[repr(align(16))]
    struct Aligned([u32; 4]);
    let mut out = Aligned([0; 4]);
    launch(&module, "k", [1; 3], [1; 3], Params::new().to(&mut out.0)).unwrap();
    assert_eq!(out.0, [42, 2, 1, 610]);
}

#[test]
fn functions_are_called_through_their_addresses() {
    let module = module(
        ".func (.param .b32 r) one(.param .b32 n) { .reg .b32 %r<2>; ld.param.u32 %r1, [n]; add.u32 %r1, %r1, 1;
            st.param.b32 [r], %r1; ret; }
         .func (.param .b32 r) two(.param .b32 n) { .reg .b32 %r<2>; ld.param.u32 %r1, [n]; mul.lo.u32 %r1, %r1, 2;
            st.param.b32 [r], %r1; ret; }
         .entry k(.param .u64 p) {
            .reg .b32 %r<3>; .reg .b64 %d<5>; .reg .pred %q;
            ld.param.u64 %d1, [p]; mov.u32 %r1, %tid.x; setp.eq.u32 %q, %r1, 0;
            mov.u64 %d2, one; mov.u64 %d3, two; selp.u64 %d2, %d2, %d3, %q;
            { .param .b32 a; .param .b32 b; st.param.b32 [a], 20;
              proto: .callprototype (.param .b32 _) _ (.param .b32 _);
              call (b), %d2, (a), proto; ld.param.b32 %r2, [b]; }
            mul.wide.u32 %d4, %r1, 4; add.u64 %d4, %d1, %d4; st.global.u32 [%d4], %r2; ret; }
         .entry wild() { .reg .b64 %d; mov.u64 %d, 12345; proto: .callprototype _ (); call %d, (), proto; ret; }",
    );
    let mut out = [0_u32; 2];
    launch(&module, "k", [1; 3], [2, 1, 1], Params::new().to(&mut out)).unwrap();
    assert_eq!(out, [21, 40]);
    assert_eq!(fault(launch(&module, "wild", [1; 3], [1; 3], Params::new())), Fault::NoFunction(12345));
}

#[test]
fn a_fault_says_which_thread_did_what_where() {
    let module = module(
        ".entry k() { .reg .b32 %r<3>; .reg .pred %q; mov.u32 %r1, %tid.y; mov.u32 %r2, %ctaid.z;
            setp.eq.u32 %q, %r1, 2; setp.eq.and.u32 %q, %r2, 1, %q;
            @%q trap;
            exit; }",
    );
    let error = launch(&module, "k", [1, 1, 2], [1, 3, 1], Params::new()).unwrap_err();
    assert_eq!(error.to_string(), "kernel k, block [0, 0, 1], thread [0, 2, 0], line 6: trap");
}

#[test]
fn endless_threads_come_to_an_end() {
    let mut module = module(
        ".entry spin() { $l: bra $l; }
         .func deep() { call deep; ret; }
         .entry recurse() { call deep; ret; }",
    );
    module.set_step_limit(100_000);
    assert_eq!(fault(launch(&module, "spin", [1; 3], [4, 1, 1], Params::new())), Fault::StepLimit(100_000));
    assert_eq!(fault(launch(&module, "recurse", [1; 3], [1; 3], Params::new())), Fault::StackOverflow);
}

#[test]
fn a_launch_that_does_not_fit_is_refused() {
    let module = module(
        ".entry k(.param .u64 p, .param .u32 n) { ret; } .global .u32 g; .entry v() { .reg .b64 %d; mov.u64 %d, g; ret; }",
    );
    for (grid, block, params) in [
        ([1, 1, 1], [1025, 1, 1], Params::new().u64(0).u32(0)),
        ([0, 1, 1], [1, 1, 1], Params::new().u64(0).u32(0)),
        ([1, 1, 1], [1, 1, 1], Params::new().u64(0)),
    ] {
        let refused = launch(&module, "k", grid, block, params);
        assert!(matches!(refused, Err(PtxError::BadLaunch { .. })), "{refused:?}");
    }
    assert_eq!(launch(&module, "x", [1; 3], [1; 3], Params::new()), Err(PtxError::NoKernel("x".to_owned())));
    assert_eq!(launch(&module, "v", [1; 3], [1; 3], Params::new()), Err(PtxError::NoAddress("g".to_owned())));
}

#[test]
fn every_thread_of_every_block_knows_its_place() {
    let module = module(
        ".entry k(.param .u64 p) { .reg .b32 %r<9>; .reg .b64 %d<4>; ld.param.u64 %d1, [p];
            mov.u32 %r1, %ctaid.z; mov.u32 %r2, %nctaid.y; mad.lo.u32 %r1, %r1, %r2, %ctaid.y;
            mov.u32 %r2, %nctaid.x; mad.lo.u32 %r1, %r1, %r2, %ctaid.x;
            mov.u32 %r2, %ntid.z; mad.lo.u32 %r1, %r1, %r2, %tid.z;
            mov.u32 %r2, %ntid.y; mad.lo.u32 %r1, %r1, %r2, %tid.y;
            mov.u32 %r2, %ntid.x; mad.lo.u32 %r1, %r1, %r2, %tid.x;
            mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d1, %d2;
            mov.u32 %r3, %laneid; mov.u32 %r4, %warpid; mad.lo.u32 %r3, %r4, 32, %r3; add.u32 %r3, %r3, 1;
            atom.global.add.u32 %r5, [%d2], %r3; ret; }",
    );
    let mut out = vec![0_u32; 2 * 3 * 4 * 60];
    launch(&module, "k", [2, 3, 4], [5, 4, 3], Params::new().to(&mut out)).unwrap();
    let want: Vec<u32> = (0..24).flat_map(|_| 1..=60).collect();
    assert_eq!(out, want);
}
