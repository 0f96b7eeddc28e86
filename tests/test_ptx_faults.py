"""The interpreter finds what a kernel does wrong, at the line that does it, and lets a right kernel pass.

Each case is a kernel with one planted fault, in the line marked FAULT, and the same kernel with that line put right.
"""

import numpy as np
import pytest

from pagedkv import nvrtc
from pagedkv.arrays import view
from pagedkv.ptx.faults import Fault, UnknownInstruction
from pagedkv.ptx.machine import Machine
from pagedkv.ptx.parse import parse_kernel

pytestmark = pytest.mark.ptx

HEAD = """
template <int UNUSED>
__global__ void kernel(float* out, const float* in) {  // [64] each
  __shared__ alignas(16) float row[64];
  const int t = threadIdx.x;
"""

# name: body with @ where the fault or the right text goes, the fault, the right text, what is reported
CASES = {
    "global load outside": ("out[t] = in[@];", "t + 1", "t", "global load outside every array"),
    "global store outside": ("out[@] = in[t];", "t - 1", "t", "global store outside every array"),
    "global misaligned": (
        "reinterpret_cast<float2*>(out)[t / 2] = *reinterpret_cast<const float2*>(in + @);",
        "(t / 2 * 2 + 61) % 62",
        "t / 2 * 2",
        "misaligned 8-byte global load",
    ),
    "shared outside": ("row[@] = in[t]; __syncthreads(); out[t] = row[t];", "t * 64", "t", "shared store outside"),
    "shared misaligned": (
        "row[t] = in[t]; __syncthreads(); float2 pair = *reinterpret_cast<float2*>(row + @); out[t] = pair.x + pair.y;",
        "t / 2 * 2 % 4 + 1",
        "t / 2 * 2",
        "misaligned 8-byte shared load",
    ),
    "never written": (
        "if (t != 5) row[t] = in[t]; __syncthreads(); out[t] = t == 5 ? 0 : row[@];",
        "5",
        "t",
        "read of shared memory never written",
    ),
    "read before __syncthreads": (
        "row[t] = in[t]; @ out[t] = row[63 - t];",
        "",
        "__syncthreads();",
        "race: shared read after an unordered write",
    ),
    "read before __syncwarp": (
        "row[t] = in[t]; @ out[t] = row[t ^ 1];",
        "",
        "__syncwarp();",
        "race: shared read after an unordered write",
    ),
    "write after an unordered read": (
        "row[t] = in[t]; __syncthreads(); float x = row[63 - t]; @ row[t] = x; out[t] = x;",
        "",
        "__syncthreads();",
        "race: shared write after an unordered read",
    ),
    "two writers": (
        "row[@] = in[t]; __syncthreads(); out[t] = row[t / 2 * 2];",
        "t / 2 * 2",
        "t",
        "race: two threads write one byte",
    ),
    "writers of two warps": (
        "if (t == 0) row[0] = in[t]; if (t == 32) row[@] = in[t]; __syncthreads(); out[t] = row[t / 32];",
        "0",
        "1",
        "race: shared write after an unordered write",
    ),
    "part of a warp shuffles": (
        "float x = in[t]; if (@) x += __shfl_xor_sync(0xffffffffu, x, 1); out[t] = x;",
        "t % 32 < 16",
        "t < 32",
        "warp instruction that only part of a warp reaches",
    ),
    "part of a CTA at a barrier": (
        "if (@) __syncthreads(); out[t] = in[t];",
        "t < 32",
        "t < 64",
        "barrier that not every thread of the CTA reaches",
    ),
}


def run(body, out, source=None):
    """Runs a kernel of two CTAs of 64 threads, both of which do the same; returns what it wrote."""
    code = f"{HEAD}  {body}\n}}\n"
    kernel = parse_kernel(*nvrtc.compile_ptx(code, "planted.cu", "kernel<0>", "compute_80"))
    arrays = [view(out, "out"), view(source if source is not None else np.arange(64, dtype=np.float32), "in")]
    params = b"".join(array.pointer.to_bytes(8, "little") for array in arrays)
    Machine(kernel, (1, 1), 64, params, arrays).run()
    return out


def fault_line(body):
    return HEAD.count("\n") + 1 + body[: body.index("@")].count("\n")


@pytest.mark.parametrize(("body", "fault", "right", "what"), CASES.values(), ids=CASES.keys())
def test_a_planted_fault_is_reported_at_its_line(body, fault, right, what):
    # Statements get a line each, so that the line says which of them is at fault.
    body = body.replace("; ", ";\n  ")
    if fault == "":  # a missing barrier shows at the access after it
        body = body.replace("@ ", "@")
    with pytest.raises(Fault, match=what) as caught:
        run(body.replace("@", fault), np.zeros(64, np.float32))
    assert caught.value.line.file == "planted.cu"
    assert caught.value.line.number == fault_line(body)
    assert caught.value.cta == 0
    run(body.replace("@", right), np.zeros(64, np.float32))


def test_a_right_kernel_computes():
    """Reverses a row through shared memory and adds neighbours by a shuffle."""
    body = "row[t] = in[t]; __syncthreads(); float x = row[63 - t]; out[t] = x + __shfl_xor_sync(0xffffffffu, x, 1);"
    source = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    reversed_row = source[::-1]
    want = reversed_row + reversed_row.reshape(32, 2)[:, ::-1].reshape(64)
    np.testing.assert_array_equal(run(body, np.zeros(64, np.float32), source), want)


DIVERGENT = """
  float x = 0;
  for (int i = 0; i <= t % 7; i++) { if (i % 2) continue; x += in[i]; }
  switch (t % 3) { case 0: x *= 2; break; case 1: x -= 1; break; default: x = -x; }
  out[t] = x + __shfl_sync(0xffffffffu, x, 31 - t % 32);
"""


def test_threads_that_went_apart_meet_again():
    source = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    x = np.array([sum((source[i] for i in range(0, t % 7 + 1, 2)), np.float32(0)) for t in range(64)], np.float32)
    x = np.choose(np.arange(64) % 3, [x * 2, x - 1, -x])
    want = x + x.reshape(2, 32)[:, ::-1].reshape(64)
    np.testing.assert_array_equal(run(DIVERGENT, np.zeros(64, np.float32), source), want)


def test_inlined_code_is_told_by_its_own_line():
    code = '#line 7 "helpers.cuh"\n__device__ float pick(const float* in, int i) { return in[i + 64]; }\n'
    code += '#line 1 "user.cu"\ntemplate <int N> __global__ void kernel(float* out, const float* in) {\n'
    code += "  out[threadIdx.x] = pick(in, threadIdx.x);\n}\n"
    kernel = parse_kernel(*nvrtc.compile_ptx(code, "user.cu", "kernel<0>", "compute_80"))
    arrays = [view(np.zeros(64, np.float32), name) for name in ("out", "in")]
    params = b"".join(array.pointer.to_bytes(8, "little") for array in arrays)
    with pytest.raises(Fault, match=r"global load outside every array at helpers\.cuh:7, CTA 0, thread 0: ld\.global"):
        Machine(kernel, (1, 1), 64, params, arrays).run()


def test_an_unknown_instruction_is_named():
    with pytest.raises(UnknownInstruction, match=r"brev\.b32 .* at planted\.cu:6"):
        run("out[t] = __brev(t) + in[t];", np.zeros(64, np.float32))
