"""``pagedkv bench mixed``: its options, and from them to the record."""

from functools import partial
from pathlib import Path

import click

from pagedkv.layout import FLASH_LAYOUTS

from .bench_options import (
    cache_kind,
    cache_options,
    check_gpu,
    check_keeps_all,
    deliver,
    record_options,
    row_option,
    run_on_card,
)
from .mixed_rows import ROWS_BY_NAME, record_name


@click.command()
@row_option(list(ROWS_BY_NAME))
@cache_options(FLASH_LAYOUTS)
@record_options("mixed")
def mixed(results: Path | None, as_json: bool, names: tuple[str, ...], repeats: int, **kind: str | int) -> None:
    """Time decodes and prefills in one call, a window, a shared prefix.

    Each beside the calls that do the same in parts, over less or one by one. A result that is not right is not timed,
    and ends the run with exit code 1.
    """
    check_keeps_all(results, {"--row": names})
    check_gpu("mixed")
    from .bench_mixed import MixedBench

    rows = [ROWS_BY_NAME[name] for name in names or ROWS_BY_NAME]
    record = run_on_card(partial(MixedBench, kind=cache_kind(**kind)), repeats, rows)
    record["name"] = record_name(record["shape"])
    deliver(record, results, as_json)
