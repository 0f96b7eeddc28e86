"""Random inputs of an op: dense keys and values first, then the same in the blocks of a poisoned pool.

The paging here is one assignment per token, on purpose: it shares no code with the package that it helps to check.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from pagedkv.dtypes import storage_dtype
from pagedkv.layout import cache_shapes

from . import reference

POISON_BYTE = 0xFF  # fills a cache with NaNs, whatever its format
SPARE_BLOCKS = 3  # of the pool, in no table
SPARE_COLUMNS = 1  # of the tables, holding no block
PADDING_ROWS = 2  # of keys and values: the first has a negative slot, the second none
NO_BLOCK = -1
MOST_FEWER = 15  # tokens of a sequence than of the longest
ALIGNMENT = 256  # bytes, of what a device allocates
PREFILL_QUERIES = 128  # of every PREFILL_EVERY-th sequence of a mixed batch; the others have one
PREFILL_EVERY = 4

# No powers of two: dividing by those is exact, and a reciprocal would do as well. A few values saturate e4m3.
K_SCALE, V_SCALE = 0.009, 0.011


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the options of ``pagedkv run`` say of the inputs."""

    seqs: int
    context: int
    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    dtype: np.dtype
    kv_cache_dtype: str
    layout: str
    seed: int

    @property
    def cache_dtype(self) -> np.dtype:
        return storage_dtype(self.dtype, self.kv_cache_dtype)

    def check(self) -> None:
        """ValueError for what no cache can be drawn for; all else is left to the package's own validation."""
        if self.heads % self.kv_heads:
            raise ValueError(
                f"--heads {self.heads} is no multiple of --kv-heads {self.kv_heads}: "
                "each kv head serves a group of query heads"
            )

    def check_packed(self) -> None:
        """ValueError if the packed layout cannot hold this head size."""
        x = 16 // self.cache_dtype.itemsize
        if self.head_size % x:
            raise ValueError(f"--head-size: expected a multiple of {x} in the packed layout, got {self.head_size}")


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of keys and values, one after the other, and the blocks that they are to lie in."""

    key: np.ndarray  # [num_tokens + PADDING_ROWS, kv_heads, head_size]
    value: np.ndarray
    starts: np.ndarray  # [seqs + 1]: where each sequence begins, and the end of the last
    block_tables: np.ndarray  # [seqs, max_blocks]
    slots: np.ndarray  # [num_tokens + 1]
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def seq_lens(self) -> np.ndarray:
        return np.diff(self.starts)

    def sequence(self, i: int) -> slice:
        """The rows of one sequence."""
        return slice(int(self.starts[i]), int(self.starts[i + 1]))


@lru_cache(maxsize=1)
def draw_batch(sizes: Sizes) -> Batch:
    """The batch of these sizes: the first sequence has ``context`` tokens, the others up to ``MOST_FEWER`` fewer."""
    rng = np.random.default_rng(sizes.seed)
    shortest = max(1, sizes.context - MOST_FEWER)
    seq_lens = rng.integers(shortest, sizes.context, sizes.seqs, endpoint=True)
    seq_lens[0] = sizes.context
    starts = np.concatenate([[0], np.cumsum(seq_lens)])
    block_tables, num_blocks = scattered_tables(rng, seq_lens, sizes.block_size)
    slots = np.concatenate([*slots_of(block_tables, seq_lens, sizes.block_size), [NO_BLOCK]])
    shape = (int(starts[-1]) + PADDING_ROWS, sizes.kv_heads, sizes.head_size)
    key, value = (normal(rng, shape, sizes.dtype) for _ in "kv")
    return Batch(key, value, starts, block_tables, slots, num_blocks)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Normally distributed numbers."""
    return rng.standard_normal(shape, np.float32).astype(dtype)


