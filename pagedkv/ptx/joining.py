"""Stores that the compiler writes apart in PTX and the assembler joins again.

A store of a vector may leave the compiler as several stores side by side: same base register, each beginning where the
one before ends. The assembler makes one instruction of them, up to 16 bytes; who counts requests has to know that.
"""

from .arithmetic import bits_of
from .parse import Address, Instruction, Kernel

WIDEST = 16  # bytes of one access


def joined_stores(kernel: Kernel) -> dict[int, int]:
    """By ``id`` of each store that is one of several: bytes of them all for the first, 0 for the others."""
    nbytes: dict[int, int] = {}
    start = 0
    while start < len(kernel.instructions):
        end = start + 1
        while end < len(kernel.instructions) and _adjoin(kernel, end):
            end += 1
        for first, count in _packs([_size(each) for each in kernel.instructions[start:end]]):
            group = kernel.instructions[start + first : start + first + count]
            nbytes |= {id(each): 0 for each in group}
            nbytes[id(group[0])] = sum(map(_size, group))
        start = end
    return nbytes


def _adjoin(kernel: Kernel, at: int) -> bool:
    """Whether a store begins where the instruction before it, a store of the same kind, ends."""
    before, after = kernel.instructions[at - 1 : at + 1]
    if at in kernel.join_points or after.opcode[0] != "st":
        return False
    if (before.opcode, before.guard, before.line) != (after.opcode, after.guard, after.line):
        return False
    one, other = before.operands[0], after.operands[0]
    return one.base == other.base and other.offset == one.offset + _size(before)


def _packs(sizes: list[int]) -> list[tuple[int, int]]:
    """First and number of those that fill a pack, of neighbours of one size."""
    count = WIDEST // sizes[0] if sizes[0] else 0
    while count > 1 and count > len(sizes):
        count //= 2
    return [(first, count) for first in range(0, len(sizes) - count + 1, count)] if count > 1 else []


def _size(instruction: Instruction) -> int:
    """Bytes that a store writes for a thread; 0 for any other instruction."""
    if instruction.opcode[0] != "st" or not isinstance(instruction.operands[0], Address):
        return 0
    values = instruction.operands[1]
    return bits_of(instruction.type) // 8 * (len(values) if isinstance(values, list) else 1)
