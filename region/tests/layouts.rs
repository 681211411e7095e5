//! The files of each layout that running containers may use, byte by byte. A library stays in its container
//! while another version replaces gpushare on the host. A changed layout therefore gets a new number, and a
//! file here.

use gpushare_region::{
    ComputePolicy, DeviceLimits, LIMITS_VERSION, LimitsFile, USAGE_HEADER_LEN, USAGE_LEN, USAGE_VERSION,
    empty_usage_header, encode_limits,
};

const LIMITS: &[u8] = include_bytes!("layouts/2.limits");
const USAGE: &[u8] = include_bytes!("layouts/2.usage");

fn devices() -> [DeviceLimits; 2] {
    let device = |first: u8, policy| DeviceLimits {
        uuid: core::array::from_fn(|at| first + u8::try_from(at).unwrap_or(0)),
        memory_bytes: 0x0123_4567_89ab_cdef,
        cores_percent: 30,
        policy,
        priority: 7,
        ceiling_percent: 80,
        most_bytes: 0,
    };
    [device(1, ComputePolicy::Burst), device(0x80, ComputePolicy::Fixed)]
}

#[test]
fn the_files_of_the_layout_in_force_are_what_they_were() {
    assert_eq!((LIMITS_VERSION, USAGE_VERSION), (2, 2), "a new number needs files of its own here");
    let (limits, usage) = (encode_limits(&devices(), 0), empty_usage_header());
    if std::env::var_os("GPUSHARE_UPDATE_LAYOUTS").is_some() {
        std::fs::write("tests/layouts/2.limits", limits.expect("two devices fit"))
            .expect("it can be written");
        std::fs::write("tests/layouts/2.usage", usage).expect("it can be written");
        return;
    }
    assert!(
        limits.is_ok_and(|limits| limits == LIMITS),
        "the limits file has another layout: raise its number"
    );
    assert!(usage == USAGE, "the usage file has another layout: raise its number");
    assert_eq!((LIMITS.len(), USAGE_HEADER_LEN, USAGE_LEN), (size_of::<LimitsFile>(), USAGE.len(), 352_256));
}
