"""What the kernels of one step have to know of its sequences: slots, starts of queries, lengths, block table."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .blocks import read_only
from .checks import check_count, integer_row, wrong
from .dtypes import INT32, LARGEST_INT32

NO_SLOT = -1  # of padding: writes nothing


@dataclass(slots=True, eq=False)
class Step:
    """The new tokens of a batch of sequences. Padding, up to the sizes of a captured graph, has slots of -1, lengths of
    0 and starts that repeat the last one.

    slot_mapping: int64 ``[num_tokens]``, where the keys and values of the new tokens go.
    positions: int64 ``[num_tokens]``, of the new tokens in their sequences; 0 in padding.
    query_start_loc: int32 ``[num_seqs + 1]``, where the new tokens of each sequence start, and the last one's end.
    seq_lens: int32 ``[num_seqs]``, with the new tokens.
    block_table: int32 ``[num_seqs, blocks of the longest]``. On the host and without padding, sequences in adjoining
        rows have a view of the table itself, which later calls on the table change.
    copies: int32 ``[n, 2]``, (source, destination) blocks to be copied before anything is written.
    max_query_len, max_seq_len: the most new tokens and tokens of a sequence.
    num_tokens, num_seqs: without padding.
    """

    slot_mapping: Any
    positions: np.ndarray
    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    max_query_len: int
    max_seq_len: int
    num_tokens: int
    num_seqs: int
    copies: np.ndarray


def lay_out(
    table: np.ndarray,
    rows: np.ndarray,
    index: slice | np.ndarray,
    ends: np.ndarray,
    counts: np.ndarray,
    block_size: int,
    *,
    copies: np.ndarray,
    pad_seqs: int | None,
    pad_tokens: int | None,
) -> Step:
    """The step that gives the sequences in ``rows`` of a table their last ``counts`` tokens, of ``ends`` in all.

    index: the rows as what picks them fastest.
    """
    num_seqs, num_tokens, most = rows.size, int(counts.sum()), int(counts.max(initial=0))
    if most == 1 and num_tokens == num_seqs:  # decode: a token each
        starts, of_token, at = np.arange(num_seqs + 1, dtype=INT32), rows, ends - 1
    else:
        starts = np.zeros(num_seqs + 1, INT32)
        counts.cumsum(out=starts[1:])
        of_token = np.repeat(rows, counts)
        at = np.arange(num_tokens) + np.repeat(ends - starts[1:], counts)
    # One index into the flat table, and no divmod: each takes half the time or less.
    block = at // block_size
    slots = (table.reshape(-1)[of_token * table.shape[1] + block] - block) * block_size + at
    longest = int(ends.max(initial=0))
    block_table = _rows_of(table, index, -(-longest // block_size))
    step = Step(slots, at, starts, ends.astype(INT32), block_table, most, longest, num_tokens, num_seqs, copies)
    return step if pad_seqs is None and pad_tokens is None else _padded(step, pad_seqs, pad_tokens)


def _rows_of(table: np.ndarray, index: slice | np.ndarray, width: int) -> np.ndarray:
    return read_only(table[index, :width])  # of the table itself, if they adjoin


def _padded(step: Step, pad_seqs: int | None, pad_tokens: int | None) -> Step:
    seqs = step.num_seqs if pad_seqs is None else pad_seqs
    tokens = step.num_tokens if pad_tokens is None else pad_tokens
    block_table = np.full((seqs, step.block_table.shape[1]), NO_SLOT, INT32)
    block_table[: step.num_seqs] = step.block_table
    return replace(
        step,
        slot_mapping=_filled(step.slot_mapping, tokens, NO_SLOT),
        positions=_filled(step.positions, tokens, 0),
        query_start_loc=_filled(step.query_start_loc, seqs + 1, step.num_tokens),
        seq_lens=_filled(step.seq_lens, seqs, 0),
        block_table=block_table,
    )


def _filled(array: np.ndarray, size: int, value: int) -> np.ndarray:
    filled = np.full(size, value, array.dtype)
    filled[: array.size] = array
    return filled


# ---- CSR, the form of FlashInfer ------------------------------------------------------------------------------------


def block_table_to_csr(
    block_table: np.ndarray, seq_lens: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A block table as ``(indptr, indices, last_page_len)``, the form in which FlashInfer takes one.

    block_table: ``[num_seqs, max_blocks]``, signed integers, on the host.
    seq_lens: ``[num_seqs]``, signed integers, on the host.
    block_size: tokens of a block.

    Returns int32 arrays: ``indptr [num_seqs + 1]``, where the blocks of each sequence start in ``indices``, and
    ``last_page_len [num_seqs]``, tokens in each one's last block, 0 without blocks. ValueError for lengths that are
    negative or longer than a row.

    >>> indptr, indices, last_page_len = block_table_to_csr(block_table, seq_lens, block_size=16)
    """
    table, lens, block_size = _table(block_table), integer_row(seq_lens, "seq_lens"), _block_size(block_size)
    if lens.shape != table.shape[:1]:
        raise ValueError(wrong("seq_lens", f"one length for each row of a table of shape {table.shape}", lens.shape))
    capacity = min(table.shape[1] * block_size, LARGEST_INT32)
    if lens.size and (lens.min() < 0 or lens.max() > capacity):
        raise ValueError(wrong("seq_lens", f"lengths from 0 to {capacity}", f"{lens.min()} to {lens.max()}"))
    counts = -(-lens // block_size)
    is_used = np.arange(table.shape[1]) < counts[:, None]
    indptr = np.zeros(lens.size + 1, INT32)
    np.cumsum(counts, out=indptr[1:])
    last = np.where(counts > 0, lens - (counts - 1) * block_size, 0)
    return indptr, _narrow(table[is_used], "block_table"), last.astype(INT32)


def _table(block_table: Any) -> np.ndarray:
    table = np.asarray(block_table)
    if table.ndim != 2:
        raise ValueError(wrong("block_table", "[num_seqs, max_blocks]", f"shape {table.shape}"))
    if table.size and table.dtype.kind != "i":
        raise TypeError(wrong("block_table", "signed integers", table.dtype.name))
    return table


def _block_size(block_size: int) -> int:
    return check_count(block_size, "block_size", minimum=1, none=0, maximum=LARGEST_INT32)


def _narrow(block_ids: np.ndarray, name: str) -> np.ndarray:
    if block_ids.size and (block_ids.min() < 0 or block_ids.max() > LARGEST_INT32):
        raise ValueError(wrong(name, f"used ids from 0 to {LARGEST_INT32}", f"{block_ids.min()} to {block_ids.max()}"))
    return block_ids.astype(INT32)


def csr_to_block_table(
    indptr: np.ndarray,
    indices: np.ndarray,
    last_page_len: np.ndarray,
    block_size: int,
    *,
    max_blocks: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """``(block_table, seq_lens)``, both int32, of FlashInfer's ``(indptr, indices, last_page_len)``; -1 past the end.

    indptr: ``[num_seqs + 1]``, where the blocks of each sequence start, and the last one's end.
    indices: ``[num_blocks or more]``, blocks.
    last_page_len: ``[num_seqs]``, from 1 to ``block_size``, not looked at where a sequence has no blocks.
    block_size: tokens of a block.
    max_blocks: columns of the table, None for as many as the longest row needs.

    All arrays are on the host. ValueError for arrays that do not belong together.

    >>> block_table, seq_lens = csr_to_block_table(indptr, indices, last_page_len, block_size=16)
    """
    starts, ids = integer_row(indptr, "indptr"), integer_row(indices, "indices")
    last, block_size = integer_row(last_page_len, "last_page_len"), _block_size(block_size)
    counts = np.diff(starts)
    if starts.size == 0 or starts[0] != 0 or (counts < 0).any() or starts[-1] > ids.size:
        raise ValueError(wrong("indptr", f"starts that rise from 0 to at most {ids.size}", starts.tolist()[:9]))
    if last.shape != counts.shape:
        raise ValueError(wrong("last_page_len", f"shape {counts.shape}", last.shape))
    if ((last < 1) | (last > block_size))[counts > 0].any():
        raise ValueError(wrong("last_page_len", f"from 1 to {block_size} tokens", last.tolist()[:9]))
    most = int(counts.max(initial=0))
    width = check_count(max_blocks, "max_blocks", minimum=most, none=most)
    table = np.full((counts.size, width), -1, INT32)
    table[np.arange(width) < counts[:, None]] = _narrow(ids[: starts[-1]], "indices")
    lens = np.where(counts > 0, (counts - 1) * block_size + last, 0)
    if lens.max(initial=0) > LARGEST_INT32:
        raise ValueError(wrong("indptr", f"at most {LARGEST_INT32} tokens in a sequence", int(lens.max())))
    return table, lens.astype(INT32)
