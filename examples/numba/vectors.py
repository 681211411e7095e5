"""numba-cuda in a container with a share: what it sees, a kernel, and what happens at the limit.

Prints the size of the GPU as the program sees it, `sum right`, and how much could be allocated until the driver said
that its memory is full.
"""

import numpy as np
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

MIB = 1 << 20


@cuda.jit
def add(total, left, right):
    i = cuda.grid(1)
    if i < total.size:
        total[i] = left[i] + right[i]


def sums():
    left, right = np.random.rand(100_000), np.random.rand(100_000)
    total = cuda.device_array_like(left)
    add[(left.size + 255) // 256, 256](total, cuda.to_device(left), cuda.to_device(right))
    return np.allclose(total.copy_to_host(), left + right)


def fill(piece):
    """Allocates pieces until there is no more, and gives all of them back. Returns how many bytes it had."""
    kept = []
    try:
        while True:
            kept.append(cuda.device_array(piece, dtype="u1"))
    except CudaAPIError as error:
        if "CUDA_ERROR_OUT_OF_MEMORY" not in str(error):
            raise
    return len(kept) * piece


free, size = cuda.current_context().get_memory_info()
print(f"GPU of {size // MIB} MiB, {free // MIB} MiB free")
print("sum", "right" if sums() else "wrong")
print(f"allocated {fill(64 * MIB) // MIB} MiB until CUDA_ERROR_OUT_OF_MEMORY")
