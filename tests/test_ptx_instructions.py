"""The interpreter computes what the device computes, instruction by instruction, and refuses what it does not know."""

import numpy as np
import pytest
from small_kernels import launch, run

from pagedkv.ptx.faults import Fault, UnknownInstruction

pytestmark = pytest.mark.ptx


def test_a_right_kernel_computes():
    """Reverses a row through shared memory and adds neighbours by a shuffle."""
    body = "row[t] = in[t]; __syncthreads(); float x = row[63 - t]; out[t] = x + __shfl_xor_sync(0xffffffffu, x, 1);"
    source = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    reversed_row = source[::-1]
    want = reversed_row + reversed_row.reshape(32, 2)[:, ::-1].reshape(64)
    np.testing.assert_array_equal(run(body, source), want)


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
    np.testing.assert_array_equal(run(DIVERGENT, source), want)


def test_an_unknown_instruction_is_named():
    with pytest.raises(UnknownInstruction, match=r"sin: unknown instruction sin\.approx\..* at planted\.cu:7"):
        run("out[t] = __sinf(in[t]);")


def test_an_unknown_modifier_is_named():
    with pytest.raises(UnknownInstruction, match=r"add: unknown modifier \.rz in add\.rz\.ftz\..* at planted\.cu:7"):
        run("out[t] = __fadd_rz(in[t], 1);")


def test_an_unknown_operand_is_named():
    with pytest.raises(UnknownInstruction, match=r"unknown operand 1\.0 at planted\.cu:7"):
        run('asm("mov.f32 %0, 1.0;" : "=f"(out[t]));')


def test_fma_rounds_once():
    """1 + 2**-12 squared is 1 + 2**-11 + 2**-24: a tie in float32 that only the addend decides."""
    addend = np.float32(2.0**-90) * np.where(np.arange(64) % 2, -1, 1).astype(np.float32)
    got = run("float x = 1 + 0x1p-12f; out[t] = fmaf(x, x + 0 * in[t], in[t]);", addend)
    want = np.where(np.arange(64) % 2, 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-23).astype(np.float32)
    np.testing.assert_array_equal(got, want)


def test_cache_policies_change_no_result():
    body = """
      unsigned long long policy; float x;
      asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
      asm volatile("ld.global.nc.L2::cache_hint.f32 %0, [%1], %2;" : "=f"(x) : "l"(in + t), "l"(policy));
      asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" :: "l"(out + t), "f"(x), "l"(policy) : "memory");
    """
    source = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    np.testing.assert_array_equal(run(body, source), source)


ATOMICS = {  # what each thread does to one word that holds 5, and what is left of 64 values by then
    "add": ("atomicAdd(word, v)", lambda old, v: old + v),
    "min": ("atomicMin(word, v)", min),
    "max": ("atomicMax(word, v)", max),
    "exch": ("atomicExch(word, v)", lambda old, v: v),
    "and": ("atomicAnd(word, v)", lambda old, v: old & v),
    "or": ("atomicOr(word, v)", lambda old, v: old | v),
    "xor": ("atomicXor(word, v)", lambda old, v: old ^ v),
    "inc": ("atomicInc(word, 9)", lambda old, v: 0 if old >= 9 else old + 1),
    "dec": ("atomicDec(word, 9)", lambda old, v: 9 if old == 0 or old > 9 else old - 1),
    "cas": ("atomicCAS(word, 5, v)", lambda old, v: v if old == 5 else old),
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("call", "change"), ATOMICS.values(), ids=ATOMICS.keys())
def test_atomics_take_turns(call, change, space):
    """One CTA, one word: thread t sees what the threads before it left."""
    code = f"""template <int N> __global__ void kernel(unsigned* out, const unsigned* in) {{
      __shared__ unsigned shared;
      unsigned* word = {"out + 64" if space == "global" else "&shared"};
      const int t = threadIdx.x;
      const unsigned v = in[t];
      if (t == 0) *word = 5;
      __syncthreads();
      out[t] = {call};
      __syncthreads();
      if (t == 0) out[65] = *word;
    }}"""
    given = np.random.default_rng(3).integers(0, 2**31, 64).astype(np.uint32)
    out = np.full(66, 0xDEADBEEF, np.uint32)
    launch(code, out, given)
    seen = [5]
    for v in given.tolist():
        seen.append(change(seen[-1], v) & 0xFFFFFFFF)
    np.testing.assert_array_equal(out[:64], seen[:64])
    assert out[65] == seen[64]


