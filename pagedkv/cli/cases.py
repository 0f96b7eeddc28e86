"""The ops that ``pagedkv run`` knows: for each its inputs, what of its outputs is right, and the bytes it must move."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import reference
from .compare import Comparison, compare_bits, compare_cache, compare_lse, compare_rows
from .inputs import (
    K_SCALE,
    V_SCALE,
    Batch,
    Sizes,
    draw_batch,
    normal,
    paged,
    poisoned,
    poisoned_caches,
    query_lens,
)

Outputs = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Case:
    """A call of one op on NumPy arrays. It writes into some of its own arguments, its outputs."""

    op: str
    shape: str
    nbytes: int  # read and written at least once
    arguments: dict[str, Any]
    outputs: tuple[str, ...]
    check: Callable[[Outputs], list[Comparison]]


def write_case(op: str, sizes: Sizes) -> Case:
    """New tokens of all sequences into poisoned caches."""
    layout = "packed" if op == "reshape_and_cache" else sizes.layout
    if layout == "packed":
        sizes.check_packed()
    batch = draw_batch(sizes)
    caches = poisoned_caches(sizes, layout, batch.num_blocks)
    outputs = ("key_cache", "value_cache")
    arguments = {
        "key": batch.key,
        "value": batch.value,
        **dict(zip(outputs, caches, strict=True)),
        "slot_mapping": batch.slots,
        **_format(sizes, "k_scale", "v_scale"),
        **({} if layout == "packed" else {"layout": layout}),
    }
    row_bytes = sizes.kv_heads * sizes.head_size * (sizes.dtype.itemsize + sizes.cache_dtype.itemsize)
    nbytes = 2 * batch.num_tokens * row_bytes + batch.slots.nbytes
    shape = f"{batch.num_tokens:,} tokens, {layout}"
    return Case(op, shape, nbytes, arguments, outputs, lambda got: _check_write(batch, sizes, layout, got))


def _check_write(batch: Batch, sizes: Sizes, layout: str, caches: Outputs) -> list[Comparison]:
    live = slice(batch.num_tokens)
    sides = (("key_cache", batch.key, K_SCALE), ("value_cache", batch.value, V_SCALE))
    return [
        compare_cache(
            name,
            caches[name],
            layout,
            sizes.block_size,
            reference.encoded(rows[live], sizes.kv_cache_dtype, scale),
            batch.slots[live],
        )
        for name, rows, scale in sides
    ]


def decode_case(op: str, sizes: Sizes) -> Case:
    """One query token per sequence over a packed cache."""
    sizes.check_packed()
    batch = draw_batch(sizes)
    key_cache, value_cache = paged(batch, sizes, "packed")
    lens = np.ones_like(batch.seq_lens)
    query = _query(sizes, lens)
    arguments = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": batch.block_tables,
        "seq_lens": batch.seq_lens.astype(np.int32),
        **_format(sizes, "k_scale", "v_scale"),
    }
    return _read_case(op, f"{sizes.seqs} x {sizes.context}, packed", batch, sizes, query, lens, arguments)


def varlen_case(op: str, sizes: Sizes) -> Case:
    """A mixed batch, causal, over an NHD or HND cache."""
    batch = draw_batch(sizes)
    k, v = paged(batch, sizes, sizes.layout)
    lens = query_lens(batch)
    query = _query(sizes, lens)
    arguments = {
        "q": query,
        "k": k,
        "v": v,
        "cu_seqlens_q": np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        "seqused_k": batch.seq_lens.astype(np.int32),
        "block_table": batch.block_tables,
        "causal": True,
        "layout": sizes.layout,
        **_format(sizes, "k_descale", "v_descale"),
    }
    shape = f"{lens.sum():,} q, {sizes.seqs} x {sizes.context}, {sizes.layout}"
    return _read_case(op, shape, batch, sizes, query, lens, arguments)


def merge_case(op: str, sizes: Sizes) -> Case:
    """Two states of as many tokens as the mixed batch has queries; some sides are empty, and hold NaN."""
    rng = np.random.default_rng(sizes.seed)
    n = int(query_lens(draw_batch(sizes)).sum())
    outputs = np.stack([normal(rng, (n, sizes.heads, sizes.head_size), sizes.dtype) for _ in range(2)])
    lses = rng.normal(0, 3, (2, sizes.heads, n)).astype(np.float32)
    empty = rng.random(lses.shape) < 0.1
    lses[empty] = -np.inf
    outputs[empty.swapaxes(1, 2)] = np.nan
    arguments = {
        "prefix_output": outputs[0],
        "prefix_lse": lses[0],
        "suffix_output": outputs[1],
        "suffix_lse": lses[1],
        **_results(outputs[0]),
    }

    def truth(precision: type) -> tuple[np.ndarray, np.ndarray]:
        return reference.merged(outputs.astype(precision), lses.astype(precision))

    nbytes = 3 * (outputs[0].nbytes + lses[0].nbytes)
    return Case(op, f"{n:,} tokens", nbytes, arguments, ("out", "lse_out"), lambda got: _check_state(got, truth))


def gather_case(op: str, sizes: Sizes) -> Case:
    """All tokens of all sequences out of an NHD or HND cache."""
    batch = draw_batch(sizes)
    caches = paged(batch, sizes, sizes.layout)
    n, outputs = batch.num_tokens, ("key_out", "value_out")
    shape = (n, sizes.kv_heads, sizes.head_size)
    arguments = {
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": batch.block_tables,
        "cu_seq_lens": batch.starts.astype(np.int32),
        "layout": sizes.layout,
        **_format(sizes, "k_scale", "v_scale"),
        **{name: poisoned(np, shape, sizes.dtype) for name in outputs},
    }
    row_bytes = sizes.kv_heads * sizes.head_size * (sizes.dtype.itemsize + sizes.cache_dtype.itemsize)
    text = f"{n:,} tokens, {sizes.layout}"
    return Case(op, text, 2 * n * row_bytes, arguments, outputs, lambda got: _check_gather(batch, sizes, got))


def _check_gather(batch: Batch, sizes: Sizes, got: Outputs) -> list[Comparison]:
    live, float32 = slice(batch.num_tokens), np.float32
    sides = (("key_out", batch.key[live], K_SCALE), ("value_out", batch.value[live], V_SCALE))
    return [
        compare_bits(
            name, got[name], reference.as_stored(rows, sizes.kv_cache_dtype, scale, float32).astype(sizes.dtype)
        )
        for name, rows, scale in sides
    ]


def convert_case(op: str, sizes: Sizes) -> Case:
    """All blocks of an NHD or HND cache into packed ones."""
    sizes.check_packed()
    batch = draw_batch(sizes)
    caches = paged(batch, sizes, sizes.layout)
    outputs = ("key_out", "value_out")
    arguments = {
        "key_cache": caches[0],
        "value_cache": caches[1],
        "layout": sizes.layout,
        "to": "packed",
        **dict(zip(outputs, poisoned_caches(sizes, "packed", batch.num_blocks), strict=True)),
    }
    shape = f"{batch.num_blocks:,} blocks, {sizes.layout}"
    return Case(op, shape, 4 * caches[0].nbytes, arguments, outputs, lambda got: _check_convert(batch, sizes, got))


def _check_convert(batch: Batch, sizes: Sizes, got: Outputs) -> list[Comparison]:
    """What no token has is poison at both ends."""
    names = {"key_out": "key_cache", "value_out": "value_cache"}
    return _check_write(batch, sizes, "packed", {names[name]: cache for name, cache in got.items()})


def copy_case(op: str, sizes: Sizes) -> Case:
    """Half of the blocks of an NHD or HND cache, K and V in turn, over the other half."""
    pool, mapping = _pool_and_mapping(sizes)
    return _move_case(op, sizes, {"caches": pool, "mapping": mapping}, pool, pool)


def swap_case(op: str, sizes: Sizes) -> Case:
    """Half of the blocks of an NHD or HND cache, K and V in turn, into a poisoned one."""
    pool, mapping = _pool_and_mapping(sizes)
    target = poisoned(np, pool.shape, pool.dtype)
    return _move_case(op, sizes, {"src": pool, "dst": target, "mapping": mapping}, pool, target)


def _pool_and_mapping(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Caches ``[num_blocks, 2, ...]``, and pairs of blocks of which none comes twice."""
    batch = draw_batch(sizes)
    shuffled = np.random.default_rng(sizes.seed).permutation(batch.num_blocks)
    half = batch.num_blocks // 2
    return np.stack(paged(batch, sizes, sizes.layout), axis=1), np.stack([shuffled[:half], shuffled[-half:]], axis=1)


