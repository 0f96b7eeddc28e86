"""Decode reads of arrays that are views: any strides with a contiguous last axis, any offset, any signed indices."""

import cases
import numpy as np
import pytest
from far_blocks import BLOCK_STRIDE, blocks_far_apart, sparse_bytes

import pagedkv

SEQ_LENS = [1, 16, 17, 70]


def assert_same_result(decode_backend, op, arguments, **views):
    """On `views` (already on the backend) in place of their namesakes the op gives the same bits."""
    expected = cases.call_decode(decode_backend, op, arguments)
    result = getattr(pagedkv, op)(**{**cases.put_all(decode_backend, arguments), **views}, return_lse=True)
    for got, want in zip(result, expected, strict=True):
        cases.assert_same_bits(decode_backend.get(got), want)


def test_strided_query_of_a_qkv_tensor(decode_backend, decode_op, rng):
    arguments = cases.decode(rng, SEQ_LENS)
    num_heads = arguments["query"].shape[1]
    qkv = np.full((len(SEQ_LENS), num_heads + 4, 64), np.nan, np.float16)
    qkv[:, :num_heads] = arguments["query"]
    assert_same_result(decode_backend, decode_op, arguments, query=decode_backend.put(qkv)[:, :num_heads])


@pytest.mark.parametrize("offset", [1, 2, 4, 7])
def test_unaligned_base_pointers(decode_backend, decode_op, rng, offset):
    arguments = cases.decode(rng, SEQ_LENS, kv_cache_dtype="fp8")
    views = {name: moved(decode_backend, arguments[name], offset) for name in ("query", "key_cache", "value_cache")}
    assert_same_result(decode_backend, decode_op, arguments, **views)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_unaligned_outputs(decode_backend, decode_op, rng, dtype):
    """Beside unaligned inputs, here in the dtype of the query."""
    arguments = cases.decode(rng, SEQ_LENS, dtype=dtype)
    names = ("query", "key_cache", "value_cache")
    views = {name: moved(decode_backend, arguments[name], 1) for name in names}
    out = moved(decode_backend, np.zeros_like(arguments["query"]), 1)
    assert_same_result(decode_backend, decode_op, arguments, **views, out=out)


def moved(decode_backend, array, offset):
    """The same on the backend, as many elements behind an aligned address."""
    buffer = np.zeros(array.size + offset, array.dtype)
    buffer[offset:] = array.ravel()
    return decode_backend.put(buffer)[offset:].reshape(array.shape)


def test_caches_as_halves_of_one_pool(decode_backend, decode_op, rng):
    """Blocks of [num_blocks, 2, ...]: the block stride is not the size of a block."""
    arguments = cases.decode(rng, SEQ_LENS)
    key_cache, value_cache = arguments["key_cache"], arguments["value_cache"]
    pool = np.stack([key_cache.reshape(value_cache.shape), value_cache], axis=1)
    pool = decode_backend.put(pool)
    views = {"key_cache": pool[:, 0].reshape(key_cache.shape), "value_cache": pool[:, 1]}
    assert_same_result(decode_backend, decode_op, arguments, **views)


def test_different_strides_of_keys_and_values(decode_backend, decode_op, rng):
    """The key cache is the head range of a wider one, the value cache every third block of a longer one."""
    arguments = cases.decode(rng, SEQ_LENS)
    key_cache, value_cache = arguments["key_cache"], arguments["value_cache"]
    wide = decode_backend.put(np.concatenate([np.full_like(key_cache, np.nan), key_cache], axis=1))
    long = decode_backend.put(np.repeat(value_cache, 3, axis=0))
    long[1::3] = long[2::3] = np.nan
    views = {"key_cache": wide[:, key_cache.shape[1] :], "value_cache": long[::3]}
    assert_same_result(decode_backend, decode_op, arguments, **views)


def test_table_of_spare_columns_and_rows(decode_backend, decode_op, rng):
    arguments = cases.decode(rng, SEQ_LENS)
    num_seqs, max_blocks = arguments["block_tables"].shape
    table = np.full((2 * num_seqs, max_blocks + 9), -1, np.int32)
    table[::2, :max_blocks] = arguments["block_tables"]
    assert_same_result(decode_backend, decode_op, arguments, block_tables=decode_backend.put(table)[::2])


