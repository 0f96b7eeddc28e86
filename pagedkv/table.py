"""The block table: which blocks hold the tokens of each sequence, and what a step has to know of them."""

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np

from .blocks import BlockPool, read_only
from .checks import check_count, check_size, integer_row, wrong
from .dtypes import INT32, INT64, LARGEST_INT32
from .step import Step, block_table_to_csr, lay_out

NO_BLOCK = -1
NONE = np.empty(0, INT64)
NO_COPIES = np.empty((0, 2), INT32)

Index = slice | np.ndarray  # of rows


class BlockTable:
    """A row of block ids for each sequence, with its length; blocks come from a pool and may be shared.

    max_seqs, max_blocks: rows, and blocks of the longest sequence.
    block_size: tokens of a block.
    pool: where blocks come from; the table owns each block once for every row that names it.

    A sequence is called by its row, an int, which is its own until it is freed. Ops on several take a list or array of
    rows, each once. Entries past a row's blocks are -1. An op that fails changes nothing: OutOfBlocks if the pool has
    too few blocks, IndexError for a row that there is not, ValueError for one without a sequence.

    >>> table = BlockTable(max_seqs=8, max_blocks=64, block_size=16, pool=BlockPool(256))
    >>> row = table.add()
    >>> step = table.step([row], [40])
    """

    def __init__(self, max_seqs: int, max_blocks: int, block_size: int, pool: BlockPool) -> None:
        self.max_seqs = check_size(max_seqs, "max_seqs", minimum=1)
        self.max_blocks = check_size(max_blocks, "max_blocks", minimum=1)
        self.block_size = check_size(block_size, "block_size", minimum=1)
        if self.capacity > LARGEST_INT32:
            longest = f"rows of at most {LARGEST_INT32} tokens"
            raise ValueError(wrong("max_blocks", longest, f"{self.max_blocks} blocks of {self.block_size}"))
        if not isinstance(pool, BlockPool):
            raise TypeError(wrong("pool", "a BlockPool", type(pool).__name__))
        self.pool = pool
        self._table = np.full((self.max_seqs, self.max_blocks), NO_BLOCK, INT32)
        self._seq_lens = np.zeros(self.max_seqs, INT64)
        self._num_blocks = np.zeros(self.max_seqs, INT64)  # of each row, those given back before the window included
        self._num_dropped = np.zeros(self.max_seqs, INT32)  # of those, the ones given back
        self._least_lens = np.zeros(self.max_seqs, INT32)  # to which a row can be truncated
        self._is_live = np.zeros(self.max_seqs, bool)
        self._numbers = np.arange(self.max_seqs)  # of the rows
        self._marks = np.empty(self.max_seqs, INT64)  # scratch
        self._free_rows = list(range(self.max_seqs))  # a heap: rows stay together at the top

    # ---- what there is ----------------------------------------------------------------------------------------------

    @property
    def block_table(self) -> np.ndarray:
        """All rows, int32 ``[max_seqs, max_blocks]``, not to be written."""
        return read_only(self._table)

    @property
    def seq_lens(self) -> np.ndarray:
        """Tokens of each row, int64 ``[max_seqs]``, 0 without a sequence; not to be written."""
        return read_only(self._seq_lens)

    @property
    def rows(self) -> np.ndarray:
        """The rows that hold a sequence."""
        return np.flatnonzero(self._is_live)

    @property
    def capacity(self) -> int:
        """Tokens that a row holds."""
        return self.max_blocks * self.block_size

    @property
    def num_free_rows(self) -> int:
        """Sequences that can still be added."""
        return len(self._free_rows)

    def blocks(self, row: int) -> np.ndarray:
        """The blocks of a sequence, -1 for those given back before its window: int32 ``[num_blocks]``."""
        row = self.check_row(row)
        return self._table[row, : self._num_blocks[row]].copy()

    def __len__(self) -> int:
        return self.max_seqs - len(self._free_rows)

    def __repr__(self) -> str:
        return f"<BlockTable: {len(self)} of {self.max_seqs} rows used, {int(self._seq_lens.sum())} tokens>"

    # ---- sequences --------------------------------------------------------------------------------------------------

    def add(self, prefix: Any = ()) -> int:
        """A new sequence, whose first tokens fill the blocks ``prefix`` (see ``BlockPool.longest_prefix``).

        The row becomes one more owner of each: they need not be touched before.
        """
        self._check_free_row()
        block_ids = self.pool.check_ids(prefix)
        if block_ids.size > self.max_blocks:
            raise ValueError(wrong("prefix", f"at most {self.max_blocks} blocks", block_ids.size))
        row = self._start_row(block_ids)
        self._seq_lens[row] = block_ids.size * self.block_size
        return row

    def fork(self, row: int) -> int:
        """A new sequence with the tokens of another one, in the same blocks. Who first writes into a block that is
        shared gets a copy of it (see ``append``)."""
        row = self.check_row(row)
        self._check_free_row()
        other = self._start_row(self._table[row, : self._blocks_for(self._seq_lens[row])])  # not what is only reserved
        for of_rows in (self._seq_lens, self._num_dropped, self._least_lens):
            of_rows[other] = of_rows[row]
        return other

    def append(self, rows: Any, num_new: Any, *, copy: Callable[[np.ndarray], Any] | None = None) -> np.ndarray:
        """Makes room for new tokens at the end of sequences.

        num_new: tokens, an int for all or one for each row.
        copy: called with what is returned, if that is not empty, before anything changes; what it raises is passed on.

        Returns the blocks to be copied before they are written, (source, destination) int32 ``[n, 2]``: tokens that
        would go into a block that other sequences share go into a copy. ValueError for a sequence that outgrows its
        row.
        """
        rows, index, counts = self._asked(rows, num_new)
        return self._append(rows, index, counts, copy)

    def reserve(self, rows: Any, num_new: Any) -> None:
        """Gives sequences the blocks for that many more tokens, and no tokens: steps that a device takes by itself need
        no new blocks then (``advance_decode``). What it has done ``append`` tells the table afterwards. The last block,
        if it is shared, is not copied: ``append`` does that.
        """
        rows, index, counts = self._asked(rows, num_new)
        missing = self._missing(self._seq_lens[index] + counts, index)
        self._extend(rows, missing, self.pool.allocate(int(missing.sum())))

    def step(
        self,
        rows: Any,
        num_new: Any,
        *,
        pad_seqs: int | None = None,
        pad_tokens: int | None = None,
        copy: Callable[[np.ndarray], Any] | None = None,
    ) -> Step:
        """Appends new tokens, and says what the kernels have to know to write and read them.

        rows, num_new, copy: as in ``append``; the blocks to copy come as ``copies``, too.
        pad_seqs, pad_tokens: sizes to fill up to, for a graph that was captured with them: at least those of the batch,
            and at most the rows of the table and the slots of the pool.

        All is laid out on the host, in a few dozen calls of NumPy whatever the number of sequences.
        """
        rows, index, counts = self._asked(rows, num_new)
        check_count(pad_seqs, "pad_seqs", minimum=rows.size, none=None, maximum=self.max_seqs)
        if pad_tokens is not None:
            most = max(int(counts.sum()), self.pool.num_blocks * self.block_size)
            check_count(pad_tokens, "pad_tokens", minimum=int(counts.sum()), none=None, maximum=most)
        copies = self._append(rows, index, counts, copy)
        layout = {"copies": copies, "pad_seqs": pad_seqs, "pad_tokens": pad_tokens}
        return lay_out(self._table, rows, index, self._seq_lens[index], counts, self.block_size, **layout)

    def truncate(self, row: int, num_tokens: int) -> None:
        """Takes back the tokens of a sequence after the first ``num_tokens``, and the blocks that held only those.

        ValueError for more tokens than there are, or fewer than its window still needs (``drop_outside_window``).
        """
        row, num_tokens = self.check_row(row), check_size(num_tokens, "num_tokens", minimum=0)
        least, most = int(self._least_lens[row]), int(self._seq_lens[row])
        if not least <= num_tokens <= most:
            raise ValueError(wrong("num_tokens", f"from {least} to {most}", num_tokens))
        first, end = self._blocks_for(num_tokens), self._num_blocks[row]
        self.pool.free(self._table[row, first:end])
        self._table[row, first:end] = NO_BLOCK
        self._num_blocks[row], self._seq_lens[row] = first, num_tokens
        if num_tokens % self.block_size:  # the rest of the last block will be written anew
            self.pool.forget(self._table[row, first - 1])

    def free(self, rows: Any) -> None:
        """Ends sequences and gives back their blocks."""
        rows = self.check_rows(rows)
        held = self._table[rows, : int(self._num_blocks[rows].max(initial=0))]
        self.pool.free(held[held != NO_BLOCK])
        self._clear(rows)
        self._free_rows += rows.tolist()
        heapq.heapify(self._free_rows)

    def drop_outside_window(self, rows: Any, window_size: int) -> int:
        """Gives back the blocks whose tokens no further token of these sequences sees; returns how many.

        window_size: tokens that a query sees, its own included (``(window_size - 1, 0)`` of the reads).
        """
        rows, window_size = self.check_rows(rows), check_size(window_size, "window_size", minimum=1)
        ends = np.maximum(self._seq_lens[rows] - (window_size - 1), 0) // self.block_size
        has_more = ends > self._num_dropped[rows]
        num_dropped = 0
        for row, end in zip(rows[has_more].tolist(), ends[has_more].tolist(), strict=True):
            first = int(self._num_dropped[row])
            self.pool.free(self._table[row, first:end])
            self._table[row, first:end] = NO_BLOCK
            self._num_dropped[row] = end
            self._least_lens[row] = end * self.block_size + window_size - 1
            num_dropped += end - first
        return num_dropped

    def tokens_dropped(self, rows: Any) -> np.ndarray:
        """How many of the first tokens of each sequence were given back, int64 ``[num_seqs]``."""
        return self._num_dropped[self.check_rows(rows)] * self.block_size

    def move(self, row: int, to: int) -> None:
        """Puts a sequence into another row, one without a sequence; ValueError for one that has one."""
        row, to = self.check_row(row), check_count(to, "to", minimum=0, none=0, maximum=self.max_seqs - 1)
        if self._is_live[to]:
            raise ValueError(wrong("to", "a row without a sequence", f"row {to}"))
        self._exchange(row, to)
        self._free_rows.remove(to)
        heapq.heapify(self._free_rows)
        heapq.heappush(self._free_rows, row)

    def swap(self, row: int, other: int) -> None:
        """Exchanges the rows of two sequences."""
        self._exchange(self.check_row(row), self.check_row(other))

    def csr(self, rows: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(indptr, indices, last_page_len)`` of sequences (see ``block_table_to_csr``)."""
        rows = self.check_rows(rows)
        width = int(self._num_blocks[rows].max(initial=0))
        return block_table_to_csr(self._table[rows, :width], self._seq_lens[rows], self.block_size)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _append(
        self, rows: np.ndarray, index: Index, counts: np.ndarray, copy: Callable[[np.ndarray], Any] | None
    ) -> np.ndarray:
        ends = self._seq_lens[index] + counts
        missing = self._missing(ends, index)
        writers, columns, shared = self._writes_into_shared(rows, counts)
        new = self.pool.allocate(int(missing.sum()) + shared.size)
        copies = NO_COPIES
        if shared.size:
            targets, rest = np.split(new, [shared.size])
            copies = np.stack([shared, targets], axis=1).astype(INT32)
            self._copy(copies, copy, new)
            new = rest
            self._table[writers, columns] = targets
            self.pool.free(shared)
        self._extend(rows, missing, new)
        self._seq_lens[index] = ends
        return copies

    def _copy(self, copies: np.ndarray, copy: Callable[[np.ndarray], Any] | None, new: np.ndarray) -> None:
        """Lets the caller copy; where that fails the new blocks go back."""
        try:
            if copy is not None:
                copy(copies)
        except BaseException:
            self.pool.free(new)
            raise

    def _missing(self, ends: np.ndarray, index: Index) -> np.ndarray:
        """Blocks that rows lack for their first ``ends`` tokens."""
        self._check_room(int(ends.max(initial=0)))
        return np.maximum((ends + (self.block_size - 1)) // self.block_size - self._num_blocks[index], 0)

    def _writes_into_shared(self, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows whose next token goes into a block that must be copied first, the columns of those blocks, and they
        themselves: of the owners of one the last may write into it, if all others have copies."""
        if not self.pool.has_writable_shared:
            return NONE, NONE, NONE
        columns = self._seq_lens[rows] // self.block_size
        is_partial = (columns * self.block_size != self._seq_lens[rows]) & (counts > 0)
        rows, columns = rows[is_partial], columns[is_partial]
        tails = self._table[rows, columns]
        owners = self.pool.ref_counts[tails]
        is_copied = owners > 1
        left = dict(zip(tails[is_copied].tolist(), owners[is_copied].tolist(), strict=True))
        for i in np.flatnonzero(is_copied).tolist():
            is_copied[i] = left[tails[i]] > 1
            left[tails[i]] -= 1
        return rows[is_copied], columns[is_copied], tails[is_copied]

    def _extend(self, rows: np.ndarray, missing: np.ndarray, block_ids: np.ndarray) -> None:
        if block_ids.size == 0:
            return
        is_short = missing > 0
        rows, missing = rows[is_short], missing[is_short]
        have = self._num_blocks[rows]
        if block_ids.size == rows.size:  # one each
            self._table[rows, have] = block_ids
        else:
            columns = np.arange(block_ids.size) + np.repeat(have + missing - missing.cumsum(), missing)
            self._table[np.repeat(rows, missing), columns] = block_ids
        self._num_blocks[rows] = have + missing

    def _start_row(self, block_ids: np.ndarray) -> int:
        """A free row with these blocks, of which it becomes one more owner."""
        self.pool.touch(block_ids[block_ids != NO_BLOCK])
        row = heapq.heappop(self._free_rows)
        self._is_live[row] = True
        self._table[row, : block_ids.size] = block_ids
        self._num_blocks[row] = block_ids.size
        return row

    def _clear(self, rows: np.ndarray) -> None:
        self._table[rows, : int(self._num_blocks[rows].max(initial=0))] = NO_BLOCK
        self._is_live[rows] = False
        for of_rows in (self._seq_lens, self._num_blocks, self._num_dropped, self._least_lens):
            of_rows[rows] = 0

    def _exchange(self, row: int, other: int) -> None:
        pair, swapped = [row, other], [other, row]
        width = int(self._num_blocks[pair].max())
        self._table[pair, :width] = self._table[swapped, :width]
        for of_rows in (self._seq_lens, self._num_blocks, self._num_dropped, self._least_lens, self._is_live):
            of_rows[pair] = of_rows[swapped]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-int(num_tokens) // self.block_size)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _check_free_row(self) -> None:
        if not self._free_rows:
            raise ValueError(wrong("max_seqs", f"a free row of {self.max_seqs}", "none"))

    def _check_room(self, num_tokens: int) -> None:
        if num_tokens > self.capacity:
            raise ValueError(wrong("num_new", f"at most {self.capacity} tokens, what a row holds", num_tokens))

    def _asked(self, rows: Any, num_new: Any) -> tuple[np.ndarray, Index, np.ndarray]:
        rows, index = self._located(rows)
        return rows, index, self.check_counts(num_new, rows)

    def check_counts(self, num_new: Any, rows: np.ndarray) -> np.ndarray:
        """``num_new`` as int64, one for each row; an error unless it is that or one for all, none negative."""
        counts = integer_row(num_new, "num_new")
        if counts.size != rows.size and np.ndim(num_new) != 0:
            raise ValueError(wrong("num_new", f"one number, or one for each of {rows.size} rows", counts.size))
        if counts.min(initial=0) < 0:
            raise ValueError(wrong("num_new", "at least 0", int(counts.min())))
        self._check_room(int(counts.max(initial=0)))  # before a sum with it could leave int64
        return np.full(rows.size, counts, INT64)

    def check_row(self, row: int, name: str = "row") -> int:
        """``row`` as an int; an error, which calls it ``name``, unless it holds a sequence."""
        return int(self.check_rows(check_size(row, name, minimum=0), name)[0])

    def check_rows(self, rows: Any, name: str = "rows") -> np.ndarray:
        """``rows`` as an array; an error, which calls them ``name``, unless each holds a sequence and comes once."""
        return self._located(rows, name)[0]

    def _located(self, rows: Any, name: str = "rows") -> tuple[np.ndarray, Index]:
        """Checked rows, as an array and as what picks them fastest: a slice where they adjoin."""
        rows = integer_row(rows, name)
        first = int(rows[0]) if rows.size else 0
        span = slice(first, first + rows.size)
        if first >= 0 and span.stop <= self.max_seqs and (rows == self._numbers[span]).all():
            index: Index = span
        else:
            index = rows
            if rows.max() >= self.max_seqs or rows.min() < 0:
                outside = rows[(rows < 0) | (rows >= self.max_seqs)][0]
                raise IndexError(wrong(name, f"numbers from 0 to {self.max_seqs - 1}", outside))
            self._check_each_once(rows, name)
        is_live = self._is_live[index]
        if not is_live.all():
            raise ValueError(wrong(name, "a sequence that was added and not freed", rows[~is_live][0]))
        return rows, index

    def _check_each_once(self, rows: np.ndarray, name: str) -> None:
        numbers = self._numbers[: rows.size] if rows.size <= self.max_seqs else np.arange(rows.size)
        self._marks[rows] = numbers
        is_last = self._marks[rows] == numbers
        if not is_last.all():
            raise ValueError(wrong(name, "each once", f"{rows[~is_last][0]} twice"))
