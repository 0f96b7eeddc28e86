"""Random paged caches, poisoned around their live tokens; calls of an op on a backend; the one tolerance."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import oracle

import pagedkv

FLOATS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FP8_NAMES = ["fp8", "fp8_e4m3", "fp8_e5m2"]
FP8_POISON = 0x7F  # a NaN in both formats
TABLE_GARBAGE = [-1, 2**31 - 1, "num_blocks"]

# Each a different pair of K and V scales, so that one taken for the other shows.
K_SCALE, V_SCALE = 0.04, 0.11

# Options that say how a result is computed, and never what it is: the oracle does not know them.
HOW = {"max_seq_len", "max_seqlen_q", "max_seqlen_k", "partition_size", "num_splits", "workspace"}


@dataclass
class Pool:
    """Sequences scattered over a pool, in NHD. Every other slot is poison, every other table entry garbage."""

    key_cache: np.ndarray  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: np.ndarray
    block_tables: np.ndarray  # [num_seqs, max_blocks]
    seq_lens: np.ndarray  # [num_seqs]

    def caches(self, layout):
        """The two caches in "NHD", "HND" or "packed"."""
        if layout == "packed":
            return to_packed_keys(self.key_cache), to_packed_values(self.value_cache)
        if layout == "HND":
            return to_hnd(self.key_cache), to_hnd(self.value_cache)
        return self.key_cache, self.value_cache


def to_hnd(cache):
    return np.ascontiguousarray(cache.swapaxes(1, 2))


def to_packed_keys(cache):
    """NHD -> [num_blocks, num_kv_heads, head_size / x, block_size, x]"""
    num_blocks, block_size, num_kv_heads, head_size = cache.shape
    x = 16 // cache.itemsize
    split = cache.reshape(num_blocks, block_size, num_kv_heads, head_size // x, x)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4))


def to_packed_values(cache):
    """NHD -> [num_blocks, num_kv_heads, head_size, block_size]"""
    return np.ascontiguousarray(cache.transpose(0, 2, 3, 1))


def poisoned(shape, dtype):
    return np.full(shape, FP8_POISON if dtype == np.uint8 else np.nan, dtype)


def without_poison(cache):
    """The same live tokens in a pool that is zero everywhere else."""
    is_poison = cache == FP8_POISON if cache.dtype == np.uint8 else np.isnan(cache)
    return np.where(is_poison, np.zeros((), cache.dtype), cache)


def quantise(tokens, kv_cache_dtype, scale):
    """fp8 codes of tokens [n, num_kv_heads, head_size], saturated, as uint8."""
    fp8 = oracle.FP8_FORMATS[kv_cache_dtype]
    largest = float(ml_dtypes.finfo(fp8).max)
    per_head = np.reshape(scale, (-1, 1))
    return np.clip(tokens / per_head, -largest, largest).astype(fp8).view(np.uint8)


def scattered_tables(rng, seq_lens, block_size, spare_columns=2):
    """Tables over a shuffled pool, with garbage past each sequence's blocks -> block_tables, num_blocks."""
    blocks_per_seq = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(blocks_per_seq) + 3
    free_ids = iter(rng.permutation(num_blocks))
    garbage = [num_blocks if entry == "num_blocks" else entry for entry in TABLE_GARBAGE]
    shape = (len(seq_lens), max(blocks_per_seq, default=0) + spare_columns)
    block_tables = np.resize(np.array(garbage, np.int32), shape)
    for row, used in zip(block_tables, blocks_per_seq, strict=True):
        row[:used] = [next(free_ids) for _ in range(used)]
    return block_tables, num_blocks


