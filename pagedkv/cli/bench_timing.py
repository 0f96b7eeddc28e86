"""What benches of reads share: a check before each time, and the ceilings of the same run."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

import pagedkv

from .bench_inputs import BatchInputs
from .execute import kernel_instance
from .markdown import Record

READ_BYTES = 256 << 20
METHOD = "medians of graph replays, L2 cold"

Row = TypeVar("Row")


def checked_time(stopwatch: Any, title: str, op: str, inputs: BatchInputs, **options: Any) -> tuple[float, str | None]:
    """Microseconds of an op with all memory given, and the instance that it chose; an error unless its result is right.

    ``title`` says in the error what was measured, ``options`` what the op takes beside its inputs.
    """
    arguments = {**inputs.arguments(op), **inputs.memory(op), **options}
    launch = call(op, arguments)
    launch()
    comparison = inputs.check(arguments["out"])
    if not comparison.ok:
        raise click.ClickException(f"{title}: {comparison.detail}, so it is not timed")
    return stopwatch.microseconds(launch), kernel_instance(op, arguments, "cuda")


def call(op: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """An op with its arguments, to be called."""
    return lambda: getattr(pagedkv, op)(**arguments)


def measured_rows(
    rows: Sequence[Row],
    measure: Callable[[Row], Record],
    progress: Callable[[str], None],
    line: Callable[[Record], str],
) -> list[Record]:
    """What ``measure`` says of each row; ``progress`` gets a ``line`` as soon as it has been measured."""
    measured = []
    for row in rows:
        measured.append(measure(row))
        progress(line(measured[-1]))
    return measured


def run_record(bench: str, stopwatch: Any, shape: Record) -> Record:
    """What every record begins with: how it was measured, and what the card allows."""
    return {
        "bench": bench,
        "method": f"{METHOD}, {stopwatch.repeats} each",
        "shape": shape,
        "ceilings": {
            "empty_us": stopwatch.empty(),
            "read": {"nbytes": READ_BYTES, "us": stopwatch.read(READ_BYTES)},
        },
    }
