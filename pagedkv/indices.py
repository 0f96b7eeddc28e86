"""Checks of what slots, ids, lengths and scales hold, on NumPy arrays: always on the NumPy and PTX backends, on cuda
inside ``checked()``. Only what would be read or written is looked at."""

from collections.abc import Callable

import numpy as np

from .arrays import ArrayView
from .checks import LARGEST, SMALLEST, wrong
from .dtypes import is_fp8
from .problem import AdvanceDecode, Attention, BlockMove, CacheWrite, GatherCache, PagedCache, ScoreOptions


def check_slots(problem: CacheWrite, slots: np.ndarray) -> None:
    """IndexError for a slot past the cache, ValueError for two live tokens with one slot. Negative slots are legal."""
    num_slots = problem.cache.shape.num_slots
    if slots.size and slots.max() >= num_slots:
        raise IndexError(wrong("slot_mapping", f"slots below {num_slots}", int(slots.max())))
    repeated = _repeated(slots[slots >= 0])
    if repeated.size:
        raise ValueError(wrong("slot_mapping", "each slot at most once", f"slot {int(repeated[0])} twice"))


def _repeated(numbers: np.ndarray) -> np.ndarray:
    """Those that come more than once, in ascending order."""
    numbers = np.sort(numbers)
    return numbers[1:][numbers[1:] == numbers[:-1]]


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
    counts = _counts_of(starts, "cu_seqlens_q", problem.query.shape[0], "the rows of q")
    if problem.max_query_len is not None and counts.size and counts.max() > problem.max_query_len:
        raise ValueError(
            wrong(
                "max_seqlen_q", f"at least the most queries of a sequence, {int(counts.max())}", problem.max_query_len
            )
        )


def _counts_of(starts: np.ndarray, name: str, most: int | None, what: str) -> np.ndarray:
    """From one start to the next, int64. ValueError unless they rise from 0, to at most ``most``."""
    if starts[0] != 0 or (starts[1:] < starts[:-1]).any():  # no differences, which might wrap
        raise ValueError(wrong(name, "starts that rise from 0", starts.tolist() if starts.size < 9 else "others"))
    if most is not None and starts[-1] > most:
        raise ValueError(wrong(name, f"at most {most}, {what}", int(starts[-1])))
    return np.diff(starts.astype(np.int64))


def check_block_ids(problem: Attention, block_ids: np.ndarray) -> None:
    """IndexError for a visible block id outside the cache."""
    name = "block_tables" if problem.query_start_loc is None else "block_table"
    _check_ids(block_ids, problem.cache.shape.num_blocks, name)


def _check_ids(block_ids: np.ndarray, num_blocks: int, name: str) -> None:
    outside = block_ids[(block_ids < 0) | (block_ids >= num_blocks)]
    if outside.size:
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


def check_row_starts(row_starts: np.ndarray, num_rows: int | None = None) -> np.ndarray:
    """How many rows each sequence has, int64. ValueError unless the starts rise from 0, to at most ``num_rows``."""
    return _counts_of(row_starts, "cu_seq_lens", num_rows, "the rows of the output")


def check_gather(
    problem: GatherCache, block_table: np.ndarray, row_starts: np.ndarray, seq_starts: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Block and offset of every row that is filled, int64. ValueError for starts of rows or ranges that are none,
    IndexError for a token past its row of the table and for a block outside the cache."""
    counts, block_size = check_row_starts(row_starts, problem.num_rows), problem.cache.shape.block_size
    (live,) = np.nonzero(counts)
    first = np.zeros(counts.size, np.int64) if seq_starts is None else seq_starts.astype(np.int64)
    if first[live].min(initial=0) < 0:
        raise ValueError(wrong("seq_starts", "starts of at least 0", int(first[live].min())))
    capacity = block_table.shape[1] * block_size
    beyond = live[counts[live] > capacity - first[live]]  # no sum, which might wrap
    if beyond.size:
        expected = f"ranges that end by token {capacity}, what a row of the block table holds"
        raise IndexError(wrong("cu_seq_lens", expected, int(first[beyond[0]]) + int(counts[beyond[0]])))
    sequence = np.repeat(np.arange(counts.size), counts)
    token = np.arange(sequence.size) + (first - row_starts[:-1])[sequence]
    block, offset = np.divmod(token, block_size)
    ids = block_table[sequence, block].astype(np.int64)
    _check_ids(ids, problem.cache.shape.num_blocks, "block_table")
    return ids, offset


def check_advance(problem: AdvanceDecode, block_table: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """The slots of the next tokens of all sequences but padding, int64. ValueError for a negative length, IndexError
    for a full row or one without a block for its token."""
    if seq_lens.min(initial=0) < 0:
        raise ValueError(wrong("seq_lens", "lengths of at least 0", int(seq_lens.min())))
    live, capacity = np.flatnonzero(seq_lens), problem.max_blocks * problem.block_size
    if seq_lens.max(initial=0) >= capacity and live.size:
        raise IndexError(wrong("seq_lens", f"less than {capacity} tokens, what a row holds", int(seq_lens.max())))
    block, offset = np.divmod(seq_lens[live].astype(np.int64), problem.block_size)
    block_ids = block_table[live, block].astype(np.int64)
    if block_ids.min(initial=0) < 0:
        row = live[np.argmin(block_ids)]
        raise IndexError(wrong("block_table", f"a block for token {seq_lens[row]} of row {row}", int(block_ids.min())))
    return block_ids * problem.block_size + offset


def check_pairs(move: BlockMove, pairs: np.ndarray) -> None:
    """IndexError for a block outside its pool, ValueError for a destination named twice."""
    if len(pairs) == 0:
        return
    for what, ids, arrays in zip(("sources", "destinations"), pairs.T, (move.sources, move.targets), strict=True):
        lowest, highest, num_blocks = int(ids.min()), int(ids.max()), next(iter(arrays.values())).shape[0]
        if lowest < 0 or highest >= num_blocks:
            wrong_one = lowest if lowest < 0 else highest
            raise IndexError(wrong("mapping", f"{what} from 0 to {num_blocks - 1}", wrong_one))
    repeated = _repeated(pairs[:, 1])
    if repeated.size:
        raise ValueError(wrong("mapping", "each destination at most once", f"block {int(repeated[0])} twice"))
