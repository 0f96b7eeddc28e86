"""NumPy backend: every op, vectorised, in float32. It says what is right and serves where there is no GPU."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from . import indices
from .arrays import ArrayView
from .dtypes import is_fp8, quantize, to_float32
from .layout import PACK_BYTES
from .problem import (
    AdvanceDecode,
    Attention,
    BlockMove,
    CacheWrite,
    ConvertLayout,
    GatherCache,
    MergeStates,
    PagedCache,
    Scale,
    ScoreOptions,
)
from .softmax import SoftmaxState, merge
from .workspace import FLOAT_BYTES, partials_nbytes

QUERY_TILE = 128  # query tokens a step: bounds the scores in memory to [num_heads, QUERY_TILE, seq_len]


# ---- writes ---------------------------------------------------------------------------------------------------------


def reshape_and_cache_flash(problem: CacheWrite) -> None:
    """Writes rows of heads into NHD or HND blocks."""
    live, block, offset = _live_tokens(problem)
    for rows, target, scale in _sides(problem):
        at = (block, offset) if problem.cache.layout == "NHD" else (block, slice(None), offset)
        target[at] = _encoded(rows[live], scale, problem.cache.format)


def reshape_and_cache(problem: CacheWrite) -> None:
    """Writes rows of heads into packed blocks."""
    live, block, offset = _live_tokens(problem)
    for rows, target, scale in _sides(problem):
        codes = _encoded(rows[live], scale, problem.cache.format)
        if target.ndim == 5:  # keys: [.., head_size / x, block_size, x]
            codes = codes.reshape(*codes.shape[:2], *target.shape[2::2])
        target[block, :, :, offset] = codes


def _live_tokens(problem: CacheWrite) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    slots = problem.slot_mapping.numpy().astype(np.int64)  # narrow integers may not hold the block size
    indices.check_slots(problem, slots)
    indices.check_scales(problem.cache, ArrayView.numpy)
    (live,) = np.nonzero(slots >= 0)
    return live, *np.divmod(slots[live], problem.cache.shape.block_size)


def _sides(problem: CacheWrite) -> Iterator[tuple[np.ndarray, np.ndarray, Scale]]:
    cache = problem.cache
    yield problem.key.numpy(), _storage(cache.key), cache.k_scale
    yield problem.value.numpy(), _storage(cache.value), cache.v_scale


def _storage(cache: ArrayView) -> np.ndarray:
    array = cache.numpy()
    return array.view(np.uint8) if is_fp8(array.dtype) else array


def _encoded(rows: np.ndarray, scale: Scale, kv_format: np.dtype) -> np.ndarray:
    if not is_fp8(kv_format):
        return rows
    return quantize(rows, _per_head(scale)[:, None], kv_format)


def _per_head(scale: Scale) -> np.ndarray:
    return np.atleast_1d(np.float32(scale.value) if scale.array is None else scale.array.numpy())


# ---- moves ----------------------------------------------------------------------------------------------------------


def copy_blocks(problem: BlockMove) -> None:
    """Copies blocks inside each cache."""
    _move_blocks(problem)


def swap_blocks(problem: BlockMove) -> None:
    """Copies blocks of each source to its target."""
    _move_blocks(problem)


def _move_blocks(problem: BlockMove) -> None:
    pairs = problem.mapping.numpy()
    indices.check_pairs(problem, pairs)
    for source, target in problem.sides:
        # The right side is a copy: all blocks are read before one is written.
        _storage(target)[pairs[:, 1]] = _storage(source)[pairs[:, 0]]


# ---- reads ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sequence:
    """One sequence of a read: its rows of the query, where they stand, and the keys that some of them see."""

    rows: slice
    query_pos: np.ndarray  # [num_queries]
    first_key: int
    last_key: int  # exclusive
    key: np.ndarray  # [num_kv_heads, last_key - first_key, head_size] float32
    value: np.ndarray


@dataclass(slots=True)
class Partials:
    """Partial states per query, head and partition (or split); views into a workspace where one was given."""

    max_logits: np.ndarray  # [num_tokens, num_heads, num_partials]
    exp_sums: np.ndarray
    tmp_out: np.ndarray  # [num_tokens, num_heads, num_partials, head_size]


def paged_attention_v1(problem: Attention) -> None:
    """Decode in a single pass over each sequence."""
    single_pass(problem)


def paged_attention_v2(problem: Attention) -> None:
    """Decode by partitions of each sequence, merged by a reduce step."""
    reduce(problem, partition(problem))


def flash_attn_varlen_func(problem: Attention) -> None:
    """Prefill, decode and mixed batches; with ``num_splits`` above 1 by way of partial states."""
    if problem.num_splits > 1:
        reduce(problem, partition(problem))
    else:
        single_pass(problem)


def single_pass(problem: Attention) -> None:
    """Attends all queries to all their keys and writes output and LSE."""
    for sequence, tile in _tiles(problem):
        state = _attend(problem, sequence, tile, sequence.first_key, sequence.last_key)
        _finish(problem, _rows(sequence, tile), state)


def partition(problem: Attention) -> Partials:
    """The state of every query over each partition (v2) or split (varlen) of its sequence's keys."""
    partials = _partials(problem)
    for sequence, tile in _tiles(problem):
        rows = _rows(sequence, tile)
        for i, (start, stop) in enumerate(_key_ranges(problem, sequence, partials.max_logits.shape[-1])):
            state = _attend(problem, sequence, tile, start, stop)
            partials.max_logits[rows, :, i] = state.max_logit.T
            partials.exp_sums[rows, :, i] = state.exp_sum.T
            partials.tmp_out[rows, :, i] = state.acc.swapaxes(0, 1)
    return partials


