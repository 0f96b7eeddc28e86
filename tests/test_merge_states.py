"""merge_attn_states: two attention states over disjoint keys make the state over all of them."""

import cases
import ml_dtypes
import numpy as np
import oracle
import pytest

import pagedkv

NAMES = ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse")
SINKS = np.array([0.5, -2.0, 3.0, 1.0], np.float32)


def states(rng, num_tokens=7, num_heads=3, head_size=40, dtype=np.float16):
    """The arguments of one merge, with LSEs apart enough that either side may dominate."""
    outputs = rng.standard_normal((2, num_tokens, num_heads, head_size)).astype(dtype)
    lses = (3 * rng.standard_normal((2, num_heads, num_tokens))).astype(np.float32)
    return dict(zip(NAMES, (outputs[0], lses[0], outputs[1], lses[1]), strict=True))


def merge(backend, arguments, **options):
    out, lse = pagedkv.merge_attn_states(**cases.put_all(backend, {**arguments, **options}))
    return backend.get(out), backend.get(lse)


def check_merge(backend, arguments):
    result = merge(backend, arguments)
    cases.assert_state_close(result, oracle.merge_states, arguments)
    return result


@pytest.mark.parametrize("dtype", cases.FLOATS.values(), ids=cases.FLOATS)
def test_dtypes(read_backend, rng, dtype):
    out, _ = check_merge(read_backend, states(rng, dtype=dtype))
    assert out.dtype == dtype


@pytest.mark.parametrize(("num_heads", "head_size"), [(1, 8), (5, 64), (71, 72), (8, 256)])
def test_head_sizes(read_backend, rng, num_heads, head_size):
    check_merge(read_backend, states(rng, num_heads=num_heads, head_size=head_size))


def test_no_tokens(read_backend, rng):
    out, lse = check_merge(read_backend, states(rng, num_tokens=0))
    assert out.shape == (0, 3, 40)
    assert lse.shape == (3, 0)


@pytest.mark.parametrize("infinity", [-np.inf, np.inf])
def test_one_side_empty(read_backend, rng, infinity):
    """An LSE of -inf, or of +inf, says that a side has no key: the other side passes through with every bit."""
    arguments = states(rng)
    arguments["prefix_lse"][:, 0] = infinity
    arguments["suffix_lse"][:, 1] = infinity
    out, lse = check_merge(read_backend, arguments)
    cases.assert_same_bits(out[0], arguments["suffix_output"][0])
    cases.assert_same_bits(out[1], arguments["prefix_output"][1])
    cases.assert_same_bits(lse[:, 0], arguments["suffix_lse"][:, 0])
    cases.assert_same_bits(lse[:, 1], arguments["prefix_lse"][:, 1])


@pytest.mark.parametrize("suffix", [-np.inf, np.inf])
@pytest.mark.parametrize("prefix", [-np.inf, np.inf])
def test_both_sides_empty(read_backend, rng, prefix, suffix):
    arguments = states(rng)
    arguments["prefix_lse"][1, 2], arguments["suffix_lse"][1, 2] = prefix, suffix
    out, lse = check_merge(read_backend, arguments)
    assert not out[2, 1].any()
    assert lse[1, 2] == -np.inf


@pytest.mark.parametrize("infinity", [-np.inf, np.inf])
def test_the_output_of_an_empty_side_is_never_read(read_backend, rng, infinity):
    """It may be memory that nobody wrote: a weight of 0 does not save a NaN."""
    arguments = states(rng)
    arguments["prefix_lse"][:, [0, 2]] = infinity
    arguments["suffix_lse"][:, [1, 2]] = infinity
    arguments["prefix_output"][[0, 2]] = np.nan
    arguments["suffix_output"][[1, 2]] = np.nan
    out, _ = check_merge(read_backend, arguments)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("offset", [6e4, -6e4])
