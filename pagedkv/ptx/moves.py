"""``mov``, ``ld`` and ``st``: between registers, and between registers and every kind of memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import WINDOW_REACH, WINDOWS, Opcode, bits_of, numpy_type
from .memory import words_of
from .parse import Address, Instruction
from .releases import is_strong

if TYPE_CHECKING:
    from .machine import Machine

Array = np.ndarray
Words = list[np.ndarray]


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
    size = bits_of(instruction.type) // 8
    for space, some, addresses in by_space(machine, instruction, address, threads):
        words = LOADS[space](machine, instruction.opcode, addresses, size, len(targets), some)
        for register, word in zip(targets, words, strict=True):
            machine.set(register, word.view(numpy_type(instruction.type)), some)


def _load_param(machine: "Machine", opcode: Opcode, offsets: Array, size: int, count: int, threads: Array) -> Words:
    return words_of(machine.params[offsets[:, None] + np.arange(size * count)], size)


def _load_shared(machine: "Machine", opcode: Opcode, offsets: Array, size: int, count: int, threads: Array) -> Words:
    accessors, report, strong = machine.accessors(threads), machine.reporter(threads), is_strong(opcode)
    words = machine.shared.load(offsets, size, count, accessors, report, strong=strong)
    machine.count_shared(offsets, size * count, threads, "load")
    if strong:
        machine.releases.access(machine.shared.words(offsets, accessors), threads, opcode)
    return words


def _load_local(machine: "Machine", opcode: Opcode, offsets: Array, size: int, count: int, threads: Array) -> Words:
    return machine.local.load(offsets, size, count, threads, machine.reporter(threads))


def _load_global(machine: "Machine", opcode: Opcode, addresses: Array, size: int, count: int, threads: Array) -> Words:
    report = machine.reporter(threads)
    words = machine.memory.load(addresses, size, count, report)
    machine.races.access(opcode, addresses, size * count, threads, report)
    machine.count_global(addresses, size * count, threads, "load")
    return words


LOADS = {"param": _load_param, "shared": _load_shared, "local": _load_local, "global": _load_global}


def store(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    address, sources = instruction.operands[:2]
    sources = sources if isinstance(sources, list) else [sources]
    size = bits_of(instruction.type) // 8
    for space, some, addresses in by_space(machine, instruction, address, threads):
        words = [machine.value(source, f"u{8 * size}", some) for source in sources]
        STORES[space](machine, instruction.opcode, addresses, words, size, some)


def _store_shared(machine: "Machine", opcode: Opcode, offsets: Array, words: Words, size: int, threads: Array) -> None:
    accessors, report, strong = machine.accessors(threads), machine.reporter(threads), is_strong(opcode)
    machine.shared.store(offsets, words, size, accessors, report, strong=strong)
    machine.count_shared(offsets, size * len(words), threads, "store")
    if strong:
        machine.releases.access(machine.shared.words(offsets, accessors), threads, opcode)


def _store_local(machine: "Machine", opcode: Opcode, offsets: Array, words: Words, size: int, threads: Array) -> None:
    machine.local.store(offsets, words, size, threads, machine.reporter(threads))


def _store_global(
    machine: "Machine", opcode: Opcode, addresses: Array, words: Words, size: int, threads: Array
) -> None:
    report = machine.reporter(threads)
    machine.memory.store(addresses, words, size, report)
    machine.races.access(opcode, addresses, size * len(words), threads, report)
    machine.count_global(addresses, size * len(words), threads, "store")


STORES = {"shared": _store_shared, "local": _store_local, "global": _store_global}


def by_space(
    machine: "Machine", instruction: Instruction, address: Address, threads: np.ndarray
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Kinds of memory, the threads that access each, and where: an address in global memory, elsewhere an offset.

    An instruction that names no memory has generic addresses: those in the windows are shared or local memory's.
    """
    for space in ("param", "shared", "local"):
        if space in instruction.opcode:
            kind = "u32" if space == "shared" else "u64"
            yield space, threads, machine.addresses(address, kind, threads).astype(np.int64)
            return
    addresses, is_global = machine.addresses(address, "u64", threads), np.ones(threads.size, np.bool_)
    for space, window in WINDOWS.items() if "global" not in instruction.opcode else ():
        offsets = (addresses - np.uint64(window)).view(np.int64)
        here = np.abs(offsets) < WINDOW_REACH
        if here.any():
            yield space, threads[here], offsets[here]
            is_global &= ~here
    if is_global.any():
        yield "global", threads[is_global], addresses[is_global]
