"""A block table of plain lists and loops over its sequences: what ``BlockTable.step`` is compared with."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedkv.table import NO_BLOCK


class LoopTable:
    """A list of block ids for each sequence.

    seq_lens: tokens that each has. order: in which blocks are handed out.
    """

    def __init__(self, seq_lens: Sequence[int], order: Sequence[int], block_size: int) -> None:
        self.block_size = block_size
        self.seq_lens = list(seq_lens)
        self.free = list(reversed(order))
        self.blocks = [[self.free.pop() for _ in range(-(-length // block_size))] for length in seq_lens]

    def step(self) -> dict[str, Any]:
        """A token more for each sequence: what kernels have to know of it, but for the block table."""
        slots, positions, starts = [], [], [0]
        for seq, blocks in enumerate(self.blocks):
            position = self.seq_lens[seq]
            column, offset = divmod(position, self.block_size)
            if offset == 0:
                blocks.append(self.free.pop())
            slots.append(blocks[column] * self.block_size + offset)
            positions.append(position)
            starts.append(starts[-1] + 1)
            self.seq_lens[seq] = position + 1
        return {
            "slot_mapping": np.array(slots, np.int64),
            "positions": np.array(positions, np.int64),
            "query_start_loc": np.array(starts, np.int32),
            "seq_lens": np.array(self.seq_lens, np.int32),
        }

    def block_table(self) -> np.ndarray:
        """The rows as an array, filled up to the longest."""
        width = max(map(len, self.blocks))
        return np.array([blocks + [NO_BLOCK] * (width - len(blocks)) for blocks in self.blocks], np.int32)
