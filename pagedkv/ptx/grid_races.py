"""Races in global memory between CTAs.

Two accesses of different CTAs to one byte, of which one writes, must be ordered by what ``releases`` knows, unless both
are atomics or strong. A CTA that stores what is there already races, too; threads of one CTA never do here, and a
launch of one CTA is not looked at.

In each buffer granules as large as its smallest access so far remember of each kind of access the last, and the last by
another CTA where unordered with it; strong loads leave nothing behind.
"""

from typing import NamedTuple

import numpy as np

from .cta_order import NOBODY, stamped, thread_of, time_of
from .memory import LARGEST_ACCESS, Report, report_first
from .pages import PAGE, PageTable, refined
from .releases import Releases, is_strong
from .warp import WARP_SIZE

KINDS = ("load", "store", "atomic or strong store")
ELSEWHERE = " of another CTA"
NO_STAMPS = np.empty((0, PAGE), np.int64)


class _Trace:
    """Who loaded, stored and changed each granule of a buffer."""

    def __init__(self) -> None:
        self.granule, self.table = LARGEST_ACCESS, PageTable()
        self.stamps: dict[str, np.ndarray] = {}  # by kind, once there are such: pages

    def granules(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Numbers of the granules of every access. A copy may take any number of bytes of those it is aligned to."""
        unit = nbytes & -nbytes
        if unit < self.granule:
            factor, self.granule = self.granule // unit, unit
            self.table.refine(factor)
            self.stamps = {name: refined(pages, factor) for name, pages in self.stamps.items()}
        return (addresses // self.granule)[:, None] + np.arange(nbytes // self.granule)

    def pages(self, name: str) -> np.ndarray:
        """The stamps of that name, to be indexed by what the table says."""
        self.stamps[name] = self.table.grown(self.stamps.get(name, NO_STAMPS), NOBODY)
        return self.stamps[name]


class _Access(NamedTuple):
    """What some threads are about to do to some granules ``[threads, granules]``, which the trace has here."""

    name: str
    trace: _Trace
    touched: np.ndarray
    here: tuple[np.ndarray, np.ndarray]
    lanes: np.ndarray  # among the active threads
    threads: np.ndarray
    stamps: np.ndarray
    report: Report


class GridRaces:
    """What is known of the buffers of a launch, which begin at the ``bases``."""

    def __init__(self, releases: Releases, threads_per_cta: int, num_ctas: int, bases: np.ndarray) -> None:
        self.releases, self.threads_per_cta, self.looks = releases, threads_per_cta, num_ctas > 1
        self.bases, self.traces = bases, [_Trace() for _ in bases]

    def access(
        self, opcode: tuple[str, ...], addresses: np.ndarray, nbytes: int, threads: np.ndarray, report: Report
    ) -> None:
        """An ``ld``, ``st``, ``atom`` or ``red`` that is about to happen, or a copy from global memory."""
        name = {"ld": "load", "cp": "load", "st": "store"}.get(opcode[0], "atomic")
        strong = name == "atomic" or is_strong(opcode)
        if self.looks:
            now = self.releases.order.now + (np.arange(threads.size) if strong else 0)
            stamps, which = stamped(now, threads)[:, None], np.searchsorted(self.bases, addresses, side="right") - 1
            for number in np.unique(which).tolist():
                lanes, trace = np.flatnonzero(which == number), self.traces[number]
                touched = trace.granules(addresses[lanes].astype(np.int64), nbytes)
                here = trace.table.locate(touched, create=True)
                self._look(_Access(name, trace, touched, here, lanes, threads[lanes], stamps[lanes], report), strong)
        if strong:
            self.releases.access(addresses, threads, opcode)

    def _look(self, access: _Access, strong: bool) -> None:
        load, store, atomic = KINDS
        self._check(access, store)
        if access.name != "load":
            self._check(access, load)
        if not strong:
            self._check(access, atomic)
            self._record(access, access.name)
        elif access.name != "load":
            self._record(access, atomic)

    def _check(self, access: _Access, before: str) -> None:
        for name in (before, before + ELSEWHERE):
            if name not in access.trace.stamps:
                continue
            stamps = access.trace.pages(name)[access.here]
            racing = self._unordered(stamps, access)
            if before == KINDS[-1]:
                self._forgive_found(racing, stamps, access)
            what = f"race: global {access.name} after an unordered {before} of another CTA"
            report_first(racing.any(axis=1), access.lanes, what, access.report)

    def _record(self, access: _Access, kind: str) -> None:
        last, here, own = access.trace.pages(kind), access.here, np.broadcast_to(access.stamps, access.touched.shape)
        before = last[here]
        self._keep(access, kind, before, self._unordered(before, access))
        last[here] = own
        several = self._foreign(last[here], access)  # where threads of this very instruction touch one granule
        if kind == "store":
            report_first(several.any(axis=1), access.lanes, "race: two CTAs store to one byte at once", access.report)
        self._keep(access, kind, own, several)

    def _keep(self, access: _Access, kind: str, stamps: np.ndarray, wanted: np.ndarray) -> None:
        if wanted.any():
            places, columns = access.here
            rows, _ = np.nonzero(wanted)
            access.trace.pages(kind + ELSEWHERE)[places[rows, 0], columns[wanted]] = stamps[wanted]

    def _foreign(self, stamps: np.ndarray, access: _Access) -> np.ndarray:
        """Where a stamp is another CTA's."""
        cta = access.threads // self.threads_per_cta
        return (stamps != NOBODY) & (thread_of(stamps) // self.threads_per_cta != cta[:, None])

    def _unordered(self, stamps: np.ndarray, access: _Access) -> np.ndarray:
        """Where a stamp is another CTA's and nothing orders this access after it."""
        foreign = self._foreign(stamps, access)
        if self.releases.known and foreign.any():
            warps = access.threads // WARP_SIZE
            for warp in self.releases.known.keys() & set(warps[foreign.any(axis=1)].tolist()):
                known, rows = self.releases.known[warp], warps == warp
                foreign[rows] &= time_of(stamps[rows]) > known[thread_of(stamps[rows]) // WARP_SIZE % known.size]
        return foreign

    def _forgive_found(self, racing: np.ndarray, stamps: np.ndarray, access: _Access) -> None:
        """A CTA that has found an atomic's word by one of its own comes after it there: it may reset a counter."""
        for row, column in np.argwhere(racing):
            byte = int(access.touched[row, column]) * access.trace.granule
            cta = int(access.threads[row]) // self.threads_per_cta
            visits = [self.releases.visited.get((byte & -size, cta), NOBODY) for size in (2, 4, 8)]
            racing[row, column] = time_of(stamps[row, column]) > max(visits)
