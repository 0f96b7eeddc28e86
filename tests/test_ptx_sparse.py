"""Caches of terabytes that hold only what is written, through the real kernels; and gaps that belong to nobody."""

import numpy as np
import pytest
from small_kernels import launch
from writes import cache_shapes, encoded, random_rows, token_of

from pagedkv import ptx_ops, validate_cache, write_plan
from pagedkv.arrays import view
from pagedkv.problem import CacheWrite
from pagedkv.ptx.faults import Fault
from pagedkv.ptx.pages import GUARD, SparseBuffer

pytestmark = pytest.mark.ptx

NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 2**20, 8, 2, 32
BLOCK_STRIDE = 3 * 2**21  # bytes: most blocks lie past 2^32
BLOCKS = [0, 341, 682, 683, 1366, NUM_BLOCKS - 1]  # on both sides of 2^31, 2^32 and 2^33
SLOTS = np.array([block * BLOCK_SIZE + i for i, block in enumerate(BLOCKS)])
SCALES = (0.5, 0.25)


def sparse_caches(layout):
    shapes = cache_shapes(layout, NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE, np.uint8)
    inner = [np.empty(shape[1:], np.uint8).strides for shape in shapes]
    return [SparseBuffer(shape, np.uint8, (BLOCK_STRIDE, *rest)) for shape, rest in zip(shapes, inner, strict=True)]


def write(key, value, caches, layout):
    """One launch of the layout's kernel; ops that are called with arrays take no buffer that exists in parts."""
    common = {"dtype": key.dtype, "like": "key", "kv_cache_dtype": "fp8", "scales": SCALES}
    views, names = [cache.view() for cache in caches], ("key_cache", "value_cache")
    if layout == "packed":
        cache, plan = validate_cache.packed_cache(*views, names, **common), write_plan.plan_packed_write
    else:
        cache = validate_cache.flash_cache(*views, names, layout=layout, **common)
        plan = write_plan.plan_flash_write
    problem = CacheWrite(view(key, "key"), view(value, "value"), cache, view(SLOTS, "slot_mapping"))
    ptx_ops.launch(plan(problem), write_plan.write_arrays(problem))


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_a_write_into_terabytes(rng, layout):
    key, value = random_rows(rng, len(SLOTS), HEADS, HEAD_SIZE, np.float16)
    caches = sparse_caches(layout)
    write(key, value, caches, layout)
    for rows, cache, scale in zip((key, value), caches, SCALES, strict=True):
        assert cache.nbytes > 2**42
        for token, block in enumerate(BLOCKS):
            got = token_of(cache[block][None], layout, 0, token)
            want = encoded(rows[token], "fp8", scale)
            np.testing.assert_array_equal(got.reshape(want.shape), want)
        assert cache.num_stored == sum((encoded(row, "fp8", scale) != 0xFF).sum() for row in rows)


def test_elements_of_a_sparse_buffer():
    buffer = SparseBuffer((4, 3, 5), np.float32, (2**40, 5, 1), fill=0)
    buffer[3, 2] = np.arange(5)
    buffer[3, 0, 4] = 7
    buffer[1] = 1
    np.testing.assert_array_equal(buffer[3], [[0, 0, 0, 0, 7], [0, 0, 0, 0, 0], [0, 1, 2, 3, 4]])
    assert buffer[1].sum() == 15
    assert not buffer[0].any()
    assert buffer[3, 2, 4] == 4
    with pytest.raises(IndexError, match=r"index: expected one inside \(4, 3, 5\), got \(3, 3\)"):
        buffer[3, 3]


def test_sparse_buffers_lie_apart():
    one, other = SparseBuffer((2**30,), np.float16), SparseBuffer((1,), np.float16)
    assert other.pointer >= one.pointer + one.nbytes + GUARD


ADD = """template <int N> __global__ void kernel(float* out, const float* in) {
  const int t = threadIdx.x;
  OFFSET
  out[i] = in[i] + 1;
  atomicAdd(out + i, 1.f);
}"""


def run_sparse(offset):
    buffers = [SparseBuffer((64,), np.float32, (2**34,), fill=0) for _ in range(2)]
    for t in range(64):
        buffers[1][t] = t
    launch(ADD.replace("OFFSET", offset), *buffers)
    return np.array([buffers[0][t] for t in range(64)])


def test_kernels_load_store_and_change_elements_of_sparse_buffers():
    np.testing.assert_array_equal(run_sparse("const long long i = t * (1ll << 34);"), np.arange(64) + 2)


@pytest.mark.parametrize(
    ("offset", "what"),
    [
        ("const long long i = t * (1ll << 34) + (t == 5);", "global load between the rows of an array .*thread 5:"),
        ("const long long i = (t + 1) * (1ll << 34);", "global load outside every array .*thread 63:"),
        ("const long long i = t - 1;", "global load outside every array .*thread 0:"),
    ],
)
def test_what_no_element_holds_is_a_fault(offset, what):
    with pytest.raises(Fault, match=what):
        run_sparse(offset)


STRIDED = {  # shape, strides in elements, an element of a gap or None
    "every other row": ((4, 8), (16, 1), 8),
    "every third element": ((10,), (3,), 4),
    "rows of rows": ((2, 3, 4), (64, 16, 1), 36),
    "rows of rows that adjoin": ((2, 3, 4), (36, 16, 1), 8),
    "a transposed array": ((8, 4), (1, 16), 8),
    "backwards": ((4, 8), (-16, 1), -8),
    "overlapping rows": ((4, 8), (3, 1), None),
    "one row again and again": ((100, 8), (0, 1), None),
}


@pytest.mark.parametrize(("shape", "strides", "gap"), STRIDED.values(), ids=STRIDED.keys())
def test_gaps_of_a_strided_array(shape, strides, gap):
    """Every element may be touched, and none between two rows."""
    code = """template <int N> __global__ void kernel(float* array, const int* elements) {
      array[elements[threadIdx.x]] = 1;
    }"""
    memory = np.zeros(512, np.float32)
    array = np.lib.stride_tricks.as_strided(memory[256:], shape, [4 * stride for stride in strides])
    elements = np.unique(np.tensordot(strides, np.indices(shape), 1)).astype(np.int32)
    launch(code, array, np.resize(elements, 128), threads=128)
    assert memory.sum() == elements.size
    assert (array == 1).all()
    if gap is not None:
        with pytest.raises(Fault, match="global store between the rows of an array"):
            launch(code, array, np.full(128, gap, np.int32), threads=128)


def test_the_gap_of_one_array_may_be_another():
    """Keys and values that lie in turn in one buffer, each with the other in its gaps."""
    both = np.zeros((4, 2, 8), np.float32)
    code = "template <int N> __global__ void kernel(float* keys, float* values) { values[threadIdx.x / 8 * 16] = 1; }"
    launch(code, both[:, 0], both[:, 1], threads=32)
    assert both[:, 1, 0].sum() == 4
    assert both.sum() == 4
    with pytest.raises(Fault, match=r"global store between the rows of an array .*thread 16:"):  # behind the last keys
        launch(code, both[:, 1], both[:2, 0], threads=32)
