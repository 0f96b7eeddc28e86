"""What ``pagedkv bench gather`` measures: reads of whole tokens beside plain copies, and a decode step laid out on the
device. None has a target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

import pagedkv
from pagedkv.dtypes import BFLOAT16, E4M3, UINT8
from pagedkv.layout import cache_shapes

from .bench_timing import measured_rows, run_record
from .markdown import Record

BITS = np.dtype(np.uint16)  # of a bfloat16


@dataclass(frozen=True, slots=True)
class GatherForm:
    """The caches that are read, and of how many sequences."""

    num_seqs: int = 16
    context: int = 4096
    block_size: int = 16
    num_kv_heads: int = 8
    head_size: int = 128

    @property
    def num_blocks(self) -> int:
        return self.num_seqs * self.context // self.block_size

    @property
    def num_numbers(self) -> int:
        """Of keys and values."""
        return 2 * self.num_seqs * self.context * self.num_kv_heads * self.head_size

    @property
    def shape(self) -> Record:
        """As a record says it."""
        names = ("num_seqs", "context", "block_size", "num_kv_heads", "head_size")
        return {"dtype": BFLOAT16.name, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True)
class GatherRow:
    """All tokens of all sequences as contiguous rows of bfloat16."""

    layout: str
    is_fp8: bool = False

    @property
    def name(self) -> str:
        return f"gather-{self.layout.lower()}{'-fp8' if self.is_fp8 else ''}"

    @property
    def what(self) -> str:
        return f"`gather_cache`, {self.layout}{', fp8' if self.is_fp8 else ''}"


@dataclass(frozen=True, slots=True)
class ConvertRow:
    """All blocks in another layout."""

    layout: str
    to: str
    is_fp8 = False

    @property
    def name(self) -> str:
        return f"convert-{self.layout.lower()}-{self.to.lower()}"

    @property
    def what(self) -> str:
        return f"`convert_layout`, {self.layout} to {self.to}"


@dataclass(frozen=True, slots=True)
class AdvanceRow:
    """A decode step laid out on the device."""

    num_seqs: int = 8192
    max_blocks: int = 320

    @property
    def name(self) -> str:
        return f"advance-{self.num_seqs}"

    @property
    def what(self) -> str:
        return f"`advance_decode`, {self.num_seqs:,} sequences"


Row = GatherRow | ConvertRow | AdvanceRow
ROWS: tuple[Row, ...] = (
    *(GatherRow(layout) for layout in ("NHD", "HND", "packed")),
    GatherRow("NHD", is_fp8=True),
    *(ConvertRow(*layouts) for layouts in (("NHD", "HND"), ("NHD", "packed"), ("packed", "NHD"))),
    AdvanceRow(),
)


@dataclass(slots=True)
class GatherBench:
    """The benchmark. ``xp`` is CuPy and ``stopwatch`` a ``Stopwatch``."""

    xp: Any
    stopwatch: Any
    form: GatherForm = GatherForm()

    def run(self, rows: Sequence[Row], progress: Callable[[str], None]) -> Record:
        """All rows, with the ceilings of the same run."""
        measured = measured_rows(rows, self._row, progress, _progress_line)
        return run_record("gather", self.stopwatch, self.form.shape) | {"rows": measured}

    def _row(self, row: Row) -> Record:
        if isinstance(row, AdvanceRow):
            return {"row": row.name, "what": row.what, "us": self._advance(row)}
        us = self._gather(row) if isinstance(row, GatherRow) else self._convert(row)
        itemsizes = (1 if row.is_fp8 else 2, 2)
        nbytes = [self.form.num_numbers * itemsize for itemsize in itemsizes]
        plain_us = self.stopwatch.copy(sum(nbytes) // 2)
        kinds = {"read_bytes": nbytes[0], "written_bytes": nbytes[1]}
        return {"row": row.name, "what": row.what, **kinds, "us": us, "plain_us": plain_us, "share": plain_us / us}

    def _gather(self, row: GatherRow) -> float:
        form, caches = self.form, self._caches(row.layout, row.is_fp8)
        ids = np.random.default_rng(1).permutation(form.num_blocks).reshape(form.num_seqs, -1)
        table = self.xp.asarray(ids.astype(np.int32))
        starts = self.xp.asarray(np.arange(form.num_seqs + 1, dtype=np.int32) * np.int32(form.context))
        shape = (form.num_seqs * form.context, form.num_kv_heads, form.head_size)
        outs = [self.xp.empty(shape, BFLOAT16) for _ in caches]
        kinds = {"kv_cache_dtype": "fp8" if row.is_fp8 else "auto", "layout": row.layout}

        def launch() -> None:
            pagedkv.gather_cache(*caches, table, starts, key_out=outs[0], value_out=outs[1], **kinds)

        launch()
        for cache, out in zip(caches, outs, strict=True):
            rows = self._by_token(cache, row.layout)[table].reshape(shape)
            self._check(row.name, out.view(BITS), self._numbers(rows) if row.is_fp8 else rows.view(BITS))
        return self.stopwatch.microseconds(launch)

    def _convert(self, row: ConvertRow) -> float:
        caches = self._caches(row.layout, is_fp8=False)
        outs = [self.xp.empty(shape, BFLOAT16) for shape in self._shapes(row.to, BFLOAT16)]

        def launch() -> None:
            pagedkv.convert_layout(*caches, row.layout, row.to, key_out=outs[0], value_out=outs[1])

        launch()
        for cache, out in zip(caches, outs, strict=True):
            of_both = (self._by_token(side.view(BITS), layout) for side, layout in ((out, row.to), (cache, row.layout)))
            self._check(row.name, *of_both)
        return self.stopwatch.microseconds(launch)

    def _advance(self, row: AdvanceRow) -> float:
        random, block_size = np.random.default_rng(2), self.form.block_size
        shape = (row.num_seqs, row.max_blocks)
        table = self.xp.asarray(random.permutation(row.num_seqs * row.max_blocks).astype(np.int32).reshape(shape))
        lens = self.xp.asarray(random.integers(1000, 4000, row.num_seqs).astype(np.int32))
        slots, starts = self.xp.empty(row.num_seqs, np.int64), self.xp.empty(row.num_seqs + 1, np.int32)
        before = lens.astype(np.int64)

        def launch() -> None:
            pagedkv.advance_decode(table, lens, slots, starts, block_size=block_size)

        launch()
        ids = table[self.xp.arange(row.num_seqs), before // block_size].astype(np.int64)
        self._check(row.name, slots, ids * block_size + before % block_size)
        self._check(row.name, starts, self.xp.arange(row.num_seqs + 1, dtype=np.int32))
        return self.stopwatch.microseconds(launch)

    # ---- caches -----------------------------------------------------------------------------------------------------

    def _shapes(self, layout: str, dtype: np.dtype) -> list[tuple[int, ...]]:
        form = self.form
        return cache_shapes(layout, form.num_blocks, form.block_size, form.num_kv_heads, form.head_size, dtype)

    def _caches(self, layout: str, is_fp8: bool) -> list[Any]:
        """Random bits, of fp8 codes those below NaN."""
        random, kind = self.xp.random.default_rng(0), UINT8 if is_fp8 else BITS
        most = 0x7F if is_fp8 else 1 << 16
        shapes = self._shapes(layout, UINT8 if is_fp8 else BFLOAT16)
        caches = [random.integers(0, most, int(np.prod(shape)), dtype=kind).reshape(shape) for shape in shapes]
        return caches if is_fp8 else [cache.view(BFLOAT16) for cache in caches]

    def _by_token(self, cache: Any, layout: str) -> Any:
        """As ``[num_blocks, block_size, num_kv_heads, head_size]``."""
        form = self.form
        if cache.ndim == 5:
            rows = cache.transpose(0, 3, 1, 2, 4)
            return rows.reshape(form.num_blocks, form.block_size, form.num_kv_heads, form.head_size)
        return cache.transpose({"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "packed": (0, 3, 1, 2)}[layout])

    def _numbers(self, codes: Any) -> Any:
        """The bits of what codes stand for, which bfloat16 holds exactly."""
        table = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32).astype(BFLOAT16).view(BITS)
        return self.xp.asarray(table)[codes]

    def _check(self, name: str, got: Any, want: Any) -> None:
        if bool((got != want).any()):
            raise click.ClickException(f"{name}: the result is wrong, so it is not timed")


def _progress_line(row: Record) -> str:
    plain = f"  plain copy {row['plain_us']:9.1f} us  ({100 * row['share']:.1f} %)" if "plain_us" in row else ""
    return f"{row['row']:18} {row['us']:9.1f} us{plain}"
