"""Atomics: read, change and write back in one step, one thread after the other.

Threads that reach one atomic together take their turns in the order of the grid's threads; the machine's seed draws
which CTAs come first in that order, so that a protocol such as "the last CTA to arrive reduces" meets many orders.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import bits_of, flushed, numpy_type
from .moves import global_addresses
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
    kind, report = instruction.type, machine.reporter(threads)
    wanted, size = numpy_type(kind), bits_of(kind) // 8
    (name,) = [part for part in instruction.opcode[1:] if part in OPERATIONS]
    values = [np.broadcast_to(machine.value(source, kind, threads), threads.shape) for source in sources]
    # A float32 sum flushes subnormal numbers on global memory, not on shared memory.
    flush = flushed if kind == "f32" and name == "add" and "shared" not in instruction.opcode else np.asarray

    def change(thread: int, word: np.ndarray) -> Any:
        old = word.view(wanted)[0]
        return flush(OPERATIONS[name](flush(old)[()], *(flush(value[thread])[()] for value in values))).astype(wanted)

    if "shared" in instruction.opcode:
        offsets = machine.addresses(address, "u32", threads).astype(np.int64)
        before = machine.shared.atomic(offsets, size, change, machine.accessors(threads), report)
        machine.count_shared(offsets, size, threads, "atomic")
    else:
        addresses = global_addresses(machine, address, threads)
        before = machine.memory.atomic(addresses, size, change, report)
        machine.count_global(addresses, size, threads, "atomic")
    if target is not None:
        machine.set(target, before.view(wanted), threads)
