"""What the lanes of a warp find out about each other's values: ``match``, ``redux``, ``activemask``."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import numpy_type
from .parse import Instruction
from .warp import WARP_SIZE, masks_of, words_of_warps

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
    target, all_same = target if isinstance(target, list) else (target, None)
    for mask, group in _groups(machine, instruction, threads):
        values = np.broadcast_to(machine.value(source, instruction.type, group), group.shape)
        bits = np.uint32(1) << (group[0] % WARP_SIZE).astype(np.uint32)
        result = np.where(values[:, :, None] == values[:, None, :], bits, np.uint32(0)).sum(axis=-1, dtype=np.uint32)
        if "all" in instruction.opcode:
            result = np.where(result == mask, mask, np.uint32(0))
        machine.set(target, result, group)
        if all_same is not None:
            machine.set(all_same, result != 0, group)


def reduce(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``redux.sync``: one result of all lanes, in each of them."""
    target, source, _ = instruction.operands
    for _, group in _groups(machine, instruction, threads):
        values = np.broadcast_to(machine.value(source, instruction.type, group), group.shape)
        operation, kind = REDUCTIONS[instruction.opcode[2]], numpy_type(instruction.type)
        machine.set(
            target, np.broadcast_to(operation.reduce(values, axis=1, dtype=kind, keepdims=True), group.shape), group
        )


def active_mask(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``activemask``: the lanes that happen to run together, on which no kernel may rely."""
    machine.set(instruction.operands[0], words_of_warps(np.ones(threads.size, np.bool_), threads), threads)


def _groups(
    machine: "Machine", instruction: Instruction, threads: np.ndarray
) -> Iterator[tuple[np.uint32, np.ndarray]]:
    """Each mask, and the threads that take part by it: ``[num_warps, num_lanes]``."""
    masks = masks_of(machine, instruction, threads)
    for mask in np.unique(masks):
        yield mask, threads[masks == mask].reshape(-1, int(mask).bit_count())


EFFECTS = {"match": match, "redux": reduce, "activemask": active_mask}
