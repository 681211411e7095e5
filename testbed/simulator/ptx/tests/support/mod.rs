//! Launches a kernel in one call, and wraps a few instructions into a kernel.

#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, reason = "a panic is the failure of the test")]

use std::collections::HashMap;

use gpushare_simulator_ptx::{Module, PtxError};

/// The first lines of every module.
pub const HEAD: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";

/// Reads a module whose text lacks the first lines.
pub fn module(text: &str) -> Module {
    Module::parse(&format!("{HEAD}{text}")).unwrap()
}

/// A buffer of kernel parameters.
#[derive(Default)]
pub struct Params(Vec<u8>);

impl Params {
    pub fn new() -> Self {
        Self::default()
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.resize(self.0.len().next_multiple_of(bytes.len()), 0);
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn f32(self, value: f32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// A device pointer to host memory.
    pub fn to<T>(self, memory: &mut [T]) -> Self {
        let address = memory.as_mut_ptr().expose_provenance();
        self.u64(address as u64)
    }
}

/// Runs a kernel of a module that has no variables.
pub fn launch(
    module: &Module,
    kernel: &str,
    grid: [u32; 3],
    block: [u32; 3],
    params: Params,
) -> Result<(), PtxError> {
    launch_with(module, kernel, (grid, block, 0), params, &Loaded::default())
}

/// Runs a kernel with dynamic shared memory and variables.
pub fn launch_with(
    module: &Module,
    kernel: &str,
    (grid, block, shared): ([u32; 3], [u32; 3], u32),
    params: Params,
    loaded: &Loaded,
) -> Result<(), PtxError> {
    // SAFETY: every test passes pointers to memory that outlives the call and is as large as its kernel uses.
    unsafe { module.run(kernel, grid, block, shared, &params.0, &|name| loaded.addresses.get(name).copied()) }
}

/// A module's variables in memory, as a loader places them.
#[derive(Default)]
pub struct Loaded {
    /// Memory of the variables. It is reached by address only, once they are placed.
    _memory: Vec<Vec<u64>>,
    addresses: HashMap<String, u64>,
}

impl Loaded {
    pub fn new(module: &Module) -> Self {
        let mut loaded = Self::default();
        for global in module.globals() {
            let mut words = vec![0_u64; global.size.div_ceil(8) + 1];
            for (word, bytes) in words.iter_mut().zip(global.init.chunks(8)) {
                let mut whole = [0; 8];
                whole[..bytes.len()].copy_from_slice(bytes);
                *word = u64::from_le_bytes(whole);
            }
            let address = words.as_mut_ptr().expose_provenance() as u64;
            loaded.addresses.insert(global.name, address);
            loaded._memory.push(words);
        }
        loaded
    }

    pub fn address(&self, name: &str) -> u64 {
        self.addresses[name]
    }

    /// The variable's first eight bytes.
    pub fn word(&self, name: &str) -> i64 {
        let address = usize::try_from(self.address(name)).unwrap();
        // SAFETY: `new` placed at least eight bytes there, which live as long as `self`.
        unsafe { std::ptr::with_exposed_provenance::<i64>(address).read() }
    }
}

/// Runs `instructions` in one thread and returns %o. The 64-bit inputs are %a, %b, %c and %d; %w, %x, %y and
/// %z are their low halves. %g and %h are the low halves of %a and %b as singles, %e and %f are %a and %b as
/// doubles. Results in %s (32 bits), %v (single), %t (double) or %p (predicate) must be moved to %o by the
/// last instructions.
pub fn evaluate(instructions: &str, inputs: &[u64]) -> u64 {
    let text = format!(
        "{HEAD}.visible .entry k(.param .u64 in) {{
        .reg .b64 %in, %a, %b, %c, %d, %o, %o2;
        .reg .b32 %w, %x, %y, %z, %s, %s2; .reg .b16 %i, %j, %k, %m;
        .reg .f32 %g, %h, %l, %v; .reg .f64 %e, %f, %n, %t; .reg .pred %p, %q, %r;
        ld.param.u64 %in, [in];
        ld.global.u64 %a, [%in]; ld.global.u64 %b, [%in+8]; ld.global.u64 %c, [%in+16]; ld.global.u64 %d, [%in+24];
        cvt.u32.u64 %w, %a; cvt.u32.u64 %x, %b; cvt.u32.u64 %y, %c; cvt.u32.u64 %z, %d;
        cvt.u16.u64 %i, %a; cvt.u16.u64 %j, %b; cvt.u16.u64 %k, %c;
        mov.b32 %g, %w; mov.b32 %h, %x; mov.b32 %l, %y;
        mov.b64 %e, %a; mov.b64 %f, %b; mov.b64 %n, %c;
        setp.ne.u64 %q, %a, 0;
        mov.u64 %o, 0;
        {instructions}
        st.global.u64 [%in], %o;
        ret; }}"
    );
    let module = Module::parse(&text).unwrap_or_else(|error| panic!("{instructions}: {error}"));
    #[repr(align(32))]
    struct Aligned([u64; 4]);
    let mut memory = Aligned([0; 4]);
    memory.0[..inputs.len()].copy_from_slice(inputs);
    let params = Params::new().to(&mut memory.0);
    launch(&module, "k", [1; 3], [1; 3], params).unwrap_or_else(|error| panic!("{instructions}: {error}"));
    memory.0[0]
}
