"""numba-cuda: kernels compiled from Python, each compared with what the host computes.

Prints one line `NAME right` for each and `total BYTES` first.
"""

import math

import numpy as np
from numba import cuda, float32, float64
from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_uniform_float32


@cuda.jit
def add_strided(total, a, b):
    first, step = cuda.grid(1), cuda.gridsize(1)
    for i in range(first, total.size, step):
        total[i] = a[i] + b[i]


def vector_addition():
    a, b = np.random.rand(100_000), np.random.rand(100_000)
    on_device = cuda.device_array_like(a)
    add_strided[64, 128](on_device, cuda.to_device(a), cuda.to_device(b))
    assert np.allclose(on_device.copy_to_host(), a + b)


@cuda.jit
def increment(values):
    i = cuda.threadIdx.x + cuda.blockIdx.x * cuda.blockDim.x
    if i < values.size:
        values[i] += 1


def increment_in_place():
    values = np.arange(1000, dtype=np.int32)
    increment[(values.size + 255) // 256, 256](values)
    assert (values == np.arange(1, 1001)).all()


@cuda.jit
def product(a, b, c):
    row, column = cuda.grid(2)
    if row < c.shape[0] and column < c.shape[1]:
        value = 0.0
        for k in range(a.shape[1]):
            value += a[row, k] * b[k, column]
        c[row, column] = value


def matrix_product():
    a, b = np.random.rand(48, 40), np.random.rand(40, 56)
    c = cuda.device_array((48, 56))
    product[(3, 4), (16, 16)](cuda.to_device(a), cuda.to_device(b), c)
    assert np.allclose(c.copy_to_host(), a @ b)


TILE = 8


@cuda.jit
def tiled_product(a, b, c):
    left = cuda.shared.array((TILE, TILE), float32)
    right = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    value = float32(0.0)
    for tile in range((a.shape[1] + TILE - 1) // TILE):
        left[ty, tx] = a[y, tx + tile * TILE] if y < a.shape[0] and tx + tile * TILE < a.shape[1] else 0
        right[ty, tx] = b[ty + tile * TILE, x] if x < b.shape[1] and ty + tile * TILE < b.shape[0] else 0
        cuda.syncthreads()
        for k in range(TILE):
            value += left[ty, k] * right[k, tx]
        cuda.syncthreads()
    if y < c.shape[0] and x < c.shape[1]:
        c[y, x] = value


def matrix_product_in_shared_memory():
    a, b = np.random.rand(20, 28).astype(np.float32), np.random.rand(28, 12).astype(np.float32)
    c = np.zeros((20, 12), dtype=np.float32)
    tiled_product[(2, 3), (TILE, TILE)](a, b, c)
    assert np.allclose(c, a @ b, rtol=1e-4)


@cuda.jit
def tree_sum(values):
    lane, distance = cuda.threadIdx.x, 1
    partial = cuda.shared.array(256, float64)
    partial[lane] = values[lane]
    cuda.syncthreads()
    while distance < cuda.blockDim.x:
        if lane % (2 * distance) == 0:
            partial[lane] += partial[lane + distance]
        distance *= 2
        cuda.syncthreads()
    if lane == 0:
        values[0] = partial[0]


def sum_by_a_tree():
    values = np.random.rand(256)
    want = values.sum()
    on_device = cuda.to_device(values)
    tree_sum[1, 256](on_device)
    assert math.isclose(on_device.copy_to_host()[0], want)


@cuda.reduce
def larger(a, b):
    return a if a > b else b


def reduction():
    values = np.random.rand(2000)
    assert larger(values) == values.max()


@cuda.jit
def histogram(values, bins):
    i = cuda.grid(1)
    if i < values.size:
        cuda.atomic.add(bins, values[i], 1)


def atomic_histogram():
    values = np.random.randint(0, 10, 5000).astype(np.int32)
    bins = np.zeros(10, dtype=np.int32)
    histogram[20, 256](values, bins)
    assert (bins == np.bincount(values, minlength=10)).all()


@cuda.jit(device=True)
def logistic(x):
    return 1.0 / (1.0 + math.exp(-x))


@cuda.jit
def squash(values):
    i = cuda.grid(1)
    if i < values.size:
        values[i] = logistic(values[i])


def device_function():
    values = np.linspace(-4, 4, 300)
    want = 1 / (1 + np.exp(-values))
    squash[3, 128](values)
    assert np.allclose(values, want)


@cuda.jit
def quarter_circle(states, tries, estimates):
    thread = cuda.grid(1)
    inside = 0
    for _ in range(tries):
        x = xoroshiro128p_uniform_float32(states, thread)
        y = xoroshiro128p_uniform_float32(states, thread)
        if x * x + y * y <= 1.0:
            inside += 1
    estimates[thread] = 4.0 * inside / tries


def monte_carlo_pi():
    states = create_xoroshiro128p_states(64 * 4, seed=1)
    estimates = np.zeros(64 * 4, dtype=np.float32)
    quarter_circle[4, 64](states, 500, estimates)
    assert abs(estimates.mean() - math.pi) < 0.02, estimates.mean()


def streams_and_events():
    values = np.arange(1000, dtype=np.int32)
    stream, begin, end = cuda.stream(), cuda.event(), cuda.event()
    begin.record(stream)
    on_device = cuda.to_device(values, stream=stream)
    increment[4, 256, stream](on_device)
    back = on_device.copy_to_host(stream=stream)
    end.record(stream)
    end.synchronize()
    assert (back == values + 1).all() and begin.elapsed_time(end) >= 0


print("total", cuda.current_context().get_memory_info().total)
for example in (
    vector_addition,
    increment_in_place,
    matrix_product,
    matrix_product_in_shared_memory,
    sum_by_a_tree,
    reduction,
    atomic_histogram,
    device_function,
    monte_carlo_pi,
    streams_and_events,
):
    example()
    print(example.__name__, "right", flush=True)
