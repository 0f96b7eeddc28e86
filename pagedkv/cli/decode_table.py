"""The Markdown tables of ``bench decode`` records: one alone, and all of a card side by side."""

from collections.abc import Iterable

from .decode_rows import DEFAULT_SHAPE, HOST_US, record_name
from .markdown import Record, origin, table_lines
from .table import size

PEER_NAMES = {  # as peers.json names them
    "vllm_v1": "vLLM v1",
    "vllm_v2": "vLLM v2",
    "flashinfer_cuda_core": "FlashInfer CUDA cores",
    "flashinfer_tensor_core": "FlashInfer tensor cores",
    "flash_attn_3": "FlashAttention-3",
}
CALLS = {"given": "with all memory given", "allocated": "with none"}


def decode_section(records: list[Record]) -> str:
    """For each card: the record of the default shape whole, of other shapes what v2 needed, and the crossover."""
    parts = []
    for card in dict.fromkeys(record["card"] for record in records):
        of_card = [record for record in records if record["card"] == card]
        crossovers = [record for record in of_card if _is_crossover(record)]
        rest = [record for record in of_card if record not in crossovers]
        parts += [decode_markdown(record) for record in rest if record["shape"] == DEFAULT_SHAPE]
        others = [record for record in rest if record["shape"] != DEFAULT_SHAPE]
        parts += [_others_markdown(sorted(others, key=_by_sizes))] if others else []
        parts += [_crossover_markdown(record) for record in crossovers]
    return "\n\n".join(parts)


def _others_markdown(records: list[Record]) -> str:
    """A row per batch, a column per record: v2's time, and its ratio to the floor of the same bytes."""
    titles = ["sequences", "context", "heads", *(_difference(record["shape"]) for record in records)]
    cells = {(row["row"], i): _time_and_ratio(row) for i, record in enumerate(records) for row in record["rows"]}
    batches = {row["row"]: _batch(row)[:3] for record in records for row in record["rows"]}
    rows = ([*batch, *(cells.get((name, i), "") for i in range(len(records)))] for name, batch in batches.items())
    introduction = (
        f"`v2` of other dtypes, caches, heads and blocks: us and the ratio to the floor of their own bytes, bold where "
        f"a target is met. {_origins(records)}."
    )
    return "\n".join([introduction, "", *table_lines(titles, 3, rows)])


def _time_and_ratio(row: Record) -> str:
    ratio = f"{row['ratio']['v2']:.3f}"
    return f"{row['us']['v2']:.1f} ({'**' + ratio + '**' if row['met']['v2'] else ratio})"


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
    return " / ".join(f"**{us[op]:.1f}**" if op == fastest else f"{us[op]:.1f}" for op in ("v1", "v2"))


def _is_crossover(record: Record) -> bool:
    return record["name"] == record_name(record["shape"], is_crossover=True)


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


def decode_markdown(record: Record) -> str:
    """A row per batch: the floor, both ops with their ratios to it, and what others needed."""
    ops = list(record["rows"][0]["us"])
    peers = list(PEER_NAMES) if record["peers"] else []
    titles = ["sequences", "context", "heads", "bytes", "floor"]
    titles += [title for op in ops for title in (op, f"{op} / floor")]
    titles += [PEER_NAMES[name] for name in peers]
    rows = [[*_batch(row), *_times(row, ops), *_peer_cells(row, peers)] for row in record["rows"]]
    return "\n".join([*_introduction(record), "", *table_lines(titles, 3, rows), "", *_notes(record)])


def _introduction(record: Record) -> list[str]:
    shape = record["shape"]
    purpose = " v1 against v2 over the context, for batches of several sizes." if _is_crossover(record) else ""
    return [
        f"{origin(record)}: {shape['dtype']}, {shape['layout']} cache {shape['kv_cache_dtype']}, heads of "
        f"{shape['head_size']}, blocks of {shape['block_size']}, {record['method']}.{purpose}",
        "",
        "us, in brackets TB/s. The floor reads the same blocks through a table and computes nothing; a ratio to "
        "it has its target in brackets, and is bold where it is met.",
    ]


def _batch(row: Record) -> list[str]:
    context = f"{row['context']:,}" + (" on average" if row["is_ragged"] else "")
    return [f"{row['num_seqs']}", context, f"{row['num_heads']}/{row['num_kv_heads']}", size(row["nbytes"])]


def _times(row: Record, ops: list[str]) -> list[str]:
    cells = [f"{row['floor_us']:.1f} ({row['floor_tb_per_s']:.2f})"]
    for op in ops:
        cells += [f"{row['us'][op]:.1f} ({row['tb_per_s'][op]:.2f})", _ratio(row, op)]
    return cells


def _ratio(row: Record, op: str) -> str:
    ratio, target = f"{row['ratio'][op]:.3f}", row["target_ratio"][op]
    if target is None:
        return ratio
    return f"**{ratio}** ({target:.3f})" if row["met"][op] else f"{ratio} ({target:.3f})"


def _peer_cells(row: Record, peers: list[str]) -> list[str]:
    us = row["peers"]["us"] if row["peers"] else {}
    return [f"{us[name]:.1f}" if name in us else "" for name in peers]


def _notes(record: Record) -> list[str]:
    read = record["ceilings"]["read"]
    lines = [
        f"Measured in the same run, in us: empty kernel {record['ceilings']['empty_us']:.2f}; best read "
        f"{size(read['nbytes'])} in {read['us']:.1f} ({read['nbytes'] / read['us'] / 1e6:.2f} TB/s); the host's time "
        f"for an eager call from CuPy arrays, which should be at most {HOST_US:.0f}, {_host_costs(record)}."
    ]
    if record["peers"]:
        source = record["peers"]
        versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
        lines += ["", f"Others as recorded on {source['date']}, {source['card']}: {source['method']}; {versions}."]
    return lines


def _host_costs(record: Record) -> str:
    return "; ".join(
        f"{op} " + ", ".join(f"{us[name]:.1f} {text}" for name, text in CALLS.items())
        for op, us in record["host_us"].items()
    )
