//! Results of single instructions, bit for bit.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of the test")]

mod support;

use support::evaluate;

/// Instructions, their inputs, and the expected result.
type Row<'a> = (&'a str, &'a [u64], u64);

fn check(rows: &[Row<'_>]) {
    for (instructions, inputs, want) in rows {
        let got = evaluate(instructions, inputs);
        assert_eq!(got, *want, "{instructions} of {inputs:x?}: {got:#x}, not {want:#x}");
    }
}

fn to_o(instruction: &str) -> String {
    format!("{instruction} cvt.u64.u32 %o, %s;")
}

fn i32s(rows: &[(&str, i32, i32, i32)]) {
    for (instruction, a, b, want) in rows {
        let bits = |value: i32| u64::from(u32::from_ne_bytes(value.to_ne_bytes()));
        let got = evaluate(&to_o(instruction), &[bits(*a), bits(*b), 0, 0]);
        assert_eq!(got, bits(*want), "{instruction} of {a}, {b}");
    }
}

#[test]
fn integers_wrap_and_divide_towards_zero() {
    i32s(&[
        ("add.s32 %s, %w, %x;", i32::MAX, 1, i32::MIN),
        ("add.sat.s32 %s, %w, %x;", i32::MAX, 1, i32::MAX),
        ("sub.s32 %s, %w, %x;", 3, 5, -2),
        ("sub.sat.s32 %s, %w, %x;", i32::MIN, 5, i32::MIN),
        ("mul.lo.s32 %s, %w, %x;", -7, 6, -42),
        ("mul.hi.s32 %s, %w, %x;", -1, 2, -1),
        ("mul.hi.u32 %s, %w, %x;", -1, -1, -2),
        ("mad.lo.s32 %s, %w, %x, 5;", -7, 6, -37),
        ("mad.hi.s32 %s, %w, %x, 5;", 1 << 30, 8, 7),
        ("mul24.lo.s32 %s, %w, %x;", 0x0100_0002, 3, 6),
        ("div.s32 %s, %w, %x;", -7, 2, -3),
        ("div.s32 %s, %w, %x;", i32::MIN, -1, i32::MIN),
        ("div.s32 %s, %w, %x;", 5, 0, -1),
        ("rem.s32 %s, %w, %x;", -7, 2, -1),
        ("min.s32 %s, %w, %x;", -7, 2, -7),
        ("max.u32 %s, %w, %x;", -7, 2, -7),
        ("neg.s32 %s, %w;", 7, 0, -7),
        ("abs.s32 %s, %w;", -7, 0, 7),
        ("sad.s32 %s, %w, %x, 1;", -7, 3, 11),
        ("not.b32 %s, %w;", 5, 0, -6),
        ("cnot.b32 %s, %w;", 0, 0, 1),
        ("shl.b32 %s, %w, %x;", 1, 32, 0),
        ("shl.b32 %s, %w, 4;", 1, 0, 16),
        ("shr.s32 %s, %w, %x;", -8, 99, -1),
        ("shr.u32 %s, %w, %x;", -8, 99, 0),
        ("shr.s32 %s, %w, 1;", -8, 0, -4),
    ]);
}

#[test]
fn wide_products_and_64_bit_values_keep_their_upper_half() {
    let minus = |value: u64| value.wrapping_neg();
    check(&[
        ("mul.wide.s32 %o, %w, %x;", &[minus(3), 5], minus(15)),
        ("mul.wide.u32 %o, %w, %x;", &[0xffff_ffff, 0xffff_ffff], 0xffff_fffe_0000_0001),
        ("mul.wide.s32 %o, %w, 4;", &[minus(3)], minus(12)),
        ("mad.wide.s32 %o, %w, %x, %c;", &[minus(3), 5, 20], 5),
        ("mad.wide.u32 %o, %w, %x, 0x100000000;", &[3, 5], 0x1_0000_000f),
        ("mul.hi.u64 %o, %a, %b;", &[u64::MAX, u64::MAX], u64::MAX - 1),
        ("mul.hi.s64 %o, %a, %b;", &[u64::MAX, 2], u64::MAX),
        ("mul.lo.s64 %o, %a, %b;", &[minus(7), 6], minus(42)),
        ("div.s64 %o, %a, %b;", &[minus(7), 2], minus(3)),
        ("rem.u64 %o, %a, %b;", &[17, 5], 2),
        ("mul.wide.s16 %s, %i, %j; cvt.u64.u32 %o, %s;", &[0xfffd, 5], 0xffff_fff1),
        ("add.s16 %m, %i, %j; cvt.u64.u16 %o, %m;", &[0xffff, 2], 1),
    ]);
}

#[test]
fn bit_instructions_follow_their_definitions() {
    check(&[
        ("popc.b64 %s, %a; cvt.u64.u32 %o, %s;", &[0xff00_0000_0000_0001], 9),
        ("clz.b32 %s, %w; cvt.u64.u32 %o, %s;", &[0x10], 27),
        ("clz.b64 %s, %a; cvt.u64.u32 %o, %s;", &[0], 64),
        ("brev.b32 %s, %w; cvt.u64.u32 %o, %s;", &[1], 0x8000_0000),
        ("bfind.u32 %s, %w; cvt.u64.u32 %o, %s;", &[0], 0xffff_ffff),
        ("bfind.s32 %s, %w; cvt.u64.u32 %o, %s;", &[0xffff_fff0], 3),
        ("bfind.shiftamt.u32 %s, %w; cvt.u64.u32 %o, %s;", &[0x10], 27),
        ("bfe.u32 %s, %w, 4, 8; cvt.u64.u32 %o, %s;", &[0xabcd], 0xbc),
        ("bfe.s32 %s, %w, 4, 8; cvt.u64.u32 %o, %s;", &[0xabcd], 0xffff_ffbc),
        ("bfe.s32 %s, %w, 28, 8; cvt.u64.u32 %o, %s;", &[0x8000_0000], 0xffff_fff8),
        ("bfe.u64 %o, %a, 60, 99;", &[0xf000_0000_0000_0000], 0xf),
        ("bfi.b32 %s, %w, %x, 8, 4; cvt.u64.u32 %o, %s;", &[0xa, 0xffff_0000], 0xffff_0a00),
        ("bfi.b64 %o, %a, %b, 32, 32;", &[7, 5], 0x7_0000_0005),
        ("lop3.b32 %s, %w, %x, %y, 0x96; cvt.u64.u32 %o, %s;", &[0b1100, 0b1010, 0b0110], 0),
        ("lop3.b32 %s, %w, %x, %y, 0xe8; cvt.u64.u32 %o, %s;", &[0b1100, 0b1010, 0b0110], 0b1110),
        ("shf.l.wrap.b32 %s, %w, %x, 8; cvt.u64.u32 %o, %s;", &[0x1122_3344, 0xaabb_ccdd], 0xbbcc_dd11),
        ("shf.r.clamp.b32 %s, %w, %x, 40; cvt.u64.u32 %o, %s;", &[0x1122_3344, 0xaabb_ccdd], 0xaabb_ccdd),
        ("prmt.b32 %s, %w, %x, 0x7410; cvt.u64.u32 %o, %s;", &[0x3322_1100, 0x7766_5544], 0x7744_1100),
        ("prmt.b32 %s, %w, %x, 0x0008; cvt.u64.u32 %o, %s;", &[0x3322_1180, 0], 0x8080_80ff),
        ("dp4a.s32.s32 %s, %w, %x, 10; cvt.u64.u32 %o, %s;", &[0x0102_03ff, 0x0101_0102], 14),
        ("fns.b32 %s, %w, 0, 2; cvt.u64.u32 %o, %s;", &[0b1010], 3),
        ("bmsk.clamp.b32 %s, 4, 8; cvt.u64.u32 %o, %s;", &[], 0xff0),
    ]);
}

#[test]
fn the_carry_goes_from_one_instruction_to_the_next() {
    let long = "add.cc.u32 %s, %w, %x; addc.u32 %s2, 0, 0; mov.b64 %o, {%s, %s2};";
    check(&[
        (long, &[0xffff_ffff, 2], 0x1_0000_0001),
        (long, &[5, 2], 7),
        ("sub.cc.u32 %s, %w, %x; subc.u32 %s2, 0, 0; mov.b64 %o, {%s, %s2};", &[1, 2], u64::MAX),
        (
            "mad.lo.cc.u32 %s, %w, %x, %y; madc.hi.u32 %s2, %w, %x, 0; mov.b64 %o, {%s, %s2};",
            &[0xffff_ffff, 0xffff_ffff, 0xffff_ffff],
            0xffff_ffff_0000_0000,
        ),
        ("add.cc.u64 %o2, %a, %b; addc.u64 %o, 0, 0;", &[u64::MAX, 1], 1),
        // Only `.cc` sets the carry.
        (
            "add.cc.u32 %s, %w, %x; add.u32 %s, 0, 0; addc.u32 %s, 0, 0; addc.u32 %s2, 0, 0; mov.b64 %o, {%s, %s2};",
            &[0xffff_ffff, 2],
            0x1_0000_0001,
        ),
    ]);
}

#[test]
fn moves_pack_unpack_and_select() {
    check(&[
        ("mov.b64 {%s, %s2}, %a; cvt.u64.u32 %o, %s2;", &[0x7_0000_0005], 7),
        ("mov.b64 {_, %s2}, %a; cvt.u64.u32 %o, %s2;", &[0x7_0000_0005], 7),
        ("mov.b32 {%i, %j}, %w; mov.b32 %s, {%j, %i}; cvt.u64.u32 %o, %s;", &[0x1234_5678], 0x5678_1234),
        ("mov.b64 %o, {%i, %j, %i, %j};", &[1, 2], 0x0002_0001_0002_0001),
        ("selp.b64 %o, %a, %b, %q;", &[3, 4], 3),
        ("selp.b64 %o, %a, %b, %q;", &[0, 4], 4),
        ("slct.u64.s32 %o, %a, %b, %y;", &[3, 4, 0xffff_ffff], 4),
        ("@!%q mov.u64 %o, 9;", &[0], 9),
        ("@%q mov.u64 %o, 9;", &[0], 0),
        (
            ".reg .v2 .u32 %v2; mov.b64 {%v2.x, %v2.y}, %a; mov.b64 %o, {%v2.y, %v2.x};",
            &[0x7_0000_0005],
            0x5_0000_0007,
        ),
    ]);
}

#[test]
fn comparisons_know_signs_and_nan() {
    let nan = u64::from(f32::NAN.to_bits());
    let one = u64::from(1_f32.to_bits());
    let rows: &[(&str, u64, u64, bool)] = &[
        ("lt.s32 %p, %w, %x", 0xffff_ffff, 1, true),
        ("lt.u32 %p, %w, %x", 0xffff_ffff, 1, false),
        ("lo.u32 %p, %w, %x", 1, 2, true),
        ("hs.u64 %p, %a, %b", 2, 2, true),
        ("ne.s64 %p, %a, %b", 2, 2, false),
        ("ge.s16 %p, %i, %j", 0xffff, 0, false),
        ("lt.f32 %p, %g, %h", nan, one, false),
        ("ltu.f32 %p, %g, %h", nan, one, true),
        ("ne.f32 %p, %g, %h", nan, one, false),
        ("neu.f32 %p, %g, %h", nan, one, true),
        ("equ.f32 %p, %g, %h", one, one, true),
        ("num.f32 %p, %g, %h", one, nan, false),
        ("nan.f32 %p, %g, %h", one, nan, true),
        ("gt.f64 %p, %e, %f", 2_f64.to_bits(), 1_f64.to_bits(), true),
        ("eq.f32 %p, %g, 0f3F800000", one, 0, true),
        ("lt.and.s32 %p, %w, %x, !%q", 1, 2, false),
        ("lt.or.s32 %p, %w, %x, %q", 3, 2, true),
        ("lt.xor.s32 %r|%p, %w, %x, %q", 1, 2, true),
        ("lt.s32 %r|%p, %w, %x", 1, 2, false),
        ("eq.ftz.f32 %p, %g, %h", 1, 2, true),
    ];
    for (comparison, a, b, want) in rows {
        let got = evaluate(&format!("setp.{comparison}; selp.u64 %o, 1, 0, %p;"), &[*a, *b]);
        assert_eq!(got, u64::from(*want), "setp.{comparison}");
    }
    check(&[
        ("set.lt.u32.s32 %s, %w, %x; cvt.u64.u32 %o, %s;", &[1, 2], 0xffff_ffff),
        ("set.lt.f32.s32 %v, %w, %x; mov.b32 %s, %v; cvt.u64.u32 %o, %s;", &[1, 2], one),
    ]);
}

fn singles(rows: &[(&str, f32, f32, f32, f32)]) {
    for (instruction, a, b, c, want) in rows {
        let bits = |value: f32| u64::from(value.to_bits());
        let got = evaluate(
            &format!("{instruction} mov.b32 %s, %v; cvt.u64.u32 %o, %s;"),
            &[bits(*a), bits(*b), bits(*c)],
        );
        let got = f32::from_bits(u32::try_from(got).unwrap());
        let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
        assert!(same, "{instruction} of {a:?}, {b:?}, {c:?}: {got:?}, not {want:?}");
    }
}

#[test]
fn singles_round_in_the_direction_asked() {
    let tiny = 2_f32.powi(-30);
    let third = 1.0 / 3.0_f32; // the nearest lies above
    let step = f32::EPSILON;
    singles(&[
        ("add.rn.f32 %v, %g, %h;", 1.0, tiny, 0.0, 1.0),
        ("add.rp.f32 %v, %g, %h;", 1.0, tiny, 0.0, 1.0 + step),
        ("add.rz.f32 %v, %g, %h;", 1.0, -tiny, 0.0, 1.0 - step / 2.0),
        ("add.rm.f32 %v, %g, %h;", -1.0, -tiny, 0.0, -1.0 - step),
        ("sub.rz.f32 %v, %g, %h;", 1.0, tiny, 0.0, 1.0 - step / 2.0),
        ("mul.rp.f32 %v, %g, %h;", 1.0 + step, 1.0 + step, 0.0, 1.0 + 3.0 * step),
        ("mul.rz.f32 %v, %g, %h;", f32::MAX, 2.0, 0.0, f32::MAX),
        ("mul.rn.f32 %v, %g, %h;", f32::MAX, 2.0, 0.0, f32::INFINITY),
        ("div.rn.f32 %v, %g, %h;", 1.0, 3.0, 0.0, third),
        ("div.rz.f32 %v, %g, %h;", 1.0, 3.0, 0.0, third.next_down()),
        ("div.rp.f32 %v, %g, %h;", 1.0, -3.0, 0.0, -third.next_down()),
        ("rcp.rm.f32 %v, %g;", 3.0, 0.0, 0.0, third.next_down()),
        ("sqrt.rp.f32 %v, %g;", 2.0, 0.0, 0.0, 2_f32.sqrt().next_up()),
        ("sqrt.rz.f32 %v, %g;", 4.0, 0.0, 0.0, 2.0),
        ("fma.rn.f32 %v, %g, %h, %l;", 1.0 + step, 1.0 - step, -1.0, -step * step),
        ("fma.rz.f32 %v, %g, %h, %l;", 1.0, 1.0, tiny, 1.0),
        ("fma.rm.f32 %v, %g, %h, %l;", 1.0, 1.0, -tiny, 1.0 - step / 2.0),
        ("fma.rp.f32 %v, %g, %h, %l;", 1.0, 1.0, tiny, 1.0 + step),
        ("mad.f32 %v, %g, %h, %l;", 2.0, 3.0, 4.0, 10.0),
    ]);
}

#[test]
fn doubles_round_in_the_direction_asked() {
    let tiny = 2_f64.powi(-60);
    let rows: &[(&str, f64, f64, f64, f64)] = &[
        ("add.rp.f64 %t, %e, %f;", 1.0, tiny, 0.0, 1.0 + f64::EPSILON),
        ("add.rz.f64 %t, %e, %f;", 1.0, -tiny, 0.0, 1.0 - f64::EPSILON / 2.0),
        ("mul.rm.f64 %t, %e, %f;", 1.0 + f64::EPSILON, 1.0 + f64::EPSILON, 0.0, 1.0 + 2.0 * f64::EPSILON),
        ("mul.rz.f64 %t, %e, %f;", f64::MAX, 2.0, 0.0, f64::MAX),
        ("div.rp.f64 %t, %e, %f;", 1.0, 3.0, 0.0, (1.0 / 3.0_f64).next_up()),
        ("sqrt.rp.f64 %t, %e;", 2.0, 0.0, 0.0, 2_f64.sqrt()),
        ("fma.rm.f64 %t, %e, %f, %n;", 1.0, 1.0, -tiny, 1.0 - f64::EPSILON / 2.0),
        (
            "fma.rn.f64 %t, %e, %f, %n;",
            1.0 + f64::EPSILON,
            1.0 - f64::EPSILON,
            -1.0,
            -f64::EPSILON * f64::EPSILON,
        ),
        ("rcp.approx.ftz.f64 %t, %e;", 4.0, 0.0, 0.0, 0.25),
        ("min.f64 %t, %e, %f;", f64::NAN, 3.0, 0.0, 3.0),
        ("max.f64 %t, %e, %f;", -0.0, 0.0, 0.0, 0.0),
        ("copysign.f64 %t, %e, %f;", -1.0, 3.0, 0.0, -3.0),
    ];
    for (instruction, a, b, c, want) in rows {
        let got =
            evaluate(&format!("{instruction} mov.b64 %o, %t;"), &[a.to_bits(), b.to_bits(), c.to_bits()]);
        assert_eq!(got, want.to_bits(), "{instruction}: {:?}, not {want:?}", f64::from_bits(got));
    }
}

#[test]
fn singles_flush_saturate_and_treat_nan_as_ptx_says() {
    let small = f32::from_bits(5);
    singles(&[
        ("add.f32 %v, %g, %h;", small, 0.0, 0.0, small),
        ("add.ftz.f32 %v, %g, %h;", small, 0.0, 0.0, 0.0),
        ("mul.ftz.f32 %v, %g, %h;", f32::MIN_POSITIVE, -0.5, 0.0, -0.0),
        ("add.sat.f32 %v, %g, %h;", 0.75, 0.75, 0.0, 1.0),
        ("add.sat.f32 %v, %g, %h;", f32::NAN, 0.0, 0.0, 0.0),
        ("fma.rn.sat.f32 %v, %g, %h, %l;", -2.0, 1.0, 0.5, 0.0),
        ("min.f32 %v, %g, %h;", f32::NAN, 2.0, 0.0, 2.0),
        ("min.NaN.f32 %v, %g, %h;", 1.0, f32::NAN, 0.0, f32::NAN),
        ("max.f32 %v, %g, %h;", 1.0, f32::NAN, 0.0, 1.0),
        ("min.f32 %v, %g, %h;", 0.0, -0.0, 0.0, -0.0),
        ("abs.f32 %v, %g;", -2.0, 0.0, 0.0, 2.0),
        ("neg.f32 %v, %g;", 2.0, 0.0, 0.0, -2.0),
        ("ex2.approx.ftz.f32 %v, %g;", 5.0, 0.0, 0.0, 32.0),
        ("lg2.approx.f32 %v, %g;", 8.0, 0.0, 0.0, 3.0),
        ("rsqrt.approx.f32 %v, %g;", 16.0, 0.0, 0.0, 0.25),
        ("sqrt.approx.f32 %v, %g;", 16.0, 0.0, 0.0, 4.0),
        ("sin.approx.f32 %v, %g;", 0.0, 0.0, 0.0, 0.0),
        ("cos.approx.f32 %v, %g;", 0.0, 0.0, 0.0, 1.0),
        ("tanh.approx.f32 %v, %g;", 0.0, 0.0, 0.0, 0.0),
        ("div.full.f32 %v, %g, %h;", 1.0, 4.0, 0.0, 0.25),
    ]);
    check(&[("testp.subnormal.f32 %p, %g; selp.u64 %o, 1, 0, %p;", &[5], 1)]);
}

#[test]
fn conversions_round_clamp_and_extend() {
    let single = |value: f32| u64::from(value.to_bits());
    check(&[
        ("cvt.s64.s32 %o, %w;", &[0xffff_fffe], u64::MAX - 1),
        ("cvt.u64.u32 %o, %w;", &[0xffff_fffe], 0xffff_fffe),
        ("cvt.s32.s8 %s, %w; cvt.u64.u32 %o, %s;", &[0x1ff], 0xffff_ffff),
        ("cvt.u32.u8 %s, %w; cvt.u64.u32 %o, %s;", &[0x1ff], 0xff),
        // The register is wider than the type: the sign fills it.
        ("cvt.s8.s32 %s, %w; cvt.u64.u32 %o, %s;", &[0x180], 0xffff_ff80),
        ("cvt.sat.s8.s32 %s, %w; cvt.u64.u32 %o, %s;", &[300], 127),
        ("cvt.sat.u8.s32 %s, %w; cvt.u64.u32 %o, %s;", &[0xffff_fff0], 0),
        ("cvt.rzi.s32.f32 %s, %g; cvt.u64.u32 %o, %s;", &[single(-2.9)], 0xffff_fffe),
        ("cvt.rni.s32.f32 %s, %g; cvt.u64.u32 %o, %s;", &[single(2.5)], 2),
        ("cvt.rmi.s32.f32 %s, %g; cvt.u64.u32 %o, %s;", &[single(-2.1)], 0xffff_fffd),
        ("cvt.rpi.u32.f32 %s, %g; cvt.u64.u32 %o, %s;", &[single(2.1)], 3),
        ("cvt.rzi.s32.f32 %s, %g; cvt.u64.u32 %o, %s;", &[single(1e20)], 0x7fff_ffff),
        ("cvt.rzi.u32.f32 %s, %g; cvt.u64.u32 %o, %s;", &[single(-5.0)], 0),
        ("cvt.rzi.s32.f32 %s, %g; cvt.u64.u32 %o, %s;", &[single(f32::NAN)], 0),
        ("cvt.rzi.s64.f64 %o, %e;", &[f64::NAN.to_bits()], 1 << 63),
        ("cvt.rzi.s64.f64 %o, %e;", &[(-3.7_f64).to_bits()], 3_u64.wrapping_neg()),
        ("cvt.rn.f32.s32 %v, %w; mov.b32 %s, %v; cvt.u64.u32 %o, %s;", &[0xffff_fffd], single(-3.0)),
        ("cvt.rz.f32.u32 %v, %w; mov.b32 %s, %v; cvt.u64.u32 %o, %s;", &[0x0100_0003], single(16_777_218.0)),
        ("cvt.rp.f32.u32 %v, %w; mov.b32 %s, %v; cvt.u64.u32 %o, %s;", &[0x0100_0001], single(16_777_218.0)),
        ("cvt.rn.f64.u64 %t, %a; mov.b64 %o, %t;", &[u64::MAX], 18_446_744_073_709_551_616_f64.to_bits()),
        (
            "cvt.rn.f32.u64 %v, %a; mov.b32 %s, %v; cvt.u64.u32 %o, %s;",
            &[(1 << 40) + (1 << 16) + 1],
            single(((1_u64 << 40) + (1 << 17)) as f32),
        ),
        (
            "cvt.rn.f32.f64 %v, %e; mov.b32 %s, %v; cvt.u64.u32 %o, %s;",
            &[1e300_f64.to_bits()],
            single(f32::INFINITY),
        ),
        (
            "cvt.rz.f32.f64 %v, %e; mov.b32 %s, %v; cvt.u64.u32 %o, %s;",
            &[1e300_f64.to_bits()],
            single(f32::MAX),
        ),
        ("cvt.f64.f32 %t, %g; mov.b64 %o, %t;", &[single(0.1)], f64::from(0.1_f32).to_bits()),
        ("cvt.rmi.f32.f32 %v, %g; mov.b32 %s, %v; cvt.u64.u32 %o, %s;", &[single(-2.5)], single(-3.0)),
        ("cvt.sat.f32.f32 %v, %g; mov.b32 %s, %v; cvt.u64.u32 %o, %s;", &[single(2.5)], single(1.0)),
    ]);
}

#[test]
fn half_precision_rounds_once() {
    check(&[
        ("cvt.rn.f16.f32 %m, %g; cvt.u64.u16 %o, %m;", &[u64::from(1_f32.to_bits())], 0x3c00),
        ("cvt.rn.f16.f32 %m, %g; cvt.u64.u16 %o, %m;", &[u64::from(65520_f32.to_bits())], 0x7c00),
        ("cvt.rz.f16.f32 %m, %g; cvt.u64.u16 %o, %m;", &[u64::from(65520_f32.to_bits())], 0x7bff),
        ("cvt.rn.f16.f32 %m, %g; cvt.u64.u16 %o, %m;", &[u64::from(6e-8_f32.to_bits())], 1),
        (
            "cvt.f32.f16 %v, %i; mov.b32 %s, %v; cvt.u64.u32 %o, %s;",
            &[0x0001],
            u64::from(2_f32.powi(-24).to_bits()),
        ),
        ("cvt.rn.bf16.f32 %m, %g; cvt.u64.u16 %o, %m;", &[0x3f80_8000], 0x3f80),
        ("cvt.rn.bf16.f32 %m, %g; cvt.u64.u16 %o, %m;", &[0x3f81_8000], 0x3f82),
        ("cvt.rn.f16x2.f32 %s, %g, %h; cvt.u64.u32 %o, %s;", &[0x3f80_0000, 0x4000_0000], 0x3c00_4000),
        ("add.f16 %m, %i, %j; cvt.u64.u16 %o, %m;", &[0x3c00, 0x1000], 0x3c00),
        ("add.f16 %m, %i, %j; cvt.u64.u16 %o, %m;", &[0x3c00, 0x3c00], 0x4000),
        ("fma.rn.f16 %m, %i, %j, %k; cvt.u64.u16 %o, %m;", &[0x4000, 0x4200, 0x3c00], 0x4700),
        ("mul.f16x2 %s, %w, %x; cvt.u64.u32 %o, %s;", &[0x4000_3c00, 0x4200_4200], 0x4600_4200),
        ("fma.rn.relu.f16 %m, %i, %j, %k; cvt.u64.u16 %o, %m;", &[0xc000, 0x4200, 0x3c00], 0),
        ("max.bf16 %m, %i, %j; cvt.u64.u16 %o, %m;", &[0x3f80, 0xbf80], 0x3f80),
        ("setp.lt.f16 %p, %i, %j; selp.u64 %o, 1, 0, %p;", &[0xc000, 0x3c00], 1),
        ("setp.lt.f16x2 %p|%r, %w, %x; selp.u64 %o, 1, 0, %r;", &[0x3c00_c000, 0x3c00_3c00], 0),
        ("set.gt.u32.f16x2 %s, %w, %x; cvt.u64.u32 %o, %s;", &[0x4000_3c00, 0x3c00_3c00], 0xffff_0000),
        ("set.le.f16x2.f16x2 %s, %w, %x; cvt.u64.u32 %o, %s;", &[0x4000_3c00, 0x3c00_3c00], 0x3c00),
        (
            "{.reg.b16 hl,hu; mov.b32 {hl, hu}, %w; mov.b32 %s, {hu, hl};} cvt.u64.u32 %o, %s;",
            &[0x1234_5678],
            0x5678_1234,
        ),
        ("add.u16x2 %s, %w, %x; cvt.u64.u32 %o, %s;", &[0x0001_ffff, 0x0001_0001], 0x0002_0000),
    ]);
}
