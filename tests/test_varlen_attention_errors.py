"""Mistakes in a varlen call: each raises an error that names the argument, before anything is written."""

import cases
import ml_dtypes
import numpy as np
import pytest

import pagedkv

QUERY_LENS, SEQ_LENS = [1, 5, 0, 17], [40, 5, 9, 30]


def change(name, function):
    """The arguments with one of them replaced by a function of itself."""
    return lambda arguments: {name: function(arguments[name])}


def give(**options):
    return lambda _: options


def both_caches(function):
    return lambda arguments: {name: function(arguments[name]) for name in ("k", "v")}


# what is wrong -> (the change to a right call, the error, the argument its message starts with)
MISTAKES = {
    "three_table_rows_for_four_lengths": (change("block_table", lambda a: a[:3]), ValueError, "block_table|seqused_k"),
    "three_lengths_for_four_sequences": (
        change("seqused_k", lambda a: a[:3]),
        ValueError,
        "seqused_k|block_table|cu_seqlens_q",
    ),
    "four_starts_for_four_sequences": (change("cu_seqlens_q", lambda a: a[:4]), ValueError, "cu_seqlens_q"),
    "starts_that_fall": (give(cu_seqlens_q=np.array([0, 6, 1, 6, 23], np.int32)), ValueError, "cu_seqlens_q"),
    "starts_past_the_queries": (give(cu_seqlens_q=np.array([0, 1, 6, 6, 24], np.int32)), ValueError, "cu_seqlens_q"),
    "starts_of_float": (change("cu_seqlens_q", lambda a: a.astype(np.float32)), TypeError, "cu_seqlens_q"),
    "starts_of_unsigned": (change("cu_seqlens_q", lambda a: a.astype(np.uint32)), TypeError, "cu_seqlens_q"),
    "lengths_of_bool": (change("seqused_k", lambda a: a > 0), TypeError, "seqused_k"),
    "lengths_of_unsigned": (change("seqused_k", lambda a: a.astype(np.uint64)), TypeError, "seqused_k"),
    "table_of_bool": (change("block_table", lambda a: a > 0), TypeError, "block_table"),
    "table_of_unsigned": (change("block_table", lambda a: a.astype(np.uint32)), TypeError, "block_table"),
    "flat_table": (change("block_table", np.ravel), ValueError, "block_table"),
    "a_length_below_zero": (give(seqused_k=np.array([40, 5, -1, 30], np.int32)), ValueError, "seqused_k"),
    "a_length_past_the_table": (give(seqused_k=np.array([40, 500, 9, 30], np.int32)), IndexError, "seqused_k"),
    "max_seqlen_q_below_a_count": (give(max_seqlen_q=16), ValueError, "max_seqlen_q"),
    "max_seqlen_k_below_a_length": (give(max_seqlen_k=39), ValueError, "max_seqlen_k"),
    "q_without_heads_axis": (change("q", lambda a: a[:, 0]), ValueError, "q"),
    "q_of_another_head_size": (change("q", lambda a: a[..., :56]), ValueError, "q"),
    "heads_that_kv_heads_do_not_divide": (change("q", lambda a: a[:, :3]), ValueError, "q|num_heads"),
    "q_with_a_strided_last_axis": (change("q", np.asfortranarray), ValueError, "q"),
    "q_of_float64": (change("q", lambda a: a.astype(np.float64)), TypeError, "q"),
    "caches_of_another_dtype": (both_caches(lambda a: a.astype(ml_dtypes.bfloat16)), TypeError, "k"),
    "v_of_another_dtype": (change("v", lambda a: a.astype(ml_dtypes.bfloat16)), TypeError, "v"),
    "v_of_fewer_blocks": (change("v", lambda a: a[:-1]), ValueError, "k|v"),
    "v_of_another_head_size": (change("v", lambda a: a[..., :56]), ValueError, "k|v|q"),
    "caches_of_five_axes": (both_caches(lambda a: a[None]), ValueError, "k"),
    "caches_with_a_strided_last_axis": (both_caches(np.asfortranarray), ValueError, "k"),
    "unknown_layout": (give(layout="packed"), ValueError, "layout"),
    "softmax_scale_of_nan": (give(softmax_scale=float("nan")), ValueError, "softmax_scale"),
    "softcap_below_zero": (give(softcap=-1.0), ValueError, "softcap"),
    "window_of_one_number": (give(window_size=16), ValueError, "window_size"),
    "window_below_minus_one": (give(window_size=(-2, 0)), ValueError, "window_size"),
    "num_splits_below_zero": (give(num_splits=-1), ValueError, "num_splits"),
    "slopes_of_three_heads": (give(alibi_slopes=np.zeros(3, np.float32)), ValueError, "alibi_slopes"),
    "slopes_of_float16": (give(alibi_slopes=np.zeros(4, np.float16)), TypeError, "alibi_slopes"),
    "s_aux_of_three_heads": (give(s_aux=np.zeros(3, np.float32)), ValueError, "s_aux"),
    "s_aux_of_float64": (give(s_aux=np.zeros(4, np.float64)), TypeError, "s_aux"),
    "unknown_kv_cache_dtype": (give(kv_cache_dtype="fp4"), ValueError, "kv_cache_dtype"),
    "fp8_on_float16_caches": (give(kv_cache_dtype="fp8"), TypeError, "k"),
    "out_of_another_dtype": (give(out=np.zeros((23, 4, 64), np.float32)), TypeError, "out"),
    "out_of_another_shape": (give(out=np.zeros((22, 4, 64), np.float16)), ValueError, "out"),
    "lse_out_of_float16": (give(lse_out=np.zeros((4, 23), np.float16)), TypeError, "lse_out"),
    "lse_out_of_another_shape": (give(lse_out=np.zeros((23, 4), np.float32)), ValueError, "lse_out"),
}
FP8_MISTAKES = {
    "uint8_with_auto": (give(kv_cache_dtype="auto"), TypeError, "k"),
    "k_descale_of_three_heads": (give(k_descale=np.ones(3, np.float32)), ValueError, "k_descale"),
    "v_descale_of_three_heads": (give(v_descale=np.ones(3, np.float32)), ValueError, "v_descale"),
    "k_descale_of_float64": (give(k_descale=np.ones(1, np.float64)), TypeError, "k_descale"),
    "v_descale_of_zero": (give(v_descale=0.0), ValueError, "v_descale"),
}


