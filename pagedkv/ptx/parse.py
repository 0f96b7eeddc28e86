"""From PTX text to instructions.

PTX is a flat language: declarations of registers and memory, labels, and instructions ``@guard opcode operands;``.
Braces open a scope for registers and labels, except inside an instruction, where they group the registers of a vector.
``.loc`` lines say which source line the instructions after them came from.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .faults import SourceLine, UnknownInstruction
from .opcodes import check_known

NOWHERE = SourceLine("<unknown>", 0)


@dataclass(frozen=True, slots=True)
class Register:
    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal: an integer, or the bits of a float (``0f3F800000``)."""

    bits: int
    is_float: bool = False


@dataclass(frozen=True, slots=True)
class Special:
    """A register the hardware fills: ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``; the base is a register or a name in parameter or shared memory."""

    base: Any
    offset: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """The name of a parameter or of a variable in shared or local memory, by its offset there."""

    space: str
    offset: int


@dataclass(frozen=True, slots=True)
class Label:
    """A label, by the names it has in the scopes around, innermost first."""

    names: tuple[str, ...]


@dataclass(slots=True)
class Instruction:
    """One instruction. ``guard`` is a predicate and whether it is negated; ``target`` where a branch goes."""

    opcode: tuple[str, ...]
    operands: list[Any]
    guard: tuple[Register, bool] | None
    line: SourceLine
    text: str
    target: int = -1

    @property
    def type(self) -> str:
        return self.opcode[-1]


@dataclass(slots=True)
class Kernel:
    """A parsed entry point."""

    name: str
    params: dict[str, int] = field(default_factory=dict)  # offset of each
    param_sizes: list[int] = field(default_factory=list)  # bytes of each, without what aligns the next
    param_bytes: int = 0
    registers: dict[str, str] = field(default_factory=dict)  # PTX type of each
    variables: dict[str, dict[str, int]] = field(default_factory=lambda: {"shared": {}, "local": {}})  # offset of each
    memory_bytes: dict[str, int] = field(default_factory=lambda: {"shared": 0, "local": 0})
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    @property
    def join_points(self) -> set[int]:
        """Where threads that went apart may meet."""
        return set(self.labels.values())


