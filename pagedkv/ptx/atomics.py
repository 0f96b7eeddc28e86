"""Atomics: read, change and write back in one step, one thread after the other.

Threads that reach one atomic together take their turns in the order of the grid's threads; the machine's seed draws
which CTAs come first in that order, so that a protocol such as "the last CTA to arrive reduces" meets many orders.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import bits_of, flushed, numpy_type
from .memory import Change
from .moves import by_space
from .parse import Instruction

if TYPE_CHECKING:
    from .machine import Machine

OPERATIONS = {
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "exch": lambda old, x: x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "inc": lambda old, last: old + 1 if old < last else 0,
    "dec": lambda old, last: old - 1 if 0 < old <= last else last,
    "cas": lambda old, expected, x: x if old == expected else old,
}


def atomic(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``atom`` and, without a result, ``red``."""
    target, address, *sources = (
        instruction.operands if instruction.opcode[0] == "atom" else [None, *instruction.operands]
    )
    kind = instruction.type
    size = bits_of(kind) // 8
    for space, some, addresses in by_space(machine, instruction, address, threads):
        values = [np.broadcast_to(machine.value(source, kind, some), some.shape) for source in sources]
        change, report = _change(instruction, space, values), machine.reporter(some)
        if space == "shared":
            accessors = machine.accessors(some)
            before = machine.shared.atomic(addresses, size, change, accessors, report)
            words = machine.shared.words(addresses, accessors)
            machine.releases.access(words, some, instruction.opcode)
            machine.count_shared(addresses, size, some, "atomic")
        else:
            before = machine.memory.atomic(addresses, size, change, report)
            machine.races.access(instruction.opcode, addresses, size, some, report)
            machine.count_global(addresses, size, some, "atomic")
        if target is not None:
            machine.set(target, before.view(numpy_type(kind)), some)


def _change(instruction: Instruction, space: str, values: list[np.ndarray]) -> Change:
    """What the instruction does to a word for one of the threads that have these values."""
    wanted = numpy_type(instruction.type)
    (name,) = [part for part in instruction.opcode[1:] if part in OPERATIONS]
    # A float32 sum flushes subnormal numbers on global memory, not on shared memory.
    flush = flushed if instruction.type == "f32" and name == "add" and space == "global" else np.asarray

    def change(thread: int, word: np.ndarray) -> Any:
        old = word.view(wanted)[0]
        return flush(OPERATIONS[name](flush(old)[()], *(flush(value[thread])[()] for value in values))).astype(wanted)

    return change
