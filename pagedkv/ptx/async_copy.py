"""``cp.async``: copies from global to shared memory that a thread starts, and that arrive when it waits for them.

Copies belong to the group that their thread commits next. ``wait_group N`` leaves the thread's N youngest groups in
flight, ``wait_all`` none. Here a copy arrives at that wait and not a moment earlier: until then its bytes are garbage,
and reading or writing them is a fault. What arrives counts as written by its thread at the wait, so other threads need
a barrier after it.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .parse import Instruction

if TYPE_CHECKING:
    from .machine import Machine


class Copies(NamedTuple):
    """Copies that one instruction started: thread, its group, where in shared memory, and what will be there."""

    thread: np.ndarray
    group: np.ndarray
    starts: np.ndarray
    data: np.ndarray

    def pick(self, chosen: np.ndarray) -> "Copies":
        return Copies(*(part[chosen] for part in self))


class AsyncCopies:
    """What is in flight in a launch, and how many groups each thread has committed."""

    def __init__(self, num_threads: int) -> None:
        self.committed = np.zeros(num_threads, np.int64)
        self.in_flight: list[Copies] = []

    def arrived(self, threads: np.ndarray, younger: int | None) -> list[Copies]:
        """Takes out the copies of all groups of these threads but the ``younger`` youngest; of all if None."""
        first_kept = np.zeros(self.committed.size, np.int64)
        first_kept[threads] = self.committed[threads] - younger if younger is not None else np.iinfo(np.int64).max
        there = [copies.group < first_kept[copies.thread] for copies in self.in_flight]
        pairs = list(zip(self.in_flight, there, strict=True))
        self.in_flight = [copies.pick(~mask) for copies, mask in pairs if not mask.all()]
        return [copies.pick(mask) for copies, mask in pairs if mask.any()]


def async_copy(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``cp.async``, ``.commit_group``, ``.wait_group`` and ``.wait_all``."""
    parts, copies = instruction.opcode, machine.copies
    if "commit_group" in parts:
        copies.committed[threads] += 1
    elif "wait_group" in parts or "wait_all" in parts:
        younger = instruction.operands[0].bits if instruction.operands else None
        for arrived in copies.arrived(threads, younger):
            machine.shared.end_copy(arrived.starts, arrived.data, machine.accessors(arrived.thread))
    else:
        _start(machine, instruction, threads)


def _start(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    target, source, nbytes, *rest = instruction.operands
    size, report = nbytes.bits, machine.reporter(threads)
    # With a fourth operand only so many bytes are read, and the others become zero.
    wanted = np.broadcast_to(machine.value(rest[0], "u32", threads) if rest else size, threads.shape)
    addresses, data = machine.addresses(source, "u64", threads), np.zeros((threads.size, size), np.uint8)
    if (wanted > size).any():
        report("cp.async that reads more than it writes", int(np.argmax(wanted > size)))
    for count in np.unique(wanted[wanted > 0]):
        lanes = np.flatnonzero(wanted == count)
        here = addresses[lanes], int(count)
        data[lanes, :count] = machine.memory.read(*here, size, machine.reporter(threads[lanes]))
        machine.races.access(instruction.opcode, *here, threads[lanes], machine.reporter(threads[lanes]))
    read = wanted > 0
    if read.any():
        machine.count_global(addresses[read], size, threads[read], "copy")
    offsets = machine.addresses(target, "u32", threads).astype(np.int64)
    starts = machine.shared.begin_copy(offsets, size, machine.accessors(threads), report)
    machine.count_shared(offsets, size, threads, "copy")
    machine.copies.in_flight.append(Copies(threads, machine.copies.committed[threads], starts, data))
