"""``pagedkv bench mixed``: calls of several kinds of sequences, with a window and with a shared prefix.

What arrays are made of and what times them is given, so that all but the timing also runs where there is no GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .bench_cache import CacheKind
from .bench_timing import checked_time, measured_rows, run_record
from .markdown import Record
from .mixed_rows import HEADS, CascadeRow, MixedRow, WindowRow


@dataclass(slots=True)
class MixedBench:
    """The benchmark for one kind of cache. ``xp`` is CuPy, ``stopwatch`` a ``Stopwatch``."""

    xp: Any
    stopwatch: Any
    kind: CacheKind

    def run(self, rows: Sequence[MixedRow | WindowRow | CascadeRow], progress: Callable[[str], None]) -> Record:
        """All rows, with the ceilings of the same run."""
        measured = measured_rows(rows, self._row, progress, _progress_line)
        return run_record("mixed", self.stopwatch, self.kind.shape) | {"rows": measured}

    def _row(self, row: MixedRow | WindowRow | CascadeRow) -> Record:
        us, instances = {}, {}
        for timed in row.calls(self.xp, self.kind):
            title = f"{row.name}, {timed.name}"
            us[timed.name], instances[timed.name] = checked_time(
                self.stopwatch, title, timed.op, timed.inputs, **timed.options
            )
        first, *others = us.values()
        ratio = first / sum(others)
        what, beside = row.texts
        return {
            "row": row.name,
            **asdict(row),
            **dict(zip(("num_heads", "num_kv_heads"), HEADS, strict=True)),
            "what": what,
            "beside": beside,
            "us": us,
            "instance": instances,
            "ratio": ratio,
            "target_ratio": row.target,
            "met": ratio <= row.target,
        }


def _progress_line(row: Record) -> str:
    times = (f"{name} {us:8.1f} us" for name, us in row["us"].items())
    return "  ".join([f"{row['row']:8}", *times, f"({row['ratio']:.3f})"])