def reduce(problem: Attention, partials: Partials) -> None:
    """Merges partial states in partition order and writes output and LSE."""
    for rows, _ in _query_rows(problem):
        state = merge(partials.max_logits[rows], partials.exp_sums[rows], partials.tmp_out[rows], axis=2)
        _finish(problem, rows, SoftmaxState(state.max_logit.T, state.exp_sum.T, state.acc.swapaxes(0, 1)))


def _query_rows(problem: Attention) -> Iterator[tuple[slice, int]]:
    lens = problem.seq_lens.numpy().tolist()
    starts = range(len(lens) + 1)
    if problem.query_start_loc is not None:
        starts = problem.query_start_loc.numpy().tolist()
    for s, seq_len in enumerate(lens):
        yield slice(starts[s], starts[s + 1]), seq_len


def _tiles(problem: Attention) -> Iterator[tuple[Sequence, slice]]:
    # All indices are checked before the first result is written.
    indices.check_scales(problem.cache, ArrayView.numpy)
    ranges = indices.check_attention(
        problem,
        problem.block_table.numpy(),
        problem.seq_lens.numpy(),
        None if problem.query_start_loc is None else problem.query_start_loc.numpy(),
    )
    table = problem.block_table.numpy()
    for s, (rows, seq_len) in enumerate(_query_rows(problem)):
        num_queries = rows.stop - rows.start
        query_pos = np.arange(seq_len - num_queries, seq_len)
        first, last = ranges[s]
        sequence = Sequence(rows, query_pos, first, last, *_gather(problem.cache, table[s], first, last))
        for start in range(0, num_queries, QUERY_TILE):
            yield sequence, slice(start, min(start + QUERY_TILE, num_queries))


def _rows(sequence: Sequence, tile: slice) -> slice:
    return slice(sequence.rows.start + tile.start, sequence.rows.start + tile.stop)


