//! Modules, libraries, kernels and functions.
//!
//! An image of PTX that the interpreter can read gives kernels that really run. Any other image (a cubin, a
//! fat binary, other PTX) gives functions that only take time, as stderr reports once. If its names are
//! unknown, any name is a function.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{CString, c_char};
use std::sync::{Arc, Mutex};

use gpushare_simulator_ptx::Parameter;

use crate::abi::{Code, Handle, In, Out, Result};
use crate::context::{current, grow_by_module};
use crate::driver::{Driver, driver, locked};
use crate::heap::Kind;
use crate::image::Image;
use crate::launch::Kernel;
use crate::registry::Registry;

/// Settings from the old launch functions (cuFuncSetBlockShape and others).
#[derive(Clone)]
pub struct OldLaunch {
    /// Number of threads of a block in three dimensions.
    pub block: [u32; 3],
    /// Shared memory, bytes.
    pub shared: u32,
    /// Parameters written by cuParamSetv and similar functions, at most 4096 bytes.
    pub parameters: Vec<u8>,
}

/// A function of a module, or a kernel of a library.
pub struct Function {
    /// Nanoseconds that a launch takes, if the name gives them.
    pub length: Option<u64>,
    /// Nanoseconds that one round of blocks takes otherwise.
    pub base: u64,
    /// Layout of the parameters, if the image describes it.
    pub parameters: Option<Vec<Parameter>>,
    /// Settings for the old launch functions.
    pub old: Mutex<OldLaunch>,
    name: CString,
    module: Arc<Module>,
    settings: Mutex<HashMap<u32, i32>>,
}

/// A loaded module or library.
pub struct Module {
    handle: Handle,
    /// Context that it belongs to; 0 for a library, which belongs to none.
    context: Handle,
    image: Image,
    globals: HashMap<String, (u64, usize)>,
    functions: Mutex<HashMap<String, Handle>>,
}

/// All modules and libraries of the process.
#[derive(Default)]
pub struct Modules {
    registry: Registry<Module>,
}

impl Function {
    /// Runs the kernel's program, if its image has one, kernels are enabled and the name gives no time.
    pub fn run(&self, driver: &Driver, kernel: &Kernel) -> Result {
        // A kernel whose name gives a time is a stand-in for work: its result does not matter.
        if !driver.runs_kernels || self.length.is_some() {
            return Ok(());
        }
        let Image::Program(program) = &self.module.image else {
            self.tell_that_it_was_not_run();
            return Ok(());
        };
        locked(&driver.heap).touch_all();
        let name = self.name.to_str().map_err(|_| Code::INVALID_IMAGE)?;
        let address = |global: &str| self.module.globals.get(global).map(|found| found.0);
        program.run(name, kernel, &address)
    }
}

impl Function {
    /// Reports on stderr, once for each name, that the kernel computed nothing. Its results could otherwise
    /// pass for computed ones.
    fn tell_that_it_was_not_run(&self) {
        static TOLD: Mutex<BTreeSet<CString>> = Mutex::new(BTreeSet::new());
        let mut told = locked(&TOLD);
        if told.len() < MOST_TOLD && told.insert(self.name.clone()) {
            let name = self.name.to_string_lossy();
            eprintln!(
                "gpushare-simulator: kernel {} is no PTX that the simulator can run (machine code?): it only took time",
                name.escape_default()
            );
        }
    }
}

/// Most kernels for which a process reports that they were not run.
const MOST_TOLD: usize = 100;

/// Returns the nanoseconds given in a name, as in `…_20us`, `…_5ms` or `…_100ns`, also inside a mangled name.
fn length_of(name: &str) -> Option<u64> {
    let mut found = None;
    for part in name.split('_').skip(1) {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        let (number, unit) = part.split_at(digits);
        let factor = match unit.get(..2) {
            Some("ns") => 1,
            Some("us") => 1_000,
            Some("ms") => 1_000_000,
            _ => continue,
        };
        let mangled = name.starts_with("_Z");
        if unit.len() == 2 || mangled {
            found = number.parse::<u64>().ok().and_then(|count| count.checked_mul(factor)).or(found);
        }
    }
    found
}

impl Modules {
    /// Unloads the modules of a dying context.
    pub fn forget(&self, driver: &Driver, context: Handle) {
        for module in self.registry.all().iter().filter(|module| module.context == context) {
            let _ = unload(driver, module.handle);
        }
    }
}

fn load(driver: &Driver, image: Image, context: Handle) -> Result<Handle> {
    let ordinal = current().map(|context| context.ordinal).unwrap_or(0);
    grow_by_module(driver, ordinal)?;
    let mut globals = HashMap::new();
    for global in image.globals() {
        let place = driver.allocate(ordinal, context, Kind::Device, global.size.max(1) as u64)?;
        crate::copy::write_bytes(place.start, &global.init)?;
        globals.insert(global.name, (place.start, global.size));
    }
    let functions = Mutex::default();
    Ok(driver.modules.registry.add_with(|handle| Module { handle, context, image, globals, functions }))
}

