"""The truth of what a bench reads: attention of some queries of each sequence, where the arrays are."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .bench_cache import RandomCache
from .inputs import on_host

CHECKED = 128  # query tokens of a batch that are compared, where it has more, but
CHECKED_OF_EACH = 8  # so many of each sequence at least

Seen = list[list[tuple[int, slice]]]  # of each sequence: which of the checked queries are its own, and what each sees


def checked_tokens(starts: np.ndarray) -> np.ndarray:
    """Tokens to compare: of each sequence the first, the last, and some that every run draws anew."""
    random = np.random.default_rng()
    most = max(CHECKED_OF_EACH, CHECKED // (len(starts) - 1)) - 2
    tokens = []
    for first, end in zip(starts.tolist(), starts[1:].tolist(), strict=False):
        between = random.permutation(np.arange(first + 1, max(first + 1, end - 1)))[:most]
        tokens.append(np.unique([first, *between, end - 1]))
    return np.concatenate(tokens)


def keys_seen(checked: np.ndarray, starts: np.ndarray, seq_lens: np.ndarray, window: int) -> Seen:
    """What the checked tokens see: no key after their own, and of those before ``window``, or with -1 all."""
    seen = []
    for first, end, seq_len in zip(starts.tolist(), starts[1:].tolist(), seq_lens.tolist(), strict=False):
        rows = np.flatnonzero((first <= checked) & (checked < end))
        positions = (seq_len - end + checked[rows]).tolist()
        begins = [0 if window < 0 else max(0, position - window) for position in positions]
        keys = [slice(begin, position + 1) for begin, position in zip(begins, positions, strict=True)]
        seen.append(list(zip(rows.tolist(), keys, strict=True)))
    return seen


def attention(cache: RandomCache, query: Any, tables: Sequence[Any], seen: Seen, precision: type) -> np.ndarray:
    """Attention of the checked queries ``[tokens, num_heads, head_size]``. ``tables``: blocks of each sequence."""
    numbers = query.astype(np.float32).astype(precision)
    grouped = numbers.reshape(len(query), cache.num_kv_heads, -1, query.shape[-1])
    out = cache.xp.empty_like(grouped)
    for blocks, rows in zip(tables, seen, strict=True):
        for head in range(cache.num_kv_heads):
            key, value = (cache.rows(side, blocks, head, precision) for side in ("key", "value"))
            for row, keys in rows:
                out[row, head] = attention_of_token(grouped[row, head], key[keys], value[keys])
    return on_host(out).reshape(query.shape)


def attention_of_token(query: Any, key: Any, value: Any) -> Any:
    """Of one token ``[queries_per_kv, head_size]`` over ``[seq_len, head_size]``, by sums of products: a matrix product
    on a card would need a library that nothing else here needs."""
    scores = (key[:, None] * query).sum(axis=-1) * query.dtype.type(query.shape[-1] ** -0.5)
    weights = np.exp(scores - scores.max(axis=0))
    return (weights[..., None] * value[:, None]).sum(axis=0) / weights.sum(axis=0)[:, None]
