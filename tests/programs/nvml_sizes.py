"""What NVML tells a program about its GPUs: one line each, `NAME TOTAL USED PROCESSES`, by nvidia-ml-py."""

import pynvml

pynvml.nvmlInit()
try:
    print("driver", pynvml.nvmlSystemGetDriverVersion())
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        newer = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
        assert newer.total == memory.total, (newer.total, memory.total)
        assert memory.free + memory.used == memory.total, memory
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        print("gpu", memory.total, memory.used, len(processes), pynvml.nvmlDeviceGetName(gpu))
finally:
    pynvml.nvmlShutdown()
