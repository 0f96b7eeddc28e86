"""What benches of varlen reads are checked by: some queries of each sequence, as far as each sees."""

import numpy as np
import pytest

import pagedkv
from pagedkv.cli.bench_cache import CacheKind
from pagedkv.cli.bench_inputs import VARLEN, random_batch
from pagedkv.cli.bench_truth import CHECKED, CHECKED_OF_EACH
from pagedkv.dtypes import BFLOAT16, FLOAT32

SEQ_LENS, QUERY_LENS = np.array([9, 40, 300], np.int32), np.array([1, 17, 300], np.int32)


def draw(kv_cache_dtype="auto", layout="NHD", window=-1, dtype=BFLOAT16):
    kind = CacheKind(dtype, kv_cache_dtype, layout, 16, 8)
    return random_batch(np, kind, 4, 2, SEQ_LENS, QUERY_LENS, window)


def result(inputs, **changed):
    return pagedkv.flash_attn_varlen_func(**inputs.arguments(VARLEN) | changed)


@pytest.mark.parametrize("window", [-1, 0, 20])
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [(BFLOAT16, "auto"), (BFLOAT16, "fp8"), (FLOAT32, "auto")])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_right_result_passes(layout, dtype, kv_cache_dtype, window):
    inputs = draw(kv_cache_dtype, layout, window, dtype)
    comparison = inputs.check(result(inputs))
    assert comparison.ok, comparison.detail


def test_first_and_last_queries_of_every_sequence_are_checked_and_others_anew():
    draws = [draw().checked.tolist() for _ in range(8)]
    for tokens in draws:
        assert tokens == sorted(set(tokens))
        assert {0, 1, 17, 18, 317} <= set(tokens)
        assert sum(tokens.count(token) for token in range(18, 318)) == CHECKED // 3
    assert len(set(map(tuple, draws))) > 1
    many = random_batch(np, draw().kind, 2, 2, np.full(64, 20, np.int32), np.full(64, 20, np.int32))
    assert many.checked.size == 64 * CHECKED_OF_EACH


@pytest.mark.parametrize("token", [0, 1, 17, 18, 317])
@pytest.mark.parametrize("head", [0, 3])
def test_one_wrong_head_of_a_checked_query_is_found_and_named(token, head):
    inputs = draw()
    out = result(inputs)
    out[token, head] = 2
    comparison = inputs.check(out)
    assert not comparison.ok
    assert f" in token {token}, head {head}," in comparison.detail


def test_a_query_that_was_not_written_is_found_wherever_it_is():
    inputs = draw()
    out = result(inputs)
    token = next(token for token in range(len(out)) if token not in inputs.checked)
    out[token] = np.nan
    assert inputs.check(out).detail == "there are NaNs"


@pytest.mark.parametrize(
    "changed",
    [{"causal": False, "window_size": (-1, -1)}, {"window_size": (19, 0)}, {"window_size": (21, 0)}, {"softcap": 2.0}],
    ids=str,
)
def test_what_a_query_sees_counts(changed):
    inputs = draw(window=20)
    assert not inputs.check(result(inputs, **changed)).ok


def test_a_part_is_the_same_sequences_alone():
    inputs = draw()
    whole, starts = result(inputs), (0, 1, 18, 318)
    for first, end in ((0, 1), (1, 3), (2, 3)):
        part = inputs.part(slice(first, end))
        out = result(part)
        assert part.cache is inputs.cache
        assert part.check(out).ok
        np.testing.assert_array_equal(out, whole[starts[first] : starts[end]])
