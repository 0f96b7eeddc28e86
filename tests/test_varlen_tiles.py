"""Tiles of queries of both sizes, and splits that the op chooses itself: no result depends on the size of a tile."""

import cases
import numpy as np
import pytest
from test_varlen_plan import problem

from pagedkv import varlen_plan

SLOPES = np.array([1.0, 0.5, 0.11, 0.02], np.float32)
SINKS = np.array([0.5, -2.0, 3.0, 1.0], np.float32)
# 140 rows of two query heads are one tile of 128 and a part; the others fill no tile of 64.
QUERY_LENS, SEQ_LENS = [70, 1, 0, 9, 1, 1], [150, 33, 7, 9, 64, 0]
OPTIONS = {
    "plain": {"causal": True},
    "full": {},
    "window": {"window_size": (40, 10)},
    "cap, slopes and sinks": {"softcap": 5.0, "alibi_slopes": SLOPES, "s_aux": SINKS, "causal": True},
    "scale of zero": {"softmax_scale": 0.0, "causal": True},
    "negative scale": {"softmax_scale": -0.2, "causal": True},
}
FORMATS = [("float16", "auto"), ("bfloat16", "auto"), ("float16", "fp8_e5m2"), ("bfloat16", "fp8_e4m3")]


def warp_tiles(arguments, **options):
    """Tiles of 16 rows that a warp of the kernel for these arguments has."""
    given = {name: array for name, array in arguments.items() if name in ("q", "k", "v", "block_table")}
    given |= {name: arguments[name] for name in ("cu_seqlens_q", "seqused_k", "kv_cache_dtype") if name in arguments}
    plain = {"kv_cache_dtype": "auto", "out": None}
    return varlen_plan.varlen_instance(problem(plain | given, **options)).arguments[5]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_both_sizes_give_the_same_bits(read_backend, rng, formats, options):
    dtype, kv_cache_dtype = formats
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, dtype=cases.FLOATS[dtype], kv_cache_dtype=kv_cache_dtype)
    assert [warp_tiles(arguments, max_seqlen_q=bound) for bound in (None, 70)] == [1, 2]
    expected = cases.check_varlen(read_backend, arguments, **options, num_splits=1)
    result = cases.call_varlen(read_backend, arguments, **options, max_seqlen_q=70, num_splits=1)
    if read_backend.name != "numpy":
        for got, want in zip(result, expected, strict=True):
            cases.assert_same_bits(got, want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("head_size", [8, 40, 64, 72, 96, 120, 128])
def test_head_sizes_of_large_tiles(read_backend, rng, head_size, layout):
    arguments = cases.varlen(rng, [70, 3], [100, 40], head_size=head_size, layout=layout)
    cases.check_varlen(read_backend, arguments, causal=True, max_seqlen_q=70)


@pytest.mark.parametrize("num_heads", [1, 3, 71])
def test_groups_of_large_tiles(read_backend, rng, num_heads):
    """Rows of one query token lie in several tiles, or in two warps."""
    arguments = cases.varlen(rng, [67, 2], [67, 20], num_heads=num_heads, num_kv_heads=1, head_size=16)
    cases.check_varlen(read_backend, arguments, causal=True, max_seqlen_q=67, num_splits=2)


@pytest.mark.parametrize("seq_len", [63, 64, 65, 127, 128, 129])
def test_edges_of_tiles_of_keys(read_backend, rng, seq_len):
    cases.check_varlen(read_backend, cases.varlen(rng, [40], [seq_len]), causal=True, max_seqlen_q=40)


def test_a_logit_that_grows_by_little_and_by_much(read_backend, rng):
    """The one that weights are relative to moves only when another exceeds it by far."""
    arguments = cases.varlen(rng, [3], [320], head_size=16, block_size=32, num_heads=1, num_kv_heads=1)
    arguments["q"][...] = 1.0
    steps = np.repeat([0.0, 3.0, 5.0, 5.5, 40.0, 45.0, 20.0, 100.0, 101.0, 90.0], 32)  # of 32 keys each
    for position, logit in enumerate(steps):
        arguments["k"][arguments["block_table"][0, position // 32], position % 32] = logit / 16
    cases.check_varlen(read_backend, arguments, softmax_scale=1.0)


@pytest.mark.parametrize("query_lens", [[2], [5, 3], [1, 30]], ids=str)
def test_splits_of_the_ops_own_choice(read_backend, rng, query_lens):
    """Few queries over many keys leave SMs idle unless the keys are split."""
    arguments = cases.varlen(rng, query_lens, [600] * len(query_lens), num_heads=2, num_kv_heads=1, head_size=32)
    cases.check_varlen(read_backend, arguments, causal=True, s_aux=SINKS[:2])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("formats", [*FORMATS, ("float32", "auto")], ids="-".join)
def test_single_queries_among_longer_ones(read_backend, rng, formats, options):
    """The op reads those by a kernel of their own, before it reads the others."""
    dtype, kv_cache_dtype = formats
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, dtype=cases.FLOATS[dtype], kv_cache_dtype=kv_cache_dtype)
    cases.check_varlen(read_backend, arguments, **options, max_seqlen_q=70)


@pytest.mark.parametrize(
    "query_lens", [[1, 1, 1, 1, 30], [30, 1, 1, 1, 1], [1, 30, 1, 2, 0], [0, 1, 0, 30, 0]], ids=str
)
def test_single_queries_wherever_they_are(read_backend, rng, query_lens):
    arguments = cases.varlen(rng, query_lens, [40, 64, 33, 80, 97], num_heads=6, num_kv_heads=2)
    cases.check_varlen(read_backend, arguments, causal=True)
    cases.check_varlen(read_backend, arguments, causal=True, max_seqlen_q=30, s_aux=rng.standard_normal(6, np.float32))
