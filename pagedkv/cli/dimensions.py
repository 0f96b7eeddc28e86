"""What random cases differ in: for each op its dimensions with their values, how cases are drawn, and their text.

A case is one value per dimension. Its text, ``tokens=3,dtype=bfloat16,seed=7``, names the values that are not the
simplest, and everything about the case follows from it: the same text is the same case on any machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from . import dimensions_of_reads as reads
from . import dimensions_of_writes as writes
from .dimension import Dimension, Value, Values
from .errors import Mistake, unknown

SEED = "seed"
LARGEST_SEED = 2**31 - 1
KEPT = 0.75  # of cases have the kernel instance of the case before: to compile one costs as much as to run several
ATTEMPTS = 1000  # at a combination of values that exists

DIMENSIONS: dict[str, tuple[Dimension, ...]] = writes.DIMENSIONS | reads.DIMENSIONS
WHY_NOT: dict[str, Callable[[Values], str | None]] = writes.WHY_NOT | reads.WHY_NOT


@dataclass(frozen=True)
class Spec:
    """One case of an op."""

    op: str
    values: Values  # of every dimension
    seed: int

    def __str__(self) -> str:
        named = [
            f"{dimension.name}={self.values[dimension.name]}"
            for dimension in DIMENSIONS[self.op]
            if self.values[dimension.name] != dimension.simplest
        ]
        return ",".join([*named, f"{SEED}={self.seed}"])

    def with_value(self, name: str, value: Value) -> "Spec":
        """The case that differs in one value."""
        return Spec(self.op, self.values | {name: value}, self.seed)

    @property
    def why_not(self) -> str | None:
        """Why there is no such case, where two values exclude each other."""
        return WHY_NOT[self.op](self.values)


def parse(op: str, text: str) -> Spec:
    """The case that a text stands for; Mistake for a text that stands for none."""
    dimensions = {dimension.name: dimension for dimension in DIMENSIONS[op]}
    values, seed = {name: dimension.simplest for name, dimension in dimensions.items()}, 0
    for part in filter(None, text.split(",")):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise Mistake(f"--case: expected name=value, got {part!r}")
        if name == SEED:
            seed = _seed(value)
        elif name in dimensions:
            values[name] = dimensions[name].parsed(value)
        else:
            raise Mistake(f"--case: {unknown('dimension', name, [*dimensions, SEED])}")
    spec = Spec(op, values, seed)
    if spec.why_not:
        raise Mistake(f"--case: {spec.why_not}")
    return spec


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) > LARGEST_SEED:
        raise Mistake(f"--case: seed: expected a number up to {LARGEST_SEED}, got {text!r}")
    return int(text)


def draw(op: str, rng: np.random.Generator) -> Iterator[Spec]:
    """Cases of an op without end."""
    spec = None
    while True:
        kept = {}
        if spec is not None and rng.random() < KEPT:
            kept = {d.name: spec.values[d.name] for d in DIMENSIONS[op] if d.decides_instance}
        spec = _draw_one(op, rng, kept)
        yield spec


def _draw_one(op: str, rng: np.random.Generator, kept: Values) -> Spec:
    first, *others = DIMENSIONS[op]
    kept = kept | {first.name: first.draw(rng)}  # or many tokens, which exclude most other sizes, would hardly occur
    for _ in range(ATTEMPTS):
        values = {first.name: first.simplest} | {dimension.name: dimension.draw(rng) for dimension in others} | kept
        spec = Spec(op, values, int(rng.integers(LARGEST_SEED)))
        if spec.why_not is None:
            return spec
    raise RuntimeError(f"{op}: no case in {ATTEMPTS} draws with {kept}")