def _gather(cache: PagedCache, table_row: np.ndarray, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    block_size = cache.shape.block_size
    ids = table_row[first // block_size : -(-last // block_size)] if last > first else table_row[:0]
    live = slice(first % block_size, first % block_size + last - first)
    sides = ((_storage(cache.key), cache.k_scale), (_storage(cache.value), cache.v_scale))
    key, value = (_dense(storage[ids], cache, scale, live) for storage, scale in sides)
    return key, value


def _dense(blocks: np.ndarray, cache: PagedCache, scale: Scale, live: slice) -> np.ndarray:
    # To [num_kv_heads, block, slot, head_size], flattened over blocks and cut to the live slots.
    axes = {"NHD": (2, 0, 1, 3), "HND": (1, 0, 2, 3), "packed": (1, 0, 3, 2)}[cache.layout]
    if blocks.ndim == 5:
        axes = (1, 0, 3, 2, 4)  # packed keys: [.., head_size / x, block_size, x]
    rows = blocks.transpose(axes).reshape(cache.shape.num_kv_heads, -1, cache.shape.head_size)[:, live]
    dense = to_float32(rows, cache.format)
    return dense * _per_head(scale)[:, None, None] if is_fp8(cache.format) else dense


def _key_ranges(problem: Attention, sequence: Sequence, count: int) -> Iterator[tuple[int, int]]:
    """What each partition or split covers. Partitions lie at multiples of their size; splits share the keys evenly."""
    first, last = sequence.first_key, sequence.last_key
    size, origin = problem.partition_size, 0
    if size == 0:
        size, origin = -(-(last - first) // count), first
    for i in range(count):
        start = min(max(origin + i * size, first), last)
        yield start, max(start, min(origin + (i + 1) * size, last))


def _attend(problem: Attention, sequence: Sequence, tile: slice, start: int, stop: int) -> SoftmaxState:
    """The state of a tile of queries over keys [start, stop), ``[num_heads, queries]``."""
    query_pos = sequence.query_pos[tile]
    left, right = problem.options.window
    if right >= 0:  # keys that no query of the tile sees are not looked at
        stop = max(start, min(stop, int(query_pos[-1]) + right + 1))
    if left >= 0:
        start = min(stop, max(start, int(query_pos[0]) - left))
    keys = slice(start - sequence.first_key, stop - sequence.first_key)
    num_kv_heads, _, head_size = sequence.key.shape
    rows = problem.query.numpy()[_rows(sequence, tile)]
    # A kv head's queries, of all heads of its group, are the rows of one product.
    group = (num_kv_heads, problem.num_heads // num_kv_heads * query_pos.size)
    query = to_float32(rows, rows.dtype).transpose(1, 0, 2).reshape(*group, head_size)
    scores = query @ sequence.key[:, keys].swapaxes(1, 2) * np.float32(problem.options.scale)
    scores = scores.reshape(problem.num_heads, query_pos.size, stop - start)
    _adjust(scores, problem.options, query_pos[:, None], np.arange(start, stop))
    state = SoftmaxState.of_scores(scores.reshape(*group, stop - start), sequence.value[:, keys])
    shape = (problem.num_heads, query_pos.size)
    return SoftmaxState(
        state.max_logit.reshape(shape), state.exp_sum.reshape(shape), state.acc.reshape(*shape, head_size)
    )


def _adjust(scores: np.ndarray, options: ScoreOptions, query_pos: np.ndarray, key_pos: np.ndarray) -> None:
    """Softcap, ALiBi and masks, in place on ``[num_heads, queries, keys]``."""
    if options.softcap > 0:
        scores[...] = np.tanh(scores / np.float32(options.softcap)) * np.float32(options.softcap)
    if options.alibi_slopes is not None:
        distance = np.abs(query_pos - key_pos).astype(np.float32)
        scores -= options.alibi_slopes.numpy()[:, None, None] * distance
    left, right = options.window
    if left >= 0:
        scores[:, key_pos < query_pos - left] = -np.inf
    if right >= 0:
        scores[:, key_pos > query_pos + right] = -np.inf


def _finish(problem: Attention, rows: slice, state: SoftmaxState) -> None:
    """Writes output and LSE of some query rows from their states ``[num_heads, rows]``."""
    sinks = problem.options.sinks
    if sinks is not None:
        logits = to_float32(sinks.numpy(), sinks.dtype)
        state = state.with_sink(np.broadcast_to(logits[:, None], state.max_logit.shape))
    out, lse = state.normalize()
    problem.out.numpy()[rows] = out.swapaxes(0, 1).astype(problem.out.dtype)
    if problem.lse_out is not None:
        problem.lse_out.numpy()[:, rows] = lse


def _partials(problem: Attention) -> Partials:
    num_tokens, num_heads, head_size = problem.query.shape
    shape = (num_tokens, num_heads, problem.num_partials)
    nbytes = partials_nbytes(*problem.query.shape, shape[-1])
    count = nbytes // FLOAT_BYTES
    if problem.workspace is None or nbytes == 0 or problem.has_equal_shares:
        flat = np.empty(count, np.float32)
    else:
        # Bytes of any alignment: NumPy reads them all the same.
        flat = np.ndarray(count, np.float32, problem.workspace.numpy())
    per_state = num_tokens * num_heads * shape[-1]
    tmp_out, max_logits, exp_sums = np.split(flat, (head_size * per_state, (head_size + 1) * per_state))
    return Partials(max_logits.reshape(shape), exp_sums.reshape(shape), tmp_out.reshape(*shape, head_size))


# ---- merging --------------------------------------------------------------------------------------------------------


def merge_attn_states(problem: MergeStates) -> None:
    """Merges two normalised results by their LSE; +inf counts as -inf (a side that saw nothing)."""
    lses = np.stack([problem.prefix_lse.numpy(), problem.suffix_lse.numpy()])
    lses = np.where(np.isposinf(lses), np.float32(-np.inf), lses)
    outputs = (problem.prefix_output, problem.suffix_output)
    dense = np.stack([to_float32(output.numpy(), output.dtype).swapaxes(0, 1) for output in outputs])
    empty = np.isneginf(lses)
    # What an empty side holds is not looked at: 0 x NaN is NaN.
    state = merge(lses, np.where(empty, np.float32(0), np.float32(1)), np.where(empty[..., None], 0, dense), axis=0)
    out, lse = state.normalize()
    problem.out.numpy()[...] = out.swapaxes(0, 1).astype(problem.out.dtype)
    problem.lse_out.numpy()[...] = lse


# ---- gathers --------------------------------------------------------------------------------------------------------


def gather_cache(problem: GatherCache) -> None:
    """Reads ranges of sequences as rows, one range after the other."""
    cache, starts = problem.cache, problem.seq_starts
    indices.check_scales(cache, ArrayView.numpy)
    arrays = (problem.block_table.numpy(), problem.cu_seq_lens.numpy(), None if starts is None else starts.numpy())
    block, offset = indices.check_gather(problem, *arrays)
    at = {"NHD": (block, offset), "HND": (block, slice(None), offset)}.get(
        cache.layout, (block, slice(None), slice(None), offset)
    )
    sides = ((cache.key, cache.k_scale, problem.key_out), (cache.value, cache.v_scale, problem.value_out))
    for side, scale, out in sides:
        rows = _storage(side)[at].reshape(block.size, *out.shape[1:])
        out.numpy()[: block.size] = _decoded(rows, scale, cache.format, out.dtype)


def _decoded(rows: np.ndarray, scale: Scale, kv_format: np.dtype, dtype: np.dtype) -> np.ndarray:
    """Numbers of stored rows: codes times the scale in float32, rounded once."""
    if not is_fp8(kv_format):
        return rows
    with np.errstate(over="ignore", under="ignore"):
        return (to_float32(rows, kv_format) * _per_head(scale)[:, None]).astype(dtype)


def convert_layout(problem: ConvertLayout) -> None:
    """Copies both caches slot by slot."""
    source, target = problem.source, problem.target
    for old, new in ((source.key, target.key), (source.value, target.value)):
        _packs_of_slots(new, target)[...] = _packs_of_slots(old, source)


def _packs_of_slots(side: ArrayView, cache: PagedCache) -> np.ndarray:
    """The bits of a cache as ``[num_blocks, block_size, num_kv_heads, packs, features of a pack]``, a view."""
    bits = side.numpy().view(f"u{side.dtype.itemsize}")
    if side.ndim == 5:
        return bits.transpose(0, 3, 1, 2, 4)
    slots = bits.transpose({"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "packed": (0, 3, 1, 2)}[cache.layout])
    head_size = cache.shape.head_size
    x = math.gcd(PACK_BYTES // side.dtype.itemsize, head_size)
    return slots.reshape(*slots.shape[:3], head_size // x, x)


# ---- a decode step --------------------------------------------------------------------------------------------------


def advance_decode(problem: AdvanceDecode) -> None:
    """Gives every sequence but padding one more token, and lays out slots, positions and starts."""
    lens, table = problem.seq_lens.numpy(), problem.block_table.numpy()
    slots = indices.check_advance(problem, table, lens)
    live = np.flatnonzero(lens)
    starts = problem.query_start_loc.numpy()
    starts[0] = 0
    np.cumsum(lens > 0, out=starts[1:])
    outputs = [(problem.slot_mapping, slots, -1), (problem.positions, lens[live], 0)]
    for output, of_live, padding in outputs:
        if output is not None:
            output.numpy()[: live.size] = of_live
            output.numpy()[live.size :] = padding
    lens[live] += 1
