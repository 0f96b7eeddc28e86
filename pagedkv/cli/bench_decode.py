"""``pagedkv bench decode``: reads of one token per sequence beside the floor of the same bytes, on the current GPU.

What arrays are made of and what times them is given, so that all but the timing also runs where there is no GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .bench_cache import CacheKind
from .bench_inputs import BatchInputs
from .bench_timing import call, checked_time, measured_rows, run_record
from .decode_inputs import decode_inputs
from .decode_rows import FUNCTIONS, OPS, ROWS, DecodeRow, nbytes
from .markdown import Record
from .read_floor import read_launches

HOST_ROW = ROWS[0]  # what a call costs the host does not depend on the size of its arrays


@dataclass(slots=True)
class DecodeBench:
    """The benchmark for one kind of cache. ``xp`` is CuPy, ``stopwatch`` a ``Stopwatch``."""

    xp: Any
    stopwatch: Any
    ops: Sequence[str]
    kind: CacheKind

    def run(self, rows: Sequence[DecodeRow], progress: Callable[[str], None]) -> Record:
        """All rows, with the ceilings of the same run."""
        measured = measured_rows(rows, self._row, progress, _progress_line)
        record = run_record("decode", self.stopwatch, self.kind.shape)
        return record | {"host_us": self._host_costs(), "rows": measured}

    def _row(self, row: DecodeRow) -> Record:
        us, instances, floors = {}, {}, []
        for kind, ops in self._caches():
            us_of, instances_of, floor = self._of_cache(row, kind, ops)
            us, instances = us | us_of, instances | instances_of
            floors.append(floor)
        floor_us, floor_launch = min(floors)
        return {
            "row": row.name,
            **{name: value for name, value in asdict(row).items() if name not in ("target", "fills_card")},
            "nbytes": nbytes(row, self.kind.head_size, self.kind.cache_dtype.itemsize),
            "floor_us": floor_us,
            "floor_launch": floor_launch,
            "us": us,
            "instance": instances,
        }

    def _caches(self) -> Iterator[tuple[CacheKind, list[str]]]:
        """The caches to read, one at a time, and what reads them."""
        for layout in dict.fromkeys((self.kind.layout, "packed")):
            ops = [op for op in self.ops if layout == ("packed" if op in OPS["packed"] else self.kind.layout)]
            if ops:
                yield replace(self.kind, layout=layout), ops

    def _of_cache(
        self, row: DecodeRow, kind: CacheKind, ops: Sequence[str]
    ) -> tuple[dict[str, float], dict[str, str | None], tuple[float, str]]:
        """Times and instances of some ops, and the floor. The cache, of many GB, is gone when this returns."""
        inputs = decode_inputs(self.xp, row, kind)
        times = {op: checked_time(self.stopwatch, f"{row.name}, {op}", FUNCTIONS[op], inputs) for op in ops}
        us, instances = ({op: pair[i] for op, pair in times.items()} for i in (0, 1))
        return us, instances, self._floor(inputs)

    def _floor(self, inputs: BatchInputs) -> tuple[float, str]:
        """Of reading the same blocks: microseconds and the launch that needed the fewest.

        They are all in one row of a table, so that nothing passes over entries that no sequence uses.
        """
        blocks, block_size = inputs.used_blocks(), self.kind.block_size
        num_kv_heads, lens = inputs.cache.num_kv_heads, np.full(1, blocks.size * block_size, np.int32)
        head_nbytes = block_size * self.kind.head_size * self.kind.cache_dtype.itemsize
        launches = read_launches(1, blocks.size, num_kv_heads, block_size, head_nbytes, self.stopwatch.sms)
        table = (self.xp.asarray(array) for array in (blocks[None], lens))
        arrays = [inputs.cache.key, inputs.cache.value, *table, self.xp.empty(1, np.uint32)]
        us, best = self.stopwatch.best(launches, arrays)
        return us, f"{best.instance}, {best.grid[0]} x {best.threads}"

    def _host_costs(self) -> Record:
        """Microseconds that an eager call keeps the host."""
        costs = {}
        for kind, ops in self._caches():
            inputs = decode_inputs(self.xp, HOST_ROW, kind)
            for op in ops:
                bare = inputs.arguments(FUNCTIONS[op])
                given = bare | inputs.memory(FUNCTIONS[op])
                costs[op] = {
                    "given": self.stopwatch.host_microseconds(call(FUNCTIONS[op], given)),
                    "allocated": self.stopwatch.host_microseconds(call(FUNCTIONS[op], bare)),
                }
        return costs


def _progress_line(row: Record) -> str:
    times = (f"{op} {us:8.1f} us ({us / row['floor_us']:.3f})" for op, us in row["us"].items())
    return "  ".join([f"{row['row']:16} floor {row['floor_us']:7.1f} us", *times])