def _move_case(op: str, sizes: Sizes, arguments: dict[str, Any], source: np.ndarray, target: np.ndarray) -> Case:
    (name,), expected = (name for name, array in arguments.items() if array is target), target.copy()
    for from_block, to_block in arguments["mapping"].tolist():
        expected[to_block] = source[from_block]
    num_pairs = len(arguments["mapping"])
    shape = f"{num_pairs:,} of {len(source):,} blocks, {sizes.layout}"

    def check(got: Outputs) -> list[Comparison]:
        return [
            compare_bits(side, _slots(got[name][:, i], sizes), _slots(expected[:, i], sizes))
            for i, side in enumerate(("keys", "values"))
        ]

    return Case(op, shape, 2 * num_pairs * source[0].nbytes, arguments, (name,), check)


def _slots(cache: np.ndarray, sizes: Sizes) -> np.ndarray:
    """What all slots of an NHD or HND cache hold ``[num_slots, kv_heads, head_size]``."""
    tokens_first = cache if sizes.layout == "NHD" else cache.swapaxes(1, 2)
    return np.ascontiguousarray(tokens_first).reshape(-1, sizes.kv_heads, sizes.head_size)


OPS: dict[str, Callable[[str, Sizes], Case]] = {
    "reshape_and_cache": write_case,
    "reshape_and_cache_flash": write_case,
    "paged_attention_v1": decode_case,
    "paged_attention_v2": decode_case,
    "flash_attn_varlen_func": varlen_case,
    "merge_attn_states": merge_case,
    "gather_cache": gather_case,
    "convert_layout": convert_case,
    "copy_blocks": copy_case,
    "swap_blocks": swap_case,
}


