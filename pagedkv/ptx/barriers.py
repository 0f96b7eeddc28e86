"""The sixteen barriers of each CTA: ``bar`` and ``barrier`` with ``sync``, ``arrive`` and ``red``.

Whole warps arrive, all lanes at one instruction. A barrier opens when as many threads have arrived as its instructions
count, which without a count is the whole CTA; those that wait then go on, after all that the others did before they
arrived. A warp that has ended arrives nowhere: who waits for it waits for ever, which is a fault.
"""

from typing import TYPE_CHECKING

import numpy as np

from .parse import Instruction
from .schedule import AT_BARRIER, RUNNING
from .warp import WARP_SIZE

if TYPE_CHECKING:
    from .machine import Machine

NUM_BARRIERS = 16  # of each CTA
NOWHERE = -1


class Barriers:
    """Barrier b of CTA c has number ``16 c + b``. What has arrived at each, of how many threads, and what they knew."""

    def __init__(self, num_ctas: int, threads_per_cta: int) -> None:
        warps_per_cta = threads_per_cta // WARP_SIZE
        count = num_ctas * NUM_BARRIERS
        self.arrived, self.expected = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.known = np.full((count, warps_per_cta), NOWHERE)
        self.waits_at = np.full(num_ctas * warps_per_cta, NOWHERE)  # of each warp
        self.votes = np.zeros(num_ctas * threads_per_cta, np.bool_)  # of each thread, at its last bar.red


def barrier(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """Whole warps arrive at a barrier; all but those of ``arrive`` wait there."""
    barriers, warps = machine.barriers, threads[::WARP_SIZE] // WARP_SIZE
    numbers, counts = _numbers_and_counts(machine, instruction, threads)
    if "red" in instruction.opcode:
        barriers.votes[threads] = machine.value(instruction.operands[-1], "pred", threads)
    _count(machine, numbers, counts, warps)
    np.maximum.at(barriers.known, numbers, machine.order.done(warps))
    machine.releases.arrive(numbers, warps)
    if "arrive" not in instruction.opcode:
        machine.schedule.state[threads] = AT_BARRIER
        barriers.waits_at[warps] = numbers
    _open(machine, np.unique(numbers))


def _numbers_and_counts(
    machine: "Machine", instruction: Instruction, threads: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of each warp, which barrier it comes to and how many threads that waits for."""
    red = "red" in instruction.opcode
    which, *count = instruction.operands[1:-1] if red else instruction.operands
    whole = np.uint32(machine.threads_per_cta)
    values = [machine.value(which, "u32", threads), machine.value(count[0], "u32", threads) if count else whole]
    which, count = (np.broadcast_to(value, threads.shape).astype(np.int64) for value in values)
    for bad, what in (
        (which >= NUM_BARRIERS, f"barrier that is none of a CTA's {NUM_BARRIERS}"),
        (count % WARP_SIZE != 0, f"barrier for a number of threads that is no multiple of {WARP_SIZE}"),
        (count > whole, "barrier for more threads than the CTA has"),
        (which != np.repeat(which[::WARP_SIZE], WARP_SIZE), "barrier at which the threads of a warp are apart"),
    ):
        if bad.any():
            machine.fault(what, int(threads[np.argmax(bad)]))
    return (machine.cta[threads] * NUM_BARRIERS + which)[::WARP_SIZE], count[::WARP_SIZE]


def _count(machine: "Machine", numbers: np.ndarray, counts: np.ndarray, warps: np.ndarray) -> None:
    """Counts warps in; all that come to a barrier must give it the same number of threads, and be no more than that."""
    barriers = machine.barriers
    fresh = barriers.expected[numbers] == 0
    barriers.expected[numbers[fresh]] = counts[fresh]
    np.add.at(barriers.arrived, numbers, WARP_SIZE)
    for bad, what in (
        (barriers.expected[numbers] != counts, "barrier for which warps give different numbers of threads"),
        (barriers.arrived[numbers] > counts, "barrier that more threads reach than it waits for"),
    ):
        if bad.any():
            machine.fault(what, int(warps[np.argmax(bad)]) * WARP_SIZE)


def _open(machine: "Machine", numbers: np.ndarray) -> None:
    """Lets those that wait go on, at barriers at which everybody has arrived."""
    barriers = machine.barriers
    complete = numbers[barriers.arrived[numbers] == barriers.expected[numbers]]
    if not complete.size:
        return
    warps = np.flatnonzero(np.isin(barriers.waits_at, complete))
    machine.order.learn(warps, barriers.known[barriers.waits_at[warps]])
    machine.releases.leave(barriers.waits_at[warps], warps)
    threads = np.flatnonzero(np.isin(np.arange(machine.cta.size) // WARP_SIZE, warps))
    _reduce(machine, threads)
    machine.schedule.state[threads], barriers.waits_at[warps] = RUNNING, NOWHERE
    barriers.arrived[complete], barriers.expected[complete], barriers.known[complete] = 0, 0, NOWHERE


def _reduce(machine: "Machine", threads: np.ndarray) -> None:
    """Gives threads that leave a ``bar.red`` its result. They may have come to it at several instructions."""
    barriers, pc = machine.barriers, machine.schedule.pc
    for at in np.unique(pc[threads]) - 1:
        instruction = machine.kernel.instructions[at]
        if "red" not in instruction.opcode:
            continue
        some = threads[pc[threads] == at + 1]
        numbers = barriers.waits_at[some // WARP_SIZE]
        votes = np.zeros(barriers.arrived.size, np.int64)
        np.add.at(votes, barriers.waits_at[threads // WARP_SIZE], barriers.votes[threads])
        result = votes[numbers]
        if "popc" not in instruction.opcode:
            result = result > 0 if "or" in instruction.opcode else result == barriers.expected[numbers]
        machine.set(instruction.operands[0], result, some)
