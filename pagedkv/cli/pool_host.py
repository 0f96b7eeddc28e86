"""The host's part of ``pagedkv bench pool``: a decode step's bookkeeping, and the blocks of a known prefix."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from pagedkv.blocks import BlockPool
from pagedkv.prefix import PrefixHashes
from pagedkv.table import BlockTable

from .bench_timing import measured_rows
from .markdown import Record
from .pool_clock import cpu_model, on_cores
from .pool_loops import LoopTable
from .pool_rows import BLOCK_SIZE, HostRow, PrefixRow, StepRow

CORES = 2
CHECKED_STEPS = BLOCK_SIZE  # in which every sequence goes on to a new block once
STEP_ROUNDS = 10  # of a step, which is short and of which a tenth of a millisecond counts
VOCABULARY = 128_000


@dataclass(slots=True)
class HostBench:
    """``clock`` is a ``HostClock``."""

    clock: Any

    def run(self, rows: Sequence[HostRow], progress: Callable[[str], None]) -> Record:
        """All rows, and on what they were measured."""
        with on_cores(CORES) as num_cores:
            measured = measured_rows(rows, self._row, progress, _progress_line)
        repeats = self.clock.repeats
        method = f"medians and bests of {repeats} calls, {STEP_ROUNDS * repeats} of a step"
        machine = {"cpu": cpu_model(), "num_cores": num_cores, "python": platform.python_version()}
        return {**machine, "method": method, "rows": measured}

    def _row(self, row: HostRow) -> Record:
        times = self._step(row) if isinstance(row, StepRow) else self._prefix(row)
        return {
            "row": row.name,
            "what": row.what,
            "block_size": BLOCK_SIZE,
            **times,
            "target_us": row.target_us,
            "met": times["us"] <= row.target_us,
        }

    def _step(self, row: StepRow) -> Record:
        table, loops = _tables(row, CHECKED_STEPS + self.clock.num_calls(STEP_ROUNDS))
        rows = table.rows
        check_steps(row.name, table, rows, loops)
        return {
            "num_seqs": row.num_seqs,
            "context": [row.least_context, row.most_context],
            **self.clock.microseconds(lambda: table.step(rows, 1), rounds=STEP_ROUNDS),
            "loops": self.clock.microseconds(loops.step),
            "loops_block_table": self.clock.microseconds(loops.block_table),
        }

    def _prefix(self, row: PrefixRow) -> Record:
        request = KnownRequest(row)
        request.check(row.name)
        return {
            "num_tokens": row.num_tokens,
            "num_hits": request.known.size - 1,
            **self.clock.microseconds(request.take_known, before=request.hash_tokens),
            "hashing": {"what": row.what_hashing, **self.clock.microseconds(request.hash_tokens)},
        }


def _tables(row: StepRow, num_steps: int) -> tuple[BlockTable, LoopTable]:
    """The same sequences twice, with room for as many steps; their blocks lie anywhere in the pool."""
    random = np.random.default_rng(row.num_seqs)
    lens = random.integers(row.least_context, row.most_context + 1, row.num_seqs)
    most_blocks = -(-(lens + num_steps) // BLOCK_SIZE)
    order = random.permutation(int(most_blocks.sum()))
    pool = BlockPool(order.size, order=order)
    table = BlockTable(row.num_seqs, int(most_blocks.max()), BLOCK_SIZE, pool)
    table.append([table.add() for _ in range(row.num_seqs)], lens)
    return table, LoopTable(lens.tolist(), order.tolist(), BLOCK_SIZE)


def check_steps(name: str, table: BlockTable, rows: np.ndarray, loops: LoopTable) -> None:
    """An error unless some steps of both say the same."""
    for _ in range(CHECKED_STEPS):
        step = table.step(rows, 1)
        for field, want in loops.step().items():
            _check_same(name, field, getattr(step, field), want)
    _check_same(name, "block_table", step.block_table, loops.block_table())


def _check_same(name: str, field: str, got: np.ndarray, want: np.ndarray) -> None:
    if got.dtype != want.dtype or not np.array_equal(got, want):
        raise click.ClickException(f"{name}: {field} is not what plain loops make of it, so it is not timed")


class KnownRequest:
    """A request, and a pool that holds all blocks of it, free to be taken.

    Its hashes are made anew for each time: bytes that have been looked up before are found faster.
    """

    def __init__(self, row: PrefixRow) -> None:
        random = np.random.default_rng(0)
        self.token_ids = random.integers(0, VOCABULARY, row.num_tokens)
        self.pool = BlockPool(2 * row.num_blocks, order=random.permutation(2 * row.num_blocks))
        self.hash_tokens()
        self.known = self.pool.allocate(row.num_blocks)
        self.pool.register(self.known, self.prefix.hashes)
        self.pool.free(self.known)

    def hash_tokens(self) -> None:
        """What is known of the request before the pool is asked."""
        self.prefix = PrefixHashes(self.token_ids, block_size=BLOCK_SIZE)

    def take_known(self) -> np.ndarray:
        """Finds its blocks, takes them and gives them back."""
        hits = self.pool.longest_prefix(self.prefix.reusable)
        self.pool.touch(hits)
        self.pool.free(hits)
        return hits

    def check(self, name: str) -> None:
        """An error unless all blocks but the last are found, in their order, and none is lost."""
        hits = self.take_known()
        if not np.array_equal(hits, self.known[:-1]):
            raise click.ClickException(f"{name}: {hits.size} blocks found, not all but the last, so it is not timed")
        if self.pool.num_used or self.pool.num_cached != self.known.size:
            raise click.ClickException(f"{name}: {self.pool!r} after all were given back, so it is not timed")


def _progress_line(row: Record) -> str:
    return f"{row['row']:14} {row['us']:9.1f} us  best {row['best_us']:9.1f} us"