def _format(sizes: Sizes, k_name: str, v_name: str) -> dict[str, Any]:
    scales = {k_name: None, v_name: None} if sizes.kv_cache_dtype == "auto" else {k_name: K_SCALE, v_name: V_SCALE}
    return {"kv_cache_dtype": sizes.kv_cache_dtype, **scales}


def _query(sizes: Sizes, lens: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(sizes.seed + 1)  # not the numbers of the keys again
    return normal(rng, (int(lens.sum()), sizes.heads, sizes.head_size), sizes.dtype)


def _results(query: np.ndarray) -> Outputs:
    """Where results go: NaN, so that what is not written shows."""
    num_tokens, heads, _ = query.shape
    return {"out": np.full_like(query, np.nan), "lse_out": np.full((heads, num_tokens), np.nan, np.float32)}


def _read_case(
    op: str, shape: str, batch: Batch, sizes: Sizes, query: np.ndarray, lens: np.ndarray, arguments: dict[str, Any]
) -> Case:
    arguments |= _results(query)
    row_bytes = sizes.kv_heads * sizes.head_size * sizes.cache_dtype.itemsize
    nbytes = 2 * batch.num_tokens * row_bytes + 2 * query.nbytes + arguments["lse_out"].nbytes

    def truth(precision: type) -> tuple[np.ndarray, np.ndarray]:
        return _dense_attention(batch, sizes, query, lens, precision)

    return Case(op, shape, nbytes, arguments, ("out", "lse_out"), lambda got: _check_state(got, truth))


def _dense_attention(
    batch: Batch, sizes: Sizes, query: np.ndarray, lens: np.ndarray, precision: type
) -> tuple[np.ndarray, np.ndarray]:
    """Each sequence by itself, over its keys and values as they were before they were paged."""
    states = []
    for i, queries in enumerate(np.split(query, np.cumsum(lens)[:-1])):
        key, value = (
            reference.as_stored(rows[batch.sequence(i)], sizes.kv_cache_dtype, scale, precision)
            for rows, scale in ((batch.key, K_SCALE), (batch.value, V_SCALE))
        )
        rounded = precision is np.float32  # where kernels round
        weights = reference.weight_dtype(sizes.dtype, sizes.kv_cache_dtype) if rounded else None
        states.append(reference.attention(queries.astype(precision), key, value, weight_dtype=weights))
    outs, lses = zip(*states, strict=True)
    return np.concatenate(outs), np.concatenate(lses, axis=1)


def _check_state(got: Outputs, truth: Callable[[type], tuple[np.ndarray, np.ndarray]]) -> list[Comparison]:
    (exact_out, exact_lse), (plain_out, plain_lse) = truth(np.float64), truth(np.float32)
    return [
        compare_rows("out", got["out"], exact_out, plain_out),
        compare_lse("lse_out", got["lse_out"], exact_lse, plain_lse),
    ]
