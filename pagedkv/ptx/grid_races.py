"""Races in global memory between CTAs.

Two accesses of different CTAs to one byte, of which one writes, must be ordered by what ``releases`` knows, unless both
are atomics or strong. A CTA that stores what is there already races, too; threads of one CTA never do here, and a
launch of one CTA is not looked at. A byte remembers of each kind of access the last, and the last by another CTA where
unordered with it; strong loads leave nothing behind.
"""

from typing import NamedTuple

import numpy as np

from .cta_order import NOBODY, stamped, thread_of, time_of
from .memory import Report, report_first
from .pages import Pages
from .releases import Releases, is_strong
from .warp import WARP_SIZE


class _Trace:
    """The stamps of one kind of access to each byte of global memory."""

    def __init__(self) -> None:
        self.last, self.other_cta = Pages(np.int64, NOBODY), Pages(np.int64, NOBODY)


class _Access(NamedTuple):
    """What some threads are about to do to some bytes ``[threads, bytes]``."""

    name: str
    touched: np.ndarray
    threads: np.ndarray
    stamps: np.ndarray
    report: Report


class GridRaces:
    """Who loaded, stored and changed each byte of global memory in a launch."""

    def __init__(self, releases: Releases, threads_per_cta: int, num_ctas: int) -> None:
        self.releases, self.threads_per_cta, self.looks = releases, threads_per_cta, num_ctas > 1
        self.loaded, self.stored, self.changed = _Trace(), _Trace(), _Trace()

    def access(
        self, opcode: tuple[str, ...], addresses: np.ndarray, nbytes: int, threads: np.ndarray, report: Report
    ) -> None:
        """An ``ld``, ``st``, ``atom`` or ``red`` that is about to happen, or a copy from global memory."""
        name = {"ld": "load", "cp": "load", "st": "store"}.get(opcode[0], "atomic")
        strong = name == "atomic" or is_strong(opcode)
        if self.looks:
            now = self.releases.order.now + (np.arange(threads.size) if strong else 0)
            touched = addresses.astype(np.int64)[:, None] + np.arange(nbytes)
            self._look(_Access(name, touched, threads, stamped(now, threads)[:, None], report), strong)
        if strong:
            self.releases.access(addresses, threads, opcode)

    def _look(self, access: _Access, strong: bool) -> None:
        self._check(access, self.stored, "store")
        if access.name != "load":
            self._check(access, self.loaded, "load")
        if not strong:
            self._check(access, self.changed, "atomic or strong store")
            self._record(access, self.loaded if access.name == "load" else self.stored)
        elif access.name != "load":
            self._record(access, self.changed)

    def _check(self, access: _Access, trace: _Trace, before: str) -> None:
        for pages in (trace.last, trace.other_cta):
            stamps = pages[access.touched]
            racing = self._unordered(stamps, access)
            if trace is self.changed:
                self._forgive_found(racing, stamps, access)
            what = f"race: global {access.name} after an unordered {before} of another CTA"
            report_first(racing.any(axis=1), None, what, access.report)

    def _record(self, access: _Access, trace: _Trace) -> None:
        before = trace.last[access.touched]
        self._keep(access, trace, before, self._unordered(before, access))
        trace.last[access.touched] = np.broadcast_to(access.stamps, access.touched.shape)
        winner = trace.last[access.touched]  # where threads of this very instruction touch one byte
        several = self._foreign(winner, access)
        if trace is self.stored:
            report_first(several.any(axis=1), None, "race: two CTAs store to one byte at once", access.report)
        self._keep(access, trace, np.broadcast_to(access.stamps, winner.shape), several)

    @staticmethod
    def _keep(access: _Access, trace: _Trace, stamps: np.ndarray, wanted: np.ndarray) -> None:
        if wanted.any():
            trace.other_cta[access.touched[wanted][:, None]] = stamps[wanted][:, None]

    def _foreign(self, stamps: np.ndarray, access: _Access) -> np.ndarray:
        """Where a stamp is another CTA's."""
        cta = access.threads // self.threads_per_cta
        return (stamps != NOBODY) & (thread_of(stamps) // self.threads_per_cta != cta[:, None])

    def _unordered(self, stamps: np.ndarray, access: _Access) -> np.ndarray:
        """Where a stamp is another CTA's and nothing orders this access after it."""
        foreign = self._foreign(stamps, access)
        for row in np.flatnonzero(foreign.any(axis=1)):
            known = self.releases.known.get(int(access.threads[row]) // WARP_SIZE)
            if known is not None:
                foreign[row] &= time_of(stamps[row]) > known[thread_of(stamps[row]) // WARP_SIZE % known.size]
        return foreign

    def _forgive_found(self, racing: np.ndarray, stamps: np.ndarray, access: _Access) -> None:
        """A CTA that has found an atomic's word by one of its own comes after it there: it may reset a counter."""
        for row, column in np.argwhere(racing):
            byte, cta = int(access.touched[row, column]), int(access.threads[row]) // self.threads_per_cta
            visits = [self.releases.visited.get((byte & -size, cta), NOBODY) for size in (2, 4, 8)]
            racing[row, column] = time_of(stamps[row, column]) > max(visits)
