"""Which accesses inside a CTA are ordered: the clock of a launch, and what each warp and lane knows of the others.

The launch counts its synchronisations; the count is the time. A barrier tells each warp that takes part all that the
others have done and know, up to that time; ``bar.warp.sync`` tells the lanes that its mask names. An access is ordered
after another thread's if that thread made it no later than its warp, or lane, knows of. Only what a kernel demands
counts: that the interpreter runs one thread before another orders nothing.

Each granule of shared memory remembers of each kind of access the last, the last by another lane of that warp, and the
last by another warp, where unordered with it. So of three or more readers that different named barriers or masks tell
apart one may be forgotten, and a write after it pass; nothing ordered is ever reported.
"""

import numpy as np

from .warp import LANES, WARP_SIZE, WHOLE_WARP

NOBODY = -1  # in place of a stamp
THREAD_BITS = 32  # of a stamp: time above, thread below


def stamped(time: int | np.ndarray, threads: np.ndarray) -> np.ndarray:
    """Who, and when, in one word."""
    return np.asarray(time, np.int64) << THREAD_BITS | threads


def time_of(stamps: np.ndarray) -> np.ndarray:
    return stamps >> THREAD_BITS


def thread_of(stamps: np.ndarray) -> np.ndarray:
    return stamps & (1 << THREAD_BITS) - 1


class CtaOrder:
    """The clock of a launch, and up to which time each warp is ordered after each one of its CTA.

    Of itself a warp knows when all its lanes last synchronised. ``lanes_seen`` is what each thread knows of the lanes
    of its warp beyond that, where a mask named only some of them.
    """

    def __init__(self, num_threads: int, threads_per_cta: int) -> None:
        self.now = 0
        self.warps_per_cta = threads_per_cta // WARP_SIZE
        self.seen = np.full((num_threads // WARP_SIZE, self.warps_per_cta), -1)
        self.lanes_seen: np.ndarray | None = None

    def done(self, warps: np.ndarray) -> np.ndarray:
        """What warps can tell others: all that they know, and all that they themselves have done. Time goes on."""
        known = self.seen[warps]
        known[np.arange(warps.size), warps % self.warps_per_cta] = self.now
        self.now += 1
        return known

    def learn(self, warps: np.ndarray, known: np.ndarray) -> None:
        self.seen[warps] = np.maximum(self.seen[warps], known)

    def learn_from_grid(self, warp: int, times: np.ndarray) -> None:
        """What a thread of the warp found, released by others: a time for each warp of the grid."""
        first = warp // self.warps_per_cta * self.warps_per_cta
        self.learn(np.array([warp]), times[first : first + self.warps_per_cta])

    def synchronise_lanes(self, threads: np.ndarray, masks: np.ndarray) -> None:
        """The lanes that each mask names, all of them among the threads, synchronise."""
        warps = threads // WARP_SIZE
        whole = np.unique(warps[masks == WHOLE_WARP])
        self.seen[whole, whole % self.warps_per_cta] = self.now
        for warp, mask in set(zip(warps.tolist(), masks.tolist(), strict=True)):
            if mask != WHOLE_WARP:
                self._synchronise_some(warp * WARP_SIZE + np.flatnonzero(mask >> LANES & 1))
        self.now += 1

    def _synchronise_some(self, threads: np.ndarray) -> None:
        if self.lanes_seen is None:
            self.lanes_seen = np.full((self.seen.shape[0] * WARP_SIZE, WARP_SIZE), -1)
        known = self.lanes_seen[threads].max(axis=0)
        known[threads % WARP_SIZE] = self.now
        self.lanes_seen[threads] = known

    def unordered(self, stamps: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Where a stamp ``[threads, granules]`` of the same CTA is another thread's that it is not ordered after."""
        time, other, mine = time_of(stamps), thread_of(stamps), threads[:, None]
        late = (time > self.seen[mine // WARP_SIZE, other // WARP_SIZE % self.warps_per_cta]) & (other != mine)
        if self.lanes_seen is not None and late.any():
            known = time <= self.lanes_seen[mine, other % WARP_SIZE]
            late &= ~(known & (other // WARP_SIZE == mine // WARP_SIZE))
        return late


class Threads:
    """Some threads of a launch: their numbers in the grid, their CTAs, the order they live in and their stamps now."""

    __slots__ = ("cta", "index", "order", "settled", "stamps")

    def __init__(self, index: np.ndarray, cta: np.ndarray, order: CtaOrder) -> None:
        self.index, self.cta, self.order = index, cta, order
        self.stamps = stamped(order.now, index)
        self.settled = order.seen[index // WARP_SIZE].min()  # up to this time all accesses are ordered with all of them

    def in_turn(self) -> "Threads":
        """The same, each a moment after the one before it."""
        threads = Threads(self.index, self.cta, self.order)
        threads.stamps = stamped(self.order.now + np.arange(self.index.size), self.index)
        return threads

    def unordered(self, stamps: np.ndarray) -> np.ndarray | None:
        """Where a stamp ``[threads, granules]`` is of an access that its thread is not ordered after; None: nowhere."""
        if time_of(stamps.max()) <= self.settled:
            return None
        late = self.order.unordered(stamps, self.index)
        return late if late.any() else None


class Accesses:
    """The stamps of one kind of access to each granule: the last and, once there are such, the others to remember."""

    def __init__(self, count: int) -> None:
        self.last = np.full(count, NOBODY)
        self.others: list[np.ndarray] = []  # by another lane, and by another warp
        self.happened = False

    def record(self, touched: np.ndarray, threads: Threads) -> np.ndarray:
        """Threads access granules ``[threads, granules]``. Where another of them accesses the same one and counts."""
        before, own = self.last[touched], threads.stamps[:, None]
        self._keep(touched, before, threads.unordered(before), before, own)
        self.last[touched], self.happened = own, True
        winner = self.last[touched]
        lost = winner != own
        if lost.any():
            self._keep(touched, np.broadcast_to(own, lost.shape), lost, winner, own)
        return lost

    def unordered(self, touched: np.ndarray, threads: Threads) -> np.ndarray | None:
        """When each granule was last accessed by a thread that this one is not ordered after; NOBODY for never.

        None if that holds for all of them.
        """
        times = None
        for kept in (self.last, *self.others) if self.happened else ():
            stamps = kept[touched]
            late = threads.unordered(stamps)
            if late is not None:
                found = np.where(late, time_of(stamps), NOBODY)
                times = found if times is None else np.maximum(times, found)
        return times

    def refine(self, factor: int) -> None:
        """Takes each granule for so many smaller ones."""
        self.last, *self.others = (np.repeat(stamps, factor) for stamps in (self.last, *self.others))

    def _keep(
        self, touched: np.ndarray, stamps: np.ndarray, wanted: np.ndarray | None, one: np.ndarray, other: np.ndarray
    ) -> None:
        """Keeps the wanted stamps, of accesses by ``one`` thread that are unordered with the ``other``'s."""
        if wanted is not None:
            self.others = self.others or [np.full_like(self.last, NOBODY) for _ in range(2)]
            one_warp = thread_of(one) // WARP_SIZE == thread_of(other) // WARP_SIZE
            for kept, which in zip(self.others, (wanted & one_warp, wanted & ~one_warp), strict=True):
                kept[touched[which]] = stamps[which]
