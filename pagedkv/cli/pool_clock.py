"""Timing of what only the host does: on a set number of cores, with the garbage collector off."""

import os
import platform
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

WARMUPS = 3


@dataclass(frozen=True, slots=True)
class HostClock:
    """Times calls one by one."""

    repeats: int

    def num_calls(self, rounds: int = 1) -> int:
        """How often ``microseconds`` calls what it times."""
        return WARMUPS + rounds * self.repeats

    def microseconds(
        self, call: Callable[[], Any], *, before: Callable[[], Any] | str = "pass", rounds: int = 1
    ) -> dict[str, float]:
        """Median and best time of a call.

        before: called before each one, outside the time. rounds: of as many calls as there are repeats.
        """
        times = timeit.repeat(call, before, repeat=self.num_calls(rounds), number=1)[WARMUPS:]
        return {"us": 1e6 * float(np.median(times)), "best_us": 1e6 * min(times)}


@contextmanager
def on_cores(count: int) -> Iterator[int | None]:
    """Keeps this thread on that many of its cores, or on all if it has fewer, and says how many those are.

    None where the platform has no way to do so.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:count]
    os.sched_setaffinity(0, cores)
    try:
        yield len(cores)
    finally:
        os.sched_setaffinity(0, before)


def cpu_model() -> str:
    """The processor's name, as far as the platform says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), platform.processor() or platform.machine())
