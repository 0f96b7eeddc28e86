"""Which handler computes an instruction that only reads and writes registers of its own thread."""

from . import arithmetic, bits, conversions, halves
from .arithmetic import Handler, Opcode

HANDLERS = arithmetic.HANDLERS | bits.HANDLERS | conversions.HANDLERS


def handler_of(opcode: Opcode) -> Handler:
    """By name, and for 16-bit floats by type."""
    name, kind = opcode[0], opcode[-1]
    return halves.HANDLERS[name] if kind in halves.TYPES and name in halves.HANDLERS else HANDLERS[name]
