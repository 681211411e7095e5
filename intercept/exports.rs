//! Builds a library from the hooks: the exported names, the function that runs at load time, and the proof
//! that no panic is reachable. Both libraries contain this module.

// The exported names, and the module of hooks that they jump to, as `library`.
include!(concat!(env!("OUT_DIR"), "/exports.rs"));

/// Looks up the real driver. Runs after the driver's own constructors, since our library depends on the
/// driver's.
extern "C" fn load() {
    library::load();
}

#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;

unsafe extern "C" {
    /// Never defined. A library that lists it as undefined contains a reachable panic, and
    /// `intercept/check-symbols.sh` rejects it.
    fn gpushare_panic_is_reachable() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: never linked into a library that passes the gate.
    unsafe { gpushare_panic_is_reachable() }
}
