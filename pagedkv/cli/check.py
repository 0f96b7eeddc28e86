"""``pagedkv check``: many random cases, each compared byte by byte; a case that fails is made small and printed."""

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import click
import numpy as np

from pagedkv.context import BACKENDS

from .coverage import Coverage
from .dimensions import DIMENSIONS, LARGEST_SEED, Spec, draw, parse
from .errors import Mistake, unknown
from .execute import check_backend, default_backend, has_kernel
from .random_merges import merge_trial
from .random_reads import read_trial
from .random_writes import write_trial
from .shrink import shrunk
from .trial import Failure, Trial, run_trial

DEFAULT_MINUTES = 1.0
TRIALS: dict[str, Callable[[Spec], Trial]] = {
    "reshape_and_cache": write_trial,
    "reshape_and_cache_flash": write_trial,
    "paged_attention_v1": read_trial,
    "paged_attention_v2": read_trial,
    "flash_attn_varlen_func": read_trial,
    "merge_attn_states": merge_trial,
}

HELP = f"""Run random cases of ops and compare every byte that they write.

OP is one or more of {", ".join(TRIALS)}; without one, all that the backend has.

Shapes, dtypes, strides, addresses, slots and contents are drawn at random; some cases begin with a wrong call, which
must raise its error and write nothing. The first case that fails is made as small as it gets and printed as the command
that repeats it, and the exit code is 1. Otherwise a list says what the cases had.
"""


@dataclass(slots=True)
class Report:
    """What became of the cases."""

    coverage: Coverage = field(default_factory=Coverage)
    failed: tuple[Spec, Failure] | None = None


def _known_ops(ctx: click.Context, param: click.Parameter, ops: tuple[str, ...]) -> tuple[str, ...]:
    """The ops of a command line; Mistake for one that no random cases are drawn for."""
    for op in ops:
        if op not in TRIALS:
            raise Mistake(unknown("op", op, TRIALS))
    return ops


@click.command(help=HELP)
@click.argument("ops", nargs=-1, metavar="[OP]...", callback=_known_ops)
@click.option("--backend", type=click.Choice(BACKENDS), help="[default: cuda where a GPU is usable, else numpy]")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), metavar="M",
              help="How long to go on.  [default: 1]")  # fmt: skip
@click.option("--cases", type=click.IntRange(min=1), metavar="N", help="How many to run, instead of --minutes.")
@click.option("--seed", type=click.IntRange(0, LARGEST_SEED), metavar="N", default=0, show_default=True,
              help="Of the cases.")  # fmt: skip
@click.option("--case", metavar="SPEC", help="Run one case: name=value,... as a failure prints it.")
@click.pass_context
def check(
    ctx: click.Context,
    ops: tuple[str, ...],
    backend: str | None,
    minutes: float | None,
    cases: int | None,
    seed: int,
    case: str | None,
) -> None:
    """Runs cases, prints a failure or the coverage, ends with exit code 1 if a case failed."""
    backend = backend or default_backend()
    if minutes is not None and cases is not None:
        raise Mistake("--minutes and --cases: expected one of them")
    if case is not None and len(ops) != 1:
        raise Mistake("--case: expected the one OP that it is a case of")
    specs = None if case is None else [parse(ops[0], case)]
    ops = _with_kernels(ops, backend)
    start = time.monotonic()
    if specs is None:
        specs = _in_bar(_interleaved(ops, seed), cases, 60 * (minutes or DEFAULT_MINUTES))
    report = _run_all(specs, backend)
    count, elapsed = report.coverage.ops.total(), time.monotonic() - start
    if report.failed is not None:
        click.echo(_failure(*report.failed, backend))
    elif case is None:
        click.echo("\n".join(report.coverage.lines()))
    verdict = "1 failed" if report.failed else "all right"
    click.echo(f"{count:,} case{'s' * (count != 1)}, {verdict}, {elapsed:.0f} s, backend {backend}, seed {seed}")
    ctx.exit(1 if report.failed else 0)


def _with_kernels(ops: tuple[str, ...], backend: str) -> tuple[str, ...]:
    """The ops asked for, or all that the backend has."""
    check_backend(backend)
    for op in ops:
        if not has_kernel(op, backend):
            raise NotImplementedError(f"{op} has no kernel yet: use --backend numpy")
    return ops or tuple(op for op in TRIALS if has_kernel(op, backend))


def _interleaved(ops: tuple[str, ...], seed: int) -> Iterator[Spec]:
    """Cases of all ops in turn, without end."""
    streams = [draw(op, np.random.default_rng([seed, list(DIMENSIONS).index(op)])) for op in ops]
    while True:
        yield from map(next, streams)


def _in_bar(specs: Iterator[Spec], cases: int | None, seconds: float) -> Iterator[Spec]:
    """The first cases, or those of some time, with a bar where somebody looks on."""
    length = int(seconds) + 1 if cases is None else cases
    start, done = time.monotonic(), 0
    with click.progressbar(length=length, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
        for count, spec in enumerate(specs):
            elapsed = time.monotonic() - start
            now = int(elapsed) if cases is None else count
            bar.update(now - done)
            done = now
            if count == cases or (cases is None and elapsed >= seconds):
                return
            yield spec


def _run_all(specs: Iterator[Spec] | list[Spec], backend: str) -> Report:
    """Runs cases until one fails, and makes that one small."""

    def run(spec: Spec) -> Failure | None:
        return run_trial(TRIALS[spec.op](spec), backend)

    report = Report()
    for spec in specs:
        failure = run(spec)
        report.coverage.add(spec)
        if failure is not None:
            report.failed = shrunk(spec, failure, run) if failure.repeats else (spec, failure)
            break
    return report


def _failure(spec: Spec, failure: Failure, backend: str) -> str:
    command = shlex.join(["pagedkv", "check", spec.op, "--backend", backend, "--case", str(spec)])
    return f"FAILED  {spec.op}: {failure.text}\n\nTo repeat it:\n  {command}\n"
