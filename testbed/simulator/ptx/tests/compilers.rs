//! Kernels as NVRTC and numba-cuda compile them, with expected results computed here. The sources are
//! fixtures/kernels.cu and kernels.py.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of the test")]

mod support;

use gpushare_simulator_ptx::Module;
use support::{Loaded, Params, launch, launch_with};

fn nvrtc() -> Module {
    Module::parse(include_str!("fixtures/nvrtc.ptx")).unwrap()
}

/// Numbers that are exact in single precision and differ from one another.
fn numbers(count: u16) -> Vec<f32> {
    (0..count).map(|i| f32::from(i % 1000 * 37 % 101) / 4.0 - 9.0).collect()
}

#[test]
fn a_grid_stride_loop_covers_all_elements() {
    let (mut x, mut y, mut out) = (numbers(1000), numbers(1000), vec![0_f32; 1000]);
    y.reverse();
    let params = Params::new().f32(2.5).to(&mut x).to(&mut y).to(&mut out).u64(1000);
    launch(&nvrtc(), "scale_add", [3, 1, 1], [64, 1, 1], params).unwrap();
    let want: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 2.5_f32.mul_add(*x, *y)).collect();
    assert_eq!(out, want);
}

#[test]
fn a_sum_uses_dynamic_shared_memory_and_barriers() {
    let (mut x, mut out) = (numbers(5000), [0_f32]);
    let params = Params::new().to(&mut x).to(&mut out).u32(5000);
    launch_with(&nvrtc(), "sum", ([4, 1, 1], [128, 1, 1], 512), params, &Loaded::default()).unwrap();
    assert_eq!(out[0], x.iter().sum::<f32>()); // quarters of small integers: exact in any order
}

fn product(a: &[f32], b: &[f32], n: usize) -> Vec<f32> {
    let cell = |row: usize, column: usize| (0..n).map(|k| a[row * n + k] * b[k * n + column]).sum();
    (0..n * n).map(|i| cell(i / n, i % n)).collect()
}

#[test]
fn a_matrix_product_in_tiles_is_exact_at_the_edges() {
    let n = 13_u16;
    let (mut a, mut b, mut c) = (numbers(n * n), numbers(n * n), vec![0_f32; usize::from(n * n)]);
    b.reverse();
    let params = Params::new().to(&mut a).to(&mut b).to(&mut c).u32(n.into());
    launch(&nvrtc(), "tile_product", [2, 2, 1], [8, 8, 1], params).unwrap();
    assert_eq!(c, product(&a, &b, n.into()));
}

#[test]
fn warps_shuffle_and_vote() {
    let (mut x, mut out) = ((0..64).collect::<Vec<i32>>(), [0_i32; 4]);
    launch(&nvrtc(), "warp_facts", [1; 3], [64, 1, 1], Params::new().to(&mut x).to(&mut out)).unwrap();
    assert_eq!(out, [496, 21, 496 + 1024, 32]);
}

#[test]
fn a_called_function_and_a_variable_of_the_module_work() {
    fn steps(mut n: u64) -> i32 {
        let mut steps = 0;
        while n > 1 {
            n = if n.is_multiple_of(2) { n / 2 } else { 3 * n + 1 };
            steps += 1;
        }
        steps
    }
    let module = nvrtc();
    let loaded = Loaded::new(&module);
    let (mut starts, mut out) = ((1..=64).map(|i| i * 1_000_003).collect::<Vec<u64>>(), vec![0_i32; 64]);
    let params = Params::new().to(&mut starts).to(&mut out);
    launch_with(&module, "collatz_steps", ([2, 1, 1], [32, 1, 1], 0), params, &loaded).unwrap();
    assert_eq!(out, starts.iter().map(|n| steps(*n)).collect::<Vec<_>>());
    assert_eq!(i64::from(out.iter().sum::<i32>()), loaded.word("total_steps"));
}

#[test]
fn a_structure_constants_and_a_local_array_meet_in_doubles() {
    let module = nvrtc();
    let (mut x, mut out) = ([0.5_f32, -2.0, 3.0], [0_f64; 3]);
    let params = Params::new().u32(4).f32(3.0).u64(1.25_f64.to_bits()).to(&mut x).to(&mut out);
    launch_with(&module, "polynomial", ([1; 3], [3, 1, 1], 0), params, &Loaded::new(&module)).unwrap();
    let at = |x: f64| (1.25 + 3.0 * (0.5 - x + 0.25 * x * x + 2.0 * x * x * x)) / 3.0;
    assert_eq!(out, x.map(|x| at(x.into())));
}

#[test]
fn a_histogram_counts_by_two_levels_of_atomics() {
    let mut bytes: Vec<u8> = (0..3000_u32).map(|i| i.wrapping_mul(i).to_le_bytes()[0]).collect();
    let mut counts = [0_u32; 16];
    let params = Params::new().to(&mut bytes).to(&mut counts).u32(3000);
    launch(&nvrtc(), "histogram", [3, 1, 1], [64, 1, 1], params).unwrap();
    let mut want = [0_u32; 16];
    bytes.iter().for_each(|byte| want[usize::from(byte >> 4)] += 1);
    assert_eq!(counts, want);
}