def test_the_seed_draws_which_cta_comes_last():
    """Every CTA takes a ticket; the one with the highest is another for other seeds."""
    code = """template <int N> __global__ void kernel(unsigned* ticket, unsigned* counter) {
      if (threadIdx.x == 0) ticket[blockIdx.x] = atomicAdd(counter, 1u);
    }"""

    def tickets(seed):
        out, counter = np.full(8, 99, np.uint32), np.zeros(1, np.uint32)
        launch(code, out, counter, grid=8, threads=32, seed=seed)
        assert counter[0] == 8
        return out.tolist()

    assert tickets(None) == list(range(8))
    drawn = [tickets(seed) for seed in range(20)]
    assert all(sorted(each) == list(range(8)) for each in drawn)
    assert len({each.index(7) for each in drawn}) > 3
    assert tickets(7) == drawn[7]


def test_cp_async_groups_arrive_at_their_waits():
    """Three groups into three rows; each row is read as soon as its group was waited for, others still in flight."""
    copy = 'asm volatile("cp.async.{kind}.shared.global [%0], [%1], {size}{zero};" :: "r"(smem({to})), "l"({source}));'
    code = """
      __device__ unsigned smem(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
      template <int N> __global__ void kernel(unsigned char* out, const unsigned char* in) {
        __shared__ alignas(16) unsigned char rows[3][32][16];
        const int t = threadIdx.x;
        auto put = [&](int row, int from) {
          for (int i = 0; i < 16; i++) out[(row * 32 + t) * 16 + i] = rows[row][from][i];
        };
        COPY0 asm volatile("cp.async.commit_group;");
        COPY1 asm volatile("cp.async.commit_group;");
        COPY2 asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 2;" ::: "memory");
        put(0, t);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        put(1, t);
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncwarp();
        put(2, t ^ 5);
      }"""
    for row, (kind, size, zero) in enumerate([("cg", 16, ""), ("ca", 8, ""), ("cg", 16, ", 12")]):
        text = copy.format(kind=kind, size=size, zero=zero, to=f"rows[{row}][t]", source=f"in + ({row} * 32 + t) * 16")
        if size == 8:
            text += copy.format(kind=kind, size=8, zero="", to="rows[1][t] + 8", source="in + (32 + t) * 16 + 8")
        code = code.replace(f"COPY{row}", text)
    given = np.random.default_rng(4).integers(0, 256, (3, 32, 16)).astype(np.uint8)
    out = np.full_like(given, 0xEE)
    launch(code, out, given, threads=32)
    np.testing.assert_array_equal(out[:2], given[:2])
    want = given[2][np.arange(32) ^ 5]
    want[:, 12:] = 0  # which the copy did not read
    np.testing.assert_array_equal(out[2], want)


def test_an_array_inside_another_takes_nothing_from_it():
    code = """template <int N> __global__ void kernel(float* out, const float* in) {
      out[threadIdx.x] = in[threadIdx.x % 8];
    }"""
    out = np.arange(64, dtype=np.float32)
    launch(code, out, out[8:16])
    np.testing.assert_array_equal(out, np.tile(np.arange(8, 16, dtype=np.float32), 8))


def test_dynamic_shared_memory_lies_behind_the_static_one():
    code = """extern __shared__ float dynamic[];
    template <int N> __global__ void kernel(float* out, const float* in) {
      __shared__ float fixed[64];
      const int t = threadIdx.x;
      dynamic[t] = in[t];
      fixed[t] = 2 * in[t];
      __syncthreads();
      out[t] = dynamic[63 - t] - fixed[63 - t];
    }"""
    given, out = np.random.default_rng(5).standard_normal(64).astype(np.float32), np.zeros(64, np.float32)
    launch(code, out, given, dynamic_shared=256)
    np.testing.assert_array_equal(out, -given[::-1])
    with pytest.raises(Fault, match=r"shared store outside the CTA's memory .*thread 63"):
        launch(code, out, given, dynamic_shared=252)


def test_every_thread_has_its_own_local_memory():
    """Inverts a permutation in each thread, with indices that the compiler cannot know."""
    code = """template <int N> __global__ void kernel(int* out, const int* in) {
      const int t = threadIdx.x;
      int own[8];
      for (int i = 0; i < 8; i++) own[in[t * 8 + i]] = i;
      for (int i = 0; i < 8; i++) out[t * 8 + i] = own[i];
    }"""
    order = np.random.default_rng(6).permuted(np.tile(np.arange(8, dtype=np.int32), (64, 1)), axis=1)
    out = np.full_like(order, -1)
    launch(code, out, order)
    np.testing.assert_array_equal(out, np.argsort(order, axis=1))


