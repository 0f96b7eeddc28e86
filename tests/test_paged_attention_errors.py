"""Mistakes in a decode call: each raises an error that names the argument, before anything is written."""

import cases
import ml_dtypes
import numpy as np
import pytest

import pagedkv

SEQ_LENS = [0, 16, 17, 40]


def change(name, function):
    """The arguments with one of them replaced by a function of itself."""
    return lambda arguments: {name: function(arguments[name])}


def give(**options):
    return lambda _: options


def both_caches(function):
    return lambda arguments: {name: function(arguments[name]) for name in ("key_cache", "value_cache")}


# what is wrong -> (the change to a right call, the error, the argument its message starts with)
MISTAKES = {
    "three_table_rows_for_four_lengths": (
        change("block_tables", lambda a: a[:3]),
        ValueError,
        "block_tables|seq_lens",
    ),
    "three_lengths_for_four_queries": (change("seq_lens", lambda a: a[:3]), ValueError, "seq_lens|block_tables"),
    "three_queries_for_four_lengths": (change("query", lambda a: a[:3]), ValueError, "query|seq_lens"),
    "flat_table": (change("block_tables", np.ravel), ValueError, "block_tables"),
    "query_without_heads_axis": (change("query", lambda a: a[:, 0]), ValueError, "query"),
    "query_of_another_head_size": (change("query", lambda a: a[..., :56]), ValueError, "query"),
    "heads_that_kv_heads_do_not_divide": (change("query", lambda a: a[:, :3]), ValueError, "query|num_heads"),
    "query_with_a_strided_last_axis": (change("query", np.asfortranarray), ValueError, "query"),
    "query_of_float64": (change("query", lambda a: a.astype(np.float64)), TypeError, "query"),
    "query_that_is_a_list": (change("query", np.ndarray.tolist), TypeError, "query"),
    "caches_of_another_dtype": (
        both_caches(lambda a: a.astype(ml_dtypes.bfloat16)),
        TypeError,
        "key_cache",
    ),
    "value_cache_of_another_dtype": (
        change("value_cache", lambda a: a.astype(ml_dtypes.bfloat16)),
        TypeError,
        "value_cache",
    ),
    "value_cache_of_fewer_heads": (change("value_cache", lambda a: a[:, :1]), ValueError, "key_cache|value_cache"),
    "value_cache_of_fewer_blocks": (change("value_cache", lambda a: a[:-1]), ValueError, "key_cache|value_cache"),
    "value_cache_of_another_head_size": (
        change("value_cache", lambda a: np.ascontiguousarray(a[:, :, :56])),
        ValueError,
        "key_cache|value_cache|query",
    ),
    "caches_with_strided_inner_axes": (both_caches(np.asfortranarray), ValueError, "key_cache"),
    "table_of_bool": (change("block_tables", lambda a: a > 0), TypeError, "block_tables"),
    "table_of_unsigned": (change("block_tables", lambda a: a.astype(np.uint32)), TypeError, "block_tables"),
    "table_of_float": (change("block_tables", lambda a: a.astype(np.float32)), TypeError, "block_tables"),
    "lengths_of_bool": (change("seq_lens", lambda a: a > 0), TypeError, "seq_lens"),
    "lengths_of_unsigned": (change("seq_lens", lambda a: a.astype(np.uint64)), TypeError, "seq_lens"),
    "max_seq_len_below_a_length": (give(max_seq_len=39), ValueError, "max_seq_len"),
    "max_seq_len_below_zero": (give(max_seq_len=-1), ValueError, "max_seq_len"),
    "scale_of_nan": (give(scale=float("nan")), ValueError, "scale"),
    "softcap_below_zero": (give(softcap=-1.0), ValueError, "softcap"),
    "window_of_one_number": (give(window_size=16), ValueError, "window_size"),
    "window_below_minus_one": (give(window_size=(-2, 0)), ValueError, "window_size"),
    "slopes_of_three_heads": (give(alibi_slopes=np.zeros(3, np.float32)), ValueError, "alibi_slopes"),
    "slopes_of_float16": (give(alibi_slopes=np.zeros(4, np.float16)), TypeError, "alibi_slopes"),
    "sinks_of_three_heads": (give(sinks=np.zeros(3, np.float32)), ValueError, "sinks"),
    "sinks_of_float64": (give(sinks=np.zeros(4, np.float64)), TypeError, "sinks"),
    "unknown_kv_cache_dtype": (give(kv_cache_dtype="fp4"), ValueError, "kv_cache_dtype"),
    "fp8_on_float16_caches": (give(kv_cache_dtype="fp8"), TypeError, "key_cache"),
    "out_of_another_dtype": (give(out=np.zeros((4, 4, 64), np.float32)), TypeError, "out"),
    "out_of_another_shape": (give(out=np.zeros((4, 4, 32), np.float16)), ValueError, "out"),
    "lse_out_of_float16": (give(lse_out=np.zeros((4, 4), np.float16)), TypeError, "lse_out"),
    "lse_out_of_another_shape": (give(lse_out=np.zeros((3, 4), np.float32)), ValueError, "lse_out"),
}
FP8_MISTAKES = {
    "uint8_with_auto": (give(kv_cache_dtype="auto"), TypeError, "key_cache"),
    "k_scale_of_three_heads": (give(k_scale=np.ones(3, np.float32)), ValueError, "k_scale"),
    "v_scale_of_three_heads": (give(v_scale=np.ones(3, np.float32)), ValueError, "v_scale"),
    "k_scale_of_float64": (give(k_scale=np.ones(1, np.float64)), TypeError, "k_scale"),
    "v_scale_of_zero": (give(v_scale=0.0), ValueError, "v_scale"),
}
FLOAT8_MISTAKES = {
    "of_the_other_format": (both_caches(lambda a: a.view(ml_dtypes.float8_e5m2)), "key_cache"),
    "keys_beside_uint8_values": (
        change("key_cache", lambda a: a.view(ml_dtypes.float8_e5m2)),
        "key_cache|value_cache",
    ),
}


