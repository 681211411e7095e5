//! State spaces, vectors, addresses and atomic operations.

mod support;

use gpushare_simulator_ptx::{Fault, PtxError};
use support::{Loaded, Params, evaluate, launch, launch_with, module};

#[test]
fn loads_and_stores_have_their_width_and_sign() {
    let each = "st.global.u8 [%in+8], 0xfe; ld.global.s8 %s, [%in+8]; cvt.u64.u32 %o, %s;";
    assert_eq!(evaluate(each, &[0, 0]), 0xffff_fffe);
    let each = "ld.global.u8 %s, [%in+1]; cvt.u64.u32 %o, %s;";
    assert_eq!(evaluate(each, &[0xab_cd]), 0xab);
    let each = "ld.s16 %o, [%in];";
    assert_eq!(evaluate(each, &[0x8000]), 0xffff_ffff_ffff_8000);
    let each = "ld.volatile.global.v2.u32 {%s, %s2}, [%in]; mov.b64 %o, {%s2, %s};";
    assert_eq!(evaluate(each, &[0x1_0000_0002]), 0x2_0000_0001);
    // The first element is loaded into the address's own register.
    let each = "mov.u64 %o, %in; ld.global.v2.u64 {%o, %o2}, [%o+16]; add.u64 %o, %o, %o2;";
    assert_eq!(evaluate(each, &[0, 0, 30, 12]), 42);
}

#[test]
fn local_memory_and_parameters_have_generic_addresses() {
    let each = ".local .align 8 .b8 depot[32]; .reg .b64 %l, %g1; mov.u64 %l, depot; cvta.local.u64 %g1, %l;
        st.local.u64 [%l+8], %a; ld.u64 %o, [%g1+8]; st.u64 [%g1+16], %b; ld.local.u64 %o2, [depot+16]; add.u64 %o, %o, %o2;
        isspacep.local %p, %g1; @!%p mov.u64 %o, 0; isspacep.global %p, %in; @!%p mov.u64 %o, 0;";
    assert_eq!(evaluate(each, &[40, 2]), 42);
    let each =
        ".reg .b64 %g1; mov.b64 %g1, in; cvta.param.u64 %g1, %g1; ld.u64 %o, [%g1]; sub.u64 %o, %o, %in;";
    assert_eq!(evaluate(each, &[]), 0);
}

#[test]
fn shared_memory_is_static_dynamic_and_generic() {
    let module = module(
        ".shared .align 4 .b8 fixed[4]; .extern .shared .align 16 .b8 dynamic[];
         .entry k(.param .u64 p) { .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %q; .shared .u32 inner;
            ld.param.u64 %d1, [p]; mov.u64 %d2, dynamic; cvta.shared.u64 %d3, %d2;
            st.shared.u32 [dynamic], 7; st.shared.u32 [fixed], 8; st.shared.u32 [inner], 9;
            ld.u32 %r1, [%d3]; ld.shared.u32 %r2, [fixed]; ld.shared.u32 %r3, [inner];
            cvta.to.shared.u64 %d4, %d3; sub.u64 %d4, %d4, %d2; cvt.u32.u64 %r4, %d4;
            isspacep.shared %q, %d3; selp.u32 %r5, 1, 0, %q; mov.u32 %r6, %dynamic_smem_size;
            mad.lo.u32 %r1, %r1, 10, %r2; mad.lo.u32 %r1, %r1, 10, %r3; mad.lo.u32 %r1, %r1, 10, %r4;
            mad.lo.u32 %r1, %r1, 10, %r5; mad.lo.u32 %r1, %r1, 100, %r6;
            st.global.u32 [%d1], %r1; ret; }
         .entry far() { st.shared.u32 [dynamic+64], 1; ret; }",
    );
    let mut out = [0_u32];
    let shape = ([1; 3], [1; 3], 64);
    launch_with(&module, "k", shape, Params::new().to(&mut out), &Loaded::default()).unwrap();
    assert_eq!(out, [7_890_164]);
    let error = launch_with(&module, "far", shape, Params::new(), &Loaded::default()).unwrap_err();
    assert!(matches!(error, PtxError::Fault { fault: Fault::OutsideShared(_), .. }), "{error}");
    let error = launch_with(&module, "k", ([1; 3], [1; 3], 1 << 20), Params::new(), &Loaded::default());
    assert!(matches!(error, Err(PtxError::BadLaunch { .. })));
}

