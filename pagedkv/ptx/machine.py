"""The machine: all threads of a grid run one instruction at a time, those whose turn it is.

It runs on with them until they branch, wait or reach a point where others may join them. A register is an array with
one element per thread of the grid.
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
from .barriers import Barriers, barrier
from .counters import Counters
from .cta_order import CtaOrder, Threads
from .faults import Fault, UnknownInstruction
from .global_memory import GlobalMemory
from .grid_races import GridRaces
from .instructions import handler_of
from .local_memory import LocalMemory
from .operands import constant_value, source_types, storage_type
from .parse import Address, Constant, Instruction, Kernel, Register, Special, Symbol
from .releases import Releases
from .schedule import AT_BARRIER, AT_WARP, DONE, RUNNING, Schedule
from .shared_memory import SharedMemory
from .warp import WARP_SIZE

STEP_LIMIT = 5_000_000  # instructions of a launch, each for all threads whose turn it is: tens of seconds


class Machine:
    """One launch of a kernel.

    ``grid`` and the ``threads`` of a CTA have up to three extents. A seed draws the order of the CTAs; without one they
    run in the order of the grid. ``dynamic_shared`` is the extent in bytes of the shared memory that the kernel
    declares ``extern``; ``counters`` are filled where there are some. A loop that goes on after ``step_limit`` steps of
    the machine counts as one that never ends.
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
        step_limit: int = STEP_LIMIT,
    ) -> None:
        block = threads if isinstance(threads, tuple) else (threads,)
        threads = math.prod(block)
        if threads % WARP_SIZE:
            raise ValueError(f"threads: expected a multiple of {WARP_SIZE}, got {threads}")
        self.kernel, self.counters, self.steps, self.step_limit = kernel, counters, 0, step_limit
        # threads
        self.num_ctas, self.threads_per_cta = math.prod(grid), threads
        count = self.num_ctas * threads
        self.cta = np.arange(count) // threads  # its place in the order of CTAs
        ctas = np.arange(self.num_ctas)
        self.cta_numbers = ctas if seed is None else np.random.default_rng(seed).permutation(ctas)
        self.schedule, self.barriers = Schedule(count), Barriers(self.num_ctas, threads)
        # registers
        self.special = _special_registers(grid, block, np.arange(count) % threads, self.cta_numbers[self.cta])
        types = kernel.registers.items()
        self.registers = {name: np.zeros(count, storage_type(kind)) for name, kind in types}
        # memory
        self.params = np.frombuffer(params.ljust(kernel.param_bytes, b"\0"), np.uint8)
        self.memory, self.copies = GlobalMemory(arrays), AsyncCopies(count)
        self.shared = SharedMemory(self.num_ctas, kernel.memory_bytes["shared"] + dynamic_shared)
        self.local = LocalMemory(count, kernel.memory_bytes["local"])
        # order of accesses
        self.order = CtaOrder(count, threads)
        self.releases = Releases(self.order)
        self.races = GridRaces(self.releases, threads, self.num_ctas, self.memory.bases)

    def run(self) -> None:
        """Runs the grid to its end; Fault if the kernel breaks a rule."""
        join_points, schedule = self.kernel.join_points, self.schedule
        with np.errstate(all="ignore"):
            while (turn := schedule.turn()) is not None:
                at, active = turn
                goes_on = True
                while goes_on:
                    self.current = self.kernel.instructions[at]
                    goes_on = self._step(self.current, active, at)
                    at += 1
                    if goes_on and at in join_points:
                        schedule.pc[active] = at
                        break
            self._check_end()

    def _step(self, instruction: Instruction, active: np.ndarray, at: int) -> bool:
        """One instruction for some threads; False if they do not go on together to the next."""
        self.steps += 1
        taking = active
        if instruction.guard is not None:
            register, negated = instruction.guard
            taking = active[self.registers[register.name][active] != negated]
        if self.counters is not None:
            self.counters.issue(instruction, active, taking)
        control = CONTROL.get(instruction.opcode[0])
        if control is not None:
            self.schedule.pc[active] = at + 1
            control(self, instruction, taking)
            return False
        if not taking.size:
            return True
        if _is_collective(instruction):
            return self._meet(instruction, active, taking, at)
        self._execute(instruction, taking)
        return True

    def _meet(self, instruction: Instruction, active: np.ndarray, taking: np.ndarray, at: int) -> bool:
        """Threads at an instruction of a warp wait for the lanes they take part with; then they execute it."""
        threads = self.schedule.meet(at, active, taking, warp.masks_of(self, instruction, taking))
        if threads.size:
            self._execute(instruction, threads)
        return np.array_equal(threads, active) and bool((self.schedule.state[active] == RUNNING).all())

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
        raise Fault(what, self.current.line, int(self.cta_numbers[cta]), local, self.current.text)

    def accessors(self, threads: np.ndarray) -> Threads:
        """The threads, as shared memory knows them."""
        return Threads(threads, self.cta[threads], self.order)

    def _check_end(self) -> None:
        """Nobody can go on: all have come to an end, or some wait for others that went past or came to an end."""
        state, pc = self.schedule.state, self.schedule.pc
        for waiting, back in ((np.flatnonzero(state == AT_WARP), 0), (np.flatnonzero(state == AT_BARRIER), 1)):
            if waiting.size:
                first = int(waiting[0])
                self.current = self.kernel.instructions[pc[first] - back]
                self.fault(self._what_waits(first), first)

    def _what_waits(self, thread: int) -> str:
        if self.current.opcode[0] not in ("bar", "barrier") or self.current.opcode[1] == "warp":
            return "warp instruction that only part of a warp reaches"
        lanes = self.schedule.state[thread // WARP_SIZE * WARP_SIZE :][:WARP_SIZE]
        if (lanes == AT_WARP).all():
            return "barrier at which the threads of a warp are apart"
        return "barrier that not every thread of the CTA reaches"


# ---- instructions that are not arithmetic ---------------------------------------------------------------------------


def _branch(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    if machine.schedule.jump(threads, instruction.target) and machine.steps > machine.step_limit:
        machine.fault(f"loop without an end: more than {machine.step_limit} steps", int(threads[0]))


def _return(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    machine.schedule.state[threads] = DONE


def _is_collective(instruction: Instruction) -> bool:
    return instruction.opcode[0] in COLLECTIVES


def _bar(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    (warp.synchronise if instruction.opcode[1] == "warp" else barrier)(machine, instruction, threads)


def _fence(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    """Nothing to store: what one thread stores, all others see at once. But it orders."""
    machine.releases.fence(threads, instruction.opcode)


def _sleep(machine: Machine, instruction: Instruction, threads: np.ndarray) -> None:
    """Nothing to do: threads that jump back give way to others without it."""


CONTROL = {"bra": _branch, "ret": _return, "exit": _return}
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
    "bar": _bar,
    "barrier": _bar,
    "nanosleep": _sleep,
    **collectives.EFFECTS,
    **tensor.EFFECTS,
}
COLLECTIVES = {"shfl", "vote", "match", "redux", "bar", "barrier", *tensor.EFFECTS}


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