def test_magnitude_of_lses(read_backend, rng, offset):
    """Only the difference of two LSEs may be exponentiated."""
    arguments = states(rng)
    for name in ("prefix_lse", "suffix_lse"):
        arguments[name] = (np.round(arguments[name] * 16) / 16 + np.float32(offset)).astype(np.float32)
    check_merge(read_backend, arguments)


def test_lses_far_apart(read_backend, rng):
    arguments = states(rng)
    arguments["prefix_lse"][0], arguments["suffix_lse"][0] = 500, -500
    arguments["prefix_lse"][1], arguments["suffix_lse"][1] = -1e38, 1e38
    out, lse = check_merge(read_backend, arguments)
    cases.assert_same_bits(out[:, 0], arguments["prefix_output"][:, 0])
    cases.assert_same_bits(out[:, 1], arguments["suffix_output"][:, 1])
    np.testing.assert_array_equal(lse[:2], [[500] * 7, [np.float32(1e38)] * 7])


def test_equal_lses_give_the_mean_and_add_the_natural_log_of_2(read_backend, rng):
    arguments = states(rng, dtype=np.float32)
    arguments["suffix_lse"] = arguments["prefix_lse"].copy()
    out, lse = check_merge(read_backend, arguments)
    np.testing.assert_allclose(out, (arguments["prefix_output"] + arguments["suffix_output"]) / 2, atol=1e-6)
    np.testing.assert_allclose(lse, arguments["prefix_lse"] + np.log(2), rtol=1e-6, atol=1e-6)


def test_transposed_lse_views(read_backend, rng):
    arguments = states(rng)
    expected = merge(read_backend, arguments)
    on_backend = cases.put_all(read_backend, arguments)
    for name in ("prefix_lse", "suffix_lse"):
        on_backend[name] = read_backend.put(np.ascontiguousarray(arguments[name].T)).T
    lse_out = read_backend.put(np.zeros((7, 3), np.float32)).T
    for got, want in zip(pagedkv.merge_attn_states(**on_backend, lse_out=lse_out), expected, strict=True):
        cases.assert_same_bits(read_backend.get(got), want)
    cases.assert_same_bits(read_backend.get(lse_out), expected[1])


def test_strided_heads(read_backend, rng):
    """Outputs as head ranges of wider tensors, each with strides of its own; what lies between stays as it was."""
    arguments = states(rng)
    expected = merge(read_backend, arguments)
    on_backend = cases.put_all(read_backend, arguments)
    for extra, name in enumerate(("prefix_output", "suffix_output"), start=1):
        wide = np.full((7, 3 + extra, 40), np.nan, np.float16)
        wide[:, extra:] = arguments[name]
        on_backend[name] = read_backend.put(wide)[:, extra:]
    wide_out = read_backend.put(np.full((7, 6, 40), 7, np.float16))
    for got, want in zip(pagedkv.merge_attn_states(**on_backend, out=wide_out[:, :3]), expected, strict=True):
        cases.assert_same_bits(read_backend.get(got), want)
    assert np.all(read_backend.get(wide_out)[:, 3:] == 7)


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("name", ["prefix_output", "suffix_output", "out"])
def test_unaligned_base_pointers(read_backend, rng, name, offset):
    arguments = states(rng)
    expected = merge(read_backend, arguments)
    on_backend = cases.put_all(read_backend, arguments | {"out": np.full((7, 3, 40), 7, np.float16)})
    room = np.zeros(7 * 3 * 40 + offset, np.float16)
    room[offset:] = read_backend.get(on_backend[name]).ravel()
    on_backend[name] = read_backend.put(room)[offset:].reshape(7, 3, 40)
    for got, want in zip(pagedkv.merge_attn_states(**on_backend), expected, strict=True):
        cases.assert_same_bits(read_backend.get(got), want)


def test_out_and_lse_out_are_filled(read_backend, rng):
    arguments = states(rng)
    expected = merge(read_backend, arguments)
    buffers = [read_backend.put(np.full_like(array, np.nan)) for array in expected]
    merge(read_backend, arguments, out=buffers[0], lse_out=buffers[1])
    for buffer, want in zip(buffers, expected, strict=True):
        cases.assert_same_bits(read_backend.get(buffer), want)


