"""One use of a framework in a limited container: frameworks.py CASE [NAME].

Prints figures as `KEY VALUE`, `held MIB` while memory is held for the host to look, and last `right` or `wrong: REASON`.
"""

import os
import sys
import time

STEP = 256 << 20


def check(condition, reason):
    if not condition:
        raise SystemExit(print("wrong:", reason))


def hold(mebibytes):
    """Says what is held and gives the host time to look."""
    print("held", mebibytes, flush=True)
    time.sleep(3)


def fill(allocate, error):
    """Allocates steps until `error`; returns what was granted."""
    kept = []
    try:
        while len(kept) < 4096:
            kept.append(allocate(STEP))
    except error:
        return kept
    check(False, "no end of memory")


def framework():
    """PyTorch: equal results, a graph that is captured and replayed, and the allocator's own error."""
    import torch

    torch.manual_seed(1)
    left, right = torch.rand(256, 256), torch.rand(256, 256)
    check(torch.allclose((left.cuda() @ right.cuda()).cpu(), left @ right, rtol=1e-2), "product")

    still, graph = torch.zeros(1024, device="cuda"), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        still.add_(1)
    torch.cuda.current_stream().wait_stream(stream)
    still.zero_()
    with torch.cuda.graph(graph):
        still.add_(1)
    still.zero_()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    check(bool((still == 5).all()), "graph")

    total = torch.cuda.mem_get_info()[1]
    print("total_mib", total >> 20)
    try:
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return
    check(False, "more than the limit was granted")


def torch_compile():
    """Triton by itself, and as torch.compile uses it. Both find libcuda by `ldconfig -p`."""
    import torch

    started = time.time()
    x = torch.rand(1 << 20, device="cuda")
    f = torch.compile(lambda a: (a.sin() * 2 + a.cos()).sum())
    check(torch.allclose(f(x), (x.sin() * 2 + x.cos()).sum(), rtol=1e-3), "torch.compile")
    print("compile_s", round(time.time() - started, 1))
    # A kernel of Triton's has to stand in a file of its own functions.
    import importlib.util
    import tempfile

    text = """
import triton, triton.language as tl
@triton.jit
def add(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(o + i, tl.load(x + i, m) + tl.load(y + i, m), m)
"""
    path = os.path.join(tempfile.mkdtemp(), "kernels.py")
    with open(path, "w") as file:
        file.write(text)
    spec = importlib.util.spec_from_file_location("kernels", path)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    y, o = torch.rand_like(x), torch.empty_like(x)
    kernels.add[(1024,)](x, y, o, x.numel(), B=1024)
    check(torch.equal(o, x + y), "Triton")


def expandable_segments():
    """PyTorch's allocator on virtual memory, until its own error; afterwards all is free again."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    kept = fill(lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"), torch.cuda.OutOfMemoryError)
    held = len(kept) * STEP >> 20
    print("reserved_mib", torch.cuda.memory_reserved() >> 20)
    hold(held)
    kept.clear()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    print("free_after_mib", free >> 20)
    check(held <= total >> 20, "more than the limit was granted")
    check(held + 1024 >= total >> 20, "little was granted")
    check(free >= held << 20, "not all came back")


def last_mebibytes():
    """PyTorch until its own error, in small steps; a training step works afterwards."""
    import torch

    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        loss = model(torch.ones(64, 1024, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    step()
    kept = fill(lambda size: torch.empty(size >> 5, dtype=torch.uint8, device="cuda"), torch.cuda.OutOfMemoryError)
    print("allocated_mib", torch.cuda.memory_allocated() >> 20)
    print("free_mib", torch.cuda.mem_get_info()[0] >> 20)
    hold(len(kept) * (STEP >> 25))
    kept.clear()
    torch.cuda.empty_cache()
    check(step() > 0, "a step after the error")


def train(seconds):
    """Steps of a transformer's training in a second."""
    import torch

    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dtype=torch.bfloat16)
    model = torch.nn.TransformerEncoder(layer, 6).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, 512, 1024, dtype=torch.bfloat16, device="cuda")

    def step():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(10):
        step()
    torch.cuda.synchronize()
    begin, steps = time.time(), 0
    while time.time() - begin < float(seconds):
        for _ in range(10):
            step()
        torch.cuda.synchronize()
        steps += 10
    print("rate", round(steps / (time.time() - begin), 2))


def jax_preallocation():
    """JAX takes 75 % of what it sees."""
    import jax
    import jax.numpy

    x = jax.numpy.ones((512, 512))
    check(float((x @ x).sum()) == 512**3, "product")
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"] >> 20
    hold(limit)
    share = int(os.environ["SHARE_MIB"])
    check(0.70 * share <= limit <= 0.755 * share, f"preallocated {limit} MiB")