NUMBERS = [1.5, 2.5, -0.7, 3.2, -2.5, np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 7e8, -3e9, 5e9, 1.0, -1.0]

# Name: what is stored for in[t], the same on NumPy arrays.
ON_FLOATS = {
    "round to even": ("rintf(x)", np.rint),
    "truncate": ("truncf(x)", np.trunc),
    "differs, or not, from 1": ("(x < 1.f || x > 1.f)", lambda x: (x < 1) | (x > 1)),
    "unequal to 1": ("(x != 1.f)", lambda x: x != 1),
    "smaller zero": ("__float_as_int(fminf(x, -0.f)) == 0x80000000", lambda x: (x == 0) | (x > 0) | np.isnan(x)),
    "larger zero": (
        "__float_as_int(fmaxf(-0.f, x)) == 0",
        lambda x: (x == 0) & ~np.signbit(x) | (x == np.float32(1e-40)),
    ),
    "the NaN of a sum": ("__float_as_int(x + 1.f) == 0x7fffffff", np.isnan),
    "toward zero as int": (
        "__float2int_rz(x)",
        lambda x: np.clip(np.nan_to_num(np.trunc(x.astype(np.float64)), posinf=2**31), -(2**31), 2**31 - 1),
    ),
}


@pytest.mark.parametrize(("call", "same"), ON_FLOATS.values(), ids=ON_FLOATS.keys())
def test_floats(call, same):
    source = np.resize(np.array(NUMBERS, np.float32), 64)
    with np.errstate(invalid="ignore"):
        want = same(source).astype(np.float32)
    np.testing.assert_array_equal(run(f"const float x = in[t]; out[t] = {call};", source), want)


