"""Matrix instructions of a warp: ``ldmatrix``, ``movmatrix`` and ``mma``.

All three know one arrangement. An 8 x 8 matrix of 16-bit numbers lies in one register of a warp: of row ``l // 4``
lane ``l`` holds the numbers ``2 * (l % 4)`` and the next, the first in the low bits. A row of 8-bit numbers has 16.
Larger operands of ``mma`` are several such matrices side by side, B by columns:

    A  [16, k]    | r0 r2 |    B  [k, 8], each of its columns a row:  | r0 r1 |    C, D  [16, 8], float32:  | r0,r1 |
                  | r1 r3 |                                                                                 | r2,r3 |

``k`` of 8 halves A and B: A is r0 above r1, B is r0. In C and D two registers make one matrix of 8 x 8 numbers.
"""

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from .dot import HOPPER, dot, dot_of_bytes
from .faults import UnknownInstruction
from .halves import FORMATS as HALVES
from .parse import Instruction
from .warp import WARP_SIZE

if TYPE_CHECKING:
    from .machine import Machine

BYTES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
FORMATS = HALVES | BYTES


def load_matrices(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``ldmatrix``: lanes 0 to 7 name and read the rows of the first matrix, 8 to 15 those of the second, and so on."""
    targets, address = instruction.operands
    readers = _by_warp(threads, threads)[:, : 8 * len(targets)].reshape(-1)
    offsets = machine.addresses(address, "u32", readers).astype(np.int64)
    words = machine.shared.load(offsets, 4, 4, machine.accessors(readers), machine.reporter(readers))
    machine.count_shared(offsets, 16, readers, "load")
    rows = np.stack(words, axis=-1).reshape(-1, len(targets), 8, 4)
    if "trans" in instruction.opcode:
        rows = _transposed(rows)
    for i, target in enumerate(targets):
        machine.set(target, rows[:, i].reshape(-1), threads)


def move_matrix(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``movmatrix``: transposes the matrix in a register."""
    target, source = instruction.operands
    rows = _by_warp(machine.value(source, "u32", threads), threads).reshape(-1, 8, 4)
    machine.set(target, _transposed(rows).reshape(-1), threads)


def multiply(machine: "Machine", instruction: Instruction, threads: np.ndarray) -> None:
    """``mma``: D = A B + C in every warp."""
    *_, result, a_form, b_form, addend = instruction.opcode
    if (result, addend) != ("f32", "f32"):
        raise UnknownInstruction(f"mma that does not add in f32: {instruction.text} at {instruction.line}")
    targets, a, b, c = instruction.operands
    a_matrices, b_matrices = (_matrices(machine, part, threads) for part in (a, b))
    c_matrices = np.stack([_by_warp(machine.value(part, "f32", threads), threads) for part in c], axis=1)
    add = dot_of_bytes if a_form in BYTES else dot
    d = add(
        _a_rows(a_matrices).view(FORMATS[a_form]),
        _b_columns(b_matrices).view(FORMATS[b_form]),
        c_matrices.reshape(-1, 2, 2, 8, 4).transpose(0, 1, 3, 4, 2).reshape(-1, 16, 8),
        HOPPER,
    )
    d_matrices = d.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
    for target, values in zip(targets, d_matrices, strict=True):
        machine.set(target, values, threads)


def _by_warp(values: object, threads: np.ndarray) -> np.ndarray:
    """One row of 32 per warp."""
    return np.broadcast_to(values, threads.shape).reshape(-1, WARP_SIZE)


def _transposed(rows: np.ndarray) -> np.ndarray:
    """Matrices of 16-bit numbers, each row four words."""
    return np.ascontiguousarray(rows.view(np.uint16).swapaxes(-1, -2)).view(np.uint32)


def _matrices(machine: "Machine", registers: list, threads: np.ndarray) -> np.ndarray:
    """``[num_warps, num_registers, 8, 4]`` words."""
    words = [_by_warp(machine.value(register, "u32", threads), threads) for register in registers]
    return np.stack(words, axis=1).reshape(-1, len(registers), 8, WARP_SIZE // 8)


def _a_rows(matrices: np.ndarray) -> np.ndarray:
    """``[num_warps, 16, k]`` numbers, in words: registers go down first, then to the right."""
    num_warps, count = matrices.shape[:2]
    grouped = matrices.reshape(num_warps, count // 2, 2, 8, 4).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(grouped).reshape(num_warps, 16, -1)


def _b_columns(matrices: np.ndarray) -> np.ndarray:
    """``[num_warps, 8, k]`` numbers, in words."""
    return np.ascontiguousarray(matrices.swapaxes(1, 2)).reshape(len(matrices), 8, -1)


EFFECTS = {"ldmatrix": load_matrices, "movmatrix": move_matrix, "mma": multiply}
