"""What ``pagedkv bench mixed`` measures: calls whose parts can be measured alone, and others that do with less.

Of each row the first call is compared with all others together: a target is a share of their time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .bench_cache import CacheKind, RandomCache
from .bench_inputs import CASCADE, VARLEN, BatchInputs, random_batch, random_query
from .bench_shape import shape_name
from .inputs import scattered_tables
from .markdown import Record

HEADS = (32, 8)


@dataclass(frozen=True, slots=True)
class Timed:
    """One call: its name in the record, the op and what it is called with."""

    name: str
    inputs: BatchInputs
    op: str = VARLEN
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MixedRow:
    """Decodes and prefills in one call, beside a call of each."""

    num_decodes: int = 32
    context: int = 4096
    num_prefills: int = 2
    length: int = 2048

    name, target = "mixed", 1.05

    @property
    def texts(self) -> tuple[str, str]:
        decodes, prefills = f"{self.num_decodes} decodes at {self.context:,}", f"prefills of {self.length:,}"
        return f"{decodes} with {self.num_prefills} {prefills} in one call", "a call of each"

    def calls(self, xp: Any, kind: CacheKind) -> Iterator[Timed]:
        """The whole, the decodes, the prefills."""
        query_lens = np.repeat([1, self.length], [self.num_decodes, self.num_prefills]).astype(np.int32)
        seq_lens = np.where(query_lens == 1, self.context, self.length).astype(np.int32)
        inputs = random_batch(xp, kind, *HEADS, seq_lens, query_lens)
        yield Timed("mixed", inputs)
        yield Timed("decode", inputs.part(slice(0, self.num_decodes)))
        yield Timed("prefill", inputs.part(slice(self.num_decodes, len(seq_lens))))


@dataclass(frozen=True, slots=True)
class WindowRow:
    """Decodes that see a window of a long context, beside as many whose context is no longer than it."""

    num_seqs: int = 32
    context: int = 32768
    window: int = 1024

    name, target = "window", 1.2

    @property
    def texts(self) -> tuple[str, str]:
        decodes = f"{self.num_seqs} decodes at"
        return f"{decodes} {self.context:,} with a window of {self.window:,}", f"{decodes} {self.window:,} without one"

    def calls(self, xp: Any, kind: CacheKind) -> Iterator[Timed]:
        """With a window, and without one."""
        query_lens = np.ones(self.num_seqs, np.int32)
        for name, context, window in (("window", self.context, self.window - 1), ("short", self.window, -1)):
            inputs = random_batch(xp, kind, *HEADS, query_lens * np.int32(context), query_lens, window)
            yield Timed(name, inputs)


@dataclass(frozen=True, slots=True)
class CascadeRow:
    """Decodes that share a prefix, read once for all of them, beside a read for each."""

    num_seqs: int = 64
    prefix: int = 32768
    suffix: int = 128

    name, target = "cascade", 1 / 5

    @property
    def texts(self) -> tuple[str, str]:
        tokens = f"{self.prefix:,} shared tokens and {self.suffix:,} of their own"
        return f"`cascade_attention`, {self.num_seqs} decodes over {tokens}", "`flash_attn_varlen_func` over the same"

    def calls(self, xp: Any, kind: CacheKind) -> Iterator[Timed]:
        """The prefix read once, and once for each sequence."""
        inputs = self._inputs(xp, kind)
        yield Timed("cascade", inputs, CASCADE, {"common_prefix_len": self.prefix})
        yield Timed("varlen", inputs)

    def _inputs(self, xp: Any, kind: CacheKind) -> BatchInputs:
        random = np.random.default_rng(1)
        own_lens = np.repeat([self.prefix, self.suffix], [1, self.num_seqs]).astype(np.int32)
        (shared, *own), num_blocks = scattered_tables(random, own_lens, kind.block_size)
        shared = shared[: self.prefix // kind.block_size]
        tables = np.array([[*shared, *table[: -(-self.suffix // kind.block_size)]] for table in own], np.int32)
        query_lens = np.ones(self.num_seqs, np.int32)
        query = random_query(xp, kind, self.num_seqs, HEADS[0], random)
        cache = RandomCache(xp, kind, num_blocks, HEADS[1])
        return BatchInputs(cache, query, tables, query_lens * np.int32(self.prefix + self.suffix), query_lens)


ROWS = (MixedRow(), WindowRow(), CascadeRow())
ROWS_BY_NAME = {row.name: row for row in ROWS}


def record_name(shape: Record) -> str:
    """``mixed``, and of another shape what sets it apart."""
    return shape_name("mixed", shape, layout="NHD")
