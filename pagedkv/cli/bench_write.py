"""``pagedkv bench write``: both writes over layouts, formats and numbers of tokens, on the current GPU."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import cupy
import numpy as np

import pagedkv
from pagedkv.dtypes import storage_dtype
from pagedkv.layout import cache_shapes

from . import reference
from .bench_timing import METHOD, READ_BYTES
from .environment import environment
from .execute import kernel_instance
from .inputs import POISON_BYTE, SPARE_BLOCKS, poisoned, slot_view
from .timing import Stopwatch

TOKENS = (1, 16, 128, 1024, 8192, 65536)
FEW_TOKENS = 128  # up to here latency counts, and an empty kernel is the measure
SCALES = {"k_scale": 0.013, "v_scale": 0.021}  # long mantissas, as calibration gives them
SECTOR_BYTES = 32
CHECKED_TOKENS = 2048  # of an fp8 write, whose codes are compared on the host


@dataclass(frozen=True, slots=True)
class Kind:
    """What distinguishes the rows of the table."""

    layout: str
    kv_cache_dtype: str
    slots: str  # "consecutive" in scattered blocks, or "scattered" one by one


KINDS = (
    *(
        Kind(layout, kv_cache_dtype, "consecutive")
        for layout in ("NHD", "HND", "packed")
        for kv_cache_dtype in ("auto", "fp8")
    ),
    *(Kind("packed", kv_cache_dtype, "scattered") for kv_cache_dtype in ("auto", "fp8")),
)


@dataclass(slots=True)
class WriteBench:
    """The benchmark for one shape of token."""

    kv_heads: int
    head_size: int
    block_size: int
    dtype: np.dtype
    repeats: int

    def run(self, tokens: tuple[int, ...], progress: Callable[[str], None]) -> dict[str, Any]:
        """All rows, with the ceilings of the same run."""
        stopwatch = Stopwatch(repeats=self.repeats)
        copies: dict[int, float] = {}
        rows = []
        for kind in KINDS:
            for num_tokens in tokens:
                rows.append(self._row(kind, num_tokens, stopwatch, copies))
                progress(
                    f"{kind.layout:6} {kind.kv_cache_dtype:4} {kind.slots:11} {num_tokens:6,} {rows[-1]['us']:8.2f} us"
                )
        shape = {"num_kv_heads": self.kv_heads, "head_size": self.head_size, "block_size": self.block_size}
        return {
            "bench": "write",
            **environment(),
            "method": f"{METHOD}, {self.repeats} each",
            "shape": {**shape, "dtype": self.dtype.name},
            "ceilings": {
                "empty_us": stopwatch.empty(),
                "copy_us": {str(nbytes): us for nbytes, us in copies.items()},
                "read": {"nbytes": READ_BYTES, "us": stopwatch.read(READ_BYTES)},
            },
            "rows": rows,
        }

    def _row(self, kind: Kind, num_tokens: int, stopwatch: Stopwatch, copies: dict[int, float]) -> dict[str, Any]:
        arguments = self._arguments(kind, num_tokens)
        op = "reshape_and_cache" if kind.layout == "packed" else "reshape_and_cache_flash"

        def launch() -> None:
            getattr(pagedkv, op)(**arguments)

        launch()
        self._check(kind, arguments)
        us, nbytes = stopwatch.microseconds(launch), self._nbytes(kind, num_tokens)
        row = {
            "layout": kind.layout,
            "kv_cache_dtype": kind.kv_cache_dtype,
            "slots": kind.slots,
            "num_tokens": num_tokens,
            "nbytes": nbytes,
            "us": us,
            "instance": kernel_instance(op, arguments, "cuda"),
            "empty_us": None,
            "share_of_copy": None,
        }
        if num_tokens <= FEW_TOKENS:
            return row | {"empty_us": stopwatch.empty()}
        return row | self._shares(kind, num_tokens, nbytes, us, copies, stopwatch)

    def _shares(
        self, kind: Kind, num_tokens: int, nbytes: int, us: float, copies: dict[int, float], stopwatch: Stopwatch
    ) -> dict[str, Any]:
        if nbytes not in copies:  # a copy reads and writes each byte
            copies[nbytes] = stopwatch.copy(nbytes // 2)
        shares = {"tb_per_s": nbytes / us / 1e6, "share_of_copy": copies[nbytes] / us}
        if kind.slots == "scattered":
            touched = self._sector_bytes(kind, num_tokens)
            shares |= {"sector_bytes": touched, "sector_tb_per_s": touched / us / 1e6}
        return shares

    # ---- inputs -----------------------------------------------------------------------------------------------------

    def _arguments(self, kind: Kind, num_tokens: int) -> dict[str, Any]:
        random = cupy.random.default_rng(num_tokens)
        shape = (num_tokens, self.kv_heads, self.head_size)
        key, value = (random.standard_normal(shape, dtype=np.float32).astype(self.dtype) for _ in "kv")
        num_blocks = -(-num_tokens // self.block_size) + SPARE_BLOCKS
        axes, dtype = (num_blocks, self.block_size, self.kv_heads, self.head_size), self._storage(kind)
        caches = (poisoned(cupy, shape, dtype) for shape in cache_shapes(kind.layout, *axes, dtype))
        return {
            "key": key,
            "value": value,
            **dict(zip(("key_cache", "value_cache"), caches, strict=True)),
            "slot_mapping": cupy.asarray(self._slots(kind, num_tokens, num_blocks)),
            "kv_cache_dtype": kind.kv_cache_dtype,
            **({} if kind.kv_cache_dtype == "auto" else SCALES),
            **({} if kind.layout == "packed" else {"layout": kind.layout}),
        }

    def _slots(self, kind: Kind, num_tokens: int, num_blocks: int) -> np.ndarray:
        rng = np.random.default_rng(num_tokens)
        num_live = num_blocks - SPARE_BLOCKS  # the spare blocks stay poison
        if kind.slots == "scattered":
            return rng.permutation(num_live * self.block_size)[:num_tokens]
        block, offset = np.divmod(np.arange(num_tokens), self.block_size)
        return rng.permutation(num_live)[block] * self.block_size + offset

    def _storage(self, kind: Kind) -> np.dtype:
        return storage_dtype(self.dtype, kind.kv_cache_dtype)

    # ---- what a write must move -------------------------------------------------------------------------------------

    def _nbytes(self, kind: Kind, num_tokens: int) -> int:
        itemsizes = self.dtype.itemsize + self._storage(kind).itemsize
        return 2 * num_tokens * self.kv_heads * self.head_size * itemsizes

    def _sector_bytes(self, kind: Kind, num_tokens: int) -> int:
        """Bytes of the sectors that scattered tokens touch: a sector per 16 bytes of K and per element of V."""
        elements = num_tokens * self.kv_heads * self.head_size
        itemsize = self._storage(kind).itemsize
        return 2 * elements * self.dtype.itemsize + elements * itemsize * SECTOR_BYTES // 16 + elements * SECTOR_BYTES

    # ---- check ------------------------------------------------------------------------------------------------------

    def _check(self, kind: Kind, arguments: dict[str, Any]) -> None:
        """An error unless tokens are in their places, bit for bit (of fp8 a sample), and spare blocks as they were."""
        block, offset = cupy.divmod(arguments["slot_mapping"], self.block_size)
        for rows_name, cache_name, scale in (("key", "key_cache", "k_scale"), ("value", "value_cache", "v_scale")):
            cache, rows = arguments[cache_name], arguments[rows_name]
            stored = slot_view(cache.view(f"u{cache.itemsize}"), kind.layout, block, offset).reshape(rows.shape)
            for got, want in self._pairs(kind, stored, rows, SCALES[scale]):
                if not bool((got == want).all()):
                    raise _not_timed(kind, f"{cache_name} is wrong")
            if not bool((cache[-SPARE_BLOCKS:].view(np.uint8) == POISON_BYTE).all()):
                raise _not_timed(kind, f"{cache_name} changed where no token is")

    @staticmethod
    def _pairs(kind: Kind, stored: cupy.ndarray, rows: cupy.ndarray, scale: float) -> Iterator[tuple[Any, Any]]:
        if kind.kv_cache_dtype == "auto":
            yield stored, rows.view(stored.dtype)
            return
        picked = np.unique(np.linspace(0, len(rows) - 1, CHECKED_TOKENS).astype(int))
        yield stored[picked].get(), reference.encoded(rows[picked].get(), kind.kv_cache_dtype, scale)


def _not_timed(kind: Kind, what: str) -> click.ClickException:
    return click.ClickException(f"{kind.layout}, {kind.kv_cache_dtype}: {what}, so its write is not timed")
