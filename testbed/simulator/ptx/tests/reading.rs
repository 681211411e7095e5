//! What is known of a module before it runs: names, places of parameters and variables, and errors with their
//! line.

mod support;

use gpushare_simulator_ptx::{Module, Parameter, PtxError};
use support::{HEAD, module};

#[test]
fn kernels_and_parameters_are_listed_with_their_places() {
    let module = module(
        ".entry b(.param .u8 x, .param .u64 .ptr .global .align 16 y, .param .align 4 .b8 z[12], .param .f32 w) { ret; }
         .visible .entry a() { ret; }
         .func helper(.param .u32 n) { ret; }",
    );
    assert_eq!(module.kernels().collect::<Vec<_>>(), ["a", "b"]);
    let places = [(0, 1), (8, 8), (16, 12), (28, 4)].map(|(offset, size)| Parameter { offset, size });
    assert_eq!(module.parameters("b").unwrap(), places);
    assert_eq!(module.parameters("a").unwrap(), []);
    assert_eq!(module.parameters("helper"), None);
}

#[test]
fn variables_carry_their_initial_bytes() {
    let module = module(
        ".const .align 4 .b8 table[6] = {1, 2, 3};
         .global .f32 real = 0f3F800000;
         .global .align 8 .f64 decimal[2] = {1.5, -2};
         .global .s16 nested[2][2] = {{1, -1}, {2}};
         .visible .global .align 16 .b8 empty[40];
         .global .u32 open[] = {7, 8};",
    );
    let globals = module.globals();
    let of = |name: &str| globals.iter().find(|global| global.name == name).unwrap();
    assert_eq!(of("table").init, [1, 2, 3, 0, 0, 0]);
    assert_eq!(of("real").init, 1_f32.to_le_bytes());
    assert_eq!(of("decimal").init, [1.5_f64.to_le_bytes(), (-2_f64).to_le_bytes()].concat());
    assert_eq!(of("nested").init, [1, 0, 255, 255, 2, 0, 0, 0]);
    assert_eq!((of("empty").size, of("empty").align), (40, 16));
    assert_eq!(of("empty").init, [0; 40]);
    assert_eq!(of("open").size, 8);
}

#[test]
fn an_unknown_instruction_is_named_with_its_line() {
    for (line, name) in [
        (
            "wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r1}, [%rd1];",
            "wmma.load.a.sync.aligned.row.m16n16k16.global.f16",
        ),
        ("add.strange.s32 %r1, %r1, 1;", "add.strange.s32"),
        ("tex.2d.v4.f32.s32 {%r1, %r1, %r1, %r1}, [t, {%r1, %r1}];", "tex.2d.v4.f32.s32"),
        ("atom.global.add.b128 %r1, [%rd1], %r1;", "atom.global.add.b128"),
        ("setp.lt.weird.s32 %p1, %r1, 0;", "setp.lt.weird.s32"),
    ] {
        let text = format!(
            "{HEAD}.entry k() {{\n.reg .b32 %r<2>; .reg .b64 %rd<2>; .reg .pred %p<2>;\n{line}\nret; }}"
        );
        let error = Module::parse(&text).unwrap_err();
        match error {
            PtxError::UnknownInstruction { line: 6, name: found } => assert_eq!(found, name),
            // The reader may meet operands of an unknown kind first; then only the line counts.
            PtxError::Syntax { line: 6, .. } => {}
            other => panic!("{line}: {other}"),
        }
    }
    let error = Module::parse(&format!("{HEAD}.entry k() {{ frob.u32 %r1; }}")).unwrap_err();
    assert_eq!(error.to_string(), "line 4: instruction frob.u32 is not simulated");
}

#[test]
fn what_is_not_declared_is_named_with_its_line() {
    for (body, name) in [
        ("mov.u32 %r9, 1;", "%r9"),
        ("bra $nowhere;", "$nowhere"),
        ("call missing, ();", "missing"),
        ("ld.param.u32 %r1, [other];", "other"),
    ] {
        let error = Module::parse(&format!(".entry k() {{ .reg .b32 %r<2>;\n{body} }}")).unwrap_err();
        assert_eq!(error, PtxError::UnknownSymbol { line: 2, name: name.to_owned() });
    }
}

#[test]
fn malformed_text_is_an_error_and_never_a_panic() {
    let whole = format!(
        "{HEAD}.global .u32 x[2] = {{1, 2}};\n.entry k(.param .u64 p) {{ .reg .b64 %a<3>; .reg .pred %q;
        ld.param.u64 %a1, [p]; setp.eq.u64 %q, %a1, 0; @%q bra $end; st.global.v2.u64 [%a1+8], {{%a1, %a2}};
        $end: ret; }} /* c */ // d"
    );
    assert!(Module::parse(&whole).is_ok());
    for length in 0..whole.len() {
        let _ = Module::parse(&whole[..length]);
        let without = format!("{}{}", &whole[..length], &whole[length + 1..]);
        let _ = Module::parse(&without);
    }
    for text in
        ["}", "{", ".entry", ".entry k(", ".global .u32 x[99999999999999999999];", ".reg .b32 x;", "\"", "/*"]
    {
        assert!(Module::parse(text).is_err(), "{text}");
    }
}

#[test]
fn several_texts_in_a_row_are_one_module() {
    let first = format!(
        "{HEAD}.extern .func (.param .b32 r) twice(.param .b32 n);\n.extern .global .u32 shared_value;
        .entry k(.param .u64 p) {{ .reg .b32 %r<3>; .reg .b64 %d<3>; ld.param.u64 %d1, [p];
        {{ .param .b32 a; .param .b32 b; st.param.b32 [a], 21; call (b), twice, (a); ld.param.b32 %r1, [b]; }}
        st.global.u32 [%d1], %r1; ret; }}\n"
    );
    assert!(matches!(Module::parse(&first), Err(PtxError::UnknownSymbol { name, .. }) if name == "twice"));
    let second = format!(
        "{HEAD}.visible .global .u32 shared_value = 5;
        .visible .func (.param .b32 r) twice(.param .b32 n) {{ .reg .b32 %r<3>; ld.param.b32 %r1, [n];
        add.s32 %r1, %r1, %r1; st.param.b32 [r], %r1; ret; }}"
    );
    let module = Module::parse(&format!("{first}{second}")).unwrap();
    let mut out = [0_u32];
    support::launch(&module, "k", [1; 3], [1; 3], support::Params::new().to(&mut out)).unwrap();
    assert_eq!(out, [42]);
    assert_eq!(module.globals()[0].init, 5_u32.to_le_bytes());
}

#[test]
fn debug_information_is_skipped() {
    let module = Module::parse(
        ".version 8.0\n.target sm_80, debug\n.address_size 64\n.file 1 \"a.cu\"\n
         .visible .entry k(.param .u64 p)\n.maxntid 256, 1, 1\n.minnctapersm 2\n{\n.loc 1 2 3\n.pragma \"nounroll\";\n
         .loc 1 5 0, function_name $L__info_string0, inlined_at 1 4 3\nret;\n$L__tmp0:\n}\n
         .section .debug_str\n{\n$L__info_string0:\n.b8 97,98,0\n.b64 $L__tmp0\n}\n",
    );
    assert_eq!(module.unwrap().kernels().count(), 1);
}