def test_inputs_are_left_alone(read_backend, rng):
    arguments = states(rng)
    before = {name: array.copy() for name, array in arguments.items()}
    merge(read_backend, arguments)
    for name, array in arguments.items():
        cases.assert_same_bits(array, before[name])


def test_the_merge_of_two_parts_is_attention_over_the_whole(read_backend, rng):
    """A cascade: a shared prefix and each sequence's own suffix, in float32. The sink goes to one of the two calls."""
    prefix_len, suffix_lens, query_lens = 32, [9, 1, 20], [4, 1, 20]
    whole = cases.varlen(rng, query_lens, [prefix_len + n for n in suffix_lens], dtype=np.float32)
    prefix = {
        "block_table": whole["block_table"][:, : prefix_len // 16],
        "seqused_k": np.full(3, prefix_len, np.int32),
    }
    suffix = {"block_table": whole["block_table"][:, prefix_len // 16 :], "seqused_k": np.array(suffix_lens, np.int32)}
    prefix_state = cases.call_varlen(read_backend, whole, **prefix, s_aux=SINKS)
    suffix_state = cases.call_varlen(read_backend, whole, **suffix, causal=True)
    merged = merge(read_backend, dict(zip(NAMES, (*prefix_state, *suffix_state), strict=True)))
    cases.assert_state_close(merged, oracle.varlen_attention, {**whole, "causal": True, "s_aux": SINKS})


MISTAKES = {
    "suffix_of_fewer_tokens": (("suffix_output", lambda a: a[:-1]), ValueError),
    "suffix_of_fewer_heads": (("suffix_output", lambda a: a[:, 1:]), ValueError),
    "suffix_of_another_dtype": (("suffix_output", lambda a: a.astype(ml_dtypes.bfloat16)), TypeError),
    "prefix_of_float64": (("prefix_output", lambda a: a.astype(np.float64)), TypeError),
    "prefix_of_two_axes": (("prefix_output", lambda a: a[0]), ValueError),
    "prefix_with_a_strided_last_axis": (("prefix_output", np.asfortranarray), ValueError),
    "lse_token_by_head": (("prefix_lse", np.transpose), ValueError),
    "lse_of_fewer_tokens": (("suffix_lse", lambda a: a[:, 1:]), ValueError),
    "lse_of_float64": (("suffix_lse", lambda a: a.astype(np.float64)), TypeError),
    "out_of_another_dtype": (("out", lambda _: np.zeros((7, 3, 40), np.float32)), TypeError),
    "out_of_another_shape": (("out", lambda _: np.zeros((3, 7, 40), np.float16)), ValueError),
    "lse_out_of_another_shape": (("lse_out", lambda _: np.zeros((7, 3), np.float32)), ValueError),
    "lse_out_of_float16": (("lse_out", lambda _: np.zeros((3, 7), np.float16)), TypeError),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(read_backend, rng, mistake):
    (name, function), error = MISTAKES[mistake]
    arguments = {**states(rng), "out": np.full((7, 3, 40), 7, np.float16)}
    wrong = {**arguments, name: function(arguments.get(name))}
    with pytest.raises(error, match=rf"^{name}: "):
        merge(read_backend, wrong)
    assert np.all(arguments["out"] == 7)


@pytest.mark.parametrize("target", ["out", "lse_out"])
def test_read_only_outputs(read_backend, rng, target):
    if read_backend.name == "cuda":
        pytest.skip("CuPy has no read-only arrays")
    arguments = states(rng)
    locked = {"out": np.zeros((7, 3, 40), np.float16), "lse_out": np.zeros((3, 7), np.float32)}[target]
    locked.flags.writeable = False
    with pytest.raises(ValueError, match=rf"^{target}: "):
        merge(read_backend, arguments, **{target: locked})
    assert not locked.any()
