"""Kernels of a few lines, for the tests of the interpreter."""

import numpy as np
import pytest

from pagedkv import nvrtc
from pagedkv.arrays import view
from pagedkv.ptx.counters import Counters
from pagedkv.ptx.faults import Fault
from pagedkv.ptx.machine import Machine
from pagedkv.ptx.pages import SparseBuffer
from pagedkv.ptx.parse import parse_kernel

HEAD = """
__device__ unsigned smem(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
template <int UNUSED>
__global__ void kernel(float* out, const float* in) {  // [64] each
  __shared__ alignas(16) float row[64];
  const int t = threadIdx.x;
"""


def launch(
    code, *arrays, grid=1, threads=64, file="planted.cu", arch="compute_80", counted=False, step_limit=50_000, **options
):
    """Runs ``kernel<0>`` of some source; its parameters are pointers to the arrays, which may be sparse buffers.

    Returns the counters, if wanted.
    """
    kernel = parse_kernel(*nvrtc.compile_ptx(code, file, "kernel<0>", arch))
    views = [
        array.view() if isinstance(array, SparseBuffer) else view(array, f"array {i}") for i, array in enumerate(arrays)
    ]
    params = b"".join(each.pointer.to_bytes(8, "little") for each in views)
    counters = Counters(kernel) if counted else None
    grid = grid if isinstance(grid, tuple) else (grid,)
    Machine(kernel, grid, threads, params, views, counters=counters, step_limit=step_limit, **options).run()
    return counters


def run(body, source=None, **options):
    """Runs HEAD's kernel with this body in one CTA of 64 threads; returns what it wrote to ``out``."""
    out = np.full(64, np.nan, np.float32)
    launch(f"{HEAD}  {body}\n}}\n", out, np.arange(64, dtype=np.float32) if source is None else source, **options)
    return out


def check_planted(body, fault, right, what, head=HEAD, run=run):
    """With ``fault`` for its @, the body is reported at the line of the @; with ``right`` it runs. Returns the latter.

    Statements get a line each, so that the line says which of them is at fault; a missing one (no text) shows at the
    statement after it.
    """
    body = body.replace("; ", ";\n  ")
    if fault == "":
        body = body.replace("@ ", "@")
    with pytest.raises(Fault, match=what) as caught:
        run(body.replace("@", fault))
    assert caught.value.line.file == "planted.cu"
    assert caught.value.line.number == head.count("\n") + 1 + body[: body.index("@")].count("\n")
    return run(body.replace("@", right))
