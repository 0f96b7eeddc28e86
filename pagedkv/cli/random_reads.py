"""A read from its spec: paged caches that are poison but for their tokens, and dense attention beside them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import pagedkv
from pagedkv.dtypes import BY_NAME

from . import reference
from .compare import Comparison, compare_lse, compare_rows
from .dimension import Values
from .dimensions import Spec
from .dimensions_of_reads import DECODE_MISTAKES, V2, VARLEN, VARLEN_MISTAKES
from .guarded import Form, Guarded, guarded, guarded_results, holding, make_poison, row_form
from .guarded_caches import draw_scales, poisoned_caches, scale_argument
from .inputs import put_tokens, scattered_tables, slots_of
from .trial import Outputs, Trial

SCALES = 0.003, 0.05  # some values saturate, all take part
LARGE = 100.0  # of queries and keys: scores of tens of thousands
SMALL_SCALE, NEGATIVE_SCALE = 0.01, -0.2
SOFTCAPS = {"none": 0.0, "weak": 30.0, "strong": 1.5}
LARGE_HINT = 1000  # tokens more than there are
OUTPUTS = ("out", "lse_out")


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences before they are paged."""

    key_lens: np.ndarray  # [seqs]
    query_lens: np.ndarray
    first_keys: np.ndarray  # of each sequence the first that is not evicted
    query: np.ndarray  # [sum of query_lens and padding, heads, head_size]
    key: np.ndarray  # [sum of key_lens, kv_heads, head_size]
    value: np.ndarray
    scales: list[reference.Scale]
    rules: reference.Rules

    @property
    def num_queries(self) -> int:
        return int(self.query_lens.sum())


def read_trial(spec: Spec) -> Trial:
    """The arguments of one call and the check of its results."""
    values, rng = spec.values, np.random.default_rng(spec.seed)
    varlen = spec.op == VARLEN
    batch = _draw_batch(values, rng)
    tables, caches = _paged(batch, values, values["layout"] if varlen else "packed", rng)
    index_dtype = tables.dtype
    build = _varlen_arguments if varlen else _decode_arguments
    arguments = build(batch, values, index_dtype) | {
        "kv_cache_dtype": values["cache"],
        "softcap": batch.rules.softcap,
        "alibi_slopes": _optional(batch.rules.slopes),
        "window_size": (values["left"], values["right"]),
        **_results(values, batch.query),
    }
    query = holding(batch.query, row_form(values["query"], batch.query.shape), values["offset"])
    lengths = holding(batch.key_lens.astype(index_dtype))
    table = holding(tables, Form(gaps=((0, 2), (1, 1))) if values["tables"] == "strided" else Form())
    names = ("q", "k", "v", "block_table", "seqused_k") if varlen else DECODE_NAMES
    arguments |= dict(zip(names, (query, *caches, table, lengths), strict=True))
    if "workspace" in values:
        arguments |= _parts(spec.op, batch, values, tables.shape[1])
    mistakes = VARLEN_MISTAKES if varlen else DECODE_MISTAKES
    return Trial(spec.op, arguments, OUTPUTS, lambda got: _check(got, batch, values), mistakes.get(values["mistake"]))


DECODE_NAMES = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")


# ---- arguments ------------------------------------------------------------------------------------------------------


def _decode_arguments(batch: Batch, values: Values, index_dtype: np.dtype) -> dict[str, Any]:
    k_scale, v_scale = map(scale_argument, batch.scales)
    scale, sinks = batch.rules.scale, _optional(batch.rules.sinks)
    hint = _hint(values, batch.key_lens)
    return {"scale": scale, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "max_seq_len": hint}


def _varlen_arguments(batch: Batch, values: Values, index_dtype: np.dtype) -> dict[str, Any]:
    k_descale, v_descale = map(scale_argument, batch.scales)
    return {
        "cu_seqlens_q": holding(np.concatenate([[0], np.cumsum(batch.query_lens)]).astype(index_dtype)),
        "max_seqlen_q": _hint(values, batch.query_lens),
        "max_seqlen_k": _hint(values, batch.key_lens),
        "softmax_scale": batch.rules.scale,
        "causal": values["causal"] == "yes",
        "s_aux": _optional(batch.rules.sinks),
        "k_descale": k_descale,
        "v_descale": v_descale,
        "layout": values["layout"],
    }


