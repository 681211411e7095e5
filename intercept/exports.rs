//! What makes a library of the hooks: the exported names, the act at load time, and the proof that no panic is reachable.
//! A module of both libraries.

// The names, and the module of hooks that they jump to as `library`.
include!(concat!(env!("OUT_DIR"), "/exports.rs"));

/// Looks up the real driver. Runs after the driver's own constructors: we depend on it.
extern "C" fn load() {
    library::load();
}

#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;

unsafe extern "C" {
    /// Defined nowhere: a library that lists it as undefined contains a panic that can be reached, and is refused by
    /// `intercept/check-symbols.sh`.
    fn gpushare_panic_is_reachable() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: never linked into a library that passes the gate.
    unsafe { gpushare_panic_is_reachable() }
}
