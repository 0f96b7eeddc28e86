"""Every option of flash_attn_varlen_func on prefill, decode and mixed batches, against the oracle."""

import cases
import ml_dtypes
import numpy as np
import oracle
import pytest

import pagedkv

QUERY_LENS = [1, 5, 17, 0, 33]
SEQ_LENS = [40, 5, 30, 7, 70]
SLOPES = np.array([1.0, 0.5, 0.11, 0.02], np.float32)
SINKS = np.array([0.5, -2.0, 3.0, 1.0], np.float32)
SCALE_FORMS = {
    "float": (0.04, 0.11),
    "one_element": (np.array([0.04], np.float32), np.array([0.11], np.float32)),
    "per_head": (np.array([0.02, 0.07], np.float32), np.array([0.3, 0.05], np.float32)),
    "numpy_scalar": (np.float32(0.04), np.float64(0.11)),
}
BATCHES = {
    "prefill": ([16, 33, 5], [16, 33, 5]),
    "prefill_after_a_cached_prefix": ([16, 33, 5], [40, 65, 21]),
    "decode": ([1, 1, 1, 1], [1, 16, 17, 70]),
    "mixed": (QUERY_LENS, SEQ_LENS),
    "one_sequence": ([20], [50]),
}


@pytest.fixture(params=["NHD", "HND"])
def layout(request):
    return request.param


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("batch", BATCHES)
def test_batches(read_backend, rng, layout, batch, causal):
    cases.check_varlen(read_backend, cases.varlen(rng, *BATCHES[batch], layout=layout), causal=causal)


@pytest.mark.parametrize("dtype", cases.FLOATS.values(), ids=cases.FLOATS)
def test_dtypes(read_backend, rng, layout, dtype):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, dtype=dtype, layout=layout)
    out, _ = cases.check_varlen(read_backend, arguments, causal=True)
    assert out.dtype == dtype


def test_layouts_are_told_apart_by_name_only(read_backend, rng):
    """With as many KV heads as tokens in a block the two shapes are the same."""
    arguments = cases.varlen(rng, [5, 3], [20, 9], num_heads=8, num_kv_heads=8, block_size=8)
    nhd = cases.check_varlen(read_backend, arguments)
    hnd = {name: cases.to_hnd(arguments[name]) for name in ("k", "v")}
    for got, want in zip(cases.call_varlen(read_backend, arguments, **hnd, layout="HND"), nhd, strict=True):
        cases.assert_same_bits(got, want)


@pytest.mark.parametrize("softmax_scale", [0.0, 0.03, 0.7])
def test_softmax_scale(read_backend, rng, softmax_scale):
    cases.check_varlen(read_backend, cases.varlen(rng, QUERY_LENS, SEQ_LENS), softmax_scale=softmax_scale)


@pytest.mark.parametrize(("max_seqlen_q", "max_seqlen_k"), [(33, None), (None, 70), (33, 70), (64, 5000)])
def test_max_seqlens_are_only_hints(read_backend, rng, max_seqlen_q, max_seqlen_k):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    cases.check_varlen(read_backend, arguments, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=True)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("window_size", [(20, -1), (20, 0), (20, 5), (-1, 5), (-1, 0), (0, 0), (3, 100)])
def test_window_size(read_backend, rng, layout, window_size, causal):
    """`causal` sets the right bound to 0, whatever the window says."""
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, layout=layout)
    cases.check_varlen(read_backend, arguments, window_size=window_size, causal=causal)


def test_causal_is_a_right_bound_of_zero(read_backend, rng):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    causal = cases.call_varlen(read_backend, arguments, causal=True, window_size=(20, 9))
    for got, want in zip(cases.call_varlen(read_backend, arguments, window_size=(20, 0)), causal, strict=True):
        cases.assert_same_bits(got, want)


@pytest.mark.parametrize("softcap", [1.5, 30.0])
def test_softcap(read_backend, rng, softcap):
    """A scale that spreads the logits over several times the cap, so that the cap bends them."""
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    cases.check_varlen(read_backend, arguments, softcap=softcap, softmax_scale=softcap / 4)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_alibi(read_backend, rng, causal):
    """Keys after the query lie at a distance too, where no causal mask hides them."""
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    cases.check_varlen(read_backend, arguments, alibi_slopes=SLOPES, causal=causal)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("sink_dtype", [np.float32, np.float16], ids=["float32", "query_dtype"])
def test_s_aux(read_backend, rng, sink_dtype, num_splits):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    cases.check_varlen(read_backend, arguments, s_aux=SINKS.astype(sink_dtype), num_splits=num_splits, causal=True)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", cases.FP8_NAMES)
def test_kv_cache_dtype(read_backend, rng, layout, kv_cache_dtype, dtype):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, dtype=dtype, kv_cache_dtype=kv_cache_dtype, layout=layout)
    cases.check_varlen(read_backend, arguments, causal=True)


