"""Attention by its definition: float64, and plain loops over sequences, queries and heads.

Nothing here is shared with the package under test. The block table is asked only for blocks that hold a key the query
may see, one block at a time, so that what lies anywhere else cannot reach a result.

`precision=np.float32` runs the same lines in float32: the plain computation whose error is the measure of a kernel's.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

FP8_FORMATS = {
    "fp8": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


@dataclass
class Rules:
    """What turns the scores of one query into the weights of its keys."""

    scale: float
    softcap: float
    alibi_slopes: np.ndarray | None  # [num_heads]
    sinks: np.ndarray | None  # [num_heads]
    window_size: tuple  # (left, right), inclusive, -1 for no bound
    precision: type


def paged_attention(
    query,  # [num_seqs, num_heads, head_size]
    key_cache,  # [num_blocks, num_kv_heads, head_size / x, block_size, x]
    value_cache,  # [num_blocks, num_kv_heads, head_size, block_size]
    block_tables,  # [num_seqs, max_blocks]
    seq_lens,  # [num_seqs]
    *,
    scale=None,
    alibi_slopes=None,
    window_size=(-1, -1),
    softcap=0.0,
    sinks=None,
    kv_cache_dtype="auto",
    k_scale=None,
    v_scale=None,
    precision=np.float64,
):
    """Decode over the packed layout: the one query of a sequence stands at its last position."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rules = Rules(scale, softcap, alibi_slopes, sinks, window_size, precision)
    block_size = value_cache.shape[-1]

    def read_block(block_id, offsets):
        keys = key_cache[block_id, :, :, offsets]  # [num_kv_heads, head_size / x, n, x]
        keys = keys.transpose(2, 0, 1, 3).reshape(keys.shape[2], len(keys), -1)  # [n, num_kv_heads, head_size]
        values = value_cache[block_id, :, :, offsets].transpose(2, 0, 1)
        return (
            to_real(keys, kv_cache_dtype, k_scale, precision),
            to_real(values, kv_cache_dtype, v_scale, precision),
        )

    out = np.zeros(query.shape, precision)
    lse = np.zeros(query.shape[1::-1], precision)
    for seq, seq_len in enumerate(int(n) for n in seq_lens):
        query_pos = seq_len - 1
        out[seq], lse[:, seq] = attend(query[seq], query_pos, seq_len, block_tables[seq], block_size, read_block, rules)
    return out, lse


def varlen_attention(
    q,  # [num_tokens, num_heads, head_size]
    k,  # NHD [num_blocks, block_size, num_kv_heads, head_size] or HND [num_blocks, num_kv_heads, block_size, head_size]
    v,  # as k
    *,
    cu_seqlens_q,  # [num_seqs + 1]
    seqused_k,  # [num_seqs]
    block_table,  # [num_seqs, max_blocks]
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    s_aux=None,
    kv_cache_dtype="auto",
    k_descale=None,
    v_descale=None,
    layout="NHD",
    precision=np.float64,
):
    """Queries packed one sequence after another: query i of n stands at i + seq_len - n. Rows past the last are NaN."""
    window_size = (window_size[0], 0) if causal else window_size
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rules = Rules(scale, softcap, alibi_slopes, s_aux, window_size, precision)
    block_size = k.shape[1] if layout == "NHD" else k.shape[2]

    def read_block(block_id, offsets):
        keys = k[block_id, offsets] if layout == "NHD" else k[block_id, :, offsets].swapaxes(0, 1)
        values = v[block_id, offsets] if layout == "NHD" else v[block_id, :, offsets].swapaxes(0, 1)
        return (
            to_real(keys, kv_cache_dtype, k_descale, precision),
            to_real(values, kv_cache_dtype, v_descale, precision),
        )

    out = np.full(q.shape, np.nan, precision)
    lse = np.full(q.shape[1::-1], np.nan, precision)
    for seq, seq_len in enumerate(int(n) for n in seqused_k):
        start, end = int(cu_seqlens_q[seq]), int(cu_seqlens_q[seq + 1])
        for token in range(start, end):
            query_pos = (token - start) + seq_len - (end - start)
            out[token], lse[:, token] = attend(
                q[token], query_pos, seq_len, block_table[seq], block_size, read_block, rules
            )
    return out, lse


