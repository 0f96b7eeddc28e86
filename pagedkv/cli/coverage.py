"""Which values random cases have had, dimension by dimension."""

import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from .dimension import Value
from .dimensions import DIMENSIONS, Spec

WIDTH = 100
INDENT = 2


@dataclass(slots=True)
class Coverage:
    """Counts of values by dimension. Dimensions of one name, of several ops, are counted as one."""

    counts: dict[str, Counter[Value]] = field(default_factory=lambda: defaultdict(Counter))
    ops: Counter[str] = field(default_factory=Counter)

    def add(self, spec: Spec) -> None:
        """Counts a case that has been run."""
        self.ops[spec.op] += 1
        for name, value in spec.values.items():
            self.counts[name][value] += 1

    def lines(self) -> list[str]:
        """A line or two per dimension, with the values seen, and one of all values not seen."""
        values = self._values()
        seen = [self._line("op", list(self.ops), self.ops)]
        seen += [self._line(name, known, self.counts[name]) for name, known in values.items()]
        missing = {name: [value for value in known if not self.counts[name][value]] for name, known in values.items()}
        text = "; ".join(f"{name} {', '.join(map(str, unseen))}" for name, unseen in missing.items() if unseen)
        return [*seen, _wrapped(f"not seen: {text or 'nothing'}")]

    def _values(self) -> dict[str, list[Value]]:
        """Every value that the ops run can have, by dimension."""
        values: dict[str, dict[Value, None]] = defaultdict(dict)
        for op in self.ops:
            for dimension in DIMENSIONS[op]:
                values[dimension.name] |= dict.fromkeys(dimension.values)
        return {name: _in_order(list(known)) for name, known in values.items()}

    def _line(self, name: str, known: list[Value], counts: Counter[Value]) -> str:
        return _wrapped(f"{name}: " + ", ".join(f"{value} {counts[value]}" for value in known if counts[value]))


def _in_order(values: list[Value]) -> list[Value]:
    return sorted(values) if all(isinstance(value, int) for value in values) else values


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * INDENT, break_on_hyphens=False)
