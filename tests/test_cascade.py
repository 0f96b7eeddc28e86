"""cascade_attention: sequences that begin with the same blocks, against attention of each over all of its keys."""

import cases
import numpy as np
import oracle
import pytest

import pagedkv

PREFIX = 32
SINKS = np.array([0.5, -2.0, 3.0, 1.0], np.float32)
QUERY_LENS, SUFFIX_LENS = [4, 1, 0, 20], [9, 1, 3, 20]


def batch(rng, query_lens=QUERY_LENS, suffix_lens=SUFFIX_LENS, prefix_len=PREFIX, **sizes):
    """A varlen call whose sequences begin with the first one's blocks, and the length of that prefix."""
    arguments = cases.varlen(rng, query_lens, [prefix_len + n for n in suffix_lens], **sizes)
    num_blocks = prefix_len // sizes.get("block_size", 16)
    arguments["block_table"][:, :num_blocks] = arguments["block_table"][0, :num_blocks]
    return arguments | {"common_prefix_len": prefix_len}


def whole(arguments):
    """The same call without a prefix."""
    return {name: value for name, value in arguments.items() if name != "common_prefix_len"}


def call(backend, arguments, **options):
    given = cases.put_all(backend, arguments | options)
    return tuple(backend.get(array) for array in pagedkv.cascade_attention(**given, return_softmax_lse=True))


def check(backend, arguments, **options):
    """Within rounding: the two parts are rounded to the query's dtype before they are merged, hence float32."""
    result = call(backend, arguments, **options)
    cases.assert_state_close(result, oracle.varlen_attention, whole(arguments | options) | {"causal": True})
    return result


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0, "softmax_scale": 0.3}, {"s_aux": SINKS}], ids=["plain", "cap", "sinks"]
)
def test_equals_attention_over_the_whole(read_backend, rng, layout, options):
    check(read_backend, batch(rng, dtype=np.float32, layout=layout), **options)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_prefixes_of_one_block_and_of_several(read_backend, rng, block_size):
    check(read_backend, batch(rng, dtype=np.float32, block_size=block_size))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes(read_backend, rng, dtype, kv_cache_dtype):
    """Each part is rounded once more than the whole."""
    arguments = batch(rng, dtype=cases.FLOATS[dtype], kv_cache_dtype=kv_cache_dtype)
    out, lse = call(read_backend, arguments)
    exact_out, exact_lse = oracle.varlen_attention(**whole(arguments), causal=True)
    assert out.dtype == cases.FLOATS[dtype]
    eps = float(cases.ml_dtypes.finfo(cases.FLOATS[dtype]).eps)
    assert np.max(cases.relative_l2(out, exact_out)) < 3 * eps
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5 if kv_cache_dtype == "fp8" else 1e-3)


def test_without_a_prefix_it_is_the_plain_call(read_backend, rng):
    arguments = batch(rng, prefix_len=0)
    expected = cases.call_varlen(read_backend, whole(arguments), causal=True)
    for got, want in zip(call(read_backend, arguments), expected, strict=True):
        cases.assert_same_bits(got, want)


def test_no_sequences(read_backend, rng):
    arguments = cases.varlen(rng, [], []) | {"common_prefix_len": 16}
    out, lse = call(read_backend, arguments)
    assert (out.shape, lse.shape) == ((0, 4, 64), (4, 0))


def test_rows_past_the_last_query_see_nothing(read_backend, rng):
    arguments = batch(rng, dtype=np.float32)
    expected = call(read_backend, arguments)
    padded = np.concatenate([arguments["q"], np.full((5, 4, 64), np.nan, np.float32)])
    out, lse = call(read_backend, arguments, q=padded)
    cases.assert_same_bits(out[:-5], expected[0])
    cases.assert_same_bits(np.ascontiguousarray(lse[:, :-5]), expected[1])
    assert not out[-5:].any()
    assert (lse[:, -5:] == -np.inf).all()


