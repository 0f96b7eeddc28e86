"""``pagedkv bench decode``: its options, and from them to the record."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from pagedkv.layout import FLASH_LAYOUTS

from . import decode_plot, report
from .bench_options import (
    DEFAULT_RESULTS,
    cache_kind,
    cache_options,
    check_gpu,
    check_keeps_all,
    chosen_rows,
    deliver,
    own_batch_options,
    record_options,
    row_option,
    run_on_card,
)
from .decode_record import completed
from .decode_rows import CROSSOVER, FUNCTIONS, OPS, ROWS_BY_NAME, DecodeRow, record_name
from .errors import Mistake
from .markdown import Record


@click.command()
@row_option(list(ROWS_BY_NAME))
@click.option("--crossover", is_flag=True, help="Measure where v1 and v2 cross over the context instead.")
@own_batch_options()
@click.option("--op", "ops", type=click.Choice(list(FUNCTIONS)), multiple=True,
              help="Repeatable; v1 and v2 on packed caches, varlen and v2 on others.  [default: both]")  # fmt: skip
@cache_options(["packed", *FLASH_LAYOUTS])
@record_options("decode")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Draw the ratios to the floor into a PNG file.")  # fmt: skip
def decode(results: Path | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Time paged_attention_v1 and v2, or flash_attn_varlen_func.

    Each beside a kernel that only reads the same blocks through a table; flash_attn_varlen_func, which reads NHD and
    HND caches, also beside v2 on a packed one. A result that is not right is not timed, and ends the run with exit
    code 1.
    """
    check_keeps_all(results, {"--row": options["names"], "--seqs": options["seqs"], "--op": options["ops"]})
    is_crossover = options["crossover"]
    ops = _ops(options.pop("ops"), options["layout"])
    rows = _rows(options)
    if plot is not None:
        decode_plot.check_matplotlib()
    check_gpu("decode")
    folder = results or DEFAULT_RESULTS  # where the times of others are, kept or not
    record = _record(rows, folder, ops, **options)
    record["name"] = record_name(record["shape"], is_crossover)
    deliver(record, results, as_json)
    if plot is not None:
        decode_plot.plot(record, plot)
        click.echo(f"plot: {plot}", err=True)


def _ops(ops: Sequence[str], layout: str) -> Sequence[str]:
    for op in ops:
        if op not in OPS[layout]:
            raise Mistake(f"--op {op}: expected {' or '.join(OPS[layout])} with --layout {layout}")
    return ops or OPS[layout]


def _rows(options: dict[str, Any]) -> list[DecodeRow]:
    """Takes the batches to measure out of all options."""
    if not options.pop("crossover"):
        return chosen_rows(options, ROWS_BY_NAME, DecodeRow)
    if options.pop("names") or options.pop("seqs") or options.pop("context"):
        raise Mistake("--crossover has rows of its own: leave out --row, --seqs and --context")
    if options["layout"] != "packed":
        raise Mistake(f"--crossover is of v1 and v2, which read no {options['layout']} cache: leave out --layout")
    del options["heads"], options["kv_heads"]
    return list(CROSSOVER)


def _record(rows: list[DecodeRow], results: Path, ops: Sequence[str], repeats: int, **kind: Any) -> Record:
    from .bench_decode import DecodeBench

    record = run_on_card(partial(DecodeBench, ops=ops, kind=cache_kind(**kind)), repeats, rows)
    plain_name = record_name({**record["shape"], "kv_cache_dtype": "auto"})
    plain, peers = (report.load(results, record["card"], name) for name in (plain_name, report.PEERS))
    return completed(record, plain, peers)
