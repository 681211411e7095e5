//! Words that look like a request and are none: whoever wrote them gets what the node gives without one, and learns why.

use crate::reading::Reading;

const HINTS: [(&str, &str); 2] = [
    // KAI-Scheduler issue 257.
    (
        "nvidia.com/gpu.memory",
        "is a label of nodes and no request: annotate gpu-memory in MiB, or gpushare.io/memory",
    ),
    ("GPU_MEM_PER_DEVICE", "is no request without AMP_VGPU_ENABLE=1"),
];

/// Notes each of them that no dialect took for its own.
pub(crate) fn note(reading: &Reading) {
    for (key, hint) in HINTS {
        for said in reading.annotation(key).into_iter().chain(reading.named(key)) {
            reading.note(format!("{said} {hint}"));
        }
    }
}
