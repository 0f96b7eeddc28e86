"""The pool of blocks: which are free, how many owners each of the others has, and which hold a known prefix."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .checks import check_size, integer_row, wrong
from .dtypes import INT32

NO_PLACE = -1


class OutOfBlocks(RuntimeError):  # noqa: N818 the field's name for what a caller waits or preempts on, not a mistake
    """The pool has fewer free blocks than were asked for. Nothing has changed.

    wanted, free: blocks.

    >>> raise OutOfBlocks(wanted=5, free=3)
    """

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"expected at most {free} blocks, which are free, got a request for {wanted}")
        self.wanted, self.free = wanted, free


class FreeQueue:
    """Blocks in the order in which they came. One that leaves in between keeps its place, which is passed over later:
    so any number come and go in a few calls of NumPy."""

    def __init__(self, num_blocks: int) -> None:
        self._places = np.empty(2 * num_blocks, INT32)  # block ids, longest there first
        self._place_of = np.full(num_blocks, NO_PLACE, INT32)  # of each block
        self._first = self._end = self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block_id: int) -> bool:
        return bool(self._place_of[block_id] != NO_PLACE)

    def __iter__(self) -> Iterator[int]:
        return iter(self.block_ids().tolist())

    def block_ids(self) -> np.ndarray:
        """All, longest there first."""
        ids = self._places[self._first : self._end]
        return ids[self._place_of[ids] == np.arange(self._first, self._end)]

    def push(self, block_ids: np.ndarray) -> None:
        """Adds blocks that are not there, each once."""
        if self._end + block_ids.size > self._places.size:  # at least half of the places are of blocks that have left
            kept = self.block_ids()
            self.clear()
            self.push(kept)
        end = self._end + block_ids.size
        self._places[self._end : end] = block_ids
        self._place_of[block_ids] = np.arange(self._end, end)
        self._end, self._count = end, self._count + block_ids.size

    def remove(self, block_ids: np.ndarray) -> None:
        """Takes out blocks, each once."""
        self._count -= block_ids.size
        self._place_of[block_ids] = NO_PLACE

    def pop(self) -> int:
        """Takes out the one that is there longest."""
        while True:
            block_id, self._first = int(self._places[self._first]), self._first + 1
            if self._place_of[block_id] == self._first - 1:
                self._place_of[block_id] = NO_PLACE
                self._count -= 1
                return block_id

    def clear(self) -> None:
        """Takes out all."""
        self._place_of[self._places[self._first : self._end]] = NO_PLACE
        self._first = self._end = self._count = 0


class BlockPool:
    """Hands out blocks by number and counts the owners of each.

    A free block may still hold a known prefix, under the hash that ``register`` was given: ``longest_prefix`` finds it
    and ``touch`` takes it back. New blocks come first from the free ones that hold nothing known, then from the others,
    of which the one freed longest ago goes first.

    num_blocks: blocks, numbered from 0.
    order: the order in which blocks are first handed out, each number once; None for that of the numbers.

    Allocating and freeing take time in proportion to the blocks asked for, whatever the size of the pool. After the
    block managers of vLLM and nano-vllm.

    >>> pool = BlockPool(100)
    >>> blocks = pool.allocate(3)
    >>> pool.free(blocks)
    """

    def __init__(self, num_blocks: int, *, order: Iterable[int] | None = None) -> None:
        self.num_blocks = check_size(num_blocks, "num_blocks", minimum=0)
        ids = np.arange(self.num_blocks, dtype=INT32) if order is None else _permutation(order, self.num_blocks)
        self._ref_counts = np.zeros(self.num_blocks, INT32)
        self._blank = ids[::-1].copy()  # a stack of the free blocks that hold nothing known; its top is the end
        self._num_blank = self.num_blocks
        self._reusable = FreeQueue(self.num_blocks)  # the other free ones
        self._hashes: dict[int, bytes] = {}  # of the blocks that hold a known prefix
        self._blocks: dict[bytes, int] = {}  # and the way back
        self._is_known = np.zeros(self.num_blocks, bool)
        self._marks = np.empty(self.num_blocks, INT32)  # scratch
        self._shared: set[int] = set()  # blocks that hold nothing known and have had several owners

    # ---- figures ----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out, those that still hold a known prefix included."""
        return self._num_blank + len(self._reusable)

    @property
    def num_used(self) -> int:
        """Blocks that have an owner."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that hold a known prefix, free or not."""
        return len(self._hashes)

    @property
    def usage(self) -> float:
        """The share of blocks that have an owner, from 0 to 1."""
        return self.num_used / self.num_blocks if self.num_blocks else 0.0

    @property
    def ref_counts(self) -> np.ndarray:
        """Owners of each block, int32 ``[num_blocks]``, not to be written."""
        return read_only(self._ref_counts)

    @property
    def has_writable_shared(self) -> bool:
        """Whether some block has several owners and might still be written: what holds nothing known need not be full.

        Asking takes no time, whether or not there is one.
        """
        while self._shared:
            block_id = self._shared.pop()
            if self._ref_counts[block_id] > 1 and not self._is_known[block_id]:
                self._shared.add(block_id)
                return True
        return False

    def __len__(self) -> int:
        return self.num_blocks

    def __repr__(self) -> str:
        return f"<BlockPool: {self.num_used} of {self.num_blocks} blocks used, {self.num_cached} hold a known prefix>"

    # ---- owners -----------------------------------------------------------------------------------------------------

    def allocate(self, count: int | None = None) -> Any:
        """One free block as an int, or with ``count`` as many as int32 ``[count]``, each with one owner.

        OutOfBlocks, with nothing changed, if there are not as many.
        """
        wanted = 1 if count is None else check_size(count, "count", minimum=0)
        if wanted > self.num_free:
            raise OutOfBlocks(wanted, self.num_free)
        num_blank = min(wanted, self._num_blank)
        self._num_blank -= num_blank
        blank = self._blank[self._num_blank : self._num_blank + num_blank][::-1]
        evicted = [self._evict() for _ in range(wanted - num_blank)]
        block_ids = np.concatenate([blank, np.array(evicted, INT32)]) if evicted else blank.copy()
        self._ref_counts[block_ids] = 1
        return block_ids if count is not None else int(block_ids[0])

    def free(self, block_ids: Any) -> None:
        """Takes one owner from a block, or from each of several; a block that has none left is free.

        block_ids: an int or a sequence of them, a repeated one as often as it is named. They are taken for the blocks
            of one sequence in its order: of those that hold a known prefix the last is reused first.

        IndexError for a number outside the pool, ValueError for a block with fewer owners than are taken; nothing is
        freed then.
        """
        ids = self.check_ids(block_ids)
        unique, first, drops = self._distinct(ids)
        left = self._ref_counts[unique] - drops
        if (left < 0).any():
            worst = int(np.argmax(left < 0))
            owners = f"block {unique[worst]} at most {self._ref_counts[unique[worst]]} times, once for each owner"
            raise ValueError(wrong("block_ids", owners, drops[worst]))
        self._ref_counts[unique] = left
        freed = ids[np.sort(first)][::-1]
        freed = freed[self._ref_counts[freed] == 0]
        known = self._is_known[freed]
        self._push_blank(freed[~known])
        self._reusable.push(freed[known])

    def touch(self, block_ids: Any) -> None:
        """Gives a block one more owner, or each of several: one that has some, or a free one with a known prefix.

        block_ids: as in ``free``. ValueError, with nothing changed, for a free block that holds nothing known.
        """
        ids = self.check_ids(block_ids)
        free = ids[self._ref_counts[ids] == 0]
        unknown = free[~self._is_known[free]]
        if unknown.size:
            raise ValueError(wrong("block_ids", "blocks with owners or a known prefix", f"free block {unknown[0]}"))
        self._reusable.remove(self._distinct(free)[0])
        np.add.at(self._ref_counts, ids, INT32.type(1))  # a Python int takes forty times as long
        self._shared.update(ids[~self._is_known[ids]].tolist())

    # ---- known prefixes ---------------------------------------------------------------------------------------------

    def register(self, block_ids: Any, hashes: Sequence[bytes]) -> None:
        """Makes it known that blocks, which have owners, hold the prefixes with these hashes (see ``PrefixHashes``).

        A hash that another block already holds, and a block already known by a hash, stay as they are. ValueError for a
        block without owners, or another number of hashes than of blocks.
        """
        ids = self.check_ids(block_ids)
        if isinstance(hashes, str | bytes) or not all(isinstance(block_hash, bytes) for block_hash in hashes):
            raise TypeError(wrong("hashes", "a sequence of bytes (PrefixHashes.hashes)", type(hashes).__name__))
        if len(hashes) != ids.size:
            raise ValueError(wrong("hashes", f"{ids.size}, one of each block", len(hashes)))
        if not self._ref_counts[ids].all():
            raise ValueError(
                wrong("block_ids", "blocks with owners", f"free block {ids[self._ref_counts[ids] == 0][0]}")
            )
        for block_id, block_hash in zip(ids.tolist(), hashes, strict=True):
            if block_hash in self._blocks or block_id in self._hashes:
                continue
            self._hashes[block_id], self._blocks[block_hash] = block_hash, block_id
            self._is_known[block_id] = True

    def longest_prefix(self, hashes: Iterable[bytes]) -> np.ndarray:
        """The blocks that hold the first of these chained hashes, up to one that no block holds: int32 ``[hits]``.

        They may be free: ``touch`` them before anything is allocated, or hand them to ``BlockTable.add``, which does.
        TypeError for what is no hash, such as a token.
        """
        hits = []
        for block_hash in hashes:
            block_id = self._blocks.get(block_hash)
            if block_id is None:
                if not isinstance(block_hash, bytes):
                    raise TypeError(wrong("hashes", "bytes (PrefixHashes.reusable)", type(block_hash).__name__))
                break
            hits.append(block_id)
        return np.array(hits, INT32)

    def forget(self, block_ids: Any) -> None:
        """Unlearns the prefixes that blocks hold, where any: what is in them is about to change."""
        ids = self.check_ids(block_ids)
        for block_id in dict.fromkeys(ids[self._is_known[ids]].tolist()):  # a repeated one once
            self._forget(block_id)

    def reset_prefix_cache(self) -> None:
        """Unlearns all prefixes. Owners stay as they are."""
        self._push_blank(self._reusable.block_ids()[::-1])
        self._reusable.clear()
        self._shared.update(np.flatnonzero(self._ref_counts * self._is_known > 1).tolist())
        self._hashes.clear()
        self._blocks.clear()
        self._is_known[:] = False

    # ---- parts ------------------------------------------------------------------------------------------------------

    def check_ids(self, block_ids: Any) -> np.ndarray:
        """``block_ids`` as an array; TypeError for what is no integer, IndexError for what is no block."""
        ids = integer_row(block_ids, "block_ids")
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_blocks):
            outside = ids[(ids < 0) | (ids >= self.num_blocks)][0]
            raise IndexError(wrong("block_ids", f"numbers from 0 to {self.num_blocks - 1}", outside))
        return ids

    def _distinct(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each of some blocks once, where it comes first, and how often it comes."""
        numbers = np.arange(ids.size, dtype=INT32)
        self._marks[ids] = numbers
        if (self._marks[ids] == numbers).all():  # as almost always; found without sorting
            return ids, numbers, np.ones_like(numbers)
        return np.unique(ids, return_index=True, return_counts=True)

    def _push_blank(self, block_ids: np.ndarray) -> None:
        self._blank[self._num_blank : self._num_blank + block_ids.size] = block_ids
        self._num_blank += block_ids.size

    def _evict(self) -> int:
        block_id = self._reusable.pop()
        self._forget(block_id)
        return block_id

    def _forget(self, block_id: int) -> None:
        del self._blocks[self._hashes.pop(block_id)]
        self._is_known[block_id] = False
        if self._ref_counts[block_id] > 1:
            self._shared.add(block_id)
        if block_id in self._reusable:
            self._reusable.remove(np.array([block_id]))
            self._push_blank(np.array([block_id], INT32))


def _permutation(order: Iterable[int], num_blocks: int) -> np.ndarray:
    ids = integer_row(order if isinstance(order, np.ndarray) else list(order), "order")
    if ids.shape != (num_blocks,) or (np.sort(ids) != np.arange(num_blocks)).any():
        raise ValueError(wrong("order", f"each number below {num_blocks} once", f"{ids.size} numbers"))
    return ids.astype(INT32)


def read_only(array: np.ndarray) -> np.ndarray:
    """The same memory, not to be written."""
    shared = array.view()
    shared.flags.writeable = False
    return shared