#[test]
fn variables_live_where_the_loader_put_them() {
    let module = module(
        ".const .align 4 .u32 table[4] = {10, 20, 30, 40};
         .global .u32 counter = 5;
         .global .align 8 .u64 pointers[2] = {generic(counter), table+8};
         .func (.param .b32 r) seven() { st.param.b32 [r], 7; ret; }
         .global .align 8 .u64 functions[1] = {seven};
         .entry k(.param .u64 p) { .reg .b32 %r<9>; .reg .b64 %d<9>;
            ld.param.u64 %d1, [p]; ld.const.u32 %r1, [table+4];
            ld.global.u64 %d2, [pointers]; ld.u32 %r2, [%d2]; add.u32 %r2, %r2, 1; st.global.u32 [counter], %r2;
            ld.global.u64 %d3, [pointers+8]; ld.u32 %r3, [%d3];
            ld.global.u64 %d4, [functions];
            { .param .b32 b; proto: .callprototype (.param .b32 _) _ (); call (b), %d4, (), proto; ld.param.b32 %r4, [b]; }
            st.global.u32 [%d1], %r1; st.global.u32 [%d1+4], %r2; st.global.u32 [%d1+8], %r3; st.global.u32 [%d1+12], %r4;
            ret; }",
    );
    let loaded = Loaded::new(&module);
    let mut out = [0_u32; 4];
    for count in [6, 7] {
        launch_with(&module, "k", ([1; 3], [1; 3], 0), Params::new().to(&mut out), &loaded).unwrap();
        assert_eq!(out, [20, count, 30, 7]);
    }
    assert_ne!(loaded.address("counter"), loaded.address("table"));
}

#[test]
fn wrong_addresses_are_faults() {
    let module = module(
        ".entry k(.param .u64 p) { .reg .b64 %d; .reg .b32 %r; ld.param.u64 %d, [p]; ld.global.u32 %r, [%d]; ret; }",
    );
    for (address, want) in [
        (0, Fault::IllegalAddress(0)),
        (0x10, Fault::IllegalAddress(0x10)),
        (0xdead_beef_dead_bee0, Fault::IllegalAddress(0xdead_beef_dead_bee0)),
        (0x7000_0002, Fault::MisalignedAddress(0x7000_0002)),
    ] {
        match launch(&module, "k", [1; 3], [1; 3], Params::new().u64(address)) {
            Err(PtxError::Fault { fault, .. }) => assert_eq!(fault, want),
            other => panic!("{address:#x}: {other:?}"),
        }
    }
}

#[test]
fn atomic_operations_give_the_old_value() {
    for (instruction, before, b, c, after) in [
        ("atom.global.add.u32 %s, [%in+24], %w;", 5, 3, 0, 8),
        ("atom.add.u32 %s, [%in+24], -1;", 5, 0, 0, 4),
        ("atom.global.min.s32 %s, [%in+24], %w;", 5, 0xffff_fff0, 0, 0xffff_fff0),
        ("atom.global.max.s32 %s, [%in+24], %w;", 5, 0xffff_fff0, 0, 5),
        ("atom.global.max.u32 %s, [%in+24], %w;", 5, 0xffff_fff0, 0, 0xffff_fff0),
        ("atom.global.inc.u32 %s, [%in+24], %w;", 5, 5, 0, 0),
        ("atom.global.inc.u32 %s, [%in+24], %w;", 4, 5, 0, 5),
        ("atom.global.dec.u32 %s, [%in+24], %w;", 0, 5, 0, 5),
        ("atom.global.dec.u32 %s, [%in+24], %w;", 3, 5, 0, 2),
        ("atom.global.and.b32 %s, [%in+24], %w;", 6, 3, 0, 2),
        ("atom.global.or.b32 %s, [%in+24], %w;", 6, 3, 0, 7),
        ("atom.global.xor.b32 %s, [%in+24], %w;", 6, 3, 0, 5),
        ("atom.global.exch.b32 %s, [%in+24], %w;", 6, 3, 0, 3),
        ("atom.acq_rel.gpu.global.cas.b32 %s, [%in+24], %w, %x;", 6, 6, 9, 9),
        ("atom.relaxed.sys.cas.b32 %s, [%in+24], %w, %x;", 6, 7, 9, 6),
        ("atom.global.add.f32 %s, [%in+24], %g;", 0x3f80_0000, 0x3f80_0000, 0, 0x4000_0000),
        ("atom.global.add.noftz.f16x2 %s, [%in+24], %w;", 0x3c00_3c00, 0x3c00_4000, 0, 0x4000_4200),
    ] {
        let text = format!("{instruction} ld.global.u32 %s2, [%in+24]; mov.b64 %o, {{%s2, %s}};");
        let got = evaluate(&text, &[b, c, 0, before]);
        assert_eq!(got, before << 32 | after, "{instruction} on {before:#x} with {b:#x}: {got:#x}");
    }
    assert_eq!(
        evaluate(
            "red.global.add.f64 [%in+24], %e; ld.global.u64 %o, [%in+24];",
            &[1.5_f64.to_bits(), 0, 0, 2_f64.to_bits()]
        ),
        3.5_f64.to_bits()
    );
    assert_eq!(
        evaluate("red.global.add.u64 [%in+24], %a; ld.global.u64 %o, [%in+24];", &[u64::MAX, 0, 0, 2]),
        1
    );
}

#[test]
fn asynchronous_copies_are_done_when_waited_for() {
    let each = ".shared .align 16 .b8 s[16]; st.shared.u64 [s+8], %a; cp.async.ca.shared.global [s], [%in], 8, 4;
        cp.async.commit_group; cp.async.wait_group 0; ld.shared.u64 %o, [s]; ld.shared.u64 %o2, [s+8]; xor.b64 %o, %o, %o2;";
    assert_eq!(evaluate(each, &[0x1111_1111_2222_2222]), 0x1111_1111_0000_0000);
}
