"""The machine: all threads of a grid run one instruction at a time, those whose turn it is.

Each thread has a program counter. The scheduler takes the lowest one and runs on with the threads that stand there
until they branch, wait or reach a point where others may join them: threads that went apart at a branch therefore meet
again at its end, as they do on the device. A register is an array with one element per thread of the grid.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import ArrayView
from . import collectives, moves, tensor, warp
from .arithmetic import bits_of, numpy_type
from .async_copy import AsyncCopies, async_copy
from .atomics import atomic
from .counters import Counters
from .faults import Fault, UnknownInstruction
from .instructions import handler_of
from .memory import GlobalMemory, LocalMemory, SharedMemory, Threads
from .operands import constant_value, source_types, storage_type
from .parse import Address, Constant, Instruction, Kernel, Register, Special, Symbol
from .warp import WARP_SIZE

RUNNING, AT_BARRIER, AT_WARP, DONE = range(4)


class Machine:
    """One launch of a kernel.

    ``grid`` and the ``threads`` of a CTA have up to three extents. A seed draws the order of the CTAs; without one they
    run in the order of the grid. ``dynamic_shared`` is the extent in bytes of the shared memory that the kernel
    declares ``extern``; ``counters`` are filled where there are some.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        threads: int | tuple[int, ...],
        params: bytes,
        arrays: list[ArrayView],
        seed: int | None = None,
        dynamic_shared: int = 0,
        counters: Counters | None = None,
    ) -> None:
        block = threads if isinstance(threads, tuple) else (threads,)
        threads = math.prod(block)
        if threads % WARP_SIZE:
            raise ValueError(f"threads: expected a multiple of {WARP_SIZE}, got {threads}")
        self.kernel, self.threads_per_cta, self.counters = kernel, threads, counters
        self.num_ctas = math.prod(grid)
        count = self.num_ctas * threads
        self.cta = np.arange(count) // threads  # its place in the order of CTAs
        ctas = np.arange(self.num_ctas)
        self.order = ctas if seed is None else np.random.default_rng(seed).permutation(ctas)
        self.special = _special_registers(grid, block, np.arange(count) % threads, self.order[self.cta])
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
        if self.counters is not None:
            self.counters.issue(instruction, active, taking)
        control = CONTROL.get(instruction.opcode[0])
        if control is not None and not _is_collective(instruction):
            self.pc[active] = at + 1
            control(self, instruction, taking)
            return False
        if not taking.size:
            return True
        if _is_collective(instruction):
            return self._meet(instruction, active, taking, at)
        self._execute(instruction, taking)
        return True

    def _meet(self, instruction: Instruction, active: np.ndarray, taking: np.ndarray, at: int) -> bool:
        """Threads at an instruction of the whole warp wait for its others; whole warps execute it."""
        if instruction.opcode[0] not in tensor.EFFECTS:  # which have no mask: they are the whole warp's
            warp.check_mask(self, instruction.operands[-1], taking)
        self.pc[active] = at + 1
        self.pc[taking], self.state[taking] = at, AT_WARP
        here = ((self.state == AT_WARP) & (self.pc == at)).reshape(-1, WARP_SIZE).all(axis=1)
        threads = np.flatnonzero(np.repeat(here, WARP_SIZE))
        if threads.size:
            self._execute(instruction, threads)
            self.pc[threads], self.state[threads] = at + 1, RUNNING
        return np.array_equal(threads, active)

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
            result = handler_of(instruction.opcode)(instruction.opcode, *values)
            if isinstance(target, list):  # setp's second result
                target, opposite = target
                self.set(opposite, ~result, threads)
            self.set(target, result, threads)

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

    # ---- counters ---------------------------------------------------------------------------------------------------

    def count_global(self, addresses: np.ndarray, nbytes: int, threads: np.ndarray, kind: str) -> None:
        """Each of the threads has accessed that many bytes of global memory."""
        if self.counters is not None:
            self.counters.global_access(self.current, addresses, nbytes, threads, kind)

    def count_shared(self, offsets: np.ndarray, nbytes: int, threads: np.ndarray, kind: str) -> None:
        """Each of the threads has accessed that many bytes of its CTA's shared memory."""
        if self.counters is not None:
            self.counters.shared_access(self.current, offsets, nbytes, threads, kind)

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
            self._report_waiting()
        at = self.pc.reshape(self.num_ctas, -1, WARP_SIZE)
        apart = complete & (at != at[:, :, :1]).any(axis=(1, 2))
        if apart.any():
            self._report_apart(int(np.argmax(apart)))
        by_cta[complete] = RUNNING
        self.cta_epoch[complete] += 1
        self.warp_epoch.reshape(self.num_ctas, -1)[complete] += 1

    def _report_waiting(self) -> None:
        """Nobody can go on: some wait for others of their warp, or of their CTA, that went past or came to an end."""
        for state, back, what in (
            (AT_WARP, 0, "warp instruction that only part of a warp reaches"),
            (AT_BARRIER, 1, "barrier that not every thread of the CTA reaches"),
        ):
            waiting = np.flatnonzero(self.state == state)
            if waiting.size:
                self.current = self.kernel.instructions[self.pc[waiting[0]] - back]
                self.fault(what, int(waiting[0]))

    def _report_apart(self, cta: int) -> None:
        at = self.pc.reshape(-1, WARP_SIZE)
        warps = np.flatnonzero((at != at[:, :1]).any(axis=1))
        thread = int(warps[warps // (self.threads_per_cta // WARP_SIZE) == cta][0]) * WARP_SIZE
        self.current = self.kernel.instructions[self.pc[thread] - 1]
        self.fault("barrier at which the threads of a warp are apart", thread)


# ---- instructions that are not arithmetic ---------------------------------------------------------------------------


def _branch(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    machine.pc[threads] = instruction.target


def _return(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    machine.state[threads] = DONE


def _barrier(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    if len(instruction.operands) != 1 or machine.value(instruction.operands[0], "u32", threads).any():
        raise UnknownInstruction(f"named barrier in {instruction.text} at {instruction.line}")
    machine.state[threads] = AT_BARRIER


def _is_collective(instruction: Instruction) -> bool:
    return instruction.opcode[0] in COLLECTIVES or instruction.opcode[:2] == ("bar", "warp")


def _fence(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    """Nothing to do: what one thread stores, all others see at once."""


CONTROL = {"bra": _branch, "ret": _return, "exit": _return, "bar": _barrier, "barrier": _barrier}
EFFECTS = {
    "mov": moves.move,
    "ld": moves.load,
    "st": moves.store,
    "atom": atomic,
    "red": atomic,
    "cp": async_copy,
    "membar": _fence,
    "fence": _fence,
    "shfl": warp.shuffle,
    "vote": warp.vote,
    "bar": warp.synchronise,
    **collectives.EFFECTS,
    **tensor.EFFECTS,
}
COLLECTIVES = {"shfl", "vote", "match", "redux", *tensor.EFFECTS}


# ---- registers -------------------------------------------------------------------------------------------------------


def _special_registers(
    grid: tuple[int, ...], block: tuple[int, ...], local: np.ndarray, cta: np.ndarray
) -> dict[str, np.ndarray]:
    """By name, for threads with these numbers in CTAs with these numbers; x runs fastest."""
    special = {"%laneid": local % WARP_SIZE, "%warpid": local // WARP_SIZE}
    for name, extents, numbers in (("%tid", block, local), ("%ctaid", grid, cta)):
        for axis, extent in zip("xyz", (*extents, 1, 1), strict=False):
            special[f"{name}.{axis}"], numbers = numbers % extent, numbers // extent
            special[f"%n{name[1:]}.{axis}"] = np.full_like(local, extent)
    return {name: value.astype(np.uint32) for name, value in special.items()}