def parse_kernel(ptx: str, name: str) -> Kernel:
    """The kernel of that (lowered) name."""
    here = f"{os.getcwd()}{os.sep}"  # which NVRTC puts before the names that #line gave
    files = {int(n): path.removeprefix(here) for n, path in re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx)}
    text = re.sub(r"//[^\n]*", "", ptx)
    head = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)[^{{]*\{{", text)
    if head is None:
        raise KeyError(f"no kernel {name} in this PTX")
    body = text[head.end() : _closing_brace(text, head.end())]
    parser = _Parser(Kernel(name), files)
    parser.declare_params(head[1])
    declarations = re.findall(r"(?:\.extern\s+)?\.(?:shared|local)\s[^;]*;", text[: head.start()] + body)
    # Memory whose extent the launch gives comes behind all other.
    for declaration in sorted(declarations, key=lambda each: each.startswith(".extern")):
        parser.declare_memory(declaration)
    return parser.parse(body)


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return start + match.start()
    raise ValueError("PTX ends inside a kernel")


class _Parser:
    def __init__(self, kernel: Kernel, files: dict[int, str]) -> None:
        self.kernel, self.files = kernel, files
        self.line = NOWHERE
        self.scopes = [""]  # suffix of names declared in each open scope
        self.num_scopes = 0

    # ---- declarations -----------------------------------------------------------------------------------------------

    def declare_params(self, text: str) -> None:
        offset = 0
        for param in filter(None, map(str.strip, text.split(","))):
            kind, name, count = re.search(r"\.(\w\d+)\s+([\w$]+)(?:\[(\d+)\])?$", param).groups()
            align = re.search(r"\.align\s+(\d+)", param)
            element = int(kind[1:]) // 8
            size = element * int(count or 1)
            offset = _aligned(offset, int(align[1]) if align else element)
            self.kernel.params[name] = offset
            self.kernel.param_sizes.append(size)
            offset += size
        self.kernel.param_bytes = offset

    def declare_memory(self, text: str) -> None:
        """A variable in shared or local memory. A lone one has no extent, one that the launch extends an empty one."""
        space, align, bits, name, extent = re.search(
            r"\.(shared|local)\s+\.align\s+(\d+)\s+\.[a-z](\d+)\s+([\w$]+)(?:\[(\d*)\])?", text
        ).groups()
        offset = _aligned(self.kernel.memory_bytes[space], int(align))
        self.kernel.variables[space][name] = offset
        nbytes = int(bits) // 8 * (1 if extent is None else int(extent or 0))
        self.kernel.memory_bytes[space] = offset + nbytes

    def declare_registers(self, text: str) -> None:
        kind, names = re.match(r"\.reg\s*\.(\w+)\s+(.*)", text, re.DOTALL).groups()
        for name in _split(names):
            ranged = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
            for each in [f"{ranged[1]}{i}" for i in range(int(ranged[2]))] if ranged else [name]:
                self.kernel.registers[each + self.scopes[-1]] = kind

    # ---- statements -------------------------------------------------------------------------------------------------

    def parse(self, body: str) -> Kernel:
        for statement in _statements(body):
            self.statement(statement)
        for instruction in self.kernel.instructions:
            for operand in instruction.operands:
                if isinstance(operand, Label):
                    instruction.target = next(self.kernel.labels[n] for n in operand.names if n in self.kernel.labels)
        return self.kernel

    def statement(self, text: str) -> None:
        if text == "{":
            self.num_scopes += 1
            self.scopes.append(f"@{self.num_scopes}")
        elif text == "}":
            self.scopes.pop()
        elif label := re.match(r"([\w$]+)\s*:(?!:)\s*", text):
            self.kernel.labels[label[1] + self.scopes[-1]] = len(self.kernel.instructions)
            if label.end() < len(text):
                self.statement(text[label.end() :])
        elif text.split()[0] == ".loc":
            file, number = map(int, text.split()[1:3])
            self.line = SourceLine(self.files.get(file, "<unknown>"), number)
        elif text.startswith(".reg"):
            self.declare_registers(text)
        elif not text.startswith("."):
            self.instruction(text)

    def instruction(self, text: str) -> None:
        text = " ".join(text.split())
        guard, rest = None, text
        if text.startswith("@"):
            predicate, rest = text[1:].split(" ", 1)
            guard = (self.register(predicate.lstrip("!")), predicate.startswith("!"))
        opcode = re.match(r"[\w.:]+", rest)[0]
        check_known(tuple(opcode.split(".")), text, self.line)
        operands = [self.operand(operand) for operand in _split(rest[len(opcode) :])]
        self.kernel.instructions.append(Instruction(tuple(opcode.split(".")), operands, guard, self.line, text))

    def register(self, name: str) -> Register | None:
        for suffix in reversed(self.scopes):
            if name + suffix in self.kernel.registers:
                return Register(name + suffix)
        return None

    def operand(self, text: str) -> Any:
        if text.startswith("{"):
            return [self.operand(part) for part in _split(text[1:-1])]
        if text.startswith("["):
            base, offset = re.fullmatch(r"\[(.*?)\s*(?:\+\s*(-?\d+))?\]", text).groups()
            return Address(self.operand(base), int(offset or 0))
        if "|" in text:  # two results
            return [self.operand(part) for part in text.split("|")]
        for space, offsets in {"param": self.kernel.params, **self.kernel.variables}.items():
            if text in offsets:
                return Symbol(space, offsets[text])
        register = self.register(text)
        if register is not None:
            return register
        if re.fullmatch(r"[A-Za-z_$][\w$]*", text):
            return Label(tuple(text + suffix for suffix in reversed(self.scopes)))
        literal = _literal(text)
        if literal is None:
            raise UnknownInstruction(f"unknown operand {text} at {self.line}")
        return literal


def _literal(text: str) -> Any:
    if text.startswith("%"):
        return Special(text)
    if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text):
        return Constant(int(text[2:], 16), is_float=True)
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        return Constant(int(text.rstrip("U"), 0))
    return None


def _statements(body: str) -> Iterator[str]:
    """Braces, labels with their colon, and what stands before semicolons; ``.loc`` ends with its line."""
    pending = ""
    for token in re.split(r"([{};\n]|^\s*[\w$]+:)", body, flags=re.MULTILINE):
        stripped = token.strip()
        if token in "{}" and token and not pending.strip():
            yield token
        elif re.fullmatch(r"[\w$]+:", stripped) and not pending.strip():
            yield stripped
        elif token == ";" or (token == "\n" and pending.split()[:1] in ([".loc"], [".pragma"])):
            if pending.strip():
                yield pending.strip()
            pending = ""
        else:
            pending += " " if token == "\n" else token


def _split(text: str) -> list[str]:
    """At commas that are outside brackets and braces."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _aligned(offset: int, align: int) -> int:
    return -(-offset // align) * align
