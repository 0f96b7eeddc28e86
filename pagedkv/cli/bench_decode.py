"""``pagedkv bench decode``: ``paged_attention_v1`` and ``v2`` beside the floor of the same bytes, on the current GPU.

What arrays are made of and what times them is given, so that all but the timing also runs where there is no GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

import pagedkv

from .decode_inputs import DecodeInputs
from .decode_rows import ROWS, DecodeRow, nbytes
from .execute import kernel_instance
from .markdown import Record
from .read_floor import read_launches

OPS = ("v1", "v2")
READ_BYTES = 256 << 20
HOST_ROW = ROWS[0]  # what a call costs the host does not depend on the size of its arrays
METHOD = "medians of graph replays, L2 cold"


@dataclass(slots=True)
class DecodeBench:
    """The benchmark for one kind of cache. ``xp`` is CuPy, ``stopwatch`` a ``Stopwatch``."""

    xp: Any
    stopwatch: Any
    ops: Sequence[str]
    dtype: np.dtype
    kv_cache_dtype: str
    head_size: int
    block_size: int

    def run(self, rows: Sequence[DecodeRow], progress: Callable[[str], None]) -> Record:
        """All rows, with the ceilings of the same run."""
        measured = []
        for row in rows:
            measured.append(self._row(row))
            progress(_progress_line(measured[-1]))
        stopwatch = self.stopwatch
        return {
            "bench": "decode",
            "method": f"{METHOD}, {stopwatch.repeats} each",
            "shape": self.shape,
            "ceilings": {
                "empty_us": stopwatch.empty(),
                "read": {"nbytes": READ_BYTES, "us": stopwatch.read(READ_BYTES)},
            },
            "host_us": self._host_costs(),
            "rows": measured,
        }

    @property
    def shape(self) -> Record:
        return {
            "dtype": self.dtype.name,
            "kv_cache_dtype": self.kv_cache_dtype,
            "layout": "packed",
            "head_size": self.head_size,
            "block_size": self.block_size,
        }

    def _inputs(self, row: DecodeRow) -> DecodeInputs:
        return DecodeInputs(self.xp, row, self.dtype, self.kv_cache_dtype, self.head_size, self.block_size)

    def _row(self, row: DecodeRow) -> Record:
        inputs = self._inputs(row)
        us, instances = {}, {}
        for op in self.ops:
            arguments = self._arguments(op, inputs)
            us[op] = self._checked_time(op, inputs, arguments)
            instances[op] = kernel_instance(f"paged_attention_{op}", arguments, "cuda")
        floor_us, floor_launch = self._floor(inputs)
        return {
            "row": row.name,
            **{name: value for name, value in asdict(row).items() if name not in ("target", "fills_card")},
            "nbytes": nbytes(row, self.head_size, inputs.cache_dtype.itemsize),
            "floor_us": floor_us,
            "floor_launch": floor_launch,
            "us": us,
            "instance": instances,
        }

    # ---- ops --------------------------------------------------------------------------------------------------------

    def _arguments(self, op: str, inputs: DecodeInputs) -> dict[str, Any]:
        """With all memory given, as an engine would call."""
        arguments = {**inputs.arrays, **inputs.options, "out": inputs.new_out()}
        if op == "v1":
            return arguments
        sizes = {"num_tokens": inputs.row.num_seqs, "num_heads": inputs.row.num_heads, "head_size": self.head_size}
        max_seq_len = inputs.tables.shape[1] * self.block_size
        size = pagedkv.workspace_nbytes("paged_attention_v2", **sizes, max_seq_len=max_seq_len)
        return arguments | {"workspace": self.xp.empty(size, np.uint8)}

    def _checked_time(self, op: str, inputs: DecodeInputs, arguments: dict[str, Any]) -> float:
        """An error unless the result is right."""
        launch = _call(op, arguments)
        launch()
        comparison = inputs.check(arguments["out"])
        if not comparison.ok:
            raise click.ClickException(f"{inputs.row.name}, {op}: {comparison.detail}, so it is not timed")
        return self.stopwatch.microseconds(launch)

    def _floor(self, inputs: DecodeInputs) -> tuple[float, str]:
        """Of reading the same blocks: microseconds and the launch that needed the fewest.

        They are all in one row of a table, so that nothing passes over entries that no sequence uses.
        """
        blocks = inputs.used_blocks()
        num_kv_heads, lens = inputs.row.num_kv_heads, np.full(1, blocks.size * self.block_size, np.int32)
        head_nbytes = self.block_size * self.head_size * inputs.cache_dtype.itemsize
        launches = read_launches(1, blocks.size, num_kv_heads, self.block_size, head_nbytes, self.stopwatch.sms)
        caches = (inputs.arrays[name] for name in ("key_cache", "value_cache"))
        table = (self.xp.asarray(array) for array in (blocks[None], lens))
        us, best = self.stopwatch.best(launches, [*caches, *table, self.xp.empty(1, np.uint32)])
        return us, f"{best.instance}, {best.grid[0]} x {best.threads}"

    def _host_costs(self) -> Record:
        """Microseconds that an eager call keeps the host."""
        inputs = self._inputs(HOST_ROW)
        costs = {}
        for op in self.ops:
            given = self._arguments(op, inputs)
            bare = {**inputs.arrays, **inputs.options}
            costs[op] = {
                "given": self.stopwatch.host_microseconds(_call(op, given)),
                "allocated": self.stopwatch.host_microseconds(_call(op, bare)),
            }
        return costs


def _call(op: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    return lambda: getattr(pagedkv, f"paged_attention_{op}")(**arguments)


def _progress_line(row: Record) -> str:
    times = (f"{op} {us:8.1f} us ({us / row['floor_us']:.3f})" for op, us in row["us"].items())
    return "  ".join([f"{row['row']:16} floor {row['floor_us']:7.1f} us", *times])