def cupy_pools():
    """CuPy's own pool and the driver's, each until CuPy's own error."""
    import cupy

    error = cupy.cuda.memory.OutOfMemoryError
    total = cupy.cuda.Device().mem_info[1] >> 20
    kept = fill(lambda size: cupy.empty(size, dtype=cupy.uint8), error)
    own = len(kept) * STEP >> 20
    print("pool_mib", own)
    hold(own)
    kept.clear()
    cupy.get_default_memory_pool().free_all_blocks()
    free = cupy.cuda.Device().mem_info[0] >> 20
    print("free_after_mib", free)
    pool = cupy.cuda.MemoryAsyncPool()
    cupy.cuda.set_allocator(pool.malloc)
    kept = fill(lambda size: cupy.empty(size, dtype=cupy.uint8), error)
    drivers = len(kept) * STEP >> 20
    print("async_pool_mib", drivers)
    check(max(own, drivers) <= total and min(own, drivers) + 1024 >= total, "the pools end elsewhere than the limit")
    check(free >= own, "not all came back")


def managed_memory():
    """cudaMallocManaged by CuPy, until it is refused."""
    import cupy

    total = cupy.cuda.Device().mem_info[1] >> 20
    cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)

    def touched(size):
        block = cupy.empty(size, dtype=cupy.uint8)
        block[:: 1 << 16] = 1
        cupy.cuda.Device().synchronize()
        return block

    kept = fill(touched, (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError))
    held = len(kept) * STEP >> 20
    hold(held)
    check(held <= total and held + 1024 >= total, f"managed memory ended at {held} MiB")


def add_in_child(tensors, sums):
    """The other process of `ipc`."""
    tensor = tensors.get()
    tensor.add_(1)
    sums.put(float(tensor.sum()))
    tensors.get()


def sum_in_child(sums):
    """The other process of `spawn`."""
    import torch

    sums.put(float(torch.ones(4, device="cuda").sum()))


def spawn():
    """A second process of Python's multiprocessing, in the same share."""
    import torch
    import torch.multiprocessing as multiprocessing

    torch.ones(1, device="cuda")
    context = multiprocessing.get_context("spawn")
    sums = context.Queue()
    child = context.Process(target=sum_in_child, args=(sums,))
    child.start()
    check(sums.get(timeout=40) == 4, "sum in the child")
    child.join(10)


def ipc():
    """A tensor that two processes share."""
    import torch
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    tensors, sums = context.Queue(), context.Queue()
    child = context.Process(target=add_in_child, args=(tensors, sums))
    child.start()
    tensor = torch.zeros(1 << 20, device="cuda")
    tensors.put(tensor)
    check(sums.get(timeout=40) == 1 << 20, "sum in the child")
    check(float(tensor.sum()) == 1 << 20, "sum in the parent")
    tensors.put(None)
    child.join(10)


def nccl():
    """A collective of one."""
    import torch
    import torch.distributed as distributed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    distributed.init_process_group("nccl", rank=0, world_size=1)
    tensor = torch.ones(1 << 20, device="cuda")
    distributed.all_reduce(tensor)
    torch.cuda.synchronize()
    check(float(tensor.sum()) == 1 << 20, "all_reduce")
    distributed.destroy_process_group()


def numba():
    import numpy
    from numba import cuda

    @cuda.jit
    def double(values):
        values[cuda.grid(1)] *= 2

    values = cuda.to_device(numpy.ones(1024))
    double[4, 256](values)
    check(values.copy_to_host().sum() == 2048, "kernel")


def pynvml():
    import pynvml as nvml

    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    check(nvml.nvmlDeviceGetCount() == 1, "number of GPUs")
    first, second = nvml.nvmlDeviceGetMemoryInfo(gpu), nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2)
    check(first.total == second.total == int(os.environ["SHARE_MIB"]) << 20, f"size {first.total} and {second.total}")


def cuda_core():
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    block = device.allocate(64 << 20, stream=stream)
    stream.sync()
    check(block.size == 64 << 20, "size")


def transformers():
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=512, n_head=8)).cuda().half().eval()
    words = torch.randint(0, 50000, (1, 16)).cuda()
    made = model.generate(words, max_new_tokens=32, do_sample=False, pad_token_id=0)
    check(made.shape[1] == 48, f"shape {made.shape}")


def on_host(name):
    """Whether a framework works on this machine at all."""
    if name == "torch":
        import torch

        torch.ones(8, device="cuda").sum().item()
    elif name == "cupy":
        import cupy

        cupy.ones(8).sum().item()
    elif name == "jax":
        import jax

        check(jax.default_backend() == "gpu", "JAX has no GPU here")
    elif name == "pynvml":
        import pynvml as nvml

        nvml.nvmlInit()
    elif name != "triton":
        globals()[name.replace(".", "_")]()


if __name__ == "__main__":
    globals()[sys.argv[1].replace(".", "_")](*sys.argv[2:])
    print("right")
