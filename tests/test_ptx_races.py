"""Races between CTAs in global memory: what a kernel lacks is reported, what orders its accesses is understood."""

import numpy as np
import pytest
from small_kernels import check_planted, launch

from pagedkv.ptx.faults import Fault

pytestmark = pytest.mark.ptx

NUM_CTAS = 4
HEAD = """
#define LOAD_ACQUIRE(v, p) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory")
#define STORE_RELEASE(p, v) asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory")
#define STORE_RELAXED(p, v) asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory")
template <int UNUSED>
__global__ void kernel(float* out, float* part, unsigned* words) {  // [4, 64], [4, 64], [8], the last two zero
  __shared__ bool last;
  __shared__ float row[64];
  const int t = threadIdx.x, cta = blockIdx.x, other = (cta + 1) % 4;
"""


def run(body, seed=0):
    """Runs the body in four CTAs of 64 threads; what it wrote to ``out`` and ``words``."""
    out, part, words = np.zeros((4, 64), np.float32), np.zeros((4, 64), np.float32), np.zeros(8, np.uint32)
    launch(f"{HEAD}  {body}\n}}\n", out, part, words, grid=NUM_CTAS, seed=seed)
    return out, words


# As in test_ptx_faults.py. What stands on one line without spaces after its semicolons is told by that one line.
CASES = {
    "two CTAs store to one byte at once": (
        "out[(cta @) * 64 + t] = cta;",
        "/ 2",
        "",
        "race: two CTAs store to one byte at once",
    ),
    "the same value": ("out[@ * 64 + t] = 1;", "cta / 2", "cta", "race: two CTAs store to one byte at once"),
    "bytes of one word": (
        "reinterpret_cast<char*>(out)[t * 4 + @] = 1;",
        "cta / 2",
        "cta",
        "race: two CTAs store to one byte at once",
    ),
    "store of a part of what another CTA loads": (
        "const float4 x = reinterpret_cast<float4*>(part)[cta]; out[cta * 64 + t] = x.x + x.y + x.z + x.w; "
        "if (cta == 3 && t == 0) reinterpret_cast<short*>(part)[@] = 1;",
        "23",
        "24",
        "race: global store after an unordered load of another CTA",
    ),
    "load of what another CTA stores a part of": (
        "if (t < 4) part[cta * 4 + t] = 1; __syncthreads(); if (cta == 1) "
        "reinterpret_cast<float4*>(out)[t] = reinterpret_cast<float4*>(part)[@];",
        "2",
        "1",
        "race: global load after an unordered store of another CTA",
    ),
    "store after a store": (
        "if (cta == 1) out[t] = 1; __syncthreads(); if (cta == 2) out[t + @] = 2;",
        "0",
        "64",
        "race: global store after an unordered store of another CTA",
    ),
    "load after a store": (
        "part[cta * 64 + t] = 1; out[cta * 64 + t] = part[@ * 64 + t];",
        "other",
        "cta",
        "race: global load after an unordered store of another CTA",
    ),
    "store after a load": (
        "float x = part[cta * 64 + t]; part[@ * 64 + t] = x + 1;",
        "other",
        "cta",
        "race: global store after an unordered load of another CTA",
    ),
    "store after loads of which the last was its own": (
        "float x = part[0]; out[cta * 64 + t] = x; if (cta == 3 && t == 63) part[@] = x + 1;",
        "0",
        "1",
        "race: global store after an unordered load of another CTA",
    ),
    "store after loads of which the earlier was another CTA's": (
        "float x = 0; if (cta == 1) x = part[t]; __syncthreads(); if (cta == 2) x = part[t]; __syncthreads(); "
        "if (cta == 2) part[t + @] = x + 1; out[cta * 64 + t] = x;",
        "0",
        "64",
        "race: global store after an unordered load of another CTA",
    ),
    "reset by a CTA that was not the last": (
        "if (t == 0 && atomicAdd(words, 1u) == @) words[0] = 0;",
        "2",
        "3",
        "race: global store after an unordered atomic or strong store of another CTA",
    ),
    "load after an atomic": (
        "atomicAdd(words + cta, 1u); out[cta * 64 + t] = words[@];",
        "other",
        "cta",
        "race: global load after an unordered atomic or strong store of another CTA",
    ),
    "atomic after a store": (
        "if (t == 0) words[cta] = 0; __syncthreads(); atomicAdd(words + @, 1u);",
        "other",
        "cta",
        "race: global atomic after an unordered store of another CTA",
    ),
    "atomic after a load": (
        "out[cta * 64 + t] = words[cta]; __syncthreads(); atomicAdd(words + @, 1u);",
        "other",
        "cta",
        "race: global atomic after an unordered load of another CTA",
    ),
    "flag that is stored plainly": (
        "if (cta == 0) {__threadfence();@} else while (atomicAdd(words, 0u) == 0);",
        "words[0] = 1;",
        "atomicExch(words, 1u);",
        "race: global store after an unordered atomic or strong store of another CTA",
    ),
    "cp.async of what another CTA stores": (
        "part[cta * 64 + t] = 1; const unsigned to = __cvta_generic_to_shared(row + t); "
        'asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(part + @ * 64 + t) : "memory"); '
        'asm volatile("cp.async.wait_all;" ::: "memory"); out[cta * 64 + t] = row[t];',
        "other",
        "cta",
        "race: global load after an unordered store of another CTA",
    ),
}


