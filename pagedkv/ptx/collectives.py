"""What the lanes of a warp find out about each other's values: ``match``, ``redux``, ``activemask``."""

from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import numpy_type
from .parse import Instruction
from .warp import LANES, WARP_SIZE, by_warp

if TYPE_CHECKING:
    from .machine import Machine

REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def match(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``match.any``: the lanes that hold the same; ``match.all``: all lanes, and whether they do, or none."""
    target, source, _ = instruction.operands
    values = by_warp(machine.value(source, instruction.type, threads), threads)
    equal = _masks(values[:, :, None] == values[:, None, :])
    if "all" in instruction.opcode:
        same = equal == np.uint32(0xFFFFFFFF)
        target, there = target if isinstance(target, list) else (target, None)
        if there is not None:
            machine.set(there, same.reshape(-1), threads)
        equal = np.where(same, equal, np.uint32(0))
    machine.set(target, equal.reshape(-1), threads)


def reduce(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``redux.sync``: one result of all lanes, in each of them."""
    target, source, _ = instruction.operands
    values = by_warp(machine.value(source, instruction.type, threads), threads)
    result = REDUCTIONS[instruction.opcode[2]].reduce(values, axis=1, dtype=numpy_type(instruction.type))
    machine.set(target, np.repeat(result, WARP_SIZE), threads)


def active_mask(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``activemask``: the lanes that run this very instruction together."""
    active = np.zeros(machine.pc.size, np.bool_)
    active[threads] = True
    masks = _masks(active.reshape(-1, WARP_SIZE))
    machine.set(instruction.operands[0], masks[threads // WARP_SIZE], threads)


def _masks(lanes: np.ndarray) -> np.ndarray:
    """The last axis, a bool for each lane, as one word."""
    return (lanes.astype(np.uint32) << LANES.astype(np.uint32)).sum(axis=-1, dtype=np.uint32)


EFFECTS = {"match": match, "redux": reduce, "activemask": active_mask}
