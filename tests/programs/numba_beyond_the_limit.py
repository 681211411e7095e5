"""numba-cuda: an allocation within the size given as argument (bytes) is granted, one beyond it is the driver's own error."""

import sys

from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

limit = int(sys.argv[1])
kept = cuda.device_array(limit // 2, dtype="u1")
print("half granted", kept.size)
try:
    cuda.device_array(limit * 3 // 4, dtype="u1")
except CudaAPIError as error:
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(error), error
    print("more refused")
else:
    raise SystemExit("an allocation beyond the limit was granted")