# Name: type, statements that may set z, what is stored, the same on Python's integers.
ON_INTEGERS = {
    "divided by 7": ("long long", "", "x / 7", lambda x, y: abs(x) // 7 * (1 if x > 0 else -1)),
    "high product, signed": ("long long", "", "__mul64hi(x, y)", lambda x, y: x * y >> 64),
    "high product, unsigned": ("unsigned long long", "", "__umul64hi(x, y)", lambda x, y: x * y >> 64),
    "high product, 32 bits": ("int", "", "__mulhi(x, y)", lambda x, y: x * y >> 32),
    "high product, 16 bits": (
        "short",
        'asm("mul.hi.s16 %0, %1, %2;" : "=h"(z) : "h"(x), "h"(y));',
        "z",
        lambda x, y: x * y >> 16,
    ),
    "two predicates": (
        "int",
        """asm("{ .reg .pred p, q; setp.lt.s32 p|q, %1, %2; selp.s32 %0, 1, 0, p; @q add.s32 %0, %0, 2; }"
            : "=r"(z) : "r"(x), "r"(y));""",
        "z",
        lambda x, y: 1 if x < y else 2,
    ),
    "a label in each of two scopes": (
        "int",
        r"""asm("{ .reg .pred p;\n setp.lt.s32 p, %1, 0;\n mov.s32 %0, 3;\n @p bra DONE;\n mov.s32 %0, 4;\n DONE: }"
            : "=r"(z) : "r"(x));
        asm("{ .reg .pred p;\n setp.lt.s32 p, %1, 0;\n @p bra DONE;\n add.s32 %0, %0, 5;\n DONE: xor.b32 %0, %0, 1; }"
            : "+r"(z) : "r"(y));""",
        "z",
        lambda x, y: ((3 if x < 0 else 4) + (0 if y < 0 else 5)) ^ 1,
    ),
}
C_TYPES = {"long long": np.int64, "unsigned long long": np.uint64, "int": np.int32, "short": np.int16}


@pytest.mark.parametrize(("kind", "statements", "result", "same"), ON_INTEGERS.values(), ids=ON_INTEGERS.keys())
def test_integers(kind, statements, result, same):
    code = f"""template <int N> __global__ void kernel({kind}* out, const {kind}* in) {{
      {kind} x = in[threadIdx.x], y = in[63 - threadIdx.x], z = 0;
      {statements}
      out[threadIdx.x] = {result};
    }}"""
    limits = np.iinfo(C_TYPES[kind])
    source = np.random.default_rng(7).integers(limits.min, limits.max, 64, C_TYPES[kind])
    source[:8] = [0, 1, 2, 5, limits.max, limits.min, 7, limits.max - 1]
    out = np.zeros_like(source)
    launch(code, out, source)
    assert out.tolist() == [same(x, y) for x, y in zip(source.tolist(), source[::-1].tolist(), strict=True)]


@pytest.mark.parametrize(
    ("call", "lane"),
    [
        ("__shfl_down_sync(0xffffffffu, x, 33)", lambda t: t + 1 if t < 31 else t),
        ("__shfl_up_sync(0xffffffffu, x, 34)", lambda t: t - 2 if t >= 2 else t),
        ("__shfl_xor_sync(0xffffffffu, x, 35)", lambda t: t ^ 3),
        ("__shfl_sync(0xffffffffu, x, t + 5, 8)", lambda t: t // 8 * 8 + (t + 5) % 8),
        ("__shfl_down_sync(0xffffffffu, x, 3, 8)", lambda t: t + 3 if t % 8 < 5 else t),
        ("__shfl_up_sync(0xffffffffu, x, 3, 16)", lambda t: t - 3 if t % 16 >= 3 else t),
    ],
)
def test_shuffles(call, lane):
    source = np.random.default_rng(8).standard_normal(64).astype(np.float32)
    want = source[[t // 32 * 32 + lane(t % 32) for t in range(64)]]
    np.testing.assert_array_equal(run(f"const float x = in[t]; out[t] = {call};", source), want)


def test_a_shuffle_says_whether_there_was_a_lane():
    body = """
      unsigned there; int got;
      asm("{ .reg .pred p; shfl.sync.down.b32 %0|p, %2, 4, 31, -1; selp.u32 %1, 1, 0, p; }"
          : "=r"(got), "=r"(there) : "r"(t));
      out[t] = there;
    """
    np.testing.assert_array_equal(run(body), np.tile(np.arange(32) < 28, 2))


RIGHT = {
    "a word that all read, then one writes": """
      if (t == 0) row[0] = 1; __syncthreads(); out[t] = row[0]; __syncthreads();
      if (t == 0) row[0] += 1; __syncthreads(); out[t] += row[0];
    """,
    "a word that a warp reads, then one of its lanes writes": """
      if (t % 32 == 0) row[t] = 1; __syncwarp(); out[t] = row[t / 32 * 32]; __syncwarp();
      if (t % 32 == 0) row[t] += 1; __syncwarp(); out[t] += row[t / 32 * 32];
    """,
    "atomics, a barrier, an atomic and a read by one thread": """
      if (t == 0) row[0] = 0; __syncthreads(); atomicAdd(row, 1.f); __syncthreads();
      if (t == 0) row[1] = atomicAdd(row, 1.f) - 62; __syncthreads(); out[t] = row[1] + 1;
    """,
    "a branch that the compiler puts behind the end": """
      float x = in[t];
      const int n = x;
      if (__builtin_expect(n == 3, 0)) { for (int i = 0; i < n; i++) x += in[i + 1]; if (x == 77) return; }
      const float all = __shfl_sync(0xffffffffu, x, 3);
      out[t] = t < 32 ? all - 6 : 3;
    """,
}


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT.keys())
def test_right_kernels_give_no_report(body):
    np.testing.assert_array_equal(run(body), np.full(64, 3, np.float32))


def test_grid_and_cta_of_three_extents():
    code = """template <int UNUSED>
__global__ void kernel(int* out) {
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int* row = out + (cta * 64 + thread) * 3;
  row[0] = threadIdx.x + 100 * threadIdx.y + 10000 * threadIdx.z;
  row[1] = blockIdx.x + 100 * blockIdx.y + 10000 * blockIdx.z;
  row[2] = blockDim.x + 100 * blockDim.y + 10000 * blockDim.z;
}
"""
    out = np.zeros((4, 3, 2, 64, 3), np.int32)
    launch(code, out, grid=(2, 3, 4), threads=(8, 4, 2))
    z, y, x = np.meshgrid(np.arange(2), np.arange(4), np.arange(8), indexing="ij")
    np.testing.assert_array_equal(out[..., 0], np.broadcast_to((x + 100 * y + 10000 * z).ravel(), (4, 3, 2, 64)))
    z, y, x = np.meshgrid(np.arange(4), np.arange(3), np.arange(2), indexing="ij")
    np.testing.assert_array_equal(out[..., 5, 1], x + 100 * y + 10000 * z)
    assert (out[..., 2] == 8 + 400 + 20000).all()
