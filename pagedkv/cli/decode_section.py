"""README sections of ``bench decode`` records: for each card one table whole, and the others side by side."""

from collections.abc import Iterable

from .bench_shape import DEFAULT_SHAPE, is_default
from .decode_rows import OPS
from .decode_table import batch_cells, decode_markdown, is_crossover
from .markdown import Record, origin, table_lines


def decode_section(records: list[Record]) -> str:
    """For each card: the record of the default shape whole, of others what the fastest op needed, the crossover.

    The records are of one layout.
    """
    parts = []
    for card in dict.fromkeys(record["card"] for record in records):
        of_card = [record for record in records if record["card"] == card]
        crossovers = [record for record in of_card if is_crossover(record)]
        rest = [record for record in of_card if record not in crossovers]
        parts += [decode_markdown(record) for record in rest if is_default(record["shape"])]
        others = [record for record in rest if not is_default(record["shape"])]
        parts += [_others_markdown(sorted(others, key=_by_sizes))] if others else []
        parts += [_crossover_markdown(record) for record in crossovers]
    return "\n\n".join(parts)


def _others_markdown(records: list[Record]) -> str:
    """A row per batch, a column per record: an op's time, and its ratio to the floor of the same bytes."""
    op = "v2" if records[0]["shape"]["layout"] == "packed" else "varlen"
    titles = ["sequences", "context", "heads", *(_difference(record["shape"]) for record in records)]
    cells = {(row["row"], i): _time_and_ratio(row, op) for i, record in enumerate(records) for row in record["rows"]}
    batches = {row["row"]: batch_cells(row)[:3] for record in records for row in record["rows"]}
    rows = ([*batch, *(cells.get((name, i), "") for i in range(len(records)))] for name, batch in batches.items())
    introduction = (
        f"`{op}` of other dtypes, caches, heads and blocks: us and the ratio to the floor of their own bytes, bold "
        f"where a target is met. {_origins(records)}."
    )
    return "\n".join([introduction, "", *table_lines(titles, 3, rows)])


def _time_and_ratio(row: Record, op: str) -> str:
    ratio = f"{row['ratio'][op]:.3f}"
    return f"{row['us'][op]:.1f} ({'**' + ratio + '**' if row['met'][op] else ratio})"


def _crossover_markdown(record: Record) -> str:
    """A row per number of sequences, a column per context."""
    contexts = sorted({row["context"] for row in record["rows"]})
    cells = {(row["num_seqs"], row["context"]): _both_times(row["us"]) for row in record["rows"]}
    rows = (
        [f"{num_seqs}", *(cells.get((num_seqs, context), "") for context in contexts)]
        for num_seqs in sorted({row["num_seqs"] for row in record["rows"]})
    )
    heads = f"{record['rows'][0]['num_heads']}/{record['rows'][0]['num_kv_heads']}"
    introduction = f"`v1` / `v2` over the context, {heads} heads, us, the faster one bold. {_origins([record])}."
    titles = ["sequences", *(f"{context:,}" for context in contexts)]
    return "\n".join([introduction, "", *table_lines(titles, 1, rows)])


def _both_times(us: dict[str, float]) -> str:
    fastest = min(us, key=us.__getitem__)
    return " / ".join(f"**{us[op]:.1f}**" if op == fastest else f"{us[op]:.1f}" for op in OPS["packed"])


def _by_sizes(record: Record) -> tuple[tuple[bool, int], ...]:
    """Other formats before other sizes, and those in order."""
    shape = record["shape"]
    return tuple((shape[name] != DEFAULT_SHAPE[name], shape[name]) for name in ("head_size", "block_size"))


def _difference(shape: Record) -> str:
    """What sets a shape apart from the default."""
    words = {"dtype": "{}", "kv_cache_dtype": "{} cache", "head_size": "heads of {}", "block_size": "blocks of {}"}
    return ", ".join(text.format(shape[name]) for name, text in words.items() if shape[name] != DEFAULT_SHAPE[name])


def _origins(records: Iterable[Record]) -> str:
    return "; ".join(dict.fromkeys(origin(record) for record in records))
