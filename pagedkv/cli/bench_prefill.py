"""``pagedkv bench prefill``: ``flash_attn_varlen_func`` over whole sequences, on the current GPU.

What arrays are made of and what times them is given, so that all but the timing also runs where there is no GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .bench_cache import CacheKind
from .bench_inputs import VARLEN, random_batch
from .bench_timing import checked_time, measured_rows, run_record
from .markdown import Record
from .prefill_rows import PrefillRow


@dataclass(slots=True)
class PrefillBench:
    """The benchmark for one kind of cache. ``xp`` is CuPy, ``stopwatch`` a ``Stopwatch``."""

    xp: Any
    stopwatch: Any
    kind: CacheKind

    def run(self, rows: Sequence[PrefillRow], progress: Callable[[str], None]) -> Record:
        """All rows, with the ceilings of the same run."""
        measured = measured_rows(rows, self._row, progress, _progress_line)
        return run_record("prefill", self.stopwatch, self.kind.shape) | {"rows": measured}

    def _row(self, row: PrefillRow) -> Record:
        lens = np.full(row.num_seqs, row.length, np.int32)
        inputs = random_batch(self.xp, self.kind, row.num_heads, row.num_kv_heads, lens, lens)
        us, instance = checked_time(self.stopwatch, row.name, VARLEN, inputs)
        sizes = {name: value for name, value in asdict(row).items() if name != "target"}
        flops = row.flops(self.kind.head_size)
        return {"row": row.name, **sizes, "flops": flops, "us": us, "instance": instance}


def _progress_line(row: Record) -> str:
    return f"{row['row']:16} {row['us']:9.1f} us  {row['flops'] / row['us'] / 1e6:6.1f} TFLOP/s"
