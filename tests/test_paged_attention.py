"""Every option of the decode reads on the packed layout, against the oracle."""

import cases
import ml_dtypes
import numpy as np
import oracle
import pytest

import pagedkv

SEQ_LENS = [1, 15, 16, 17, 70]
SLOPES = np.array([1.0, 0.5, 0.11, 0.02], np.float32)
SINKS = np.array([0.5, -2.0, 3.0, 1.0], np.float32)
SCALE_FORMS = {
    "float": (0.04, 0.11),
    "one_element": (np.array([0.04], np.float32), np.array([0.11], np.float32)),
    "per_head": (np.array([0.02, 0.07], np.float32), np.array([0.3, 0.05], np.float32)),
    "numpy_scalar": (np.float32(0.04), np.float64(0.11)),
}


@pytest.mark.parametrize("dtype", cases.FLOATS.values(), ids=cases.FLOATS)
def test_dtypes(decode_backend, decode_op, rng, dtype):
    out, _ = cases.check_decode(decode_backend, decode_op, cases.decode(rng, SEQ_LENS, dtype=dtype))
    assert out.dtype == dtype


@pytest.mark.parametrize("scale", [0.0, 0.03, 0.7])
def test_scale(decode_backend, decode_op, rng, scale):
    cases.check_decode(decode_backend, decode_op, cases.decode(rng, SEQ_LENS), scale=scale)


@pytest.mark.parametrize("max_seq_len", [70, 71, 128, 5000])
def test_max_seq_len_is_only_a_hint(decode_backend, decode_op, rng, max_seq_len):
    cases.check_decode(decode_backend, decode_op, cases.decode(rng, SEQ_LENS), max_seq_len=max_seq_len)


def test_alibi(decode_backend, decode_op, rng):
    cases.check_decode(decode_backend, decode_op, cases.decode(rng, SEQ_LENS), alibi_slopes=SLOPES)


@pytest.mark.parametrize("softcap", [1.5, 30.0])
def test_softcap(decode_backend, decode_op, rng, softcap):
    """A scale that spreads the logits over several times the cap, so that the cap bends them."""
    cases.check_decode(decode_backend, decode_op, cases.decode(rng, SEQ_LENS), softcap=softcap, scale=softcap / 4)


@pytest.mark.parametrize("softcap", [1e3, 1e6, 1e30, 3e38])
def test_a_softcap_far_above_the_scores(decode_backend, decode_op, rng, softcap):
    """It bends nothing, and what rounding does to the hyperbolic tangent must not be magnified by it."""
    arguments = cases.decode(rng, SEQ_LENS, dtype=np.float32)
    cases.check_decode(decode_backend, decode_op, arguments, softcap=softcap)


@pytest.mark.parametrize("sink_dtype", [np.float32, np.float16], ids=["float32", "query_dtype"])
def test_sinks(decode_backend, decode_op, rng, sink_dtype):
    cases.check_decode(decode_backend, decode_op, cases.decode(rng, SEQ_LENS), sinks=SINKS.astype(sink_dtype))


@pytest.mark.parametrize("window_size", [(-1, -1), (20, -1), (20, 0), (20, 5), (-1, 0), (0, 0)])
def test_window_size(decode_backend, decode_op, rng, window_size):
    """A decode query is the last token, so that the right bound takes nothing away."""
    cases.check_decode(decode_backend, decode_op, cases.decode(rng, SEQ_LENS), window_size=window_size)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", cases.FP8_NAMES)