fn unload(driver: &Driver, handle: Handle) -> Result {
    let module = driver.modules.registry.remove(handle)?;
    for function in locked(&module.functions).values() {
        let _ = driver.functions.remove(*function);
    }
    for (start, _) in module.globals.values() {
        let _ = driver.release(*start);
    }
    Ok(())
}

fn function_of(driver: &Driver, module: &Arc<Module>, name: &str) -> Result<Handle> {
    if !module.image.has(name) {
        return Err(Code::NOT_FOUND);
    }
    let text = CString::new(name).map_err(|_| Code::INVALID_VALUE)?;
    let mut functions = locked(&module.functions);
    if let Some(&handle) = functions.get(name) {
        return Ok(handle);
    }
    let handle = driver.functions.add(Function {
        length: length_of(name),
        base: driver.kernel_time,
        parameters: module.image.parameters(name),
        old: Mutex::new(OldLaunch { block: [1, 1, 1], shared: 0, parameters: Vec::new() }),
        name: text,
        module: Arc::clone(module),
        settings: Mutex::default(),
    });
    functions.insert(name.to_owned(), handle);
    Ok(handle)
}

fn load_data(out: Out<Handle>, data: In<u8>) -> Result {
    out.given()?;
    let driver = driver()?;
    let context = current()?.handle;
    out.set(load(driver, Image::read(data)?, context)?)
}

fn load_library(out: Out<Handle>, image: Result<Image>) -> Result {
    out.given()?;
    let driver = driver()?;
    out.set(load(driver, image?, 0)?)
}

fn attribute(function: &Function, number: u32) -> Result<i32> {
    if let Some(&value) = locked(&function.settings).get(&number) {
        return Ok(value);
    }
    Ok(match number {
        0 => 1024,
        1..=3 => 0,
        4 => 32,
        5 => 80,
        6 => 90,
        7 => 0,
        8 => 49152,
        9 => -1,
        10..=16 => 0,
        _ => return Err(Code::INVALID_VALUE),
    })
}

fn write_parameter(function: Handle, index: usize, offset: Out<usize>, size: Out<usize>) -> Result {
    let function = driver()?.functions.get(function)?;
    let found = function.parameters.as_ref().and_then(|list| list.get(index)).ok_or(Code::INVALID_VALUE)?;
    offset.set_if_given(found.offset);
    size.set_if_given(found.size);
    Ok(())
}

fn list_functions(driver: &Driver, module: Handle) -> Result<Vec<Handle>> {
    let module = driver.modules.registry.get(module)?;
    module.image.names().iter().map(|name| function_of(driver, &module, name)).collect()
}

fn global(module: Handle, name: In<c_char>, address: Out<u64>, size: Out<usize>) -> Result {
    let module = driver()?.modules.registry.get(module)?;
    let (start, length) = *module.globals.get(&name.text()?).ok_or(Code::NOT_FOUND)?;
    address.set_if_given(start);
    size.set_if_given(length);
    Ok(())
}

