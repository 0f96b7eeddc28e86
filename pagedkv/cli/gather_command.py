"""``pagedkv bench gather``: its options, and from them to the record."""

from pathlib import Path

import click

from .bench_options import check_gpu, check_keeps_all, deliver, record_options, row_option, run_on_card
from .gather_rows import ROWS, GatherBench

ROWS_BY_NAME = {row.name: row for row in ROWS}


@click.command()
@row_option(list(ROWS_BY_NAME))
@record_options("gather")
def gather(results: Path | None, as_json: bool, names: tuple[str, ...], repeats: int) -> None:
    """Time gather_cache, convert_layout and advance_decode.

    The first two beside plain copies of as many bytes. A result that is not right is not timed, and ends the run with
    exit code 1.
    """
    check_keeps_all(results, {"--row": names})
    check_gpu("gather")
    rows = [ROWS_BY_NAME[name] for name in names or ROWS_BY_NAME]
    deliver(run_on_card(GatherBench, repeats, rows), results, as_json)
