"""What a launch asks of the hardware, counted per source line and opcode.

A request is one memory instruction of one warp with the lanes that take part in it. On global memory it costs the
32-byte sectors that it touches; ideal are as many as would hold its bytes side by side. On shared memory it costs
wavefronts: passes in which each of 32 banks gives one 4-byte word. Lanes that ask for 8 or 16 bytes are served by half
or quarter warps.

What is counted is PTX: the assembler may split, move or drop instructions; of those that it joins only stores side by
side are known (``joining``). No cache is modelled: a sector is a request to the memory hierarchy, not a transfer from
DRAM.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from .faults import SourceLine
from .joining import joined_stores
from .parse import Instruction, Kernel
from .warp import WARP_SIZE

SECTOR, BANK, NUM_BANKS = 32, 4, 32  # bytes, bytes, banks
WAVEFRONT = BANK * NUM_BANKS


@dataclass(slots=True)
class Traffic:
    """Requests of one kind, in units of 32-byte sectors or of shared-memory wavefronts."""

    requests: int = 0
    units: int = 0
    ideal_units: int = 0
    nbytes: int = 0  # different ones, request by request
    runs: int = 0  # stretches of adjacent bytes, request by request

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in Traffic.__slots__))


@dataclass(slots=True)
class Tally:
    """What instructions of one opcode did for one source line. ``traffic`` is by kind, such as ``global load``."""

    warps: int = 0  # warp instructions issued
    lanes: int = 0  # threads that took part in them
    traffic: dict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))

    def __add__(self, other: "Tally") -> "Tally":
        total = Tally(self.warps + other.warps, self.lanes + other.lanes)
        for tally in (self, other):
            for kind, traffic in tally.traffic.items():
                total.traffic[kind] += traffic
        return total


class Counters:
    """The tallies of a launch of a kernel by source line and opcode; the machine fills them."""

    def __init__(self, kernel: Kernel) -> None:
        self.tallies: dict[tuple[SourceLine, tuple[str, ...]], Tally] = defaultdict(Tally)
        self.joined = joined_stores(kernel)

    def issue(self, instruction: Instruction, active: np.ndarray, taking: np.ndarray) -> None:
        """The warps of ``active`` issue an instruction whose guard holds in ``taking``."""
        tally = self._tally(instruction)
        tally.warps += _num_groups(active // WARP_SIZE)
        tally.lanes += taking.size

    def global_access(
        self, instruction: Instruction, addresses: np.ndarray, nbytes: int, threads: np.ndarray, kind: str
    ) -> None:
        """Each thread accesses ``nbytes`` at its address, a multiple of them."""
        nbytes = self.joined.get(id(instruction), nbytes)
        if nbytes:
            self._tally(instruction).traffic[f"global {kind}"] += _sectors(threads // WARP_SIZE, addresses, nbytes)

    def shared_access(
        self, instruction: Instruction, offsets: np.ndarray, nbytes: int, threads: np.ndarray, kind: str
    ) -> None:
        """Each thread accesses ``nbytes`` at its offset in the memory of its CTA, a multiple of them."""
        nbytes = self.joined.get(id(instruction), nbytes)
        if nbytes:
            self._tally(instruction).traffic[f"shared {kind}"] += _wavefronts(threads, offsets, nbytes)

    def by_line(self) -> dict[SourceLine, Tally]:
        """All opcodes of a line together, lines in order of file and number."""
        lines: dict[SourceLine, Tally] = defaultdict(Tally)
        for (line, _), tally in self.tallies.items():
            lines[line] += tally
        return dict(sorted(lines.items(), key=lambda item: (item[0].file, item[0].number)))

    def total(self) -> Tally:
        return sum(self.tallies.values(), Tally())

    def mix(self) -> Counter[str]:
        """Warp instructions of each class."""
        classes: Counter[str] = Counter()
        for (_, opcode), tally in self.tallies.items():
            classes[class_of(opcode)] += tally.warps
        return classes

    def _tally(self, instruction: Instruction) -> Tally:
        return self.tallies[instruction.line, instruction.opcode]


CLASSES = {
    "memory": "ld st atom red cp ldmatrix",
    "tensor": "mma",
    "warp": "shfl vote match redux activemask movmatrix",
    "control": "bra ret exit bar barrier membar fence",
    "convert": "cvt",
    "move": "mov selp cvta createpolicy",
}
CLASS_OF = {name: kind for kind, names in CLASSES.items() for name in names.split()}


def class_of(opcode: tuple[str, ...]) -> str:
    """The class that an instruction counts to in the mix; arithmetic is ``float`` or ``integer``."""
    arithmetic = "float" if any(part.startswith(("f16", "bf16", "f32", "f64")) for part in opcode) else "integer"
    return CLASS_OF.get(opcode[0], arithmetic)


def _sectors(warp: np.ndarray, addresses: np.ndarray, nbytes: int) -> Traffic:
    warp, starts = _distinct(warp, addresses.astype(np.int64))
    per_warp = _group_sizes(warp) * nbytes
    sectors, _ = _distinct(warp, starts // SECTOR)
    breaks = (np.diff(warp) != 0) | (np.diff(starts) != nbytes)
    return Traffic(
        requests=per_warp.size,
        units=sectors.size * -(-nbytes // SECTOR),
        ideal_units=int((-(-per_warp // SECTOR)).sum()),
        nbytes=int(per_warp.sum()),
        runs=int(breaks.sum()) + 1,
    )


def _wavefronts(threads: np.ndarray, offsets: np.ndarray, nbytes: int) -> Traffic:
    warp, starts = _distinct(threads // WARP_SIZE, offsets)
    per_warp = _group_sizes(warp) * nbytes
    breaks = (np.diff(warp) != 0) | (np.diff(starts) != nbytes)
    words = np.arange(-(-nbytes // BANK))  # of one thread
    served_together = threads // (WARP_SIZE // words.size)
    group, word = _distinct(np.repeat(served_together, words.size), (offsets[:, None] // BANK + words).ravel())
    number = np.cumsum(np.r_[0, np.diff(group) != 0])
    in_bank = np.bincount(number * NUM_BANKS + word % NUM_BANKS, minlength=(number[-1] + 1) * NUM_BANKS)
    return Traffic(
        requests=per_warp.size,
        units=int(in_bank.reshape(-1, NUM_BANKS).max(axis=1).sum()),
        ideal_units=int((-(-per_warp // WAVEFRONT)).sum()),
        nbytes=int(per_warp.sum()),
        runs=int(breaks.sum()) + 1,
    )


def _distinct(group: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each value once in its group, sorted by group and value."""
    order = np.lexsort((values, group))
    group, values = group[order], values[order]
    first = np.r_[True, (np.diff(group) != 0) | (np.diff(values) != 0)]
    return group[first], values[first]


def _group_sizes(group: np.ndarray) -> np.ndarray:
    """How often each number occurs in a sorted array."""
    return np.diff(np.r_[np.flatnonzero(np.r_[True, np.diff(group) != 0]), group.size])


def _num_groups(sorted_groups: np.ndarray) -> int:
    return int(np.count_nonzero(np.diff(sorted_groups))) + 1
