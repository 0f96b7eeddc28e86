"""Instructions in which lanes of a warp take part together: those that a mask names, or all 32.

The machine waits until all of them have arrived. A lane must be in its own mask, and may read only from lanes in it.
"""

from typing import TYPE_CHECKING

import numpy as np

from .parse import Instruction

if TYPE_CHECKING:
    from .machine import Machine

WARP_SIZE = 32
WHOLE_WARP = np.uint32(0xFFFFFFFF)
LANES = np.arange(WARP_SIZE)


def masks_of(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> np.ndarray:
    """The lanes with which each thread takes part, as bits; Fault if its own is not among them."""
    named = instruction.opcode[0] in ("shfl", "vote", "match", "redux") or instruction.opcode[:2] == ("bar", "warp")
    mask = machine.value(instruction.operands[-1], "u32", threads) if named else WHOLE_WARP
    masks = np.broadcast_to(mask, threads.shape)
    outside = ~_names(masks, threads % WARP_SIZE)
    if outside.any():
        machine.fault("mask that does not name its own lane", int(threads[np.argmax(outside)]))
    return masks


def synchronise(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``bar.warp.sync``: orders the accesses of the lanes that take part."""
    machine.order.synchronise_lanes(threads, masks_of(machine, instruction, threads))


def shuffle(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``shfl.sync``: each lane reads a register of another; one outside the segment leaves a lane its own value."""
    target, source, position, clamp, _ = instruction.operands
    position, clamp = (machine.value(operand, "u32", threads) for operand in (position, clamp))
    lanes, position = threads % WARP_SIZE, np.asarray(position).astype(np.int64) & 31
    segment, last = clamp >> np.uint32(8) & np.uint32(31), clamp & np.uint32(31)
    first = lanes & segment
    bound = first | last & ~segment
    mode = instruction.opcode[2]
    wanted = {
        "idx": first | position & ~segment & 31,
        "bfly": lanes ^ position,
        "down": lanes + position,
        "up": lanes - position,
    }[mode]
    inside = wanted >= bound if mode == "up" else wanted <= bound
    wanted = np.where(inside, wanted, lanes).astype(np.int64)
    unnamed = ~_names(masks_of(machine, instruction, threads), wanted)
    if unnamed.any():
        machine.fault("shuffle from a lane that its mask does not name", int(threads[np.argmax(unnamed)]))
    picked = machine.value(source, "u32", threads - lanes + wanted)
    target, there = target if isinstance(target, list) else (target, None)
    machine.set(target, picked, threads)
    if there is not None:  # whether there was such a lane
        machine.set(there, inside, threads)


def vote(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``vote.sync``: a predicate of all lanes as a mask, or whether any or all of them hold."""
    target, source, _ = instruction.operands
    masks = masks_of(machine, instruction, threads)
    votes = words_of_warps(np.broadcast_to(machine.value(source, "pred", threads), threads.shape), threads) & masks
    result = {"ballot": votes, "any": votes != 0, "all": votes == masks}[instruction.opcode[2]]
    machine.set(target, result, threads)


def as_words(holds: np.ndarray) -> np.ndarray:
    """The last axis, one element per lane, as the bits of a word."""
    return np.packbits(holds, axis=-1, bitorder="little").view(np.uint32)[..., 0]


def words_of_warps(holds: np.ndarray, threads: np.ndarray) -> np.ndarray:
    """For each thread a word with a bit for each thread of its warp."""
    warps, rows = np.unique(threads // WARP_SIZE, return_inverse=True)
    by_lane = np.zeros((warps.size, WARP_SIZE), np.bool_)
    by_lane[rows, threads % WARP_SIZE] = holds
    return as_words(by_lane)[rows]


def _names(masks: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    return (masks >> lanes.astype(np.uint32) & np.uint32(1)).astype(np.bool_)