@pytest.mark.parametrize("form", SCALE_FORMS)
def test_descales(read_backend, rng, layout, form):
    k_descale, v_descale = SCALE_FORMS[form]
    fp8 = {"kv_cache_dtype": "fp8", "k_descale": k_descale, "v_descale": v_descale}
    cases.check_varlen(read_backend, cases.varlen(rng, QUERY_LENS, SEQ_LENS, layout=layout, **fp8), causal=True)


@pytest.mark.parametrize("missing", [("k_descale",), ("v_descale",), ("k_descale", "v_descale")], ids="_and_".join)
def test_a_descale_of_none_is_one(read_backend, rng, missing):
    descales = {"k_descale": cases.K_SCALE, "v_descale": cases.V_SCALE, **dict.fromkeys(missing, 1.0)}
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, kv_cache_dtype="fp8_e4m3", **descales)
    cases.check_varlen(read_backend, arguments, **dict.fromkeys(missing))


def test_descales_of_a_cache_that_is_not_fp8_change_nothing(read_backend, rng):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    cases.check_varlen(read_backend, arguments, k_descale=3.0, v_descale=np.full(1, 5.0, np.float32))


@pytest.mark.parametrize("kv_cache_dtype", cases.FP8_NAMES)
def test_float8_arrays_are_taken_as_their_codes(read_backend, rng, kv_cache_dtype):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, kv_cache_dtype=kv_cache_dtype)
    typed = {name: arguments[name].view(oracle.FP8_FORMATS[kv_cache_dtype]) for name in ("k", "v")}
    expected = cases.call_varlen(read_backend, arguments)
    for got, want in zip(cases.call_varlen(read_backend, arguments, **typed), expected, strict=True):
        cases.assert_same_bits(got, want)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 3, 7, 64])
def test_num_splits(read_backend, rng, layout, num_splits):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, layout=layout)
    cases.check_varlen(read_backend, arguments, num_splits=num_splits, causal=True)


def test_out_and_lse_out_are_filled(read_backend, rng):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    expected = cases.call_varlen(read_backend, arguments)
    buffers = [read_backend.put(np.full_like(array, np.nan)) for array in expected]
    returned = cases.call_varlen(read_backend, arguments, out=buffers[0], lse_out=buffers[1])
    for got, buffer, want in zip(returned, buffers, expected, strict=True):
        cases.assert_same_bits(got, want)
        cases.assert_same_bits(read_backend.get(buffer), want)


def test_without_return_softmax_lse_the_result_is_the_output_alone(read_backend, rng):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    expected, _ = cases.call_varlen(read_backend, arguments)
    out = pagedkv.flash_attn_varlen_func(**cases.put_all(read_backend, arguments))
    cases.assert_same_bits(read_backend.get(out), expected)


def test_workspace_may_hold_anything(read_backend, rng):
    arguments, options = cases.varlen(rng, QUERY_LENS, SEQ_LENS), {"num_splits": 3, "max_seqlen_k": 70}
    expected = cases.check_varlen(read_backend, arguments, **options)
    for garbage in (0, 0x7F, 0xFF):
        workspace = np.full(workspace_nbytes(arguments, 3), garbage, np.uint8)
        actual = cases.call_varlen(read_backend, arguments, **options, workspace=workspace)
        for got, want in zip(actual, expected, strict=True):
            cases.assert_same_bits(got, want)


def test_workspace_holds_a_state_for_each_split(rng):
    """An unnormalised output and an LSE, float32, of each split of each head of each token."""
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    nbytes = workspace_nbytes(arguments, 3)
    assert isinstance(nbytes, int)
    assert nbytes >= 3 * sum(QUERY_LENS) * 4 * (64 + 1) * 4


def workspace_nbytes(arguments, num_splits):
    num_tokens, num_heads, head_size = arguments["q"].shape
    sizes = {"num_tokens": num_tokens, "num_heads": num_heads, "head_size": head_size, "max_seq_len": 70}
    return pagedkv.workspace_nbytes("flash_attn_varlen_func", **sizes, num_splits=num_splits)