# CTA 1 sets the flag that CTA 0 has released to another value.
OVERWRITTEN = """
  unsigned set = 0;
  if (cta == 0) { part[t] = 7; __syncthreads(); if (t == 0) STORE_RELEASE(words, 1); }
  if (cta == 1 && t == 0) { do { LOAD_ACQUIRE(set, words); } while (set != 1); STORE(words, 2); }
  if (cta == 2) { do { LOAD_ACQUIRE(set, words); } while (set != 2); out[t] = part[t]; }
"""


def test_a_flag_that_is_overwritten_releases_no_more():
    out, _ = run(OVERWRITTEN.replace("STORE(", "STORE_RELEASE("))
    assert (out[0] == 7).all()
    with pytest.raises(Fault, match="race: global load after an unordered store of another CTA") as caught:
        run(OVERWRITTEN.replace("STORE(", "STORE_RELAXED("))
    assert caught.value.line.number == HEAD.count("\n") + 5


@pytest.mark.parametrize(("body", "fault", "right", "what"), CASES.values(), ids=CASES.keys())
def test_a_planted_race_is_reported_at_its_line(body, fault, right, what):
    check_planted(body, fault, right, what, HEAD, run)


# The last CTA to arrive adds up what all have written.
LAST_ADDS = [
    "part[cta * 64 + t] = cta + 1;",
    "__threadfence();",
    "__syncthreads();",
    "if (t == 0) last = atomicAdd(words, 1u) == gridDim.x - 1;",
    "__syncthreads();",
    "if (!last) return;",
    "__threadfence();",
    "for (int i = 0; i < 4; i++) out[t] += __ldcg(part + i * 64 + t);",
    "if (t == 63) words[0] = 0;",
]
# Name: the line that is put wrong, and how.
LAST_ADDS_WRONG = {
    "no fence": (1, ""),
    "a fence for the CTA only": (1, "__threadfence_block();"),
    "a fence before the store": (slice(0, 2), ["__threadfence();", LAST_ADDS[0]]),
    "no barrier before the atomic": (2, ""),
    "an atomic for the CTA only": (3, LAST_ADDS[3].replace("atomicAdd", "atomicAdd_block")),
    "not the last": (3, LAST_ADDS[3].replace("- 1", "- 2")),
}


@pytest.mark.parametrize("seed", range(4))
def test_the_last_cta_adds_up(seed):
    out, words = run("\n  ".join(LAST_ADDS), seed)
    np.testing.assert_array_equal(out, np.repeat([[10], [0], [0], [0]], 64, axis=1))
    assert words[0] == 0


@pytest.mark.parametrize(("line", "wrong"), LAST_ADDS_WRONG.values(), ids=LAST_ADDS_WRONG.keys())
def test_the_last_cta_adds_up_what_may_not_be_there(line, wrong):
    lines = LAST_ADDS.copy()
    lines[line] = wrong
    with pytest.raises(Fault, match="race: global load after an unordered store of another CTA") as caught:
        run("\n  ".join(lines))
    assert caught.value.line.number == HEAD.count("\n") + 1 + 7


