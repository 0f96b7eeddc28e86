"""``pagedkv bench prefill``: its options, and from them to the record."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from pagedkv.layout import FLASH_LAYOUTS

from . import report
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
from .markdown import Record
from .prefill_record import completed
from .prefill_rows import ROWS_BY_NAME, PrefillRow, record_name


@click.command()
@row_option(list(ROWS_BY_NAME))
@own_batch_options()
@cache_options(FLASH_LAYOUTS)
@record_options("prefill")
def prefill(results: Path | None, as_json: bool, **options: Any) -> None:
    """Time flash_attn_varlen_func over whole sequences.

    All tokens of each are queries, and each sees those before it. A result that is not right is not timed, and ends the
    run with exit code 1.
    """
    check_keeps_all(results, {"--row": options["names"], "--seqs": options["seqs"]})
    rows = chosen_rows(options, ROWS_BY_NAME, PrefillRow)
    check_gpu("prefill")
    record = _record(rows, results or DEFAULT_RESULTS, **options)
    record["name"] = record_name(record["shape"])
    deliver(record, results, as_json)


def _record(rows: list[PrefillRow], results: Path, repeats: int, **kind: Any) -> Record:
    from .bench_prefill import PrefillBench

    record = run_on_card(partial(PrefillBench, kind=cache_kind(**kind)), repeats, rows)
    return completed(record, report.load(results, record["card"], report.PEERS))