def _optional(array: np.ndarray | None) -> Guarded | None:
    return None if array is None else holding(array)


def _hint(values: Values, lens: np.ndarray) -> int | None:
    longest = int(lens.max(initial=0))
    return {"none": None, "exact": longest, "large": longest + LARGE_HINT}[values["hints"]]


def _results(values: Values, query: np.ndarray) -> dict[str, Any]:
    """Where results go: into new arrays, or into poison."""
    if values["results"] == "returned":
        return {RETURN_LSE["layout" in values]: True}
    return guarded_results(values["results"], query.shape, query.dtype, values["offset"])


RETURN_LSE = {False: "return_lse", True: "return_softmax_lse"}


def _parts(op: str, batch: Batch, values: Values, max_blocks: int) -> dict[str, Any]:
    """Partitions or splits, and the workspace that they need."""
    name, number = ("partition_size", values["partition"] or None) if op == V2 else ("num_splits", values["splits"])
    if values["workspace"] == "none":
        return {name: number}
    num_tokens, num_heads, head_size = batch.query.shape
    shape = {"num_tokens": num_tokens, "num_heads": num_heads, "head_size": head_size}
    longest = max_blocks * values["block_size"]
    nbytes = pagedkv.workspace_nbytes(op, **shape, max_seq_len=longest, **{name: number})
    (workspace,) = guarded((nbytes,), np.dtype(np.uint8))
    return {name: number, "workspace": workspace}


# ---- inputs ---------------------------------------------------------------------------------------------------------


def _draw_batch(values: Values, rng: np.random.Generator) -> Batch:
    key_lens = _key_lens(values, rng)
    query_lens = _query_lens(values, key_lens, rng)
    first_keys = np.zeros_like(key_lens)
    if values["evicted"] == "yes" and values["left"] >= 0:
        first_keys = np.clip(key_lens - query_lens - values["left"], 0, key_lens)
    dtype, heads = BY_NAME[values["dtype"]], values["kv_heads"] * values["group"]
    query_rows = int(query_lens.sum()) + values.get("padding", 0)
    query = rng.standard_normal((query_rows, heads, values["head_size"]), np.float32)
    shape = (int(key_lens.sum()), values["kv_heads"], values["head_size"])
    key, value = rng.standard_normal((2, *shape), np.float32)
    if values["content"] == "large":
        query, key = query * LARGE, key * LARGE
    elif values["content"] == "one_key":
        key[::7] *= 8
    elif values["content"] == "equal_keys":
        key[...] = key[:1]
    arrays = (array.astype(dtype) for array in (query, key, value))
    scales = draw_scales(values, rng, SCALES)
    return Batch(key_lens, query_lens, first_keys, *arrays, scales, _rules(values, heads, rng))


def _key_lens(values: Values, rng: np.random.Generator) -> np.ndarray:
    lens = np.full(values["seqs"], values["context"])
    if values["lengths"] in ("mixed", "some_empty"):
        lens[1:] = rng.integers(1, values["context"], lens[1:].shape, endpoint=True)
    if values["lengths"] in ("some_empty", "all_empty"):
        lens[rng.random(lens.shape) < (0.5 if values["lengths"] == "some_empty" else 1)] = 0
    return lens