#[test]
fn mathematical_functions_are_as_good_as_single_precision() {
    let (mut x, mut out) = (numbers(40), vec![0_f32; 40]);
    launch(&nvrtc(), "gauss", [1; 3], [40, 1, 1], Params::new().to(&mut x).to(&mut out)).unwrap();
    for (x, got) in x.iter().zip(out) {
        let v = f64::from(*x);
        let want = (-0.5 * v * v).exp() / std::f64::consts::TAU.sqrt() + v.round_ties_even() + v.floor();
        assert!((f64::from(got) - want).abs() <= 1e-6 * want.abs().max(1.0), "{x}: {got}, not {want}");
    }
}

/// numba passes an array as seven values and its shape and strides.
trait Array {
    fn array<T>(self, memory: &mut [T], shape: &[u64]) -> Self;
}

impl Array for Params {
    fn array<T>(self, memory: &mut [T], shape: &[u64]) -> Self {
        let item = size_of::<T>() as u64;
        let mut params = self.u64(0).u64(0).u64(memory.len() as u64).u64(item).to(memory);
        for length in shape {
            params = params.u64(*length);
        }
        for axis in 1..=shape.len() {
            params = params.u64(shape[axis..].iter().product::<u64>() * item);
        }
        params
    }
}

fn numba(text: &str, grid: [u32; 3], block: [u32; 3], shared: u32, params: Params) {
    let module = Module::parse(text).unwrap();
    let kernel = module.kernels().next().unwrap().to_owned();
    launch_with(&module, &kernel, (grid, block, shared), params, &Loaded::new(&module)).unwrap();
}

#[test]
fn numba_adds_and_increments() {
    let (mut x, mut y, mut out) = (numbers(300), numbers(300), vec![0_f32; 300]);
    y.reverse();
    let params = Params::new().array(&mut out, &[300]).array(&mut x, &[300]).array(&mut y, &[300]);
    numba(include_str!("fixtures/numba_stride_add.ptx"), [2, 1, 1], [64, 1, 1], 0, params);
    assert_eq!(out, x.iter().zip(&y).map(|(x, y)| x + y).collect::<Vec<_>>());
    let mut values = (0..100).collect::<Vec<i64>>();
    let params = Params::new().array(&mut values, &[100]);
    numba(include_str!("fixtures/numba_increment.ptx"), [4, 1, 1], [32, 1, 1], 0, params);
    assert_eq!(values, (1..=100).collect::<Vec<_>>());
}

#[test]
fn numba_multiplies_matrices_with_and_without_shared_memory() {
    let n = 12;
    let (mut a, mut b, mut c) = (numbers(144), numbers(144), vec![0_f32; 144]);
    b.reverse();
    let params = Params::new().array(&mut a, &[n, n]).array(&mut b, &[n, n]).array(&mut c, &[n, n]);
    numba(include_str!("fixtures/numba_tile_product.ptx"), [2, 2, 1], [8, 8, 1], 0, params);
    assert_eq!(c, product(&a, &b, 12));
    let double = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
    let (mut a, mut b, mut d) = (double(&a), double(&b), vec![0_f64; 144]);
    let params = Params::new().array(&mut a, &[n, n]).array(&mut b, &[n, n]).array(&mut d, &[n, n]);
    numba(include_str!("fixtures/numba_product.ptx"), [2, 2, 1], [8, 8, 1], 0, params);
    assert_eq!(d, double(&c));
}

#[test]
fn numba_sums_with_barriers_and_finds_extremes_with_atomics() {
    let mut values = (1..=256).collect::<Vec<i32>>();
    let params = Params::new().array(&mut values, &[256]);
    numba(include_str!("fixtures/numba_block_sum.ptx"), [1; 3], [256, 1, 1], 1024, params);
    assert_eq!(values[0], 256 * 257 / 2);
    let (mut out, mut values) = ([0_f64; 3], (0..128).map(|i| f64::from(i * 29 % 128)).collect::<Vec<_>>());
    let params = Params::new().array(&mut out, &[3]).array(&mut values, &[128]);
    numba(include_str!("fixtures/numba_extremes.ptx"), [2, 1, 1], [64, 1, 1], 0, params);
    assert_eq!(out, [8128.0, 127.0, 0.0]);
}

#[test]
fn numba_draws_random_points() {
    let mut counts = [0_i32; 64];
    let params = Params::new().array(&mut counts, &[64]).u64(200);
    numba(include_str!("fixtures/numba_circle.ptx"), [2, 1, 1], [32, 1, 1], 0, params);
    for (i, count) in (0..).zip(counts) {
        let mut state = 2_654_435_761_u64.wrapping_mul(i).wrapping_add(88_172_645_463_325_252);
        let mut want = 0;
        for _ in 0..200 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let part = |bits: u64| f64::from(u16::try_from(bits & 0xffff).unwrap()) / 65536.0;
            want += i32::from(part(state).hypot(part(state >> 20)) < 1.0);
        }
        assert_eq!(count, want, "thread {i}");
    }
}
