"""The interpreter's matrix instructions: where numbers lie in registers, what is added how, and what is refused."""

import ml_dtypes
import numpy as np
import pytest
from small_kernels import launch

from pagedkv.ptx.dot import AMPERE, HOPPER, Adder, dot, dot_of_bytes
from pagedkv.ptx.faults import Fault, UnknownInstruction

pytestmark = pytest.mark.ptx

TYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
LANES = np.arange(32)
GROUP, MEMBER = LANES // 4, LANES % 4  # of the lanes, as the PTX ISA counts them


# ---- layouts --------------------------------------------------------------------------------------------------------

LOAD = """
  __device__ unsigned smem(const void* p) {{ return static_cast<unsigned>(__cvta_generic_to_shared(p)); }}
  template <int N> __global__ void kernel(unsigned* out, const uint4* in) {{  // [4, 64], [64]
    __shared__ uint4 rows[64];
    const int t = threadIdx.x;
    rows[t] = in[t];
    __syncthreads();
    unsigned r[4] = {{7, 7, 7, 7}};
    {statement}
    for (int i = 0; i < 4; i++) out[i * 64 + t] = r[i];
  }}"""


def load_matrix(count, trans="", row="16 * t", guard=""):
    registers = ", ".join(f"%{i}" for i in range(count))
    results = ", ".join(f'"=r"(r[{i}])' for i in range(count))
    opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
    statement = f'{guard} asm volatile("{opcode} {{{registers}}}, [%{count}];" : {results} : "r"(smem(rows) + {row}));'
    return LOAD.format(statement=statement)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_gives_each_lane_its_two_numbers(count, trans):
    """Row i of a warp is where lane i says, here backwards; its numbers are 100 * i and up. Two warps, 32 rows each."""
    numbers = (100 * np.arange(64)[:, None] + np.arange(8)).astype(np.uint16)
    out = np.zeros((4, 64), np.uint32)
    launch(load_matrix(count, trans, "16 * (t ^ 31)"), out, numbers)
    got = out.view(np.uint16).reshape(4, 2, 32, 2)
    for warp in range(2):
        for register in range(count):
            matrix = numbers[warp * 32 + (8 * register + np.arange(8) ^ 31)]
            matrix = matrix.T if trans else matrix
            want = np.stack([matrix[GROUP, 2 * MEMBER], matrix[GROUP, 2 * MEMBER + 1]], axis=1)
            np.testing.assert_array_equal(got[register, warp], want)
    assert (out[count:] == 7).all()


@pytest.mark.parametrize(("count", "row", "wavefronts"), [(4, "16 * t", 4), (2, "16 * t", 2), (4, "128 * (t % 8)", 32)])
def test_each_matrix_of_ldmatrix_is_a_wavefront_if_its_rows_lie_in_other_banks(count, row, wavefronts):
    arrays = np.zeros((4, 64), np.uint32), np.zeros((64, 4), np.uint32)
    counters = launch(load_matrix(count, "", row), *arrays, counted=True)
    loads = counters.total().traffic["shared load"]
    assert (loads.requests, loads.units) == (2, 2 * wavefronts)  # of two warps


def test_movmatrix_transposes():
    code = """template <int N> __global__ void kernel(unsigned* out, const unsigned* in) {
      const unsigned x = in[threadIdx.x];
      asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out[threadIdx.x]) : "r"(x));
    }"""
    matrices = np.arange(2 * 64, dtype=np.uint16).reshape(2, 8, 8)
    out = np.zeros_like(matrices)
    launch(code, out, matrices)
    np.testing.assert_array_equal(out, matrices.transpose(0, 2, 1))


def words(registers):
    """Numbers ``[warps, 32]``, in a list for each register, as words ``[warps, registers, 32]``."""
    numbers = np.moveaxis(np.array(registers), (0, 1), (1, 3))
    return np.ascontiguousarray(numbers).view(np.uint32)[..., 0]


def fragments_a(matrix):
    """``[warps, 16, k]`` numbers as ``[warps, registers, 32]`` words, after the figures of the PTX ISA."""
    width = 4 // matrix.itemsize  # numbers of a register
    columns = range(0, matrix.shape[2], 4 * width)
    return words(
        [
            [matrix[:, row + GROUP, column + width * MEMBER + i] for i in range(width)]
            for column in columns
            for row in (0, 8)
        ]
    )


def fragments_b(matrix):
    """``[warps, k, 8]`` numbers."""
    width = 4 // matrix.itemsize
    rows = range(0, matrix.shape[1], 4 * width)
    return words([[matrix[:, row + width * MEMBER + i, GROUP] for i in range(width)] for row in rows])