# Each CTA waits for the flag of the one before it and adds its own to what that has left.
CHAIN = """
  float sum = cta;
  if (cta > 0) { WAIT }
  if (cta > 0) sum += part[cta * 64 + t - 64];
  part[cta * 64 + t] = sum;
  PUBLISH
  out[cta * 64 + t] = sum;
"""
WAIT_ACQUIRE = "unsigned set; do { LOAD_ACQUIRE(set, words + cta - 1); } while (set == 0);"
WAIT_VOLATILE = "while (*(volatile unsigned*)(words + cta - 1) == 0); __threadfence();"
WAIT_ONE_THREAD = "if (t == 0) { while (atomicAdd(words + cta - 1, 0u) == 0); } __syncthreads();"
RIGHT_CHAINS = {
    "release and acquire": (WAIT_ACQUIRE, "__syncthreads(); if (t == 0) STORE_RELEASE(words + cta, 1);"),
    "fence and relaxed": (WAIT_ACQUIRE, "__threadfence(); __syncthreads(); if (t == 0) STORE_RELAXED(words + cta, 1);"),
    "fence and volatile": (
        WAIT_VOLATILE,
        "__threadfence(); __syncthreads(); if (t == 0) *(volatile unsigned*)(words + cta) = 1;",
    ),
    "one thread waits": (
        WAIT_ONE_THREAD,
        "__syncthreads(); if (t == 0) { __threadfence(); atomicExch(words + cta, 1u); }",
    ),
}
LOAD_RACES = (4, "race: global load after an unordered store of another CTA")  # line of CHAIN, report
STORE_RACES = (5, "race: global store after an unordered load of another CTA")
WRONG_CHAINS = {
    "relaxed without a fence": (
        WAIT_ACQUIRE,
        "__syncthreads(); if (t == 0) STORE_RELAXED(words + cta, 1);",
        LOAD_RACES,
    ),
    "release before the others have stored": (WAIT_ACQUIRE, "if (t == 0) STORE_RELEASE(words + cta, 1);", LOAD_RACES),
    "volatile without a fence": (
        WAIT_VOLATILE,
        "__syncthreads(); if (t == 0) *(volatile unsigned*)(words + cta) = 1;",
        LOAD_RACES,
    ),
    "one thread waits, the others do not": (
        WAIT_ONE_THREAD.replace("__syncthreads();", ""),
        RIGHT_CHAINS["one thread waits"][1],
        STORE_RACES,
    ),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("wait", "publish"), RIGHT_CHAINS.values(), ids=RIGHT_CHAINS.keys())
def test_a_chain_of_flags(wait, publish, seed):
    out, _ = run(CHAIN.replace("WAIT", wait).replace("PUBLISH", publish), seed)
    np.testing.assert_array_equal(out, np.repeat([[0], [1], [3], [6]], 64, axis=1))


@pytest.mark.parametrize(("wait", "publish", "report"), WRONG_CHAINS.values(), ids=WRONG_CHAINS.keys())
def test_a_broken_chain_of_flags(wait, publish, report):
    line, what = report
    with pytest.raises(Fault, match=what) as caught:
        run(CHAIN.replace("WAIT", wait).replace("PUBLISH", publish))
    assert caught.value.line.number == HEAD.count("\n") + line


def test_knowledge_passes_through_a_cta_in_between():
    """CTA 2 reads what CTA 0 stored; only CTA 1 has met either."""
    body = """
      if (cta == 0) { part[t] = 7; __syncthreads(); if (t == 0) STORE_RELEASE(words, 1); }
      unsigned set;
      if (cta == 1) { do { LOAD_ACQUIRE(set, words); } while (set == 0); STORE_RELEASE(words + 1 + t / 32, 1); }
      if (cta == 2) { do { LOAD_ACQUIRE(set, words + 1); } while (set == 0); out[t] = part[t]; }
    """
    out, _ = run(body)
    assert (out[0] == 7).all()
