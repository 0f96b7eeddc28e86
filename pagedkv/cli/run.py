"""``pagedkv run``: ops on random inputs, each result checked, in a small table."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

import click

from pagedkv.context import BACKENDS
from pagedkv.dtypes import BY_NAME

from .cases import OPS
from .errors import MISTAKES, Mistake, first_line, unknown
from .execute import Result, check_backend, default_backend, has_kernel, run_case
from .inputs import Sizes
from .options import POSITIVE, input_options
from .table import Column, Table, duration, size

DEFAULT_BATCH = {"numpy": (8, 1024), "ptx": (4, 64), "cuda": (64, 4096)}  # seqs, context: what each does in a moment

TABLE = Table(
    (
        Column("op", 23),
        Column("shape", 24),
        Column("backend", 7),
        Column("time", 7, right=True),
        Column("bytes", 7, right=True),
        Column("error", 7, right=True),
        Column("verdict", 7),
    )
)
LEGEND = "error: written values that differ, or relative L2 against float64 in the worst row of a read"

HELP = f"""Run ops on random inputs and check every result.

OP is one or more of {", ".join(OPS)}; without one, all run.

Writes are compared value for value, reads with a dense float64 attention. The exit code is 1 if a result is wrong.
Times are medians: on numpy and ptx of a few calls, on cuda of graph replays that find L2 cold.
"""


def known_ops(ctx: click.Context, param: click.Parameter, ops: tuple[str, ...]) -> tuple[str, ...]:
    """The ops of a command line; Mistake for one that there is not."""
    for op in ops:
        if op not in OPS:
            raise Mistake(unknown("op", op, OPS))
    return ops


@click.command(help=HELP)
@click.argument("ops", nargs=-1, metavar="[OP]...", callback=known_ops)
@click.option("--seqs", type=POSITIVE, metavar="N", help="Sequences.  [default: 8 on numpy, 4 on ptx, 64 on cuda]")
@click.option(
    "--context",
    type=POSITIVE,
    metavar="N",
    help="Tokens of the longest one.  [default: 1024 on numpy, 64 on ptx, 4096 on cuda]",
)
@input_options(layout_help="Of all caches but those of reshape_and_cache and paged_attention, which are packed.")
@click.option("--backend", type=click.Choice(BACKENDS), help="[default: cuda where a GPU is usable, else numpy]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--verbose", is_flag=True, help="Say which kernel instance ran, and what was allowed.")
@click.pass_context
def run(
    ctx: click.Context, ops: tuple[str, ...], backend: str | None, as_json: bool, verbose: bool, **options: Any
) -> None:
    """Runs ops, prints a table or JSON, ends with exit code 1 if a result is wrong."""
    places = [(op, _place(op, backend, asked=bool(ops))) for op in ops or OPS]
    options["dtype"] = BY_NAME[options["dtype"]]
    Sizes(**options).check()
    results = []
    for op, place in places:
        results.append(_run(op, place, options))
        if not as_json:
            heading = f"{_heading(options)}\n\n{TABLE.header()}\n" if len(results) == 1 else ""
            click.echo(heading + _lines(results[-1], verbose))
    click.echo(json.dumps([_record(result, options) for result in results], indent=2) if as_json else _end(results))
    ctx.exit(0 if all(result.ok for result in results) else 1)


def _place(op: str, backend: str | None, asked: bool) -> str:
    """Where an op runs: as told, or numpy where it has no kernel and was not asked for by name."""
    place = backend or default_backend()
    check_backend(place)
    if has_kernel(op, place):
        return place
    if backend is not None and asked:
        raise NotImplementedError(f"{op} has no kernel yet: use --backend numpy")
    return "numpy"


def _sizes(options: dict[str, Any], backend: str) -> Sizes:
    seqs, context = DEFAULT_BATCH[backend]
    sizes = Sizes(**options)
    return replace(sizes, seqs=sizes.seqs or seqs, context=sizes.context or context)


def _run(op: str, backend: str, options: dict[str, Any]) -> Result:
    try:
        return run_case(OPS[op](op, _sizes(options, backend)), backend)
    except MISTAKES as error:
        advice = "; try fewer --seqs or a shorter --context" if isinstance(error, MemoryError) else ""
        raise click.ClickException(f"{op}: {first_line(error)}{advice}") from error


def _heading(options: dict[str, Any]) -> str:
    heads = f"{options['heads']} query / {options['kv_heads']} kv heads x {options['head_size']}"
    cache = f"cache {options['kv_cache_dtype']}, blocks of {options['block_size']}"
    return f"{options['dtype'].name}, {heads}, {cache}, seed {options['seed']}"


def _lines(result: Result, verbose: bool) -> str:
    case, worst = result.case, result.worst
    elapsed = "-" if result.microseconds is None else duration(result.microseconds)
    verdict = "ok" if result.ok else "WRONG"
    lines = [TABLE.row([case.op, case.shape, result.backend, elapsed, size(case.nbytes), _error(worst), verdict])]
    lines += [f"    {c.name}: {c.detail}" for c in result.comparisons if not c.ok]
    if verbose:
        lines.append(f"    kernel: {result.instance or 'none, NumPy'}")
        lines += [f"    {c.name}: error {c.error:.2g}, allowed {c.tolerance:.2g}" for c in result.comparisons if c.ok]
    return "\n".join(lines)


def _error(worst: Any) -> str:
    if worst.tolerance == 0:
        return "exact" if worst.ok else f"{worst.error:.2g}"
    return f"{worst.error:.1e}"


def _end(results: list[Result]) -> str:
    wrong = sum(not result.ok for result in results)
    lines = ["", LEGEND]
    if len({result.backend for result in results}) > 1:
        lines.append("ops shown on numpy have no kernel yet")
    total = f"{len(results)} result" + "s" * (len(results) != 1)
    lines.append(f"{wrong} of {total} wrong" if wrong else f"{total}, all right")
    return "\n".join(lines)


def _record(result: Result, options: dict[str, Any]) -> dict[str, Any]:
    sizes = asdict(_sizes(options, result.backend)) | {"dtype": options["dtype"].name}
    return {
        "op": result.case.op,
        "backend": result.backend,
        "shape": result.case.shape,
        "sizes": sizes,
        "microseconds": result.microseconds,
        "bytes": result.case.nbytes,
        "ok": result.ok,
        "outputs": [asdict(c) | {"error": _finite(c.error), "ok": c.ok} for c in result.comparisons],
        "instance": result.instance,
    }


def _finite(number: float) -> float | None:
    """JSON has no NaN."""
    return number if math.isfinite(number) else None