def test_every_second_column_of_a_table(decode_backend, decode_op, rng):
    arguments = cases.decode(rng, SEQ_LENS)
    num_seqs, max_blocks = arguments["block_tables"].shape
    table = np.full((num_seqs, 2 * max_blocks), -1, np.int32)
    table[:, ::2] = arguments["block_tables"]
    assert_same_result(decode_backend, decode_op, arguments, block_tables=decode_backend.put(table)[:, ::2])


@pytest.mark.parametrize("table_dtype", [np.int64, np.int16])
@pytest.mark.parametrize("lens_dtype", [np.int64, np.int16])
def test_index_dtypes(decode_backend, decode_op, rng, table_dtype, lens_dtype):
    arguments = cases.decode(rng, SEQ_LENS)
    tables, lens = arguments["block_tables"].astype(table_dtype), arguments["seq_lens"].astype(lens_dtype)
    views = {"block_tables": decode_backend.put(tables), "seq_lens": decode_backend.put(lens)}
    assert_same_result(decode_backend, decode_op, arguments, **views)


def test_int64_tails_beyond_int32(decode_backend, decode_op, rng):
    arguments = cases.decode(rng, SEQ_LENS)
    tables = arguments["block_tables"].astype(np.int64)
    for row, seq_len in zip(tables, SEQ_LENS, strict=True):
        row[-(-seq_len // 16) :] = 2**40
    assert_same_result(decode_backend, decode_op, arguments, block_tables=decode_backend.put(tables))


def test_strided_lengths(decode_backend, decode_op, rng):
    arguments = cases.decode(rng, SEQ_LENS)
    lens = np.full(2 * len(SEQ_LENS), 10_000, np.int32)
    lens[::2] = SEQ_LENS
    assert_same_result(decode_backend, decode_op, arguments, seq_lens=decode_backend.put(lens)[::2])


def test_strided_numbers_of_heads(decode_backend, decode_op, rng):
    """Slopes, sinks and scales as columns of wider arrays."""
    numbers = {
        "alibi_slopes": np.array([1.0, 0.5, 0.11, 0.02], np.float32),
        "sinks": np.array([0.5, -2.0, 3.0, 1.0], np.float32),
        "k_scale": np.array([0.02, 0.07], np.float32),
        "v_scale": np.array([0.3, 0.05], np.float32),
    }
    arguments = {**cases.decode(rng, SEQ_LENS, kv_cache_dtype="fp8"), **numbers}
    views = {name: decode_backend.put(np.stack([array, array + 9], axis=1))[:, 0] for name, array in numbers.items()}
    assert_same_result(decode_backend, decode_op, arguments, **views)


def test_strided_outputs(decode_backend, decode_op, rng):
    """What lies between the heads and rows of a strided output stays as it was."""
    arguments = cases.decode(rng, SEQ_LENS)
    num_seqs, num_heads, head_size = arguments["query"].shape
    wide = decode_backend.put(np.full((num_seqs, num_heads + 3, head_size), 7, np.float16))
    lse = decode_backend.put(np.full((num_seqs, num_heads), 7, np.float32))
    assert_same_result(decode_backend, decode_op, arguments, out=wide[:, :num_heads], lse_out=lse.T)
    assert np.all(decode_backend.get(wide)[:, num_heads:] == 7)


def test_offsets_past_two_and_four_gigabytes(decode_backend, decode_op, rng):
    """What an offset that lost its high bits would find is zero."""
    arguments = cases.decode(rng, [30, 17], block_size=32, head_size=32, kv_cache_dtype="fp8")
    used, far = arguments["block_tables"][:, 0], [2, 3]
    views = {"block_tables": arguments["block_tables"].copy()}
    views["block_tables"][:, 0] = far
    views["block_tables"] = decode_backend.put(views["block_tables"])
    for name in ("key_cache", "value_cache"):
        blocks = arguments[name][used]
        views[name] = blocks_far_apart(
            sparse_bytes(decode_backend, 3 * BLOCK_STRIDE + blocks[0].nbytes), (4, *blocks.shape[1:])
        )
        views[name][2:] = decode_backend.put(blocks)
    assert_same_result(decode_backend, decode_op, arguments, **views)
