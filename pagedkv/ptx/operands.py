"""The types of operands. A register has a size only: each instruction says how it takes the bits."""

from typing import Any

import numpy as np

from .arithmetic import bits_of, numpy_type
from .parse import Constant, Instruction

# What comes as a register's bits, for want of a NumPy type or because two share a register.
AS_BITS = {"f16": "u16", "bf16": "u16", "e4m3x2": "u16", "e5m2x2": "u16", "f16x2": "u32", "bf16x2": "u32"}


def storage_type(kind: str) -> type:
    return np.bool_ if kind == "pred" else numpy_type(f"u{bits_of(kind)}")


def constant_value(constant: Constant, kind: str) -> Any:
    wanted = numpy_type(kind)
    if wanted is np.bool_:
        return np.bool_(constant.bits)
    if kind[0] == "f" and not constant.is_float:
        return wanted(constant.bits)
    bits = bits_of(kind)
    return np.array(constant.bits & (1 << bits) - 1, f"u{bits // 8}").view(wanted)[()]


def source_types(instruction: Instruction, count: int) -> list[str]:
    """The type of each source operand."""
    opcode, kind = instruction.opcode, instruction.type
    name = opcode[0]
    if name in ("shl", "shr"):
        return [kind if name == "shr" else f"u{bits_of(kind)}", "u32"]
    if name == "bfi":
        return [f"u{bits_of(kind)}"] * 2 + ["u32"] * 2
    if name == "bfe":
        return [kind] + ["u32"] * 2
    if name in ("prmt", "lop3", "shf"):
        return ["u32"] * count
    if name == "selp":
        return [kind, kind, "pred"]
    if name == "slct":
        return [opcode[-2]] * 2 + [kind]
    if name == "createpolicy":
        return ["f32"] * count
    if name == "mad" and "wide" in opcode:
        return [kind, kind, f"{kind[0]}{2 * bits_of(kind)}"]
    return [AS_BITS.get(kind, kind)] * count
