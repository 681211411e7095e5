"""cuda-bindings in four threads, each on its own default stream: stream-ordered memory is granted, filled, copied and
freed without a wait between the threads; memory of the size given as argument (bytes), the limit, is refused.

Prints `4 threads right`, then `more refused`.
"""

import sys
import threading

import numpy as np
from cuda.bindings import driver

THREADS, ROUNDS, WORDS = 4, 20, 1 << 18


def done(answer):
    """The values of a call, once its error code is found to be zero."""
    error, *values = answer
    if error.value:
        raise RuntimeError(f"{error!r}")
    return values[0] if len(values) == 1 else values


done(driver.cuInit(0))
device = done(driver.cuDeviceGet(0))
context = done(driver.cuDevicePrimaryCtxRetain(device))
own_stream = driver.CUstream(0)
right = []


def work(number):
    done(driver.cuCtxSetCurrent(context))
    for turn in range(ROUNDS):
        value = number << 16 | turn
        memory = done(driver.cuMemAllocAsync(WORDS * 4, own_stream))
        done(driver.cuMemsetD32Async(memory, value, WORDS, own_stream))
        copy = np.zeros(WORDS, dtype=np.uint32)
        done(driver.cuMemcpyDtoHAsync(copy.ctypes.data, memory, copy.nbytes, own_stream))
        done(driver.cuMemFreeAsync(memory, own_stream))
        done(driver.cuStreamSynchronize(own_stream))
        assert (copy == value).all(), (number, turn)
    right.append(number)


threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(right) == list(range(THREADS)), right
print(THREADS, "threads right")

done(driver.cuCtxSetCurrent(context))
error, _ = driver.cuMemAllocAsync(int(sys.argv[1]), own_stream)
assert error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, error
print("more refused")
