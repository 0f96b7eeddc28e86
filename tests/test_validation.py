"""Checks that hold for every op: devices, options and sizes, and what each error names."""

import numpy as np
import pytest

import pagedkv
from pagedkv import arrays, kernels


class Elsewhere(np.ndarray):
    """An array that claims to lie on a CUDA device; validation must stop before anyone looks."""


@pytest.fixture
def elsewhere(monkeypatch):
    """Turns an array into one that is seen on cuda:0."""
    original = arrays._view_numpy

    def on_device(array, name):
        seen = original(array, name)
        seen.device = 0 if isinstance(array, Elsewhere) else seen.device
        return seen

    arrays._reader.cache_clear()
    monkeypatch.setattr(arrays, "_view_numpy", on_device)
    yield lambda array: array.view(Elsewhere)
    arrays._reader.cache_clear()


def write_arguments():
    rows = np.zeros((5, 2, 32), np.float16)
    caches = [np.zeros((4, 16, 2, 32), np.uint8) for _ in "kv"]
    scales = {"k_scale": np.ones(2, np.float32), "v_scale": np.ones(2, np.float32)}
    return {
        "key": rows,
        "value": rows.copy(),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slot_mapping": np.arange(5),
        "kv_cache_dtype": "fp8",
        **scales,
    }


def decode_arguments():
    return {
        "query": np.zeros((2, 4, 32), np.float16),
        "key_cache": np.zeros((4, 2, 2, 16, 16), np.uint8),
        "value_cache": np.zeros((4, 2, 32, 16), np.uint8),
        "block_tables": np.zeros((2, 2), np.int32),
        "seq_lens": np.ones(2, np.int32),
        "alibi_slopes": np.zeros(4, np.float32),
        "sinks": np.zeros(4, np.float32),
        "out": np.zeros((2, 4, 32), np.float16),
        "lse_out": np.zeros((4, 2), np.float32),
        "workspace": np.zeros(1 << 16, np.uint8),
        "partition_size": 16,
        "kv_cache_dtype": "fp8",
        "k_scale": np.ones(2, np.float32),
        "v_scale": np.ones(2, np.float32),
    }


def varlen_arguments():
    return {
        "q": np.zeros((3, 4, 32), np.float16),
        "k": np.zeros((4, 16, 2, 32), np.float16),
        "v": np.zeros((4, 16, 2, 32), np.float16),
        "cu_seqlens_q": np.array([0, 1, 3], np.int32),
        "seqused_k": np.array([4, 5], np.int32),
        "block_table": np.zeros((2, 2), np.int32),
        "alibi_slopes": np.zeros(4, np.float32),
        "s_aux": np.zeros(4, np.float32),
        "out": np.zeros((3, 4, 32), np.float16),
        "lse_out": np.zeros((4, 3), np.float32),
        "workspace": np.zeros(1 << 23, np.uint8),
    }


def merge_arguments():
    output, lse = np.zeros((3, 4, 32), np.float16), np.zeros((4, 3), np.float32)
    names = ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "out", "lse_out")
    return dict(zip(names, (array.copy() for array in (output, lse) * 3), strict=True))


OPS = {
    "reshape_and_cache_flash": write_arguments,
    "paged_attention_v2": decode_arguments,
    "flash_attn_varlen_func": varlen_arguments,
    "merge_attn_states": merge_arguments,
}
PLACES = [
    (op, name)
    for op, arguments in OPS.items()
    for name, value in arguments().items()
    if isinstance(value, np.ndarray) and name != next(iter(arguments()))
]


@pytest.mark.parametrize("op", OPS)
def test_the_arguments_used_here_are_right(op):
    getattr(pagedkv, op)(**OPS[op]())


@pytest.mark.parametrize(("op", "name"), PLACES, ids="-".join)
def test_every_array_is_on_the_device_of_the_first(elsewhere, op, name):
    given = OPS[op]()
    given[name] = elsewhere(given[name])
    with pytest.raises(TypeError, match=r"expected an array on (cpu|cuda:0) like \w+, got (cuda:0|cpu)"):
        getattr(pagedkv, op)(**given)