FLOAT8_MISTAKES = {
    "of_the_other_format": (both_caches(lambda a: a.view(ml_dtypes.float8_e5m2)), "k"),
    "keys_beside_uint8_values": (change("k", lambda a: a.view(ml_dtypes.float8_e5m2)), "k|v"),
}


def assert_raises_before_writing(backend, arguments, error, name):
    """The error names the argument, and a given output keeps every bit. Indices on a device are checked as well."""
    out = np.full(arguments["q"].shape, 7, np.float16)
    given = cases.put_all(backend, {"out": out, **arguments})
    with pagedkv.checked(), pytest.raises(error, match=rf"^({name}): "):
        pagedkv.flash_attn_varlen_func(**given)
    assert np.all(backend.get(given["out"]) == (0 if "out" in arguments else 7))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(read_backend, rng, mistake):
    wrong, error, name = MISTAKES[mistake]
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    assert_raises_before_writing(read_backend, {**arguments, **wrong(arguments)}, error, name)


@pytest.mark.parametrize("mistake", FP8_MISTAKES)
def test_mistakes_with_fp8(read_backend, rng, mistake):
    wrong, error, name = FP8_MISTAKES[mistake]
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, kv_cache_dtype="fp8")
    assert_raises_before_writing(read_backend, {**arguments, **wrong(arguments)}, error, name)


@pytest.mark.parametrize("mistake", FLOAT8_MISTAKES)
def test_mistakes_with_float8_arrays(host_backend, rng, mistake):
    """Of host arrays: CuPy has no float8."""
    wrong, name = FLOAT8_MISTAKES[mistake]
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, kv_cache_dtype="fp8")
    assert_raises_before_writing(host_backend, {**arguments, **wrong(arguments)}, (TypeError, ValueError), name)


@pytest.mark.parametrize("kv_cache_dtype", cases.FP8_NAMES)
def test_a_float32_query_on_an_fp8_cache_is_not_built(read_backend, rng, kv_cache_dtype):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, dtype=np.float32, kv_cache_dtype=kv_cache_dtype)
    with pytest.raises(NotImplementedError, match=r"^q: "):
        cases.call_varlen(read_backend, arguments)


@pytest.mark.parametrize("head_size", [4, 12, 100, 264])
def test_head_sizes_that_are_not_a_multiple_of_8_up_to_256(read_backend, rng, head_size):
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS, head_size=head_size)
    with pytest.raises((ValueError, NotImplementedError), match=r"^head_size: "):
        cases.call_varlen(read_backend, arguments)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("block_id", [-1, "num_blocks", 2**31 - 1])
def test_a_visible_block_outside_the_pool(read_backend, rng, block_id, num_splits):
    arguments = {**cases.varlen(rng, QUERY_LENS, SEQ_LENS), "num_splits": num_splits}
    arguments["block_table"][3, 1] = len(arguments["k"]) if block_id == "num_blocks" else block_id
    assert_raises_before_writing(read_backend, arguments, IndexError, "block_table")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v", "block_table", "seqused_k", "cu_seqlens_q"])
def test_arrays_on_two_devices(rng, name):
    import cupy

    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    arguments[name] = cupy.asarray(arguments[name])
    with pytest.raises(TypeError, match=r"^(k|v|block_table|seqused_k|cu_seqlens_q): "):
        pagedkv.flash_attn_varlen_func(**arguments)


@pytest.mark.parametrize("target", ["out", "lse_out"])
def test_read_only_outputs(read_backend, rng, target):
    if read_backend.name == "cuda":
        pytest.skip("CuPy has no read-only arrays")
    arguments = cases.varlen(rng, QUERY_LENS, SEQ_LENS)
    out, lse = cases.call_varlen(read_backend, arguments)
    locked = {"out": np.zeros_like(out), "lse_out": np.zeros_like(lse)}[target]
    locked.flags.writeable = False
    with pytest.raises(ValueError, match=rf"^{target}: "):
        cases.call_varlen(read_backend, arguments, **{target: locked})
    assert not locked.any()


@pytest.mark.parametrize("workspace", ["one byte short", "empty", "float32"])
def test_workspaces_that_do_not_do(read_backend, rng, workspace):
    arguments = {**cases.varlen(rng, QUERY_LENS, SEQ_LENS), "num_splits": 3, "max_seqlen_k": 40}
    sizes = {"num_tokens": 23, "num_heads": 4, "head_size": 64, "max_seq_len": 40}
    nbytes = pagedkv.workspace_nbytes("flash_attn_varlen_func", **sizes, num_splits=3)
    array, error = {
        "one byte short": (np.zeros(nbytes - 1, np.uint8), ValueError),
        "empty": (np.zeros(0, np.uint8), ValueError),
        "float32": (np.zeros(nbytes, np.float32), TypeError),
    }[workspace]
    assert_raises_before_writing(read_backend, {**arguments, "workspace": array}, error, "workspace")