def make_pool(
    rng, seq_lens, num_kv_heads, head_size, block_size, dtype, kv_cache_dtype="auto", k_scale=None, v_scale=None
):
    block_tables, num_blocks = scattered_tables(rng, seq_lens, block_size)
    cache_dtype = dtype if kv_cache_dtype == "auto" else np.uint8
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    pool = Pool(poisoned(shape, cache_dtype), poisoned(shape, cache_dtype), block_tables, np.array(seq_lens, np.int32))
    for block_table, seq_len in zip(block_tables, seq_lens, strict=True):
        position = np.arange(seq_len)
        block_ids, offsets = block_table[position // block_size], position % block_size
        for cache, scale in ((pool.key_cache, k_scale), (pool.value_cache, v_scale)):
            tokens = rng.standard_normal((seq_len, num_kv_heads, head_size))
            is_fp8 = kv_cache_dtype != "auto"
            cache[block_ids, offsets] = quantise(tokens, kv_cache_dtype, scale) if is_fp8 else tokens.astype(dtype)
    return pool


def decode(
    rng,
    seq_lens,
    *,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    block_size=16,
    dtype=np.float16,
    kv_cache_dtype="auto",
    k_scale=K_SCALE,
    v_scale=V_SCALE,
):
    """The arguments of one paged_attention call over a poisoned pool."""
    fp8 = fp8_options(kv_cache_dtype, k_scale=k_scale, v_scale=v_scale)
    pool = make_pool(rng, seq_lens, num_kv_heads, head_size, block_size, dtype, **fp8)
    key_cache, value_cache = pool.caches("packed")
    return {
        "query": rng.standard_normal((len(seq_lens), num_heads, head_size)).astype(dtype),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": pool.block_tables,
        "seq_lens": pool.seq_lens,
        **fp8,
    }


def varlen(
    rng,
    query_lens,
    seq_lens,
    *,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    block_size=16,
    dtype=np.float16,
    kv_cache_dtype="auto",
    k_descale=K_SCALE,
    v_descale=V_SCALE,
    layout="NHD",
):
    """The arguments of one flash_attn_varlen_func call over a poisoned pool."""
    fp8 = fp8_options(kv_cache_dtype, k_descale=k_descale, v_descale=v_descale)
    pool = make_pool(rng, seq_lens, num_kv_heads, head_size, block_size, dtype, kv_cache_dtype, k_descale, v_descale)
    k, v = pool.caches(layout)
    return {
        "q": rng.standard_normal((sum(query_lens), num_heads, head_size)).astype(dtype),
        "k": k,
        "v": v,
        "cu_seqlens_q": np.cumsum([0, *query_lens], dtype=np.int32),
        "seqused_k": pool.seq_lens,
        "block_table": pool.block_tables,
        "layout": layout,
        **fp8,
    }


def fp8_options(kv_cache_dtype, **scales):
    return {} if kv_cache_dtype == "auto" else {"kv_cache_dtype": kv_cache_dtype, **scales}


def put_all(backend, arguments):
    return {name: backend.put(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}


def call_decode(backend, op, arguments, **options):
    """pagedkv's op of that name -> out, lse as NumPy arrays."""
    arguments = put_all(backend, {**arguments, **options})
    out, lse = getattr(pagedkv, op)(**arguments, return_lse=True)
    return backend.get(out), backend.get(lse)


def call_varlen(backend, arguments, **options):
    arguments = put_all(backend, {**arguments, **options})
    out, lse = pagedkv.flash_attn_varlen_func(**arguments, return_softmax_lse=True)
    return backend.get(out), backend.get(lse)


def check_decode(backend, op, arguments, **options):
    """Call the op, hold its result against the oracle, return it."""
    result = call_decode(backend, op, arguments, **options)
    assert_state_close(result, oracle.paged_attention, {**arguments, **options})
    return result


def check_varlen(backend, arguments, **options):
    result = call_varlen(backend, arguments, **options)
    assert_state_close(result, oracle.varlen_attention, {**arguments, **options})
    return result


def assert_state_close(state, oracle_op, arguments):
    """`state` (out, lse) against what `oracle_op` makes of the same arguments."""
    arguments = {name: argument for name, argument in arguments.items() if name not in HOW}
    exact_out, exact_lse = oracle_op(**arguments)
    plain_out, plain_lse = oracle_op(**arguments, precision=np.float32)
    assert_out_close(state[0], exact_out, plain_out)
    assert_lse_close(state[1], exact_lse, plain_lse)


def assert_out_close(out, exact, plain):
    assert out.shape == exact.shape
    error, plain_error = relative_l2(out, exact), relative_l2(plain.astype(out.dtype), exact)
    assert np.max(error, initial=0) <= tolerance(np.max(plain_error, initial=0), out.dtype)


def assert_lse_close(lse, exact, plain):
    """Equal where infinite; elsewhere relative L2, of sizes of at least 1, since a logarithm may pass through 0."""
    assert lse.dtype == np.float32
    assert lse.shape == exact.shape
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(lse[~finite], exact[~finite])
    size = max(np.linalg.norm(np.maximum(np.abs(exact[finite]), 1)), 1)
    error, plain_error = (np.linalg.norm(got[finite] - exact[finite]) / size for got in (lse, plain))
    assert error <= tolerance(plain_error, np.float32)


def tolerance(plain_error, dtype):
    """How far a kernel may be from float64, given how far the plain computation is at its worst on the same numbers.

    Both work in float32 and round to `dtype` at the same points, so neither is nearer the truth by right. A kernel
    adds in another order, which may double the error but has no reason to do more. The few ulp are for numbers on
    which the plain computation happens to be exact, and for an exponential that the hardware approximates.
    """
    few_ulp = 3 * float(ml_dtypes.finfo(dtype).eps)
    return 2 * plain_error + few_ulp


def relative_l2(actual, exact):
    """Of each head of each token, so that one wrong row cannot hide among many. A row of zeros must be met exactly."""
    error = np.linalg.norm(actual.astype(np.float64) - exact, axis=-1)
    size = np.linalg.norm(exact, axis=-1)
    return np.divide(error, size, out=np.where(error == 0, 0.0, np.inf), where=size > 0)


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(bits(actual), bits(expected))


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")
