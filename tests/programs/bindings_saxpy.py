"""cuda-bindings: a kernel compiled by NVRTC to PTX, loaded, run on a stream, and compared with numpy.

Prints `total BYTES` first and `result right` last.
"""

import numpy as np
from cuda.bindings import driver, nvrtc

SOURCE = r"""
extern "C" __global__ void saxpy(float factor, const float *x, const float *y, float *sum, size_t count)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        sum[i] = factor * x[i] + y[i];
}
"""
THREADS, BLOCKS = 128, 32


def done(answer):
    """The values of a call, once its error code is found to be zero."""
    error, *values = answer
    if error.value:
        raise RuntimeError(f"{error!r}")
    return values[0] if len(values) == 1 else values


def compiled(source, device):
    attribute = driver.CUdevice_attribute
    major = done(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = done(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    program = done(nvrtc.nvrtcCreateProgram(source.encode(), b"saxpy.cu", 0, [], []))
    options = [b"--fmad=false", f"--gpu-architecture=compute_{major}{minor}".encode()]
    done(nvrtc.nvrtcCompileProgram(program, len(options), options))
    text = b" " * done(nvrtc.nvrtcGetPTXSize(program))
    done(nvrtc.nvrtcGetPTX(program, text))
    return text


done(driver.cuInit(0))
device = done(driver.cuDeviceGet(0))
context = done(driver.cuCtxCreate(0, device))
print("total", done(driver.cuMemGetInfo())[1])

module = done(driver.cuModuleLoadData(np.char.array(compiled(SOURCE, device)).ctypes.data))
kernel = done(driver.cuModuleGetFunction(module, b"saxpy"))

count = THREADS * BLOCKS
factor = np.array([2.5], dtype=np.float32)
length = np.array([count], dtype=np.uint64)
x, y = (np.random.rand(count).astype(np.float32) for _ in range(2))
total = np.zeros(count, dtype=np.float32)

stream = done(driver.cuStreamCreate(0))
buffers = [done(driver.cuMemAlloc(array.nbytes)) for array in (x, y, total)]
for buffer, array in zip(buffers, (x, y)):
    done(driver.cuMemcpyHtoDAsync(buffer, array.ctypes.data, array.nbytes, stream))

addresses = [np.array([int(buffer)], dtype=np.uint64) for buffer in buffers]
arguments = np.array([value.ctypes.data for value in (factor, *addresses, length)], dtype=np.uint64)
done(driver.cuLaunchKernel(kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, stream, arguments.ctypes.data, 0))
done(driver.cuMemcpyDtoHAsync(total.ctypes.data, buffers[2], total.nbytes, stream))
done(driver.cuStreamSynchronize(stream))

assert np.allclose(total, factor * x + y)
for buffer in buffers:
    done(driver.cuMemFree(buffer))
done(driver.cuStreamDestroy(stream))
done(driver.cuModuleUnload(module))
done(driver.cuCtxDestroy(context))
print("result right")
