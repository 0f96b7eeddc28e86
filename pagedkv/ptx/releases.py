"""How threads of any CTA order their accesses without a barrier: a fence and an atomic, a release and an acquire.

A fence takes down all that its warp has done and knows. What the warp, or one that it meets at a barrier later, then
does to a word by an atomic or a strong store (volatile, relaxed, release) hands that on to those who find it there by
an atomic or a strong load. A release is a fence of its own. A fence or access of scope ``cta`` reaches no further than
its CTA. The lanes of a warp count as one here, and no fence is asked for between the finding and what follows: a kernel
that lacks only these passes.
"""

import numpy as np

from .cta_order import CtaOrder
from .warp import WARP_SIZE

STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel"}
RELEASING = {"release", "acq_rel"}
EVERYBODY = -1  # in place of a CTA

Times = dict[int, np.ndarray]  # by warp or barrier, a time for each warp of the grid


class Releases:
    """What warps found and what their fences took down, what lies for others at which word, and at which barrier."""

    def __init__(self, order: CtaOrder) -> None:
        self.order, self.num_warps = order, order.seen.shape[0]
        self.known: Times = {}
        self.fenced: Times = {}
        self.fenced_for_cta: Times = {}
        self.left_at_barriers: list[Times] = [{}, {}, {}]  # of each of these three
        self.released: dict[tuple[int, int], np.ndarray] = {}  # by word and CTA or EVERYBODY
        self.visited: dict[tuple[int, int], int] = {}  # by word and CTA: when that last accessed it in such a way

    def fence(self, threads: np.ndarray, opcode: tuple[str, ...]) -> None:
        """Takes down what the threads' warps have done and know."""
        per_cta = self.order.warps_per_cta
        for warp in np.unique(threads // WARP_SIZE).tolist():
            times = np.full(self.num_warps, -1)
            first = warp // per_cta * per_cta
            times[first : first + per_cta] = self.order.seen[warp]
            times[warp] = self.order.now
            self.fenced_for_cta[warp] = times = _later(self.known.get(warp), times)
            if "cta" not in opcode:
                self.fenced[warp] = times
        self.order.now += 1

    def access(self, words: np.ndarray, threads: np.ndarray, opcode: tuple[str, ...]) -> None:
        """Atomics, or loads or stores that are strong, in turn; each takes a moment of its own."""
        if not RELEASING.isdisjoint(opcode):
            self.fence(threads, opcode)
        for word, thread in zip(words.tolist(), threads.tolist(), strict=True):
            warp = thread // WARP_SIZE
            cta = warp // self.order.warps_per_cta
            places = [((word, cta), self.fenced_for_cta), ((word, EVERYBODY), self.fenced)]
            for place, fenced in places[: 1 if "cta" in opcode else 2]:
                if opcode[0] != "st":
                    self._acquire(warp, self.released.get(place))
                if opcode[0] != "ld":
                    self._release(place, fenced.get(warp), opcode[0] == "st")
            self.visited[word, cta] = self.order.now
            self.order.now += 1

    def arrive(self, barriers: np.ndarray, warps: np.ndarray) -> None:
        """Warps leave at barriers what they found and what their fences took down."""
        for held, left in zip((self.known, self.fenced, self.fenced_for_cta), self.left_at_barriers, strict=True):
            _hand_on(held, warps, left, barriers)

    def leave(self, barriers: np.ndarray, warps: np.ndarray) -> None:
        """Warps go on from barriers that have opened, with what others left there."""
        for held, left in zip((self.known, self.fenced, self.fenced_for_cta), self.left_at_barriers, strict=True):
            _hand_on(left, barriers, held, warps)
            for barrier in set(barriers.tolist()) & left.keys():
                del left[barrier]

    def _acquire(self, warp: int, found: np.ndarray | None) -> None:
        if found is not None:
            self.known[warp] = _later(self.known.get(warp), found)
            self.order.learn_from_grid(warp, found)

    def _release(self, place: tuple[int, int], fenced: np.ndarray | None, overwrites: bool) -> None:
        """An atomic adds to what lies there; a store takes its place."""
        before = self.released.pop(place, None)
        if overwrites:
            before = None
        if fenced is not None:
            before = _later(before, fenced)
        if before is not None:
            self.released[place] = before


def is_strong(opcode: tuple[str, ...]) -> bool:
    """Whether a load or store may meet others' at the same word without a race."""
    return not STRONG.isdisjoint(opcode)


def _hand_on(source: Times, owners: np.ndarray, target: Times, heirs: np.ndarray) -> None:
    if source:
        for owner, heir in zip(owners.tolist(), heirs.tolist(), strict=True):
            if owner in source:
                target[heir] = _later(target.get(heir), source[owner])


def _later(one: np.ndarray | None, other: np.ndarray) -> np.ndarray:
    """For each warp the later time; what is kept is never changed in place."""
    return other if one is None else np.maximum(one, other)