def fragments_c(matrix):
    """``[warps, 16, 8]`` float32."""
    registers = [matrix[:, row + GROUP, 2 * MEMBER + i] for row in (0, 8) for i in (0, 1)]
    return np.ascontiguousarray(np.stack(registers, axis=1))


def multiply_code(shape, a, b, num_a, num_b):
    """The kernel is given A's registers, B's and C's, ``[warps, registers, 32]`` each, and gives D's."""
    names = [f"%{i}" for i in range(8 + num_a + num_b)]
    groups = (names[:4], names[4 : 4 + num_a], names[4 + num_a : 4 + num_a + num_b], names[-4:])
    operands = ", ".join("{" + ", ".join(group) + "}" for group in groups)
    sources = [f'"r"(a[(warp * {num_a} + {i}) * 32 + lane])' for i in range(num_a)]
    sources += [f'"r"(b[(warp * {num_b} + {i}) * 32 + lane])' for i in range(num_b)]
    sources += [f'"f"(c[(warp * 4 + {i}) * 32 + lane])' for i in range(4)]
    return f"""
      template <int N>
      __global__ void kernel(float* d, const unsigned* a, const unsigned* b, const float* c) {{
        const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
        float r[4];
        asm("mma.sync.aligned.{shape}.row.col.f32.{a}.{b}.f32 {operands};"
            : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3]) : {", ".join(sources)});
        for (int i = 0; i < 4; i++) d[(warp * 4 + i) * 32 + lane] = r[i];
      }}"""