def scattered_tables(rng: np.random.Generator, seq_lens: np.ndarray, block_size: int) -> tuple[np.ndarray, int]:
    """Tables over a shuffled pool, and the pool's blocks."""
    counts = [-(-int(seq_len) // block_size) for seq_len in seq_lens]
    num_blocks = sum(counts) + SPARE_BLOCKS
    shuffled = rng.permutation(num_blocks)
    tables = np.full((len(counts), max(counts, default=0) + SPARE_COLUMNS), NO_BLOCK, np.int32)
    for row, count in zip(tables, counts, strict=True):
        row[:count], shuffled = shuffled[:count], shuffled[count:]
    return tables, num_blocks


def slots_of(block_tables: np.ndarray, seq_lens: np.ndarray, block_size: int) -> list[np.ndarray]:
    """Where the tokens of each sequence go."""
    slots = []
    for table, seq_len in zip(block_tables.astype(np.int64), seq_lens, strict=True):
        positions = np.arange(seq_len)
        slots.append(table[positions // block_size] * block_size + positions % block_size)
    return slots


def query_lens(batch: Batch) -> np.ndarray:
    """Query tokens of each sequence of a mixed batch: some prefill, the others decode."""
    lens = np.ones_like(batch.seq_lens)
    lens[::PREFILL_EVERY] = np.minimum(PREFILL_QUERIES, batch.seq_lens[::PREFILL_EVERY])
    return lens


def poisoned_caches(sizes: Sizes, layout: str, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """A key and a value cache full of NaNs."""
    axes = (num_blocks, sizes.block_size, sizes.kv_heads, sizes.head_size)
    return tuple(poisoned(np, shape, sizes.cache_dtype) for shape in cache_shapes(layout, *axes, sizes.cache_dtype))


def poisoned(xp: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """An array of NaNs of ``xp``, which is NumPy or CuPy."""
    return xp.full(math.prod(shape) * dtype.itemsize, POISON_BYTE, np.uint8).view(dtype).reshape(shape)


def slot_view(cache: Any, layout: str, block: Any, offset: Any) -> Any:
    """What a cache holds of one slot: ``[kv_heads, head_size]``, of packed keys ``[kv_heads, head_size / x, x]``.

    Arrays of blocks and offsets give a copy of many slots, one after the other.
    """
    if layout == "NHD":
        return cache[block, offset]
    if layout == "HND":
        return cache[block, :, offset]
    return cache[block, :, :, offset]


def paged(batch: Batch, sizes: Sizes, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """The batch in the blocks of otherwise poisoned caches."""
    caches = poisoned_caches(sizes, layout, batch.num_blocks)
    for rows, cache, scale in zip((batch.key, batch.value), caches, (K_SCALE, V_SCALE), strict=True):
        stored = reference.encoded(rows[: batch.num_tokens], sizes.kv_cache_dtype, scale)
        put_tokens(cache, layout, sizes.block_size, stored, batch.slots[: batch.num_tokens])
    return caches


def on_host(array: Any) -> np.ndarray:
    """An array of NumPy or CuPy in host memory."""
    return array if isinstance(array, np.ndarray) else array.get()


def poisoned_bytes(count: int) -> np.ndarray:
    """So many bytes of poison that begin where an allocation on a device would."""
    padded = np.full(count + ALIGNMENT, POISON_BYTE, np.uint8)
    first = -padded.ctypes.data % ALIGNMENT
    return padded[first : first + count]


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins where an allocation on a device would, so that it touches as many sectors."""
    copy = poisoned_bytes(array.nbytes)
    copy[...] = np.frombuffer(array.tobytes(), np.uint8)
    return copy.view(array.dtype).reshape(array.shape)


def put_tokens(cache: np.ndarray, layout: str, block_size: int, tokens: np.ndarray, slots: np.ndarray) -> None:
    """Puts each token ``[kv_heads, head_size]`` into its slot."""
    for token, slot in zip(tokens, slots.tolist(), strict=True):
        target = slot_view(cache, layout, *divmod(slot, block_size))
        target[...] = token.reshape(target.shape)