def test_kv_cache_dtype(decode_backend, decode_op, rng, kv_cache_dtype, dtype):
    arguments = cases.decode(rng, SEQ_LENS, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    cases.check_decode(decode_backend, decode_op, arguments)


@pytest.mark.parametrize("form", SCALE_FORMS)
def test_scales(decode_backend, decode_op, rng, form):
    k_scale, v_scale = SCALE_FORMS[form]
    arguments = cases.decode(rng, SEQ_LENS, kv_cache_dtype="fp8", k_scale=k_scale, v_scale=v_scale)
    cases.check_decode(decode_backend, decode_op, arguments)


@pytest.mark.parametrize("missing", [("k_scale",), ("v_scale",), ("k_scale", "v_scale")], ids="_and_".join)
def test_a_scale_of_none_is_one(decode_backend, decode_op, rng, missing):
    scales = {"k_scale": cases.K_SCALE, "v_scale": cases.V_SCALE, **dict.fromkeys(missing, 1.0)}
    arguments = cases.decode(rng, SEQ_LENS, kv_cache_dtype="fp8_e4m3", **scales)
    cases.check_decode(decode_backend, decode_op, arguments, **dict.fromkeys(missing))


def test_scales_of_a_cache_that_is_not_fp8_change_nothing(decode_backend, decode_op, rng):
    arguments = cases.decode(rng, SEQ_LENS)
    cases.check_decode(decode_backend, decode_op, arguments, k_scale=3.0, v_scale=np.full(1, 5.0, np.float32))


@pytest.mark.parametrize("kv_cache_dtype", cases.FP8_NAMES)
def test_float8_arrays_are_taken_as_their_codes(decode_backend, decode_op, rng, kv_cache_dtype):
    arguments = cases.decode(rng, SEQ_LENS, kv_cache_dtype=kv_cache_dtype)
    float8 = oracle.FP8_FORMATS[kv_cache_dtype]
    typed = {name: arguments[name].view(float8) for name in ("key_cache", "value_cache")}
    expected = cases.call_decode(decode_backend, decode_op, arguments)
    actual = cases.call_decode(decode_backend, decode_op, arguments, **typed)
    for got, want in zip(actual, expected, strict=True):
        cases.assert_same_bits(got, want)


def test_out_and_lse_out_are_filled(decode_backend, decode_op, rng):
    arguments = cases.decode(rng, SEQ_LENS)
    expected = cases.call_decode(decode_backend, decode_op, arguments)
    buffers = [decode_backend.put(np.full_like(array, np.nan)) for array in expected]
    returned = cases.call_decode(decode_backend, decode_op, arguments, out=buffers[0], lse_out=buffers[1])
    for got, buffer, want in zip(returned, buffers, expected, strict=True):
        cases.assert_same_bits(got, want)
        cases.assert_same_bits(decode_backend.get(buffer), want)


def test_without_return_lse_the_result_is_the_output_alone(decode_backend, decode_op, rng):
    arguments = cases.decode(rng, SEQ_LENS)
    expected, _ = cases.call_decode(decode_backend, decode_op, arguments)
    out = getattr(pagedkv, decode_op)(**cases.put_all(decode_backend, arguments))
    cases.assert_same_bits(decode_backend.get(out), expected)


@pytest.mark.parametrize("op", ["paged_attention_v2", "paged_attention"])
@pytest.mark.parametrize("partition_size", [16, 32, 64, 512])
def test_partition_size(decode_backend, rng, partition_size, op):
    arguments = cases.decode(rng, [1, 31, 32, 33, 65, 130])
    cases.check_decode(decode_backend, op, arguments, partition_size=partition_size)


def test_workspace_may_hold_anything(decode_backend, rng):
    arguments, options = cases.decode(rng, SEQ_LENS), {"max_seq_len": 70, "partition_size": 16}
    expected = cases.check_decode(decode_backend, "paged_attention_v2", arguments, **options)
    for garbage in (0, 0x7F, 0xFF):
        workspace = np.full(workspace_nbytes(arguments, **options), garbage, np.uint8)
        actual = cases.call_decode(decode_backend, "paged_attention_v2", arguments, **options, workspace=workspace)
        for got, want in zip(actual, expected, strict=True):
            cases.assert_same_bits(got, want)


def test_workspace_holds_a_state_for_each_partition(rng):
    """max_logit and exp_sum and an unnormalised output, float32, of each partition of each head of each sequence."""
    arguments = cases.decode(rng, SEQ_LENS)
    num_states = len(SEQ_LENS) * 4 * 5  # 70 tokens lie in five partitions of 16
    nbytes = workspace_nbytes(arguments, max_seq_len=70, partition_size=16)
    assert isinstance(nbytes, int)
    assert nbytes >= num_states * (64 + 2) * 4


def workspace_nbytes(arguments, **options):
    num_tokens, num_heads, head_size = arguments["query"].shape
    return pagedkv.workspace_nbytes(
        "paged_attention_v2", num_tokens=num_tokens, num_heads=num_heads, head_size=head_size, **options
    )


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "columns", "options", "chosen"),
    [
        (16, 8, 16, {}, "paged_attention_v1"),  # 128 kv heads, 256 tokens
        (17, 8, 16, {}, "paged_attention_v2"),
        (16, 8, 17, {}, "paged_attention_v2"),
        (16, 8, 1000, {"max_seq_len": 256}, "paged_attention_v1"),
        (16, 8, 1000, {"max_seq_len": np.int64(257)}, "paged_attention_v2"),
        (1, 1, 1, {"partition_size": None, "workspace": None}, "paged_attention_v1"),
        (1, 1, 1, {"partition_size": 16}, "paged_attention_v2"),
        (1, 1, 1, {"workspace": np.empty(10**8, np.uint8)}, "paged_attention_v2"),
    ],
)
def test_few_short_sequences_take_a_single_pass(monkeypatch, num_seqs, num_kv_heads, columns, options, chosen):
    arrays = (np.zeros((num_seqs, num_kv_heads, 8), np.float16), np.zeros((1, num_kv_heads, 1, 16, 8), np.float16))
    arrays += (np.zeros((1, num_kv_heads, 8, 16), np.float16), np.zeros((num_seqs, columns), np.int32))
    arrays += (np.ones(num_seqs, np.int32),)
    called = []
    for op in ("paged_attention_v1", "paged_attention_v2"):
        real = getattr(pagedkv.ops, op)

        def spy(*given, op=op, real=real, **options):
            called.append(op)
            return real(*given, **options)

        monkeypatch.setattr(pagedkv.ops, op, spy)
    out, lse = pagedkv.paged_attention(*arrays, **options, return_lse=True)
    assert called == [chosen]
    assert (out.shape, lse.shape) == ((num_seqs, num_kv_heads, 8), (num_kv_heads, num_seqs))


@pytest.mark.parametrize("wrong", [{"query": None}, {"value_cache": np.zeros(3)}, {"max_seq_len": "long"}], ids=str)
def test_errors_of_the_choice_are_those_of_the_ops(rng, wrong):
    arguments = cases.decode(rng, [5]) | wrong
    with pytest.raises((TypeError, ValueError)) as expected:
        pagedkv.paged_attention_v2(**arguments)
    with pytest.raises(type(expected.value)) as raised:
        pagedkv.paged_attention(**arguments)
    assert str(raised.value) == str(expected.value)
