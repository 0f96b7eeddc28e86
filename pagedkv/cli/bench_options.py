"""Options that benches share, and what they do before and after measuring."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from pagedkv.dtypes import BY_NAME, KV_CACHE_DTYPES

from . import machine, report
from .bench_cache import CacheKind
from .errors import Mistake
from .markdown import Record
from .options import POSITIVE, all_of

DEFAULT_RESULTS = Path("results")
SIZES = ("seqs", "context", "heads", "kv_heads")  # of a batch of one's own

Row = TypeVar("Row")
Decorator = Callable[[Any], Any]


def row_option(names: Sequence[str]) -> Decorator:
    """Which of the rows to measure."""
    return click.option("--row", "names", type=click.Choice(list(names)), multiple=True, metavar="NAME",
                        help=f"Repeatable; of {', '.join(names)}.  [default: all]")  # fmt: skip


def own_batch_options() -> Decorator:
    """A batch that is none of the rows."""
    return all_of(
        click.option("--seqs", type=POSITIVE, metavar="N", help="Sequences of a batch of your own, with --context."),
        click.option("--context", type=POSITIVE, metavar="N", help="Tokens of each of its sequences."),
        click.option("--heads", type=POSITIVE, metavar="N", default=32, show_default=True, help="Its query heads."),
        click.option("--kv-heads", type=POSITIVE, metavar="N", default=8, show_default=True,
                     help="Its key and value heads."),
    )  # fmt: skip


def layout_option(layouts: Sequence[str]) -> Decorator:
    """The cache's layout, the first by default."""
    return click.option("--layout", type=click.Choice(layouts), default=layouts[0], show_default=True,
                        help="Of the cache.")  # fmt: skip


def cache_options(layouts: Sequence[str]) -> Decorator:
    """The fields of ``CacheKind``."""
    return all_of(
        layout_option(layouts),
        click.option("--head-size", type=POSITIVE, metavar="N", default=128, show_default=True,
                     help="Features of a head."),
        click.option("--block-size", type=POSITIVE, metavar="N", default=16, show_default=True,
                     help="Slots of a block."),
        click.option("--dtype", type=click.Choice(list(BY_NAME)), default="bfloat16", show_default=True,
                     help="Of queries."),
        click.option("--kv-cache-dtype", type=click.Choice(list(KV_CACHE_DTYPES)), default="auto", show_default=True,
                     help="Format of the cache; auto: that of --dtype."),
    )  # fmt: skip


def record_options(name: str, what: str = "a record of all rows goes") -> Decorator:
    """How often is measured, and what becomes of it."""
    return all_of(
        click.option("--repeats", type=POSITIVE, metavar="N", default=30, show_default=True,
                     help="Replays per figure."),
        click.option("--results", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
                     help=f"Where {what}, as <card>/{name}.json; none is kept without it."),
        click.option("--json", "as_json", is_flag=True, help="Print the record instead of its table."),
    )  # fmt: skip


def cache_kind(layout: str, head_size: int, block_size: int, dtype: str, kv_cache_dtype: str) -> CacheKind:
    """What these options say of the cache."""
    return CacheKind(BY_NAME[dtype], kv_cache_dtype, layout, head_size, block_size)


def check_keeps_all(results: Path | None, parts: Mapping[str, Any]) -> None:
    """A mistake where a part would replace a record of all. ``parts``: options that choose one, with their values."""
    if results is not None and any(parts.values()):
        raise Mistake(f"--results keeps records of all rows and ops: leave out {', '.join(parts)}, or take --json")


def chosen_rows(options: dict[str, Any], rows: Mapping[str, Row], own: Callable[..., Row]) -> list[Row]:
    """Takes the batches to measure out of all options: some rows, or one of ``own`` of the sizes given."""
    names = options.pop("names")
    seqs, context, heads, kv_heads = sizes = [options.pop(name) for name in SIZES]
    if seqs is None and context is None:
        return [rows[name] for name in names or rows]
    if names:
        raise Mistake("--row and --seqs with --context: expected one or the other")
    if seqs is None or context is None:
        raise Mistake("a batch of your own needs both --seqs and --context")
    if heads % kv_heads:
        raise Mistake(f"--heads {heads} is no multiple of --kv-heads {kv_heads}")
    return [own(*sizes)]


def check_gpu(name: str) -> None:
    """An error that says why, where there is none."""
    if machine.why_no_cuda() is not None:
        raise ValueError(f"bench {name} needs a GPU: {machine.why_no_cuda()}; see pagedkv info")


def progress(line: str) -> None:
    """Says that a row has been measured."""
    click.echo(line, err=True)


def run_on_card(bench: Callable[[Any, Any], Any], repeats: int, rows: Sequence[Any]) -> Record:
    """What a bench, made of CuPy and a stopwatch, records of these rows, and where."""
    import cupy

    from .environment import environment
    from .timing import Stopwatch

    return environment() | bench(cupy, Stopwatch(repeats)).run(rows, progress)


def deliver(record: Record, results: Path | None, as_json: bool) -> None:
    """Keeps a record where it should be kept, and prints it or its table."""
    if results is not None:
        click.echo(f"record: {report.save(record, results)}", err=True)
    click.echo(json.dumps(record, indent=1) if as_json else report.MARKDOWN[record["bench"]](record))
