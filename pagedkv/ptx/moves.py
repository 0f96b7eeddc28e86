"""``mov``, ``ld`` and ``st``: between registers, and between registers and every kind of memory."""

from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import SHARED_WINDOW, bits_of, numpy_type
from .faults import UnknownInstruction
from .memory import words_of
from .parse import Address, Instruction

if TYPE_CHECKING:
    from .machine import Machine


def move(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    target, source = instruction.operands
    kind = instruction.type
    if isinstance(target, list):  # a word taken apart into registers, the first in the low bits
        bits = bits_of(kind) // len(target)
        word = machine.value(source, f"u{bits_of(kind)}", threads)
        for i, register in enumerate(target):
            machine.set(register, (word >> word.dtype.type(bits * i)).astype(f"u{bits // 8}"), threads)
    elif isinstance(source, list):
        bits, wide = bits_of(kind) // len(source), numpy_type(f"u{bits_of(kind)}")
        parts = [np.asarray(machine.value(part, f"u{bits}", threads)).astype(wide) for part in source]
        machine.set(target, sum(part << wide(bits * i) for i, part in enumerate(parts)), threads)
    else:
        machine.set(target, machine.value(source, kind, threads), threads)


def load(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    targets, address = instruction.operands[:2]  # a third would be a cache policy
    targets = targets if isinstance(targets, list) else [targets]
    size, report = bits_of(instruction.type) // 8, machine.reporter(threads)
    if "param" in instruction.opcode:
        offsets = machine.addresses(address, "u64", threads).astype(np.int64)
        where = offsets[:, None] + np.arange(size * len(targets))
        words = words_of(machine.params[where], size)
    elif "shared" in instruction.opcode:
        offsets = machine.addresses(address, "u32", threads).astype(np.int64)
        words = machine.shared.load(offsets, size, len(targets), machine.accessors(threads), report)
        machine.count_shared(offsets, size * len(targets), threads, "load")
    elif "local" in instruction.opcode:
        offsets = machine.addresses(address, "u64", threads).astype(np.int64)
        words = machine.local.load(offsets, size, len(targets), threads, report)
    else:
        addresses = global_addresses(machine, address, threads)
        words = machine.memory.load(addresses, size, len(targets), report)
        machine.count_global(addresses, size * len(targets), threads, "load")
    for register, word in zip(targets, words, strict=True):
        machine.set(register, word.view(numpy_type(instruction.type)), threads)


def store(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    address, sources = instruction.operands[:2]
    size, report = bits_of(instruction.type) // 8, machine.reporter(threads)
    words = [
        machine.value(source, f"u{8 * size}", threads)
        for source in (sources if isinstance(sources, list) else [sources])
    ]
    if "shared" in instruction.opcode:
        offsets = machine.addresses(address, "u32", threads).astype(np.int64)
        machine.shared.store(offsets, words, size, machine.accessors(threads), report)
        machine.count_shared(offsets, size * len(words), threads, "store")
    elif "local" in instruction.opcode:
        offsets = machine.addresses(address, "u64", threads).astype(np.int64)
        machine.local.store(offsets, words, size, threads, report)
    else:
        addresses = global_addresses(machine, address, threads)
        machine.memory.store(addresses, words, size, report)
        machine.count_global(addresses, size * len(words), threads, "store")


def global_addresses(machine: "Machine", address: Address, threads: np.ndarray) -> np.ndarray:
    """Addresses in global memory, also where the instruction names no memory: then they must not be shared memory's."""
    addresses = machine.addresses(address, "u64", threads)
    if (addresses >= np.uint64(SHARED_WINDOW)).any():
        instruction = machine.current
        raise UnknownInstruction(f"generic address of shared memory in {instruction.text} at {instruction.line}")
    return addresses
