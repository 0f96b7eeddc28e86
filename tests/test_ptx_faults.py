"""The interpreter finds what a kernel does wrong, at the line that does it, and lets a right kernel pass.

Each case is a kernel with one planted fault, in the line marked FAULT, and the same kernel with that line put right.
"""

import numpy as np
import pytest
from small_kernels import check_planted, launch

from pagedkv.ptx.faults import Fault

pytestmark = pytest.mark.ptx

COPY = """asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(smem(row + t)), "l"(in + t) : "memory");"""
COMMIT = 'asm volatile("cp.async.commit_group;" ::: "memory");'
WAIT = 'asm volatile("cp.async.wait_all;" ::: "memory");'
WAIT_BUT_ONE = 'asm volatile("cp.async.wait_group 1;" ::: "memory");'
LOCAL = "float own[8]; for (int i = 0; i < 4; i++) own[(i + int(in[t])) % 4] = i;"

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
    "write after reads of which the last was its own": (
        "row[t] = in[t]; __syncthreads(); float x = row[0]; if (t == @) row[0] = x + 1; out[t] = x;",
        "63",
        "64",
        "race: shared write after an unordered read",
    ),
    "write after reads of its warp of which the last was its own": (
        "row[t] = in[t]; __syncthreads(); float x = row[t & 32]; if (t == @) row[32] = x + 1; out[t] = x;",
        "63",
        "64",
        "race: shared write after an unordered read",
    ),
    "read after an unordered atomic": (
        "row[t] = in[t]; __syncthreads(); atomicAdd(row + t / 2, 1.0f); @ out[t] = row[63 - t];",
        "",
        "__syncthreads();",
        "race: shared read after an unordered atomic",
    ),
    "read after its own atomic that another's follows": (
        "row[t] = in[t]; __syncthreads(); atomicAdd(row + t / 2, 1.0f); if (t % 2 == @) out[t] = row[t / 2];",
        "0",
        "1",
        "race: shared read after an unordered atomic",
    ),
    "write after an atomic that its own does not follow": (
        "row[t] = in[t]; __syncthreads(); atomicAdd(row + t / 32 * 32, 1.0f); if (t == 31) row[@] = 7;",
        "32",
        "0",
        "race: shared write after an unordered atomic",
    ),
    "write of a part of what another reads": (
        "if (t < 16) reinterpret_cast<float4*>(row)[t] = float4{1, 2, 3, 4}; __syncthreads(); "
        "float4 x = reinterpret_cast<float4*>(row)[t / 32]; "
        "if (t == 32) row[@] = 1; out[t] = x.x + x.y + x.z + x.w;",
        "3",
        "8",
        "race: shared write after an unordered read",
    ),
    "atomic after an unordered write": (
        "row[t] = in[t]; @ atomicAdd(row + t / 2, 1.0f); __syncthreads(); out[t] = row[t];",
        "",
        "__syncthreads();",
        "race: shared atomic after an unordered write",
    ),
    "atomic on memory never written": (
        "if (t) row[t] = in[t]; __syncthreads(); atomicAdd(row + @, 1.0f); __syncthreads(); out[t] = t ? row[t] : 0;",
        "t",
        "(t ? t : 1)",
        "read of shared memory never written",
    ),
    "global atomic outside": ("atomicAdd(out + @, in[t]);", "t * 2", "t", "global atomic outside every array"),
    "read of a cp.async before its wait": (
        f"{COPY} @ out[t] = row[t];",
        "",
        WAIT,
        "read of a cp.async before its wait",
    ),
    "read of a cp.async whose group is still in flight": (
        f"{COPY} {COMMIT} {WAIT_BUT_ONE} @ out[t] = row[t];",
        "",
        WAIT,
        "read of a cp.async before its wait",
    ),
    "read of another's cp.async before __syncthreads": (
        f"{COPY} {WAIT} @ out[t] = row[63 - t];",
        "",
        "__syncthreads();",
        "race: shared read after an unordered write",
    ),
    "write into a cp.async": (
        f"{COPY} @ row[t] = 0; {WAIT} out[t] = row[t];",
        "",
        WAIT,
        "write into a cp.async before its wait",
    ),
    "cp.async over what is still read": (
        f"row[t] = in[t]; __syncthreads(); out[t] = row[63 - t]; @ {COPY}",
        "",
        "__syncthreads();",
        "race: shared write after an unordered read",
    ),
    "cp.async from outside": (
        f"{COPY.replace('(in + t)', '(in + @)')} {WAIT} out[t] = row[t];",
        "t + 1",
        "t",
        "global load outside every array",
    ),
    "local outside": (
        f"{LOCAL} own[int(in[t]) % 8 + @] = 1; out[t] = own[int(in[t]) % 3];",
        "8 * (t / 63)",
        "0",
        "local store outside the thread's memory",
    ),
    "local never written": (
        f"{LOCAL} out[t] = own[int(in[t]) % 4 @];",
        "+ t / 63",
        "",
        "read of local memory never written",
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
    "threads of a warp at two barriers": (
        'if ((t & @) == 0) asm volatile("bar.sync 0;"); else asm volatile("bar.sync 0;" ::: "memory"); out[t] = in[t];',
        "1",
        "32",
        "barrier at which the threads of a warp are apart",
    ),
    "part of a CTA at a barrier": (
        "if (@) __syncthreads(); out[t] = in[t];",
        "t < 32",
        "t < 64",
        "barrier that not every thread of the CTA reaches",
    ),
}


@pytest.mark.parametrize(("body", "fault", "right", "what"), CASES.values(), ids=CASES.keys())
def test_a_planted_fault_is_reported_at_its_line(body, fault, right, what):
    check_planted(body, fault, right, what)


def test_inlined_code_is_told_by_its_own_line():
    code = '#line 7 "helpers.cuh"\n__device__ float pick(const float* in, int i) { return in[i + 64]; }\n'
    code += '#line 1 "user.cu"\ntemplate <int N> __global__ void kernel(float* out, const float* in) {\n'
    code += "  out[threadIdx.x] = pick(in, threadIdx.x);\n}\n"
    with pytest.raises(Fault, match=r"global load outside every array at helpers\.cuh:7, CTA 0, thread 0: ld\.global"):
        launch(code, np.zeros(64, np.float32), np.zeros(64, np.float32), file="user.cu")