def multiplied(a_type, b_type, a, b, c):
    """D's registers for matrices of several warps, two to a CTA."""
    registers = fragments_a(a.astype(TYPES[a_type])), fragments_b(b.astype(TYPES[b_type]))
    code = multiply_code(f"m16n8k{a.shape[2]}", a_type, b_type, *(part.shape[1] for part in registers))
    c = fragments_c(c.astype(np.float32))
    d = np.full_like(c, np.nan)
    launch(code, d, *registers, c, grid=len(a) // 2, arch="compute_89")
    return d


MULTIPLICATIONS = [
    ("f16", "f16", 8),
    ("f16", "f16", 16),
    ("bf16", "bf16", 8),
    ("bf16", "bf16", 16),
    ("e4m3", "e4m3", 32),
    ("e4m3", "e5m2", 32),
    ("e5m2", "e4m3", 32),
    ("e5m2", "e5m2", 32),
]


@pytest.mark.parametrize(("a_type", "b_type", "k"), MULTIPLICATIONS)
def test_mma_of_small_integers_is_the_matrix_product(a_type, b_type, k, rng):
    """Sums that no addition rounds: every number must be in its place."""
    a, b = rng.integers(-3, 4, (4, 16, k)), rng.integers(-3, 4, (4, k, 8))
    c = rng.integers(-1000, 1000, (4, 16, 8))
    np.testing.assert_array_equal(multiplied(a_type, b_type, a, b, c), fragments_c((a @ b + c).astype(np.float32)))


@pytest.mark.parametrize(("a_type", "b_type", "k"), MULTIPLICATIONS)
def test_mma_adds_as_dot_does(a_type, b_type, k, rng):
    """Rounded sums, which show the order in which products are added."""
    a = (rng.standard_normal((2, 16, k)) * 2.0 ** rng.integers(-8, 6, k)).astype(TYPES[a_type])
    b = rng.standard_normal((2, k, 8)).astype(TYPES[b_type])
    c = rng.standard_normal((2, 16, 8)).astype(np.float32)
    add = dot_of_bytes if k == 32 else dot
    want = fragments_c(add(a, b.swapaxes(1, 2), c, HOPPER))
    np.testing.assert_array_equal(multiplied(a_type, b_type, a, b, c), want)
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_allclose(want, fragments_c(exact), rtol=0, atol=2.0**-13)  # sums below 1024, cut twice to 24 bits
    assert (want != fragments_c(exact.astype(np.float32))).any()


# ---- sums -----------------------------------------------------------------------------------------------------------


def dot_of(products, c, adder):
    """One dot product of float16 factors; ``products`` are pairs of them."""
    a, b = (np.array([factors], np.float16) for factors in zip(*products, strict=True))
    (result,) = dot(a, b, np.array([[c]], np.float32), adder).ravel()
    return float(result)


ONE, NONE = (1, 1), (0, 1)
SUMS = {
    # name: products, accumulator, how they are added, the sum
    "bits below the last are lost": ([ONE, (2**-6, 2**-6)], 0, Adder(11, 16), 1),
    "the last bit is kept": ([ONE, (2**-6, 2**-6)], 0, Adder(12, 16), 1 + 2**-12),
    "each is cut, not their sum": ([ONE, (2**-7, 2**-6), (2**-7, 2**-6)], 0, Adder(12, 16), 1),
    "cut toward zero below zero": ([(1, -1), (2**-6, 2**-7 * -1.5)], 0, Adder(13, 16), -1 - 2**-13),
    "cut toward zero against the sign of the sum": ([ONE, (2**-6, 2**-7 * -1.5)], 0, Adder(13, 16), 1 - 2**-13),
    "a product of 2 and more keeps its exponent": ([(1.5, 1.5), (2**-6, 2**-6)], 0, Adder(12, 16), 2.25 + 2**-12),
    "the accumulator is cut": ([(2**12, 1)], 1 + 2**-12, Adder(23, 16), 2**12 + 1),
    "the accumulator cuts": ([(2**-6, 2**-6)], 1, Adder(11, 16), 1),
    "a product with 0 has no exponent": ([(0, 2**15), (2**-6, 2**-6)], 0, Adder(12, 16), 2**-12),
    "a subnormal factor has the smallest exponent": ([(2**-24, 1), (2**-14, 2**-12)], 0, Adder(11, 16), 2**-24),
    "the sum is cut to 24 bits": ([ONE] * 2, 2**24 - 1, Adder(25, 16), 2**24),
    "a negative sum is cut to 24 bits": ([(-1, 1)] * 2, 1 - 2**24, Adder(25, 16), -(2**24)),
    "one step": ([(2**12, 2**12), ONE, (-(2**12), 2**12), NONE], 0, Adder(23, 4), 0),
    "two steps": ([(2**12, 2**12), (-(2**12), 2**12), ONE, NONE], 0, Adder(23, 2), 1),
    "two steps, the first loses": ([(2**12, 2**12), ONE, (-(2**12), 2**12), NONE], 0, Adder(23, 2), 0),
    "Ampere takes 8": ([(2**12, 2**13), (-(2**12), 2**13), *[NONE] * 6, ONE, *[NONE] * 7], 0, AMPERE, 1),
    "Ampere keeps 24 bits": ([(2**12, 2**12), (-(2**12), 2**12), ONE, *[NONE] * 5], 0, AMPERE, 1),
    "Ampere keeps no more": ([(2**13, 2**12), (-(2**13), 2**12), ONE, *[NONE] * 5], 0, AMPERE, 0),
    "Hopper takes 16": ([(2**13, 2**13), (-(2**13), 2**13), *[NONE] * 6, ONE, *[NONE] * 7], 0, HOPPER, 0),
    "Hopper keeps 25 bits": ([(2**13, 2**12), (-(2**13), 2**12), ONE, *[NONE] * 13], 0, HOPPER, 1),
    "nothing": ([NONE] * 16, 0, HOPPER, 0),
    "overflow": ([ONE], np.finfo(np.float32).max, HOPPER, np.finfo(np.float32).max),
    "infinite": ([(np.inf, -1), ONE], 0, HOPPER, -np.inf),
    "infinite accumulator": ([ONE], np.inf, HOPPER, np.inf),
}


@pytest.mark.parametrize(("products", "c", "adder", "want"), SUMS.values(), ids=SUMS.keys())
def test_a_sum(products, c, adder, want):
    assert dot_of(products, c, adder) == want


@pytest.mark.parametrize(
    ("products", "c"),
    [
        ([(np.nan, 1)], 0),
        ([(np.inf, 0)], 0),
        ([(np.inf, 1), (-np.inf, 1)], 0),
        ([(np.inf, 1)], -np.inf),
        ([ONE], np.nan),
    ],
)
def test_a_sum_that_is_no_number_is_one_nan(products, c):
    a, b = (np.array([factors], np.float16) for factors in zip(*products, strict=True))
    with np.errstate(invalid="ignore"):
        got = dot(a, b, np.array([[c]], np.float32), HOPPER)
    assert got.view(np.uint32).ravel().tolist() == [0x7FFFFFFF]


def test_a_zero_sum_is_positive():
    assert not np.signbit(dot_of([(-1, 2**-24), NONE], 2**10, Adder(4, 16)) - 2**10)
    assert not np.signbit(dot_of([(-1, 0), (0, -1)], -0.0, HOPPER))
    assert not np.signbit(dot_of([(1, -1)], 1, HOPPER))


def test_bytes_are_added_two_of_four_at_a_time_and_the_accumulator_last():
    """2**26 and its opposite hide a 1 that is added with both, or to what one of them left, but not a later one."""
    large, eight_bits = 2.0**13, ml_dtypes.float8_e5m2
    b = np.full((1, 32), 1, eight_bits)
    b[0, [4, 8]] = large
    pairs = {(0, 1): 0, (1, 17): 0, (2, 3): 1, (31, 30): 1}  # places of 1 and of nothing: what is left of 1

    def total(place, c=0.0):
        a = np.zeros((1, 32), eight_bits)
        a[0, [4, 8, place]] = large, -large, 1
        return float(dot_of_bytes(a, b, np.array([[c]], np.float32), HOPPER)[0, 0])

    assert [total(place) for place, _ in pairs] == list(pairs.values())
    assert total(2, 2.0**24) == 2**24  # a tie, to even
    assert total(2, 2.0**24 + 2) == 2**24 + 4
    assert total(2, np.nan) != total(2, np.nan)


def test_bfloat16_products_may_leave_float32():
    """2**127 * 2 - 2**127 * 2 cancels within the sum; what is left of 2**127 * 2 alone is infinite."""
    a = np.array([[2.0**127, -(2.0**127)]], ml_dtypes.bfloat16)
    with np.errstate(over="ignore"):
        got = dot(a, np.array([[2, 2], [2, 0]], ml_dtypes.bfloat16), np.array([[5, 5]], np.float32), HOPPER)
    assert got.tolist() == [[0, np.inf]]


# ---- faults ---------------------------------------------------------------------------------------------------------

BARRIER = "__syncthreads();"
COPY = 'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(smem(rows + t)), "l"(in + t) : "memory");'
FAULTS = {
    # name: the right kernel, what is put for what, what is reported, the thread
    "misaligned row": (load_matrix(4), "16 * t", "16 * t + 8 * (t == 9)", "misaligned 16-byte shared", 9),
    "row outside": (load_matrix(4), "16 * t", "16 * (t + 1)", "shared load outside the CTA's memory", 63),
    "row never written": (load_matrix(2), "rows[t]", "if (t != 3) rows[t]", "shared memory never written", 3),
    "row of another warp": (load_matrix(1, "", "16 * (t ^ 32)"), BARRIER, "__syncwarp();", "unordered write", 0),
    "row that a cp.async is on its way to": (load_matrix(1), BARRIER, COPY, "read of a cp.async before its wait", 0),
    "row overwritten": (
        load_matrix(4),
        "for (int i = 0; i < 4; i++) out",
        "rows[t ^ 8] = in[t]; for (int i = 0; i < 4; i++) out",
        "shared write after an unordered read",
        0,
    ),
    "part of a warp": (
        load_matrix(1, guard="if (t < 32)"),
        "t < 32",
        "t < 40",
        "warp instruction that only part of a warp reaches",
        32,
    ),
}


@pytest.mark.parametrize(("code", "right", "fault", "what", "thread"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_of_ldmatrix_is_told(code, right, fault, what, thread):
    arrays = np.zeros((4, 64), np.uint32), np.zeros((64, 4), np.uint32)
    launch(code, *arrays)
    assert right in code
    with pytest.raises(Fault, match=what) as caught:
        launch(code.replace(right, fault), *arrays)
    assert caught.value.thread == thread


def test_lanes_whose_rows_are_not_loaded_may_point_anywhere():
    arrays = np.zeros((4, 64), np.uint32), np.zeros((64, 4), np.uint32)
    launch(load_matrix(2, "", "16 * t + (t % 32 < 16 ? 0 : 100003)"), *arrays)
    with pytest.raises(Fault, match="thread 15"):
        launch(load_matrix(2, "", "16 * t + (t % 32 < 15 ? 0 : 100003)"), *arrays)


def test_other_accumulators_are_refused():
    code = """template <int N> __global__ void kernel(unsigned* out, const unsigned* in) {
      unsigned d[2], x = in[threadIdx.x];
      asm("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %2}, {%2}, {%2, %2};"
          : "=r"(d[0]), "=r"(d[1]) : "r"(x));
      out[threadIdx.x] = d[0] + d[1];
    }"""
    with pytest.raises(UnknownInstruction, match="mma that does not add in f32"):
        launch(code, np.zeros(64, np.uint32), np.zeros(64, np.uint32))
