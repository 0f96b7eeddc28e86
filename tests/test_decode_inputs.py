"""What ``pagedkv bench decode`` reads, and the check of a result: right ones pass, wrong ones do not."""

import numpy as np
import pytest

import pagedkv
from pagedkv.cli import bench_cache
from pagedkv.cli.bench_cache import CacheKind
from pagedkv.cli.bench_truth import attention_of_token
from pagedkv.cli.decode_inputs import decode_inputs
from pagedkv.cli.decode_rows import ROWS, ROWS_BY_NAME, DecodeRow, nbytes
from pagedkv.cli.inputs import NO_BLOCK
from pagedkv.cli.reference import attention as reference_attention
from pagedkv.dtypes import BFLOAT16, FLOAT16, FLOAT32

SMALL = DecodeRow(3, 40, 6, 2, is_ragged=True)
FORMATS = [(BFLOAT16, "auto"), (FLOAT16, "auto"), (FLOAT32, "auto"), (BFLOAT16, "fp8"), (FLOAT16, "fp8_e5m2")]


LAYOUTS = {"packed": "paged_attention_v1", "NHD": "flash_attn_varlen_func", "HND": "flash_attn_varlen_func"}


def draw(dtype=BFLOAT16, kv_cache_dtype="auto", layout="packed", block_size=16):
    return decode_inputs(np, SMALL, CacheKind(dtype, kv_cache_dtype, layout, 32, block_size))


def result(inputs, **changed):
    """What the op of the layout says."""
    op = LAYOUTS[inputs.kind.layout]
    return getattr(pagedkv, op)(**inputs.arguments(op) | changed)


# ---- batches --------------------------------------------------------------------------------------------------------


def test_the_rows_are_those_whose_targets_were_set():
    """Bytes of bfloat16 over 4.6 TB/s, in us, as they stand beside the targets."""
    floors = [nbytes(row, 128, 2) / 4.6e6 for row in ROWS]
    want = [0.9, 3.6, 29.2, 116.7, 29.2, 116.7, 116.7, 233.4, 466.8, 933.7, 233.4]
    assert np.round(floors[:-1], 1).tolist() == want
    assert [row.target for row in ROWS] == [1.45, 1.25, 1.07, 1.04, 1.07, 1.03, 1.03, 1.025, 1.015, 1.015, 1.035, 1.1]
    assert [row.fills_card for row in ROWS] == [False] * 6 + [True] * 5 + [False]
    assert len(ROWS_BY_NAME) == len(ROWS) == 12


def test_ragged_lengths():
    row = ROWS_BY_NAME["256xragged-64/8"]
    lens = row.seq_lens()
    assert lens.dtype == np.int32
    assert lens.size == 256
    assert abs(lens.mean() - 2048) < 1
    assert 0.7 < np.log(lens).std() < 0.9
    assert lens.min() < 400 and lens.max() > 8000
    np.testing.assert_array_equal(lens, row.seq_lens())


# ---- inputs and their check -----------------------------------------------------------------------------------------


def test_inputs_are_scattered_and_random():
    inputs = draw()
    used = inputs.tables[inputs.tables != NO_BLOCK]
    assert used.size == np.unique(used).size == sum(-(-inputs.seq_lens // 16))
    assert (np.diff(used) != 1).any()
    cache = inputs.cache.key.astype(np.float32)
    assert abs(cache.mean()) < 0.05
    assert abs(cache.std() - 1) < 0.05
    assert (inputs.cache.key.reshape(-1) != inputs.cache.value.reshape(-1)).any()


def test_pieces_make_a_whole(monkeypatch):
    monkeypatch.setattr(bench_cache, "PIECE", 1001)
    cache = draw().cache.key.astype(np.float32)
    assert abs(cache.std() - 1) < 0.05
    assert np.unique(cache.reshape(-1)[-24:]).size > 12


@pytest.mark.parametrize("precision", [np.float32, np.float64])
def test_attention_is_that_of_the_reference(precision, rng):
    query, key, value = (rng.standard_normal((n, 1, 16)).astype(precision) for n in (3, 50, 50))
    exact, _ = reference_attention(query.swapaxes(0, 1), key, value)
    got = attention_of_token(query[:, 0], key[:, 0], value[:, 0])
    assert got.dtype == precision
    np.testing.assert_allclose(got, exact[0], rtol=1e-5 if precision == np.float32 else 1e-12, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), FORMATS)
def test_a_right_result_passes(dtype, kv_cache_dtype, block_size, layout):
    inputs = draw(dtype, kv_cache_dtype, layout, block_size)
    comparison = inputs.check(result(inputs))
    assert comparison.ok, comparison.detail


def test_memory_is_as_large_as_the_op_asks():
    for layout, op in (("packed", "paged_attention_v2"), ("NHD", "flash_attn_varlen_func")):
        inputs = draw(layout=layout)
        memory = inputs.memory(op)
        getattr(pagedkv, op)(**inputs.arguments(op), **memory)
        assert inputs.check(memory["out"]).ok
    assert draw().memory("paged_attention_v1").keys() == {"out"}


def one_head(out):
    out[2, 5] = out[2, 4]


def one_number(out):
    out[1, 0, 7] *= 1.25


def one_nan(out):
    out[0, 3, 31] = np.nan


def one_percent(out):
    out[...] = out.astype(np.float32) * 1.01


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", [one_head, one_number, one_nan, one_percent])
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), FORMATS)
def test_a_wrong_result_does_not(dtype, kv_cache_dtype, fault, layout):
    inputs = draw(dtype, kv_cache_dtype, layout)
    out = result(inputs)
    fault(out)
    assert not inputs.check(out).ok
    assert not inputs.check(inputs.new_out()).ok


def test_the_last_token_counts():
    inputs = draw()
    assert not inputs.check(result(inputs, seq_lens=inputs.seq_lens - np.array([0, 0, 1], np.int32))).ok