RISE = "cu_seqlens_q: expected starts that rise from 0"
HALF = np.zeros(1 << 17, np.uint8)[::2]
WRONG_OPTIONS = [
    ("paged_attention_v2", "sinks", np.zeros(4, np.float64), TypeError, "sinks: expected float32 or float16"),
    ("paged_attention_v2", "max_seq_len", -1, ValueError, "max_seq_len: expected at least 0, got -1"),
    ("paged_attention_v2", "max_seq_len", 1.5, TypeError, "max_seq_len: expected an integer or None, got 1.5"),
    ("paged_attention_v2", "partition_size", 0, ValueError, "partition_size: expected at least 1, got 0"),
    ("paged_attention_v2", "window_size", (True, 0), TypeError, "window_size: expected an integer or None, got True"),
    ("paged_attention_v2", "window_size", (-2, 0), ValueError, "window_size: expected at least -1, got -2"),
    ("paged_attention_v2", "window_size", 3, ValueError, r"window_size: expected \(left, right\)"),
    ("paged_attention_v2", "softcap", -1, ValueError, "softcap: expected a number, 0 for none, got -1"),
    ("paged_attention_v2", "softcap", 1e39, ValueError, "softcap: expected a number, 0 for none"),
    ("paged_attention_v2", "softcap", 1e-50, ValueError, "softcap: expected 0 or a number in float32's normal range"),
    ("paged_attention_v2", "softcap", True, TypeError, "softcap: expected a number, 0 for none, got True"),
    ("paged_attention_v2", "scale", float("nan"), ValueError, "scale: expected a finite number or None, got nan"),
    ("paged_attention_v2", "scale", 2**200, ValueError, "scale: expected a finite number or None"),
    ("paged_attention_v2", "workspace", HALF, ValueError, "workspace: expected last axis"),
    ("paged_attention_v2", "workspace", HALF.reshape(2, -1), ValueError, r"workspace: expected \[nbytes\]"),
    ("paged_attention_v2", "workspace", np.zeros(1 << 14, np.float32), TypeError, "workspace: expected uint8"),
    ("flash_attn_varlen_func", "num_splits", -1, ValueError, "num_splits: expected at least 0, got -1"),
    ("flash_attn_varlen_func", "num_splits", 2**40, ValueError, "num_splits: expected at most 65536"),
    ("flash_attn_varlen_func", "max_seqlen_q", -1, ValueError, "max_seqlen_q: expected at least 0, got -1"),
    ("flash_attn_varlen_func", "cu_seqlens_q", np.array([1, 2, 3]), ValueError, RISE),
    ("flash_attn_varlen_func", "cu_seqlens_q", np.array([0, 2, 1]), ValueError, RISE),
    ("flash_attn_varlen_func", "cu_seqlens_q", np.array([0, 2, -(2**31)], np.int32), ValueError, RISE),
    ("flash_attn_varlen_func", "cu_seqlens_q", np.array([0, 127, -128], np.int8), ValueError, RISE),
    ("flash_attn_varlen_func", "s_aux", np.zeros(3, np.float32), ValueError, r"s_aux: expected shape \(4\)"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "name", "value", "kind", "text"), WRONG_OPTIONS)
def test_options(op, name, value, kind, text):
    given = OPS[op]()
    given["out"].fill(7)
    with pytest.raises(kind, match=text):
        getattr(pagedkv, op)(**{**given, name: value})
    assert (given["out"] == 7).all()


def test_read_only_workspace():
    given = decode_arguments()
    given["workspace"].flags.writeable = False
    with pytest.raises(ValueError, match="workspace: expected a writable array"):
        pagedkv.paged_attention_v2(**given)


def test_windows_wider_than_any_sequence(rng):
    given = varlen_arguments()
    given["q"], given["k"], given["v"] = (rng.standard_normal(given[n].shape).astype(np.float16) for n in "qkv")
    del given["out"], given["lse_out"]
    want = pagedkv.flash_attn_varlen_func(**given)
    for window in ((2**63, -1), (2**70, 2**70), (2**31, 2**31)):
        np.testing.assert_array_equal(pagedkv.flash_attn_varlen_func(**given, window_size=window), want)


def test_no_kv_heads():
    given = write_arguments() | {"key": np.zeros((5, 0, 32), np.float16), "value": np.zeros((5, 0, 32), np.float16)}
    given |= {name: np.zeros((4, 16, 0, 32), np.uint8) for name in ("key_cache", "value_cache")}
    given |= {"k_scale": None, "v_scale": None}
    with pytest.raises(ValueError, match="key_cache: expected at least one slot and one head per block"):
        pagedkv.reshape_and_cache_flash(**given)


