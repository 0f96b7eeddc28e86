"""From a case that fails to a simpler one that fails in the same way."""

import time
from collections.abc import Callable, Iterator

from .dimensions import DIMENSIONS, Spec
from .trial import Failure

SECONDS = 20.0  # that it may take


def shrunk(
    spec: Spec, failure: Failure, run: Callable[[Spec], Failure | None], seconds: float = SECONDS
) -> tuple[Spec, Failure]:
    """The simplest case found, and how it fails.

    Each dimension in turn gets its simplest value, or of numbers one half-way there, as long as the case still fails in
    the same way; this goes on until no dimension gives way, or the time is up.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for simpler in _simpler(spec):
            again = run(simpler)
            if again is not None and again.kind == failure.kind:
                spec, failure = simpler, again
                break
            if time.monotonic() > deadline:
                return spec, failure
        else:
            return spec, failure
    return spec, failure


def _simpler(spec: Spec) -> Iterator[Spec]:
    for dimension in DIMENSIONS[spec.op]:
        for value in dimension.simpler(spec.values[dimension.name]):
            candidate = spec.with_value(dimension.name, value)
            if candidate.why_not is None:
                yield candidate
