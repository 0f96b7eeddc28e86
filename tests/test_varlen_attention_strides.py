"""Varlen reads of arrays that are views: any strides with a contiguous last axis, any offset, any signed indices."""

import cases
import numpy as np
import pytest

import pagedkv

QUERY_LENS, SEQ_LENS = [1, 5, 17], [40, 5, 30]


@pytest.fixture(params=["NHD", "HND"])
def layout(request):
    return request.param


def assert_same_result(read_backend, arguments, **views):
    """On `views` (already on the backend) in place of their namesakes the op gives the same bits."""
    expected = cases.call_varlen(read_backend, arguments, causal=True)
    arguments = {**cases.put_all(read_backend, arguments), **views}
    result = pagedkv.flash_attn_varlen_func(**arguments, causal=True, return_softmax_lse=True)
    for got, want in zip(result, expected, strict=True):
        cases.assert_same_bits(read_backend.get(got), want)


def test_strided_queries_of_a_qkv_tensor(read_backend, rng):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    qkv = np.full((sum(QUERY_LENS), 8, 64), np.nan, np.float16)
    qkv[:, :4] = arguments["q"]
    assert_same_result(read_backend, arguments, q=read_backend.put(qkv)[:, :4])


@pytest.mark.parametrize("offset", range(1, 8))
def test_unaligned_base_pointers(read_backend, rng, offset):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, kv_cache_dtype="fp8", head_size=40)
    views = {}
    for name in ("q", "k", "v"):
        array = arguments[name]
        buffer = np.zeros(array.size + offset, array.dtype)
        buffer[offset:] = array.ravel()
        views[name] = read_backend.put(buffer)[offset:].reshape(array.shape)
    assert_same_result(read_backend, arguments, **views)


def test_caches_as_halves_of_one_pool(read_backend, rng, layout):
    """Blocks of [num_blocks, 2, ...]: the block stride is not the size of a block."""
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, layout=layout)
    pool = read_backend.put(np.stack([arguments["k"], arguments["v"]], axis=1))
    assert_same_result(read_backend, arguments, k=pool[:, 0], v=pool[:, 1])


def test_caches_packed_side_by_side(read_backend, rng, layout):
    """Keys and values of a token in one row of [.., 2 * head_size]: neither token nor head stride is the head size."""
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, layout=layout)
    pool = read_backend.put(np.concatenate([arguments["k"], arguments["v"]], axis=-1))
    assert_same_result(read_backend, arguments, k=pool[..., :64], v=pool[..., 64:])


def test_caches_of_the_other_layout_seen_through_a_view(read_backend, rng):
    """An NHD-shaped view of physical HND, and the reverse."""
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    hnd = [read_backend.put(cases.to_hnd(arguments[name])).swapaxes(1, 2) for name in ("k", "v")]
    assert_same_result(read_backend, arguments, k=hnd[0], v=hnd[1])
    nhd = [read_backend.put(arguments[name]).swapaxes(1, 2) for name in ("k", "v")]
    assert_same_result(read_backend, arguments, k=nhd[0], v=nhd[1], layout="HND")


def test_different_strides_of_keys_and_values(read_backend, rng):
    """Keys in physical HND behind an NHD-shaped view, values every second block of a longer pool."""
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    k = read_backend.put(cases.to_hnd(arguments["k"])).swapaxes(1, 2)
    long = np.repeat(arguments["v"], 2, axis=0)
    long[1::2] = np.nan
    assert_same_result(read_backend, arguments, k=k, v=read_backend.put(long)[::2])


def test_table_of_spare_columns_and_rows(read_backend, rng):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    num_seqs, max_blocks = arguments["block_table"].shape
    table = np.full((2 * num_seqs, max_blocks + 9), -1, np.int32)
    table[::2, :max_blocks] = arguments["block_table"]
    assert_same_result(read_backend, arguments, block_table=read_backend.put(table)[::2])


@pytest.mark.parametrize("name", ["block_table", "seqused_k", "cu_seqlens_q"])
@pytest.mark.parametrize("dtype", [np.int64, np.int16])
def test_index_dtypes(read_backend, rng, name, dtype):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    indices = np.zeros((*arguments[name].shape, 2), dtype)
    indices[..., 0] = arguments[name].clip(-1, 30_000)  # garbage that int16 holds
    assert_same_result(read_backend, arguments, **{name: read_backend.put(indices)[..., 0]})


def test_strided_numbers_of_heads(read_backend, rng):
    """Slopes, sinks and scales as columns of wider arrays."""
    numbers = {
        "alibi_slopes": np.array([1.0, 0.5, 0.11, 0.02], np.float32),
        "s_aux": np.array([0.5, -2.0, 3.0, 1.0], np.float32),
        "k_descale": np.array([0.02, 0.07], np.float32),
        "v_descale": np.array([0.3, 0.05], np.float32),
    }
    arguments = {**cases.varlen(rng, QUERY_LENS, SEQ_LENS, kv_cache_dtype="fp8"), **numbers}
    views = {name: read_backend.put(np.stack([array, array + 9], axis=1))[:, 0] for name, array in numbers.items()}
    assert_same_result(read_backend, arguments, **views)


def test_strided_outputs(read_backend, rng):
    """What lies between the heads and rows of a strided output stays as it was."""
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    wide = read_backend.put(np.full((sum(QUERY_LENS), 7, 64), 7, np.float16))
    lse = read_backend.put(np.full((sum(QUERY_LENS), 4), 7, np.float32))
    assert_same_result(read_backend, arguments, out=wide[:, :4], lse_out=lse.T)
    assert np.all(read_backend.get(wide)[:, 4:] == 7)