def assert_raises_before_writing(backend, op, arguments, error, name):
    """The error names the argument, and a given output keeps every bit. Indices on a device are checked as well."""
    out = np.full(np.shape(arguments["query"]), 7, np.float16)
    given = cases.put_all(backend, {"out": out, **arguments})
    with pagedkv.checked(), pytest.raises(error, match=rf"^({name}): "):
        getattr(pagedkv, op)(**given)
    assert np.all(backend.get(given["out"]) == (0 if "out" in arguments else 7))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(decode_backend, decode_op, rng, mistake):
    wrong, error, name = MISTAKES[mistake]
    arguments = cases.decode(rng, SEQ_LENS)
    assert_raises_before_writing(decode_backend, decode_op, {**arguments, **wrong(arguments)}, error, name)


@pytest.mark.parametrize("mistake", FP8_MISTAKES)
def test_mistakes_with_fp8(decode_backend, decode_op, rng, mistake):
    wrong, error, name = FP8_MISTAKES[mistake]
    arguments = cases.decode(rng, SEQ_LENS, kv_cache_dtype="fp8")
    assert_raises_before_writing(decode_backend, decode_op, {**arguments, **wrong(arguments)}, error, name)


@pytest.mark.parametrize("mistake", FLOAT8_MISTAKES)
def test_mistakes_with_float8_arrays(host_backend, decode_op, rng, mistake):
    """Of host arrays: CuPy has no float8."""
    wrong, name = FLOAT8_MISTAKES[mistake]
    arguments = cases.decode(rng, SEQ_LENS, kv_cache_dtype="fp8")
    arguments |= wrong(arguments)
    assert_raises_before_writing(host_backend, decode_op, arguments, (TypeError, ValueError), name)


@pytest.mark.parametrize("kv_cache_dtype", cases.FP8_NAMES)
def test_a_float32_query_on_an_fp8_cache_is_not_built(decode_backend, decode_op, rng, kv_cache_dtype):
    arguments = cases.decode(rng, SEQ_LENS, dtype=np.float32, kv_cache_dtype=kv_cache_dtype)
    with pytest.raises(NotImplementedError, match=r"^query: "):
        cases.call_decode(decode_backend, decode_op, arguments)