def test_results_go_where_they_are_asked_to(read_backend, rng):
    arguments = batch(rng)
    expected = call(read_backend, arguments)
    given = {"out": np.full_like(expected[0], np.nan), "lse_out": np.full_like(expected[1], np.nan)}
    given = cases.put_all(read_backend, arguments | given)
    assert pagedkv.cascade_attention(**given) is given["out"]
    for name, want in zip(("out", "lse_out"), expected, strict=True):
        cases.assert_same_bits(read_backend.get(given[name]), want)


@pytest.mark.parametrize(
    "hints", [{"max_seqlen_q": 20}, {"max_seqlen_k": 52}, {"max_seqlen_q": 99, "max_seqlen_k": 99}], ids=str
)
def test_hints_change_nothing(read_backend, rng, hints):
    arguments = batch(rng)
    for got, want in zip(call(read_backend, arguments, **hints), call(read_backend, arguments), strict=True):
        cases.assert_same_bits(got, want)


def test_the_prefix_is_read_through_the_first_row_alone(read_backend, rng):
    arguments = batch(rng)
    expected = call(read_backend, arguments)
    arguments["block_table"][1:, : PREFIX // 16] = -1
    for got, want in zip(call(read_backend, arguments), expected, strict=True):
        cases.assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int64])
def test_index_dtypes(read_backend, rng, dtype):
    """Lengths are lowered by the prefix in their own dtype; those of the prefix are its length in that."""
    arguments = batch(rng)
    wide = {name: arguments[name].clip(-1, 100).astype(dtype) for name in ("cu_seqlens_q", "seqused_k", "block_table")}
    for got, want in zip(call(read_backend, arguments, **wide), call(read_backend, arguments), strict=True):
        cases.assert_same_bits(got, want)


def test_inputs_are_left_alone(read_backend, rng):
    arguments = batch(rng)
    given = cases.put_all(read_backend, arguments)
    pagedkv.cascade_attention(**given)
    for name in ("cu_seqlens_q", "seqused_k", "block_table", "q", "k", "v"):
        cases.assert_same_bits(read_backend.get(given[name]), arguments[name])


MISTAKES = {
    "part of a block": (
        {"common_prefix_len": 24},
        ValueError,
        "common_prefix_len: expected at most 6 whole blocks of 16",
    ),
    "more blocks than the table has": ({"common_prefix_len": 112}, ValueError, "common_prefix_len: expected at most 6"),
    "a negative prefix": ({"common_prefix_len": -16}, ValueError, "common_prefix_len: "),
    "no prefix given": ({"common_prefix_len": None}, TypeError, "common_prefix_len: expected an integer"),
    "a prefix of half a token": ({"common_prefix_len": 16.5}, TypeError, "common_prefix_len: "),
    "queries inside the prefix": (
        {"common_prefix_len": 48},
        ValueError,
        "seqused_k: expected queries that begin at 48",
    ),
    "unknown layout": ({"layout": "packed"}, ValueError, "layout: "),
    "fewer tables": ({"block_table": np.zeros((3, 6), np.int32)}, ValueError, "block_table: "),
    "lengths of bool": ({"seqused_k": np.ones(4, bool)}, TypeError, "seqused_k: expected signed integers"),
    "lengths of unsigned": ({"seqused_k": np.full(4, 99, np.uint32)}, TypeError, "seqused_k: expected signed integers"),
    "starts of float": ({"cu_seqlens_q": np.zeros(5, np.float32)}, TypeError, "cu_seqlens_q: expected signed integers"),
    "one start": ({"cu_seqlens_q": np.zeros(1, np.int32)}, ValueError, "cu_seqlens_q: "),
    "lengths of two axes": ({"seqused_k": np.zeros((4, 1), np.int32)}, ValueError, "seqused_k: "),
    "output of another shape": ({"out": np.full((25, 4, 32), 7, np.float16)}, ValueError, "out: "),
}


@pytest.mark.parametrize(("change", "error", "text"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes(rng, change, error, text):
    arguments = batch(rng) | {"out": np.full((25, 4, 64), 7, np.float16)} | change
    with pytest.raises(error, match=f"^{text}"):
        pagedkv.cascade_attention(**arguments)
    assert (arguments["out"] == 7).all()
