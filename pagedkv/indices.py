"""Checks of what slots, ids, lengths and scales hold, on NumPy arrays: always on the NumPy and PTX backends, on cuda
inside ``checked()``. Only what would be read or written is looked at."""

from collections.abc import Callable

import numpy as np

from .arrays import ArrayView
from .checks import LARGEST, SMALLEST, wrong
from .dtypes import is_fp8
from .problem import Attention, CacheWrite, PagedCache, ScoreOptions


def check_slots(problem: CacheWrite, slots: np.ndarray) -> None:
    """IndexError for a slot past the cache, ValueError for two live tokens with one slot. Negative slots are legal."""
    num_slots = problem.cache.shape.num_slots
    if slots.size and slots.max() >= num_slots:
        raise IndexError(wrong("slot_mapping", f"slots below {num_slots}", int(slots.max())))
    live = np.sort(slots[slots >= 0])
    repeated = live[1:][live[1:] == live[:-1]]
    if repeated.size:
        raise ValueError(wrong("slot_mapping", "each slot at most once", f"slot {int(repeated[0])} twice"))


def check_scales(cache: PagedCache, read: Callable[[ArrayView], np.ndarray]) -> None:
    """ValueError for a scale in an array that is not positive or not in float32's normal range; ``read`` fetches it."""
    for scale in (cache.k_scale, cache.v_scale):
        if scale.array is None or not is_fp8(cache.format):
            continue
        values = np.atleast_1d(read(scale.array))
        wrong_ones = values[~((values >= SMALLEST) & (values <= LARGEST))]
        if wrong_ones.size:
            raise ValueError(wrong(scale.name, "positive numbers in float32's normal range", wrong_ones[0]))


def check_lengths(problem: Attention, seq_lens: np.ndarray) -> None:
    """ValueError for a length that is negative or beyond the hint, IndexError for one beyond the table."""
    if seq_lens.size == 0:
        return
    name = "seq_lens" if problem.query_start_loc is None else "seqused_k"
    longest, capacity = int(seq_lens.max()), problem.block_table.shape[1] * problem.cache.shape.block_size
    if seq_lens.min() < 0:
        raise ValueError(wrong(name, "lengths of at least 0", int(seq_lens.min())))
    if longest > capacity:
        raise IndexError(wrong(name, f"at most {capacity} tokens, what a row of the block table holds", longest))
    if problem.max_seq_len is not None and longest > problem.max_seq_len:
        hint = "max_seq_len" if problem.query_start_loc is None else "max_seqlen_k"
        raise ValueError(wrong(hint, f"at least the longest sequence, {longest}", problem.max_seq_len))


def check_starts(problem: Attention, starts: np.ndarray) -> None:
    """ValueError unless the starts rise from 0 to at most the rows of the query, no step beyond the hint."""
    name, num_tokens = "cu_seqlens_q", problem.query.shape[0]
    counts = np.diff(starts.astype(np.int64))  # narrow integers would wrap
    if starts[0] != 0 or (counts < 0).any():
        raise ValueError(wrong(name, "starts that rise from 0", starts.tolist() if starts.size < 9 else "others"))
    if starts[-1] > num_tokens:
        raise ValueError(wrong(name, f"at most {num_tokens}, the rows of q", int(starts[-1])))
    if problem.max_query_len is not None and counts.size and counts.max() > problem.max_query_len:
        raise ValueError(
            wrong(
                "max_seqlen_q", f"at least the most queries of a sequence, {int(counts.max())}", problem.max_query_len
            )
        )


def check_block_ids(problem: Attention, block_ids: np.ndarray) -> None:
    """IndexError for a visible block id outside the cache."""
    num_blocks = problem.cache.shape.num_blocks
    outside = block_ids[(block_ids < 0) | (block_ids >= num_blocks)]
    if outside.size:
        name = "block_tables" if problem.query_start_loc is None else "block_table"
        raise IndexError(wrong(name, f"visible ids from 0 to {num_blocks - 1}", int(outside[0])))


def key_range(options: ScoreOptions, seq_len: int, num_queries: int) -> tuple[int, int]:
    """First and last (exclusive) key that some query of a sequence sees; an empty range where none does."""
    if num_queries == 0:
        return 0, 0
    left, _ = options.window  # the last query is the last token: no right bound cuts its sequence short
    return (max(0, seq_len - num_queries - left) if left >= 0 else 0), seq_len


def check_attention(
    problem: Attention, block_table: np.ndarray, seq_lens: np.ndarray, starts: np.ndarray | None = None
) -> list[tuple[int, int]]:
    """Checks all indices of a read and returns each sequence's range of visible keys."""
    check_lengths(problem, seq_lens)
    if starts is not None:
        check_starts(problem, starts)
    counts = np.ones(seq_lens.size, int) if starts is None else np.diff(starts.astype(np.int64))
    block_size = problem.cache.shape.block_size
    ranges = [
        key_range(problem.options, int(seq_len), int(count)) for seq_len, count in zip(seq_lens, counts, strict=True)
    ]
    for row, (first, last) in zip(block_table, ranges, strict=True):
        if last > first:
            check_block_ids(problem, row[first // block_size : -(-last // block_size)])
    return ranges
