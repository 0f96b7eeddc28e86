"""`warmup`: the kernels it names are those that calls launch, whatever their lengths; errors."""

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
from writes import cache_shapes, op_of

import pagedkv

HEADS, KV_HEADS = 12, 2
FORMATS = [(dtype, cache) for dtype in ("float16", "bfloat16") for cache in ("auto", "fp8_e5m2")]
FORMATS.append(("float32", "auto"))


@pytest.fixture
def launched(monkeypatch):
    """What calls launch and what warmup compiles; nothing runs."""
    from pagedkv import ptx_ops

    launches, warm = [], []
    warmup = ptx_ops.warmup
    monkeypatch.setattr(ptx_ops, "launch", lambda planned, arrays: launches.append(planned))
    monkeypatch.setattr(ptx_ops, "warmup", lambda planned, device: (warm.extend(planned), warmup(planned, device)))
    monkeypatch.setattr(ptx_ops, "_kernel", lambda instance: None)
    with pagedkv.use_backend("ptx"):
        yield launches, warm


def loads(launches):
    """What a device loads for them: a kernel, and shared memory that it may have."""
    return {(str(launch.instance), launch.shared_bytes) for launch in launches}


def caches(layout, dtype, kv_cache_dtype, head_size, num_blocks):
    stored = dtype if kv_cache_dtype == "auto" else np.dtype(np.uint8)
    shapes = cache_shapes(layout, num_blocks, 16, KV_HEADS, head_size, stored)
    return [np.zeros(shape, stored) for shape in shapes]


@pytest.mark.ptx
@pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), FORMATS)
@pytest.mark.parametrize("head_size", [16, 80, 256])
def test_calls_of_all_lengths_launch_what_was_warmed_up(launched, layout, dtype, kv_cache_dtype, head_size):
    launches, warm = launched
    names = pagedkv.warmup(dtype, HEADS, KV_HEADS, head_size, 16, layout=layout, kv_cache_dtype=kv_cache_dtype)
    assert len(names) == len(set(names)) and set(names) == {name for name, _ in loads(warm)}
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    pair = caches(layout, dtype, kv_cache_dtype, head_size, num_blocks=200)
    scales = (None,) if kv_cache_dtype == "auto" else (None, np.ones(KV_HEADS, np.float32))
    for scale in scales:
        for num_tokens in (1, 512, 513, 3000):
            new = np.zeros((num_tokens, KV_HEADS, head_size), dtype)
            op_of(layout)(new, new, *pair, np.arange(num_tokens), kv_cache_dtype, scale, scale)
        query = np.zeros((HEADS, head_size), dtype)
        if layout == "packed":
            _decode(pair, query, kv_cache_dtype=kv_cache_dtype, k_scale=scale, v_scale=scale)
        else:
            _varlen(pair, query, kv_cache_dtype=kv_cache_dtype, k_descale=scale, v_descale=scale, layout=layout)
    table, out_dtype = np.zeros((3, 4), np.int32), None if kv_cache_dtype == "auto" else dtype
    starts, options = np.array([0, 3, 3, 40], np.int32), {"kv_cache_dtype": kv_cache_dtype, "layout": layout}
    for scale in scales:
        pagedkv.gather_cache(*pair, table, starts, k_scale=scale, v_scale=scale, dtype=out_dtype, **options)
    table, slots = np.zeros((3, 2), np.int32), np.zeros(3, np.int64)
    pagedkv.advance_decode(table, np.ones(3, np.int32), slots, np.zeros(4, np.int32), block_size=16)
    assert loads(launches) == loads(warm)


def _decode(pair, query, **options):
    tables, queries = np.arange(180).reshape(3, 60), np.stack([query] * 3)
    for lens in ([0, 1, 2], [960, 40, 0]):
        call = functools.partial(pagedkv.paged_attention_v2, queries, *pair, tables, np.array(lens), **options)
        pagedkv.paged_attention_v1(*call.args, **options)
        call()
        call(partition_size=64)


def _varlen(pair, query, **options):
    tables = np.arange(180).reshape(3, 60)
    for counts in ([1, 1, 1], [0, 1, 0], [40, 1, 7], [800, 0, 900]):
        queries = np.broadcast_to(query, (sum(counts), *query.shape))
        lens = {"cu_seqlens_q": np.cumsum([0, *counts]), "seqused_k": np.array([960, 40, 950]), "block_table": tables}
        for hint in (None, max(counts), 1000):
            for num_splits, softcap in itertools.product((0, 1, 3), (0.0, 20.0)):
                hints = {"max_seqlen_q": hint, "num_splits": num_splits, "softcap": softcap}
                pagedkv.flash_attn_varlen_func(queries, *pair, **lens, **hints, **options)
        lse = np.zeros(queries.shape[1::-1], np.float32)
        pagedkv.merge_attn_states(queries, lse, queries, lse)


def test_numpy_has_no_kernels():
    with pagedkv.use_backend("numpy"):
        assert pagedkv.warmup("float16", HEADS, KV_HEADS, 64, 16) == []


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), "float16"])
def test_dtypes_of_numpy(launched, dtype):
    assert "paged_attention<__half, " in pagedkv.warmup(dtype, HEADS, KV_HEADS, 64, 16)[-1]


@pytest.mark.parametrize("module", ["torch", "jax.numpy"])
def test_dtypes_of_frameworks(launched, module):
    dtype = pytest.importorskip(module).bfloat16
    assert "paged_attention<__nv_bfloat16, " in pagedkv.warmup(dtype, HEADS, KV_HEADS, 64, 16)[-1]


ERRORS = {
    "dtype": ({"dtype": "float64"}, TypeError, "dtype: expected one of float16, bfloat16, float32, got 'float64'"),
    "heads": ({"num_heads": 5}, ValueError, "num_heads a multiple of num_kv_heads = 2, got 5"),
    "no heads": ({"num_kv_heads": 0}, ValueError, "num_kv_heads: expected at least 1, got 0"),
    "head_size": ({"head_size": 60}, ValueError, "head_size: expected a multiple of"),
    "large heads": ({"head_size": 512}, NotImplementedError, "head_size: expected at most 256"),
    "block_size": ({"block_size": 12}, ValueError, "block_size: expected one of"),
    "no integer": ({"block_size": 16.0}, TypeError, "block_size: expected an integer"),
    "none": ({"block_size": None}, TypeError, "block_size: expected an integer, got None"),
    "layout": ({"layout": "NDH"}, ValueError, "layout: expected one of packed, NHD, HND, got 'NDH'"),
    "format": ({"kv_cache_dtype": "int8"}, ValueError, "kv_cache_dtype: expected one of"),
}
ERRORS |= {
    f"float32, {layout}": (
        {"dtype": "float32", "kv_cache_dtype": "fp8", "layout": layout},
        NotImplementedError,
        "for an fp8 cache, got float32",
    )
    for layout in ("packed", "NHD", "HND")
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    wrong, kind, message = ERRORS[name]
    right = {"dtype": "float16", "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "block_size": 16}
    with pagedkv.use_backend("numpy"), pytest.raises(kind, match=message):
        pagedkv.warmup(**right | wrong)


def test_the_interpreter_has_no_devices(launched):
    with pytest.raises(ValueError, match="device: expected None"):
        pagedkv.warmup("float16", HEADS, KV_HEADS, 64, 16, device=0)