exports! {
    fn cuModuleLoadData also cuModuleLoadFatBinary (out: Out<Handle>, data: In<u8>) {
        load_data(out, data)
    }

    fn cuModuleLoadDataEx(out: Out<Handle>, data: In<u8>, _count: u32, _options: In<u32>, _values: In<usize>) {
        load_data(out, data)
    }

    fn cuModuleLoad(out: Out<Handle>, path: In<c_char>) {
        out.given()?;
        let driver = driver()?;
        let context = current()?.handle;
        out.set(load(driver, Image::open(&path.text()?)?, context)?)
    }

    fn cuModuleUnload(handle: Handle) {
        unload(driver()?, handle)
    }

    fn cuModuleGetLoadingMode(out: Out<u32>) {
        driver()?;
        out.set(1)
    }

    fn cuModuleGetFunction(out: Out<Handle>, module: Handle, name: In<c_char>) {
        out.given()?;
        let driver = driver()?;
        out.set(function_of(driver, &driver.modules.registry.get(module)?, &name.text()?)?)
    }

    fn cuModuleGetFunctionCount(out: Out<u32>, module: Handle) {
        let names = driver()?.modules.registry.get(module)?.image.names();
        out.set(u32::try_from(names.len()).unwrap_or(u32::MAX))
    }

    fn cuModuleEnumerateFunctions(out: Out<Handle>, most: u32, module: Handle) {
        let all = list_functions(driver()?, module)?;
        all.into_iter().take(most as usize).enumerate().try_for_each(|(index, function)| out.set_at(index, function))
    }

    fn cuModuleGetGlobal_v2(address: Out<u64>, size: Out<usize>, module: Handle, name: In<c_char>) {
        global(module, name, address, size)
    }

    fn cuLibraryLoadData (
        out: Out<Handle>, data: In<u8>, _options: In<u32>, _values: In<usize>, _count: u32, _more: In<u32>,
        _more_values: In<usize>, _more_count: u32,
    ) {
        load_library(out, Image::read(data))
    }

    fn cuLibraryLoadFromFile (
        out: Out<Handle>, path: In<c_char>, _options: In<u32>, _values: In<usize>, _count: u32, _more: In<u32>,
        _more_values: In<usize>, _more_count: u32,
    ) {
        load_library(out, Image::open(&path.text()?))
    }

    fn cuLibraryUnload(handle: Handle) {
        unload(driver()?, handle)
    }

    fn cuLibraryGetKernel(out: Out<Handle>, library: Handle, name: In<c_char>) {
        out.given()?;
        let driver = driver()?;
        out.set(function_of(driver, &driver.modules.registry.get(library)?, &name.text()?)?)
    }

    fn cuLibraryGetModule(out: Out<Handle>, library: Handle) {
        driver()?.modules.registry.get(library)?;
        out.set(library)
    }

    fn cuLibraryGetKernelCount(out: Out<u32>, library: Handle) {
        let names = driver()?.modules.registry.get(library)?.image.names();
        out.set(u32::try_from(names.len()).unwrap_or(u32::MAX))
    }

    fn cuLibraryEnumerateKernels(out: Out<Handle>, most: u32, library: Handle) {
        let all = list_functions(driver()?, library)?;
        all.into_iter().take(most as usize).enumerate().try_for_each(|(index, kernel)| out.set_at(index, kernel))
    }

    fn cuLibraryGetGlobal also cuLibraryGetManaged
    (address: Out<u64>, size: Out<usize>, library: Handle, name: In<c_char>) {
        global(library, name, address, size)
    }

    fn cuKernelGetFunction(out: Out<Handle>, kernel: Handle) {
        driver()?.functions.get(kernel)?;
        out.set(kernel)
    }

    fn cuKernelGetLibrary(out: Out<Handle>, kernel: Handle) {
        out.set(driver()?.functions.get(kernel)?.module.handle)
    }

    fn cuFuncGetModule(out: Out<Handle>, function: Handle) {
        out.set(driver()?.functions.get(function)?.module.handle)
    }

    fn cuFuncGetName also cuKernelGetName (out: Out<*const c_char>, function: Handle) {
        out.set(driver()?.functions.get(function)?.name.as_ptr())
    }

    fn cuFuncGetAttribute(out: Out<i32>, number: u32, function: Handle) {
        out.set(attribute(&*driver()?.functions.get(function)?, number)?)
    }

    fn cuKernelGetAttribute(out: Out<i32>, number: u32, kernel: Handle, _ordinal: i32) {
        out.set(attribute(&*driver()?.functions.get(kernel)?, number)?)
    }

    fn cuFuncSetAttribute(function: Handle, number: u32, value: i32) {
        locked(&driver()?.functions.get(function)?.settings).insert(number, value);
        Ok(())
    }

    fn cuKernelSetAttribute(number: u32, value: i32, kernel: Handle, _ordinal: i32) {
        locked(&driver()?.functions.get(kernel)?.settings).insert(number, value);
        Ok(())
    }

    fn cuFuncSetCacheConfig also cuFuncSetSharedMemConfig (function: Handle, _value: u32) {
        driver()?.functions.get(function).map(|_| ())
    }

    fn cuKernelSetCacheConfig(kernel: Handle, _value: u32, _ordinal: i32) {
        driver()?.functions.get(kernel).map(|_| ())
    }

    fn cuFuncGetParamInfo also cuKernelGetParamInfo
    (function: Handle, index: usize, offset: Out<usize>, size: Out<usize>) {
        write_parameter(function, index, offset, size)
    }

    fn cuFuncIsLoaded(out: Out<u32>, function: Handle) {
        driver()?.functions.get(function)?;
        out.set(1)
    }

    fn cuFuncLoad(function: Handle) {
        driver()?.functions.get(function).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_tell_how_long_its_kernel_runs() {
        for (name, want) in [
            ("busy_10ms", Some(10_000_000)),
            ("busy_250us", Some(250_000)),
            ("_Z9busy_20usPf", Some(20_000)),
            ("busy", None),
            ("busy_ms", None),
            ("busy_10msx", None),
            ("vector_add", None),
        ] {
            assert_eq!(length_of(name), want, "kernel {name}");
        }
    }
}