def _query_lens(values: Values, key_lens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return {
        "one": np.ones_like(key_lens),  # also every decode
        "ragged": rng.integers(0, key_lens, endpoint=True),
        "all": key_lens,
        "more_than_keys": key_lens + rng.integers(1, 3, key_lens.shape, endpoint=True),
        "none": np.zeros_like(key_lens),
    }[values.get("queries", "one")]


def _rules(values: Values, heads: int, rng: np.random.Generator) -> reference.Rules:
    slopes, sinks = rng.random(heads, np.float32), rng.normal(0, 2, heads)
    sink_dtype = {"float32": np.dtype(np.float32), "query_dtype": BY_NAME[values["dtype"]]}.get(values["sinks"])
    right = 0 if values.get("causal") == "yes" else values["right"]
    return reference.Rules(
        {"default": None, "small": SMALL_SCALE, "negative": NEGATIVE_SCALE}[values["scale"]],
        SOFTCAPS[values["softcap"]],
        slopes if values["alibi"] == "yes" else None,
        (values["left"], right),
        None if sink_dtype is None else sinks.astype(sink_dtype),
    )


def _paged(batch: Batch, values: Values, layout: str, rng: np.random.Generator) -> tuple[np.ndarray, list[Guarded]]:
    """Tables with garbage wherever no query looks, and caches that hold nothing but the keys that are not evicted."""
    block_size = values["block_size"]
    tables, num_blocks = scattered_tables(rng, batch.key_lens, block_size)
    caches = poisoned_caches(values, layout, num_blocks)
    lies = [np.arange(n) >= first for n, first in zip(batch.key_lens, batch.first_keys, strict=True)]
    lies = np.concatenate([np.zeros(0, bool), *lies])
    slots = np.concatenate([np.zeros(0, int), *slots_of(tables, batch.key_lens, block_size)])[lies]
    for rows, cache, scale in zip((batch.key, batch.value), caches, batch.scales, strict=True):
        put_tokens(cache.array, layout, block_size, reference.encoded(rows[lies], values["cache"], scale), slots)
    tables = tables.astype("int32" if values["tables"] == "strided" else values["tables"])
    column = np.arange(tables.shape[1])
    first, end = batch.first_keys // block_size, -(-batch.key_lens // block_size)
    unseen = (column < first[:, None]) | (column >= end[:, None])
    garbage = rng.choice([-1, np.iinfo(tables.dtype).max, np.iinfo(tables.dtype).min, num_blocks, 0], tables.shape)
    return np.where(unseen, garbage, tables).astype(tables.dtype), caches


# ---- check ----------------------------------------------------------------------------------------------------------


def _check(got: Outputs, batch: Batch, values: Values) -> list[Comparison]:
    live = slice(batch.num_queries)
    out, lse = got["out"][live], got["lse_out"][:, live]
    exact_out, exact_lse = _attention(batch, values, np.float64)
    weights = reference.weight_dtype(batch.query.dtype, values["cache"])
    plain_out, plain_lse = _attention(batch, values, np.float32, weight_dtype=weights)
    sizes, scores = _by_sequence(reference.magnitudes, batch, values, np.float64)
    norm = np.linalg.norm(exact_out, axis=-1)
    cancelled = np.divide(sizes, norm, out=np.ones_like(norm), where=norm > 0)
    comparisons = [
        compare_rows("out", out, exact_out, plain_out, (1 + scores.T) * cancelled),
        compare_lse("lse_out", lse, exact_lse, plain_lse, 1 + scores),
    ]
    for written in (out, lse, got.get("workspace")):
        if written is not None:
            make_poison(written)
    return comparisons


def _attention(batch: Batch, values: Values, precision: type, **rounding: Any) -> tuple[np.ndarray, np.ndarray]:
    return _by_sequence(partial(reference.attention, **rounding), batch, values, precision)


def _by_sequence(function: Any, batch: Batch, values: Values, precision: type) -> tuple[np.ndarray, np.ndarray]:
    """Two results of each sequence by itself, the second with tokens in its last axis."""
    ends = np.cumsum(batch.key_lens)
    sides = [
        np.split(reference.as_stored(rows, values["cache"], scale, precision), ends)
        for rows, scale in zip((batch.key, batch.value), batch.scales, strict=True)
    ]
    queries = np.split(batch.query.astype(precision), np.cumsum(batch.query_lens))
    # The last part, after the last sequence, has no keys; of queries it is padding, of which nothing is looked at.
    queries[-1] = queries[-1][:0]
    states = [function(query, key, value, batch.rules) for query, key, value in zip(queries, *sides, strict=True)]
    first, second = zip(*states, strict=True)
    return np.concatenate(first), np.concatenate(second, axis=1)
