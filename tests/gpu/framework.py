"""PyTorch in a limited container: equal results, a graph that is captured and replayed, and the allocator's own error.

Prints `right` or `wrong: REASON` last.
"""

import torch

torch.manual_seed(1)
left, right = torch.rand(256, 256), torch.rand(256, 256)
got = (left.cuda() @ right.cuda()).cpu()
if not torch.allclose(got, left @ right, rtol=1e-2):
    raise SystemExit(print("wrong: product"))

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
if not bool((still == 5).all()):
    raise SystemExit(print("wrong: graph"))

total = torch.cuda.mem_get_info()[1]
try:
    torch.empty(total + 1, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError:
    print("right")
else:
    print("wrong: more than the limit was granted")
