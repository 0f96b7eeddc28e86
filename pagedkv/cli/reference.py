"""What is right, in plain NumPy: fp8 codes, dense attention and the merge of two states, in a precision of choice.

Nothing here knows of blocks, and nothing is shared with the package that it checks.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
# By ``kv_cache_dtype``, and by the dtype of an array that carries its own format.
FP8 = {"fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "float8_e4m3fn": E4M3, "float8_e5m2": E5M2}
Scale = np.ndarray | float | None


def per_head(scale: Scale) -> np.ndarray:
    """A scale as a column, ``[kv_heads, 1]`` or ``[1, 1]``."""
    return np.reshape(np.float32(1 if scale is None else scale), (-1, 1))


def encoded(rows: np.ndarray, kv_cache_dtype: str, scale: Scale) -> np.ndarray:
    """What a cache holds of these numbers: themselves, or the fp8 codes of ``saturate(x / scale)`` as uint8."""
    if kv_cache_dtype == "auto":
        return rows
    fp8 = FP8[kv_cache_dtype]
    largest = float(ml_dtypes.finfo(fp8).max)
    with np.errstate(over="ignore", invalid="ignore"):
        quotient = rows.astype(np.float32) / per_head(scale)
        return np.clip(quotient, -largest, largest).astype(fp8).view(np.uint8)


def as_stored(rows: np.ndarray, kv_cache_dtype: str, scale: Scale, precision: type) -> np.ndarray:
    """These numbers as a read sees them: through the cache's format and back."""
    if kv_cache_dtype == "auto":
        return rows.astype(precision)
    codes = encoded(rows, kv_cache_dtype, scale).view(FP8[kv_cache_dtype])
    return codes.astype(precision) * per_head(scale).astype(precision)


@dataclass(frozen=True, slots=True)
class Rules:
    """How scores become weights. window: tokens to the left and right that a query sees beside its own, -1 for all."""

    scale: float | None = None  # None: head_size ** -0.5
    softcap: float = 0.0
    slopes: np.ndarray | None = None  # [heads]
    window: tuple[int, int] = (-1, -1)
    sinks: np.ndarray | None = None  # [heads]


CAUSAL = Rules(window=(-1, 0))


def attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    rules: Rules = CAUSAL,
    weight_dtype: np.dtype | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of the last tokens of one sequence, in the precision of its arguments.

    ``weight_dtype`` is what the weights of the values are rounded to, which tensor cores multiply; not their sum.

    query: ``[n, heads, head_size]``, of the last n of ``seq_len`` tokens; key, value:
    ``[seq_len, kv_heads, head_size]``. Returns out, like the query, and the log of the denominator ``[heads, n]``: 0
    and -inf where a query sees no key.
    """
    (n, heads, head_size), (seq_len, kv_heads, _) = query.shape, key.shape
    logits = _logits(query, key, rules)
    largest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    sinks = np.full(1, -np.inf, query.dtype) if rules.sinks is None else rules.sinks.astype(query.dtype)
    largest = np.maximum(largest, sinks[:, None, None])
    shift = np.where(np.isneginf(largest), 0, largest)  # -inf - -inf would be NaN
    weights = np.exp(logits - shift)
    denominator = weights.sum(axis=-1, keepdims=True) + np.exp(sinks[:, None, None] - shift)
    if weight_dtype is not None:
        weights = weights.astype(weight_dtype).astype(query.dtype)
    out = weights.reshape(kv_heads, heads // kv_heads * n, seq_len) @ value.swapaxes(0, 1)
    out = out.reshape(heads, n, head_size) / np.where(denominator > 0, denominator, 1)
    with np.errstate(divide="ignore"):
        return out.swapaxes(0, 1), (shift + np.log(denominator))[..., 0]


def weight_dtype(query: np.dtype, kv_cache_dtype: str) -> np.dtype:
    """What kernels round weights to: the query's dtype, float16 beside fp8 values."""
    return query if kv_cache_dtype == "auto" else np.dtype(np.float16)


def _logits(query: np.ndarray, key: np.ndarray, rules: Rules) -> np.ndarray:
    """Scores with all that the rules make of them, ``[heads, n, seq_len]``."""
    (n, heads, head_size), (seq_len, kv_heads, _), real = query.shape, key.shape, query.dtype.type
    # The queries of all heads that share a kv head are the rows of one product.
    grouped = query.swapaxes(0, 1).reshape(kv_heads, heads // kv_heads * n, head_size)
    logits = grouped @ key.transpose(1, 2, 0) * real(head_size**-0.5 if rules.scale is None else rules.scale)
    logits = logits.reshape(heads, n, seq_len)
    if rules.softcap:
        logits = real(rules.softcap) * np.tanh(logits / real(rules.softcap))
    distance = np.arange(seq_len) - np.arange(seq_len - n, seq_len)[:, None]  # [n, seq_len], from query to key
    if rules.slopes is not None:
        logits = logits - rules.slopes.astype(query.dtype)[:, None, None] * np.abs(distance).astype(query.dtype)
    left, right = rules.window
    outside = ((left >= 0) & (distance < -left)) | ((right >= 0) & (distance > right))
    return np.where(outside, real(-np.inf), logits)


def magnitudes(query: np.ndarray, key: np.ndarray, value: np.ndarray, rules: Rules) -> tuple[np.ndarray, np.ndarray]:
    """What rounding errors are relative to: of outputs ``[n, heads]`` and of the largest score ``[heads, n]``.

    A score is a sum whose rounding grows with the sum of its terms' magnitudes, and exp makes the absolute error of a
    score a relative one of its weight. An output's terms may cancel, its errors do not.
    """
    plain = Rules(abs(query.shape[-1] ** -0.5 if rules.scale is None else rules.scale))
    scores = _logits(np.abs(query), np.abs(key), plain).max(axis=-1, initial=0)
    if rules.slopes is not None:
        scores = scores + np.abs(rules.slopes)[:, None] * max(len(key), len(query))
    out, _ = attention(query, key, np.abs(value), rules)
    return np.linalg.norm(out, axis=-1), scores


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
