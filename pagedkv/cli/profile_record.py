"""A profile as plain data: what ``pagedkv profile --json`` prints, and what its tables are made of."""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

from pagedkv.kernels import source_folder
from pagedkv.ptx.counters import Counters, Tally
from pagedkv.ptx.faults import SourceLine

from .markdown import Record

UNITS = {"global": "sectors", "shared": "wavefronts"}


def launch_record(
    kernel: str,
    grid: tuple[int, ...],
    threads: int,
    counters: Counters,
    source_text: Callable[[SourceLine], str],
) -> Record:
    """One launch. ``per`` kind of traffic: requests, what they cost, what they would cost side by side."""
    lines = [
        {"line": str(line), "source": source_text(line), **tally_record(tally)}
        for line, tally in counters.by_line().items()
    ]
    total = tally_record(counters.total())
    return {"kernel": kernel, "grid": list(grid), "threads": threads, **total, "mix": counters.mix(), "lines": lines}


def tally_record(tally: Tally) -> Record:
    traffic = {}
    for kind, counts in sorted(tally.traffic.items()):
        unit, counts = UNITS[kind.split()[0]], asdict(counts)
        traffic[kind] = {
            "requests": counts["requests"],
            unit: counts["units"],
            f"ideal_{unit}": counts["ideal_units"],
            "bytes": counts["nbytes"],
            "runs": counts["runs"],
        }
    return {"warp_instructions": tally.warps, "thread_instructions": tally.lanes, "traffic": traffic}


def cost(kind: str, traffic: Record) -> tuple[float, float]:
    """Sectors or wavefronts of a request, and how few they could be."""
    unit = UNITS[kind.split()[0]]
    return traffic[unit] / traffic["requests"], traffic[f"ideal_{unit}"] / traffic["requests"]


def package_source(line: SourceLine) -> str:
    """The text of a line of ``cuda/``; nothing for other files."""
    folder, _, name = line.file.rpartition("/")
    return text_of_line(source_folder() / name, line.number) if folder == "cuda" else ""


def text_of_line(path: Path, number: int) -> str:
    """A line of a file without the space around it; nothing where there is no such line."""
    lines = _lines(path)
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