@pytest.mark.parametrize(
    ("head_size", "kv_cache_dtype"), [(8, "fp8"), (40, "fp8"), (72, "fp8_e5m2"), (4, "auto"), (12, "auto")]
)
def test_head_sizes_that_the_packed_layout_cannot_hold(decode_backend, decode_op, rng, head_size, kv_cache_dtype):
    """Not a multiple of x, the elements in 16 bytes; or, with x = 4 of float32, not one of 8."""
    dtype = np.float32 if kv_cache_dtype == "auto" else np.float16
    x = 4 if kv_cache_dtype == "auto" else 16
    arguments = cases.decode(
        rng, SEQ_LENS, head_size=-(-head_size // x) * x, dtype=dtype, kv_cache_dtype=kv_cache_dtype
    )
    arguments["query"] = arguments["query"][..., :head_size]
    arguments["value_cache"] = np.ascontiguousarray(arguments["value_cache"][:, :, :head_size])
    with pytest.raises(ValueError, match=r"^(head_size|key_cache|value_cache): "):
        cases.call_decode(decode_backend, decode_op, arguments)


def test_head_sizes_above_256(decode_backend, decode_op, rng):
    with pytest.raises((ValueError, NotImplementedError), match=r"^head_size: "):
        cases.call_decode(decode_backend, decode_op, cases.decode(rng, SEQ_LENS, head_size=264))


@pytest.mark.parametrize("block_size", [1, 4, 17, 24, 512])
def test_block_sizes_that_the_packed_layout_does_not_have(decode_backend, decode_op, rng, block_size):
    with pytest.raises(ValueError, match=r"^block_size: "):
        cases.call_decode(decode_backend, decode_op, cases.decode(rng, SEQ_LENS, block_size=block_size))


@pytest.mark.parametrize("block_id", [-1, "num_blocks", 2**31 - 1])
def test_a_visible_block_outside_the_pool(decode_backend, decode_op, rng, block_id):
    arguments = cases.decode(rng, SEQ_LENS)
    arguments["block_tables"][3, 2] = len(arguments["key_cache"]) if block_id == "num_blocks" else block_id
    assert_raises_before_writing(decode_backend, decode_op, arguments, IndexError, "block_tables")


@pytest.mark.parametrize(("seq_len", "error"), [(-1, ValueError), (1000, IndexError)])
def test_a_length_below_zero_or_past_the_table(decode_backend, decode_op, rng, seq_len, error):
    arguments = cases.decode(rng, SEQ_LENS)
    arguments["seq_lens"][1] = seq_len
    assert_raises_before_writing(decode_backend, decode_op, arguments, error, "seq_lens")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["key_cache", "value_cache", "block_tables", "seq_lens", "k_scale"])
def test_arrays_on_two_devices(decode_op, rng, name):
    import cupy

    k_scale, v_scale = np.array([0.02, 0.07], np.float32), np.array([0.3, 0.05], np.float32)
    arguments = cases.decode(rng, SEQ_LENS, kv_cache_dtype="fp8", k_scale=k_scale, v_scale=v_scale)
    arguments[name] = cupy.asarray(arguments[name])
    with pytest.raises(TypeError, match=r"^(key_cache|value_cache|block_tables|seq_lens|k_scale|v_scale): "):
        getattr(pagedkv, decode_op)(**arguments)


@pytest.mark.parametrize("target", ["out", "lse_out"])
def test_read_only_outputs(decode_backend, decode_op, rng, target):
    if decode_backend.name == "cuda":
        pytest.skip("CuPy has no read-only arrays")
    arguments = cases.decode(rng, SEQ_LENS)
    out, lse = cases.call_decode(decode_backend, decode_op, arguments)
    locked = {"out": np.zeros_like(out), "lse_out": np.zeros_like(lse)}[target]
    locked.flags.writeable = False
    with pytest.raises(ValueError, match=rf"^{target}: "):
        cases.call_decode(decode_backend, decode_op, arguments, **{target: locked})
    assert not locked.any()


@pytest.mark.parametrize("partition_size", [0, -16])
def test_partition_sizes_below_one(decode_backend, rng, partition_size):
    with pytest.raises(ValueError, match=r"^partition_size: "):
        cases.call_decode(
            decode_backend, "paged_attention_v2", cases.decode(rng, SEQ_LENS), partition_size=partition_size
        )


@pytest.mark.parametrize("partition_size", [None, 16])
@pytest.mark.parametrize("workspace", ["one byte short", "empty", "float32", "two axes"])
def test_workspaces_that_do_not_do(decode_backend, rng, workspace, partition_size):
    arguments, options = cases.decode(rng, SEQ_LENS), {"max_seq_len": 40, "partition_size": partition_size}
    nbytes = pagedkv.workspace_nbytes("paged_attention_v2", num_tokens=4, num_heads=4, head_size=64, **options)
    array, error = {
        "one byte short": (np.zeros(nbytes - 1, np.uint8), ValueError),
        "empty": (np.zeros(0, np.uint8), ValueError),
        "float32": (np.zeros(nbytes, np.float32), TypeError),
        "two axes": (np.zeros((2, nbytes), np.uint8), ValueError),
    }[workspace]
    wrong = {**arguments, **options, "workspace": array}
    assert_raises_before_writing(decode_backend, "paged_attention_v2", wrong, error, "workspace")


def test_workspace_nbytes_of_an_unknown_op():
    with pytest.raises(ValueError, match=r"^op: "):
        pagedkv.workspace_nbytes("paged_attention_v3", num_tokens=4, num_heads=4, head_size=64, max_seq_len=40)
