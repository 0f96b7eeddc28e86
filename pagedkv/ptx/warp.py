"""Instructions in which the 32 threads of a warp take part together. The machine waits until all have arrived."""

from typing import TYPE_CHECKING

import numpy as np

from .faults import UnknownInstruction
from .parse import Instruction

if TYPE_CHECKING:
    from .machine import Machine

WARP_SIZE = 32
LANES = np.arange(WARP_SIZE)


def check_mask(machine: "Machine", mask: object, threads: np.ndarray) -> None:
    """Only masks that name the whole warp are known here."""
    if (machine.value(mask, "u32", threads) != np.uint32(0xFFFFFFFF)).any():
        instruction = machine.current
        raise UnknownInstruction(f"mask of less than a warp in {instruction.text} at {instruction.line}")


def synchronise(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``bar.warp.sync``: orders the accesses of a warp's lanes."""
    machine.warp_epoch[np.unique(threads // WARP_SIZE)] += 1


def by_warp(values: object, threads: np.ndarray) -> np.ndarray:
    """One row of 32 per warp."""
    return np.broadcast_to(values, threads.shape).reshape(-1, WARP_SIZE)


def shuffle(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``shfl.sync``: each lane reads a register of another; one outside the segment leaves a lane its own value."""
    target, source, position, clamp, _ = instruction.operands
    value, position, clamp = (by_warp(machine.value(o, "u32", threads), threads) for o in (source, position, clamp))
    position = position.astype(np.int64) & 31
    segment, last = clamp >> np.uint32(8) & np.uint32(31), clamp & np.uint32(31)
    first = LANES & segment
    bound = first | last & ~segment
    mode = instruction.opcode[2]
    wanted = {
        "idx": first | position & ~segment & 31,
        "bfly": LANES ^ position,
        "down": LANES + position,
        "up": LANES - position,
    }[mode]
    inside = wanted >= bound if mode == "up" else wanted <= bound
    picked = np.take_along_axis(value, np.where(inside, wanted, LANES).astype(np.int64), axis=1)
    target, there = target if isinstance(target, list) else (target, None)
    machine.set(target, picked.reshape(-1), threads)
    if there is not None:  # whether there was such a lane
        machine.set(there, inside.reshape(-1), threads)


def vote(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``vote.sync``: a predicate of all lanes as a mask, or whether any or all of them hold."""
    target, source, _ = instruction.operands
    holds = by_warp(machine.value(source, "pred", threads), threads)
    if "ballot" in instruction.opcode:
        result = (holds.astype(np.uint32) << LANES.astype(np.uint32)).sum(axis=1, dtype=np.uint32)
    else:
        result = holds.any(axis=1) if "any" in instruction.opcode else holds.all(axis=1)
    machine.set(target, np.repeat(result, WARP_SIZE), threads)
