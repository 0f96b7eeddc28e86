"""Kernels of a few lines, for the tests of the interpreter."""

import numpy as np

from pagedkv import nvrtc
from pagedkv.arrays import view
from pagedkv.ptx.counters import Counters
from pagedkv.ptx.machine import Machine
from pagedkv.ptx.parse import parse_kernel

HEAD = """
__device__ unsigned smem(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
template <int UNUSED>
__global__ void kernel(float* out, const float* in) {  // [64] each
  __shared__ alignas(16) float row[64];
  const int t = threadIdx.x;
"""


def launch(
    code, *arrays, grid=1, threads=64, seed=None, dynamic_shared=0, file="planted.cu", arch="compute_80", counted=False
):
    """Runs ``kernel<0>`` of some source; its parameters are pointers to the arrays. -> counters, if wanted"""
    kernel = parse_kernel(*nvrtc.compile_ptx(code, file, "kernel<0>", arch))
    views = [view(array, f"array {i}") for i, array in enumerate(arrays)]
    params = b"".join(each.pointer.to_bytes(8, "little") for each in views)
    counters = Counters(kernel) if counted else None
    grid = grid if isinstance(grid, tuple) else (grid,)
    Machine(kernel, grid, threads, params, views, seed, dynamic_shared, counters).run()
    return counters


def run(body, source=None):
    """Runs HEAD's kernel with this body in one CTA of 64 threads; returns what it wrote to ``out``."""
    out = np.full(64, np.nan, np.float32)
    launch(f"{HEAD}  {body}\n}}\n", out, np.arange(64, dtype=np.float32) if source is None else source)
    return out
