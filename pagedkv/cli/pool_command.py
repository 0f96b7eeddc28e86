"""``pagedkv bench pool``: its options, and from them to the record."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click
import numpy as np

import pagedkv

from . import machine
from .bench_options import check_gpu, check_keeps_all, deliver, progress, record_options, row_option, run_on_card
from .markdown import Record
from .pool_clock import HostClock
from .pool_host import HostBench
from .pool_rows import HOST_BY_NAME, MOVES_BY_NAME, CacheForm, HostRow, MoveRow


@click.command()
@row_option([*HOST_BY_NAME, *MOVES_BY_NAME])
@record_options("pool")
def pool(results: Path | None, as_json: bool, names: tuple[str, ...], repeats: int) -> None:
    """Time a step's bookkeeping, known prefixes, moves of blocks.

    The first two on two cores of the host, beside plain Python loops; moves on a GPU, beside plain copies of the same
    bytes, and left out where there is none. A result that is not right is not timed, and ends the run with exit code 1.
    """
    check_keeps_all(results, {"--row": names})
    if results is not None:
        check_gpu("pool --results")
    if not MOVES_BY_NAME.keys().isdisjoint(names):
        check_gpu("pool")
    host = [row for name, row in HOST_BY_NAME.items() if name in names or not names]
    moves = [row for name, row in MOVES_BY_NAME.items() if name in names or not names]
    deliver(_record(host, moves, repeats), results, as_json)


def _record(host: Sequence[HostRow], moves: Sequence[MoveRow], repeats: int) -> Record:
    """The host first: a card in use has threads of its own there."""
    on_host = HostBench(HostClock(repeats)).run(host, progress) if host else None
    return (_of_moves(moves, repeats) if moves else _without_moves()) | {"host": on_host}


def _of_moves(rows: Sequence[MoveRow], repeats: int) -> Record:
    if machine.why_no_cuda() is not None:
        no_moves = f"Moves of blocks need a GPU: {machine.why_no_cuda()}; see pagedkv info."
        return _without_moves() | {"no_moves": no_moves}
    from . import pool_memory
    from .pool_moves import MovesBench

    return run_on_card(partial(MovesBench, memory=pool_memory), repeats, rows)


def _without_moves() -> Record:
    """What a record says where a card has not been asked."""
    return {
        "bench": "pool",
        "card": None,
        "versions": {"pagedkv": pagedkv.__version__, "numpy": np.__version__},
        "date": datetime.now(UTC).date().isoformat(),
        "shape": CacheForm().shape,
        "rows": [],
    }
