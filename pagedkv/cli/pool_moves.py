"""The card's part of ``pagedkv bench pool``: blocks of all layers' caches copied, to the host and back.

What arrays are made of, what times them and what copies them plainly is given, so that all but the timing also runs
where there is no GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np

import pagedkv

from .bench_timing import measured_rows, run_record
from .inputs import SPARE_BLOCKS
from .markdown import Record
from .pool_rows import SHARE, TO_HOST, CacheForm, CopyRow, MoveRow, SwapRow

WORD = np.dtype(np.uint32)


@dataclass(slots=True)
class DrawnCaches:
    """Caches of all layers, on the card or on the host, whose first contents can be drawn again."""

    xp: Any
    form: CacheForm
    words: list[Any]  # of each cache, uint32 [num_blocks, words of a block]
    seed: int

    def drawn(self, i: int) -> Any:
        """What cache ``i`` holds at first, on the card: random bits, since zeros would be measured too fast."""
        random = self.xp.random.default_rng(self.seed + i)
        words = self.words[i]
        return random.integers(0, 2**32, words.size, dtype=np.uint32).reshape(words.shape)

    @property
    def caches(self) -> list[Any]:
        """As ops take them."""
        return [words.view(self.form.dtype).reshape(len(words), *self.form.block_shape) for words in self.words]


@dataclass(slots=True)
class MovesBench:
    """The benchmark. ``xp`` is CuPy, ``stopwatch`` a ``Stopwatch``, ``memory`` the module ``pool_memory``."""

    xp: Any
    stopwatch: Any
    memory: Any
    form: CacheForm = field(default_factory=CacheForm)

    def run(self, rows: Sequence[MoveRow], progress: Callable[[str], None]) -> Record:
        """All rows, with the ceilings of the same run."""
        measured = measured_rows(rows, self._row, progress, _progress_line)
        return run_record("pool", self.stopwatch, self.form.shape) | {"rows": measured}

    def _row(self, row: MoveRow) -> Record:
        us, plain_us = self._copy(row) if isinstance(row, CopyRow) else self._swap(row)
        return {
            "row": row.name,
            "what": row.what,
            "num_pairs": row.num_pairs,
            "num_caches": self.form.num_caches,
            "nbytes": self._nbytes(row),
            "us": us,
            "plain_us": plain_us,
            "share": plain_us / us,
            "target_share": SHARE,
            "met": plain_us / us >= SHARE,
        }

    def _copy(self, row: CopyRow) -> tuple[float, float]:
        """Microseconds of the op, and of the best copy on the card."""
        us = self._copy_us(row)  # in a function of its own: its caches are gone when the plain copy takes its memory
        return us, self.stopwatch.copy(self._nbytes(row))

    def _copy_us(self, row: CopyRow) -> float:
        pool = self._on_card(2 * row.num_pairs + SPARE_BLOCKS, seed=0)
        blocks = np.random.default_rng(row.num_pairs).permutation(2 * row.num_pairs + SPARE_BLOCKS)
        pairs = self.xp.asarray(blocks[: 2 * row.num_pairs].reshape(-1, 2))
        caches = pool.caches

        def launch() -> None:
            pagedkv.copy_blocks(caches, pairs)

        launch()
        self._check(row.name, pool, pool, pairs)
        return self.stopwatch.microseconds(launch)

    def _swap(self, row: SwapRow) -> tuple[float, float]:
        """Microseconds of the op, and of the driver's copy of as many bytes in one piece."""
        random, num_blocks = np.random.default_rng(row.num_pairs), row.num_pairs + SPARE_BLOCKS
        sides = self._on_card(num_blocks, seed=0), self._on_host(num_blocks, seed=self.form.num_caches)
        source, target = sides if row.direction == TO_HOST else sides[::-1]
        ids = [random.permutation(num_blocks)[: row.num_pairs] for _ in sides]
        pairs = self.xp.asarray(np.stack(ids, axis=1))
        caches = source.caches, target.caches

        def launch() -> None:
            pagedkv.swap_blocks(*caches, pairs)

        launch()
        self._check(row.name, source, target, pairs)
        us = self.stopwatch.microseconds(launch)
        return us, self.stopwatch.microseconds(self._plain_swap(row))

    def _plain_swap(self, row: SwapRow) -> Callable[[], None]:
        num_words = self._nbytes(row) // WORD.itemsize
        on_card = self.xp.random.default_rng(0).integers(0, 2**32, num_words, dtype=np.uint32)
        on_host = self.memory.empty_pinned(on_card.shape, WORD)
        self.memory.copy(on_host, on_card)
        source, target = (on_card, on_host) if row.direction == TO_HOST else (on_host, on_card)
        return lambda: self.memory.copy(target, source)

    def _nbytes(self, row: MoveRow) -> int:
        """That are read, and as many are written."""
        return row.num_pairs * self.form.num_caches * self.form.block_bytes

    # ---- caches -----------------------------------------------------------------------------------------------------

    def _on_card(self, num_blocks: int, seed: int) -> DrawnCaches:
        words = [self.xp.empty(self._words(num_blocks), WORD) for _ in range(self.form.num_caches)]
        return self._filled(words, seed)

    def _on_host(self, num_blocks: int, seed: int) -> DrawnCaches:
        """In one piece, as a pool in host memory is."""
        shape = (self.form.num_caches, *self._words(num_blocks))
        return self._filled(list(self.memory.empty_pinned(shape, WORD)), seed)

    def _words(self, num_blocks: int) -> tuple[int, int]:
        return num_blocks, self.form.block_bytes // WORD.itemsize

    def _filled(self, words: list[Any], seed: int) -> DrawnCaches:
        pool = DrawnCaches(self.xp, self.form, words, seed)
        for i, of_cache in enumerate(words):
            self.memory.copy(of_cache, pool.drawn(i))
        self.memory.wait()
        return pool

    def _check(self, name: str, source: DrawnCaches, target: DrawnCaches, pairs: Any) -> None:
        """An error unless every block of every cache is what it was, or what it was to become."""
        self.memory.wait()
        for i in range(self.form.num_caches):
            want = target.drawn(i)
            want[pairs[:, 1]] = source.drawn(i)[pairs[:, 0]]
            self._check_cache(name, i, target.words[i], want)
            if source is not target:
                self._check_cache(name, i, source.words[i], source.drawn(i))

    def _check_cache(self, name: str, i: int, words: Any, want: Any) -> None:
        is_wrong = (self.xp.asarray(words) != want).any(axis=1)
        if bool(is_wrong.any()):
            kind, block = ("key", "value")[i % 2], int(is_wrong.argmax())
            raise click.ClickException(
                f"{name}: block {block} of layer {i // 2}'s {kind} cache is wrong, so it is not timed"
            )


def _progress_line(row: Record) -> str:
    return f"{row['row']:14} {row['us']:9.1f} us  plain copy {row['plain_us']:9.1f} us  ({100 * row['share']:.1f} %)"
