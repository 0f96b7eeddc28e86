"""The machine: all threads of a grid run one instruction at a time, those whose turn it is.

Each thread has a program counter. The scheduler takes the lowest one and runs on with the threads that stand there
until they branch, wait or reach a point where others may join them: threads that went apart at a branch therefore meet
again at its end, as they do on the device. A register is an array with one element per thread of the grid.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import ArrayView
from . import warp
from .arithmetic import HANDLERS, bits_of, numpy_type
from .async_copy import AsyncCopies, async_copy
from .atomics import atomic
from .faults import Fault, UnknownInstruction
from .memory import GlobalMemory, LocalMemory, SharedMemory, Threads
from .operands import constant_value, source_types, storage_type
from .parse import Address, Constant, Instruction, Kernel, Register, Special, Symbol

WARP_SIZE = 32
RUNNING, AT_BARRIER, DONE = range(3)


class Machine:
    """One launch of a kernel.

    A seed draws the order of the CTAs; without one they run in the order of the grid. ``dynamic_shared`` is the extent
    in bytes of the shared memory that the kernel declares ``extern``.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int],
        threads: int,
        params: bytes,
        arrays: list[ArrayView],
        seed: int | None = None,
        dynamic_shared: int = 0,
    ) -> None:
        if threads % WARP_SIZE:
            raise ValueError(f"threads: expected a multiple of {WARP_SIZE}, got {threads}")
        self.kernel, self.threads_per_cta = kernel, threads
        self.num_ctas = grid[0] * grid[1]
        count = self.num_ctas * threads
        self.cta = np.arange(count) // threads  # its place in the order of CTAs
        ctas = np.arange(self.num_ctas)
        self.order = ctas if seed is None else np.random.default_rng(seed).permutation(ctas)
        self.special = _special_registers(grid, threads, np.arange(count) % threads, self.order[self.cta])
        types = kernel.registers.items()
        self.registers = {name: np.zeros(count, storage_type(kind)) for name, kind in types}
        self.params = np.frombuffer(params.ljust(kernel.param_bytes, b"\0"), np.uint8)
        self.memory = GlobalMemory(arrays)
        self.shared = SharedMemory(self.num_ctas, kernel.memory_bytes["shared"] + dynamic_shared)
        self.local = LocalMemory(count, kernel.memory_bytes["local"])
        self.copies = AsyncCopies(count)
        self.pc, self.state = np.zeros(count, np.int64), np.full(count, RUNNING)
        self.cta_epoch, self.warp_epoch = np.zeros(self.num_ctas, np.int64), np.zeros(count // WARP_SIZE, np.int64)

    def run(self) -> None:
        """Runs the grid to its end; Fault if the kernel breaks a rule."""
        join_points = self.kernel.join_points
        with np.errstate(all="ignore"):
            while (self.state != DONE).any():
                running = self.state == RUNNING
                if not running.any():
                    self._open_barriers()
                    continue
                at = int(self.pc[running].min())
                active = np.flatnonzero(running & (self.pc == at))
                while active.size:
                    instruction = self.kernel.instructions[at]
                    self.current = instruction
                    goes_on = self._step(instruction, active, at)
                    at += 1
                    if not goes_on or at in join_points:
                        break
                if active.size and goes_on:
                    self.pc[active] = at

    def _step(self, instruction: Instruction, active: np.ndarray, at: int) -> bool:
        """One instruction for some threads; False if they do not go on together to the next."""
        taking = active
        if instruction.guard is not None:
            register, negated = instruction.guard
            taking = active[self.registers[register.name][active] != negated]
        control = CONTROL.get(instruction.opcode[0])
        if control is not None:
            self.pc[active] = at + 1
            control(self, instruction, taking)
            return False
        if taking.size:
            self._execute(instruction, taking)
        return True

    def _execute(self, instruction: Instruction, threads: np.ndarray) -> None:
        name = instruction.opcode[0]
        special = EFFECTS.get(name)
        if special is not None:
            special(self, instruction, threads)
        else:
            target, *sources = instruction.operands
            values = [
                self.value(source, kind, threads)
                for source, kind in zip(sources, source_types(instruction, len(sources)), strict=True)
            ]
            self.set(target, HANDLERS[name](instruction.opcode, *values), threads)

    # ---- operands ---------------------------------------------------------------------------------------------------

    def value(self, operand: Any, kind: str, threads: np.ndarray) -> Any:
        """An operand as an array of the type, one element per thread, or as a scalar."""
        wanted = numpy_type(kind)
        if isinstance(operand, Register):
            stored = self.registers[operand.name][threads]
            if stored.dtype == wanted:
                return stored
            size = np.dtype(wanted).itemsize
            return (stored if stored.itemsize == size else stored.astype(f"u{size}")).view(wanted)
        if isinstance(operand, Constant):
            return constant_value(operand, kind)
        if isinstance(operand, Special):
            return self.special[operand.name][threads].astype(wanted)
        if isinstance(operand, Symbol):
            return wanted(operand.offset)
        raise UnknownInstruction(f"{self.current.text} at {self.current.line}")

    def set(self, register: Register, value: Any, threads: np.ndarray) -> None:
        """Stores a result of any type of the register's size, or a narrower integer, which is extended by its sign."""
        target = self.registers[register.name]
        value = np.asarray(value)
        if target.dtype != np.bool_:
            if value.itemsize != target.itemsize:
                value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{target.itemsize}")
            value = value.view(target.dtype) if value.ndim else np.asarray([value]).view(target.dtype)[0]
        target[threads] = value

    def addresses(self, address: Address, kind: str, threads: np.ndarray) -> np.ndarray:
        """Base plus offset, one per thread."""
        base = np.broadcast_to(self.value(address.base, kind, threads), threads.shape)
        return base + base.dtype.type(address.offset & (1 << bits_of(kind)) - 1)

    # ---- faults and barriers ----------------------------------------------------------------------------------------

    def reporter(self, threads: np.ndarray) -> Callable[[str, int], None]:
        """What memory calls with the number of a thread among the active ones."""

        def report(what: str, index: int) -> None:
            self.fault(what, int(threads[index]))

        return report

    def fault(self, what: str, thread: int) -> None:
        """Ends the launch with a report."""
        cta, local = divmod(thread, self.threads_per_cta)
        raise Fault(what, self.current.line, int(self.order[cta]), local, self.current.text)

    def accessors(self, threads: np.ndarray) -> Threads:
        """The threads, as shared memory knows them."""
        return Threads(threads, self.cta[threads], self.cta_epoch, self.warp_epoch)

    def _open_barriers(self) -> None:
        by_cta = self.state.reshape(self.num_ctas, self.threads_per_cta)
        complete = (by_cta == AT_BARRIER).all(axis=1)
        if not complete.any():
            waiting = int(np.flatnonzero(self.state == AT_BARRIER)[0])
            self.current = self.kernel.instructions[self.pc[waiting] - 1]
            self.fault("barrier that not every thread of the CTA reaches", waiting)
        by_cta[complete] = RUNNING
        self.cta_epoch[complete] += 1


# ---- instructions that are not arithmetic ---------------------------------------------------------------------------


def _branch(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    machine.pc[threads] = instruction.target


def _return(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    machine.state[threads] = DONE


def _barrier(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    if instruction.opcode[1] == "warp":
        warp.check_whole(machine, threads)
        machine.warp_epoch[np.unique(threads // WARP_SIZE)] += 1
    else:
        machine.state[threads] = AT_BARRIER


def _move(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
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


def _load(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    targets, address = instruction.operands[:2]  # a third would be a cache policy
    targets = targets if isinstance(targets, list) else [targets]
    size, report = bits_of(instruction.type) // 8, machine.reporter(threads)
    if "param" in instruction.opcode:
        offsets = machine.addresses(address, "u64", threads).astype(np.int64)
        where = offsets[:, None] + np.arange(size * len(targets))
        words = list(machine.params[where].view(f"u{size}").T)
    elif "shared" in instruction.opcode:
        offsets = machine.addresses(address, "u32", threads).astype(np.int64)
        words = machine.shared.load(offsets, size, len(targets), machine.accessors(threads), report)
    elif "local" in instruction.opcode:
        offsets = machine.addresses(address, "u64", threads).astype(np.int64)
        words = machine.local.load(offsets, size, len(targets), threads, report)
    else:
        words = machine.memory.load(machine.addresses(address, "u64", threads), size, len(targets), report)
    for register, word in zip(targets, words, strict=True):
        machine.set(register, word.view(numpy_type(instruction.type)), threads)


def _store(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    address, sources = instruction.operands[:2]
    size, report = bits_of(instruction.type) // 8, machine.reporter(threads)
    words = [
        machine.value(source, f"u{8 * size}", threads)
        for source in (sources if isinstance(sources, list) else [sources])
    ]
    if "shared" in instruction.opcode:
        offsets = machine.addresses(address, "u32", threads).astype(np.int64)
        machine.shared.store(offsets, words, size, machine.accessors(threads), report)
    elif "local" in instruction.opcode:
        offsets = machine.addresses(address, "u64", threads).astype(np.int64)
        machine.local.store(offsets, words, size, threads, report)
    else:
        machine.memory.store(machine.addresses(address, "u64", threads), words, size, report)


def _fence(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    """Nothing to do: what one thread stores, all others see at once."""


CONTROL = {"bra": _branch, "ret": _return, "exit": _return, "bar": _barrier, "barrier": _barrier}
EFFECTS = {
    "mov": _move,
    "ld": _load,
    "st": _store,
    "atom": atomic,
    "red": atomic,
    "cp": async_copy,
    "membar": _fence,
    "fence": _fence,
    "shfl": warp.shuffle,
    "vote": warp.vote,
}


# ---- registers -------------------------------------------------------------------------------------------------------


def _special_registers(grid: tuple[int, int], threads: int, local: np.ndarray, cta: np.ndarray) -> dict[str, Any]:
    zero, one = np.zeros_like(cta), np.ones_like(cta)
    axes = {
        "%tid": (local, zero, zero),
        "%ntid": (one * threads, one, one),
        "%ctaid": (cta % grid[0], cta // grid[0], zero),
        "%nctaid": (one * grid[0], one * grid[1], one),
    }
    named = {
        f"{name}.{axis}": value for name, values in axes.items() for axis, value in zip("xyz", values, strict=True)
    }
    return {name: value.astype(np.uint32) for name, value in (named | {"%laneid": local % WARP_SIZE}).items()}
