"""What a kernel did wrong, and where: the words of every report of the interpreter."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a source file, as the compiler's line table names it; inlined code keeps the file it was written in."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class Fault(RuntimeError):  # noqa: N818 - what a kernel has, not what a program raises
    """A kernel broke a rule. The text names rule, source line, CTA, thread and instruction."""

    def __init__(self, what: str, line: SourceLine, cta: int, thread: int, text: str) -> None:
        super().__init__(f"{what} at {line}, CTA {cta}, thread {thread}: {text}")
        self.what, self.line, self.cta, self.thread = what, line, cta, thread


class UnknownInstruction(NotImplementedError):  # noqa: N818
    """PTX that the interpreter does not know."""