def merge_states(prefix_output, prefix_lse, suffix_output, suffix_lse, *, precision=np.float64):
    """Two attention states over disjoint keys into one. A state whose LSE is infinite, of either sign, holds no key."""
    out = np.zeros(prefix_output.shape, precision)
    lse = np.full(prefix_lse.shape, -np.inf, precision)
    num_tokens, num_heads, _ = prefix_output.shape
    for token in range(num_tokens):
        for head in range(num_heads):
            states = [
                (precision(prefix_lse[head, token]), prefix_output[token, head].astype(precision)),
                (precision(suffix_lse[head, token]), suffix_output[token, head].astype(precision)),
            ]
            states = [(state_lse, state_out) for state_lse, state_out in states if np.isfinite(state_lse)]
            if states:
                max_lse = max(state_lse for state_lse, _ in states)
                exp_sum = sum(np.exp(state_lse - max_lse) for state_lse, _ in states)
                out[token, head] = sum(np.exp(state_lse - max_lse) * o for state_lse, o in states) / exp_sum
                lse[head, token] = max_lse + np.log(exp_sum)
    return out, lse


def attend(query, query_pos, seq_len, block_table, block_size, read_block, rules):
    """One query [num_heads, head_size] over the keys it may see -> out [num_heads, head_size], lse [num_heads]."""
    query = query.astype(rules.precision)
    out = np.zeros(query.shape, rules.precision)
    lse = np.full(len(query), -np.inf, rules.precision)

    first, end = visible_keys(query_pos, seq_len, rules.window_size)
    blocks = [read_block(*block) for block in visible_blocks(first, end, block_table, block_size)]
    if blocks:
        keys = np.concatenate([keys for keys, _ in blocks])  # [n, num_kv_heads, head_size]
        values = np.concatenate([values for _, values in blocks])
        queries_per_kv = len(query) // keys.shape[1]

    for head in range(len(query)):
        sink = None if rules.sinks is None else rules.sinks[head]
        if blocks:
            kv_head = head // queries_per_kv
            logits = head_logits(query[head], keys[:, kv_head], head, query_pos, np.arange(first, end), rules)
            out[head], lse[head] = softmax_sum(logits, values[:, kv_head], sink)
        elif sink is not None:
            lse[head] = sink
    return out, lse


def visible_keys(query_pos, seq_len, window_size):
    """The half-open range of key positions that lie in the sequence and in the window around the query."""
    left, right = window_size
    first = 0 if left < 0 else max(query_pos - left, 0)
    end = seq_len if right < 0 else min(query_pos + right + 1, seq_len)
    return first, end


def visible_blocks(first, end, block_table, block_size):
    """Each block that holds a position of [first, end): its id, and the slice of its tokens inside the range."""
    block_index = first // block_size
    while block_index * block_size < end and first < end:
        start = block_index * block_size
        yield int(block_table[block_index]), slice(max(first - start, 0), min(end - start, block_size))
        block_index += 1


def to_real(stored, kv_cache_dtype, scale, precision):
    """What a cache holds [n, num_kv_heads, head_size], as numbers: an fp8 code is decoded and takes its scale."""
    if kv_cache_dtype == "auto":
        return stored.astype(precision)
    per_head = np.reshape(1.0 if scale is None else scale, (-1, 1)).astype(precision)  # [1 or num_kv_heads, 1]
    return stored.view(FP8_FORMATS[kv_cache_dtype]).astype(precision) * per_head


def head_logits(query, keys, head, query_pos, key_pos, rules):
    """scale, then softcap, then ALiBi -> [n]"""
    # One product after the other, which every machine does alike: BLAS keeps more partial sums for a vector than for a
    # matrix, by which a plain computation would be up to four times as exact as the same one of many queries at once.
    logits = np.add.accumulate(keys * query, axis=-1)[:, -1] * rules.precision(rules.scale)
    if rules.softcap:
        cap = rules.precision(rules.softcap)
        logits = cap * np.tanh(logits / cap)
    if rules.alibi_slopes is not None:
        distance = np.abs(query_pos - key_pos).astype(rules.precision)
        logits = logits - rules.precision(rules.alibi_slopes[head]) * distance
    return logits


def softmax_sum(logits, values, sink):
    """Softmax-weighted sum of values [n, head_size], and the log of the denominator, to which alone the sink adds."""
    max_logit = logits.max() if sink is None else max(logits.max(), logits.dtype.type(sink))
    weights = np.exp(logits - max_logit)
    exp_sum = weights.sum()
    if sink is not None:
        exp_sum += np.exp(logits.dtype.type(sink) - max_logit)
    return weights @ values / exp_sum, max_logit + np.log(exp_sum)