def test_scales_without_axes_go_with_numbers():
    given = write_arguments() | {"k_scale": np.array(0.5, np.float32), "v_scale": 0.5}
    pagedkv.reshape_and_cache_flash(**given)
    with pytest.raises(ValueError, match="v_scale: expected one scale like k_scale, got a scale per head"):
        pagedkv.reshape_and_cache_flash(**{**given, "v_scale": np.ones(2, np.float32)})


def test_axes_of_one_element_may_have_any_stride(rng):
    rows = rng.standard_normal((1, 1, 8)).astype(np.float16)
    odd = np.lib.stride_tricks.as_strided(rows, rows.shape, (26, 38, 2))
    caches = [np.zeros((1, 1, 1, 8, 8), np.float16), np.zeros((1, 1, 8, 8), np.float16)]
    caches[0] = np.lib.stride_tricks.as_strided(caches[0], caches[0].shape, (4096, 4096, 74, 16, 2))
    pagedkv.reshape_and_cache(odd, odd, *caches, np.array([3]))
    np.testing.assert_array_equal(caches[0][0, 0, 0, 3], rows[0, 0])
    np.testing.assert_array_equal(caches[1][0, 0, :, 3], rows[0, 0])


def test_workspace_sizes():
    """By hand: states of (2 + head_size) floats; none where there is one pass. NumPy integers do not wrap.

    Without a partition size or a number of splits two states of each of 32 query heads for each of at most 512 CTAs,
    whatever the query."""
    sizes = {"num_tokens": 3, "num_heads": 4, "head_size": 8}
    nbytes = pagedkv.workspace_nbytes
    assert nbytes("paged_attention_v2", **sizes, max_seq_len=100, partition_size=32) == 3 * 4 * 4 * 10 * 4
    assert nbytes("paged_attention_v2", **sizes, max_seq_len=0, partition_size=32) == 0
    for max_seq_len in (0, 100, 10**6):
        assert nbytes("paged_attention_v2", **sizes, max_seq_len=max_seq_len) == 2 * 512 * 32 * 10 * 4
    assert nbytes("flash_attn_varlen_func", **sizes, max_seq_len=100) == 2 * 512 * 32 * 10 * 4
    assert nbytes("flash_attn_varlen_func", **sizes, max_seq_len=100, num_splits=1) == 0
    assert nbytes("flash_attn_varlen_func", **sizes, max_seq_len=100, num_splits=5) == 3 * 4 * 5 * 10 * 4
    large = {"num_tokens": np.int32(10000), "num_heads": np.int32(128), "head_size": np.int32(128)}
    partitions = {"max_seq_len": np.int32(131072), "partition_size": np.int32(512)}
    assert nbytes("paged_attention_v2", **large, **partitions) == 10000 * 128 * 256 * 130 * 4
    with pytest.raises(TypeError, match="num_tokens: expected an integer, got None"):
        nbytes("paged_attention_v2", **{**sizes, "num_tokens": None}, max_seq_len=1)
    with pytest.raises(ValueError, match="op: expected one of paged_attention_v2, flash_attn_varlen_func"):
        nbytes("paged_attention_v1", **sizes, max_seq_len=1)


def test_a_nan_among_the_live_keys_is_not_silence(rng):
    """LSE -inf means that nothing was seen, and a merge drops that side; NaN stays NaN."""
    given = varlen_arguments()
    for name in "qkv":
        given[name] = rng.standard_normal(given[name].shape).astype(np.float16)
    given["k"][0, 2, 1, 5] = np.nan
    given["block_table"][:] = 0
    _, lse = pagedkv.flash_attn_varlen_func(**{**given, "out": None, "lse_out": None}, return_softmax_lse=True)
    assert np.isnan(lse[2:]).all()  # the heads of that kv head
    assert np.isfinite(lse[:2]).all()


def test_hopper_gets_its_own_instruction_set():
    assert kernels.arch_options("90") == ("-arch=sm_90a",)
    assert kernels.arch_options("80") == kernels.arch_options("89") == ()
