"""One dimension of random cases: its values, how often the simplest is drawn, and what stands for a value in text."""

from dataclasses import dataclass

import numpy as np

from .errors import Mistake, unknown

Value = int | str
Values = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Dimension:
    """Values that a case may have, the simplest first. Numbers may also be any others in their range, if asked for."""

    name: str
    values: tuple[Value, ...]
    simple_share: float = 0.0  # of draws that take the simplest without a choice
    decides_instance: bool = False  # a kernel is compiled for each value

    @property
    def simplest(self) -> Value:
        return self.values[0]

    @property
    def is_number(self) -> bool:
        return isinstance(self.simplest, int)

    def draw(self, rng: np.random.Generator) -> Value:
        """A random value."""
        is_simple = rng.random() < self.simple_share
        return self.values[0 if is_simple else rng.integers(len(self.values))]

    def parsed(self, text: str) -> Value:
        """The value that a text stands for; Mistake for a text that stands for none."""
        if not self.is_number:
            if text not in self.values:
                raise Mistake(f"--case: {unknown(self.name, text, self.values)}")
            return text
        low, high = min(self.values), max(self.values)
        if not text.removeprefix("-").isdecimal() or not low <= int(text) <= high:
            raise Mistake(f"--case: {self.name}: expected a number from {low} to {high}, got {text!r}")
        return int(text)

    def simpler(self, value: Value) -> list[Value]:
        """Values to try in place of one, the simplest first: of numbers also those half-way to it, and the next."""
        if value == self.simplest:
            return []
        if not self.is_number:
            return [self.simplest]
        step = 1 if value > self.simplest else -1
        distance, smaller = abs(value - self.simplest), []
        while distance > 1:
            distance //= 2
            smaller.append(value - step * distance)
        return [self.simplest, *smaller]
