"""What is right, in plain NumPy: fp8 codes, dense attention and the merge of two states, in a precision of choice.

Nothing here knows of blocks, and nothing is shared with the package that it checks.
"""

import ml_dtypes
import numpy as np

FP8 = {"fp8": ml_dtypes.float8_e4m3fn, "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


def encoded(rows: np.ndarray, kv_cache_dtype: str, scale: float) -> np.ndarray:
    """What a cache holds of these numbers: themselves, or the fp8 codes of ``saturate(x / scale)`` as uint8."""
    if kv_cache_dtype == "auto":
        return rows
    fp8 = FP8[kv_cache_dtype]
    largest = float(ml_dtypes.finfo(fp8).max)
    return np.clip(rows.astype(np.float32) / np.float32(scale), -largest, largest).astype(fp8).view(np.uint8)


def as_stored(rows: np.ndarray, kv_cache_dtype: str, scale: float, precision: type) -> np.ndarray:
    """These numbers as a read sees them: through the cache's format and back."""
    if kv_cache_dtype == "auto":
        return rows.astype(precision)
    codes = encoded(rows, kv_cache_dtype, scale).view(FP8[kv_cache_dtype])
    return codes.astype(precision) * precision(np.float32(scale))


def attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention of the last tokens of one sequence, in the precision of its arguments.

    query: ``[n, heads, head_size]``, of the last n of ``seq_len`` tokens; key, value:
    ``[seq_len, kv_heads, head_size]``. Returns out, like the query, and the log of the denominator ``[heads, n]``.
    """
    (n, heads, head_size), (seq_len, kv_heads, _) = query.shape, key.shape
    # The queries of all heads that share a kv head are the rows of one product.
    grouped = query.swapaxes(0, 1).reshape(kv_heads, heads // kv_heads * n, head_size)
    logits = grouped @ key.transpose(1, 2, 0) * query.dtype.type(head_size**-0.5)
    logits = logits.reshape(heads, n, seq_len)
    logits[:, np.arange(seq_len) > np.arange(seq_len - n, seq_len)[:, None]] = -np.inf
    largest = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - largest)
    denominator = weights.sum(axis=-1, keepdims=True)
    out = weights.reshape(kv_heads, -1, seq_len) @ value.swapaxes(0, 1)
    out = out.reshape(heads, n, head_size) / denominator
    return out.swapaxes(0, 1), (largest + np.log(denominator))[..., 0]


def merged(outputs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Attention states over disjoint keys as one: ``[2, n, heads, head_size]``, ``[2, heads, n]``, -inf: no keys."""
    largest = lses.max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.where(np.isneginf(lses), 0, np.exp(lses - largest))
        denominator = weights.sum(axis=0)
        shares = np.where(denominator > 0, weights / denominator, 0).swapaxes(1, 2)[..., None]
        lse = np.where(denominator > 0, largest + np.log(denominator), -np.inf)
    # What an empty side holds is not looked at: 0 x NaN is NaN.
    out = (np.where(shares > 0, outputs, 0) * shares).sum(axis=0, dtype=outputs.dtype)
    return out, lse.astype(outputs.dtype)
