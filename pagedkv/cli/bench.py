"""``pagedkv bench``: all benchmarks. Each checks before it times and measures its ceilings in the same run. With
``--results`` it leaves a record in ``<folder>/<card>/``, from which tables are generated."""

import json
from pathlib import Path
from typing import Any

import click

from pagedkv.dtypes import BY_NAME, KV_CACHE_DTYPES
from pagedkv.layout import FLASH_LAYOUTS

from . import decode_plot, machine, report
from .decode_record import completed
from .decode_rows import CROSSOVER, ROWS_BY_NAME, DecodeRow, record_name
from .errors import Mistake
from .execute import has_kernel
from .markdown import Record
from .options import POSITIVE

DEFAULT_RESULTS = Path("results")


@click.group()
def bench() -> None:
    """Measure the kernels against what the card allows."""


@bench.command()
@click.option("--tokens", type=POSITIVE, metavar="N", multiple=True, help="Repeatable.  [default: 1 to 65,536]")
@click.option("--kv-heads", type=POSITIVE, metavar="N", default=8, show_default=True, help="Key and value heads.")
@click.option("--head-size", type=POSITIVE, metavar="N", default=128, show_default=True, help="Features of a head.")
@click.option("--block-size", type=POSITIVE, metavar="N", default=16, show_default=True, help="Slots of a block.")
@click.option("--dtype", type=click.Choice(list(BY_NAME)), default="bfloat16", show_default=True, help="Of new tokens.")
@click.option("--repeats", type=POSITIVE, metavar="N", default=30, show_default=True, help="Replays per figure.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Where records go, as <card>/write.json; none are kept without it.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of its table.")
def write(results: Path | None, as_json: bool, tokens: tuple[int, ...], dtype: str, **sizes: int) -> None:
    """Time reshape_and_cache and reshape_and_cache_flash.

    Every layout, plain and fp8, few tokens against an empty kernel and many against a plain copy of the same bytes.
    A write whose bytes are not right is not timed, and ends the run with exit code 1.
    """
    _check_gpu("write")
    from .bench_write import TOKENS, WriteBench

    record = WriteBench(dtype=BY_NAME[dtype], **sizes).run(tokens or TOKENS, _progress)
    _deliver(record, results, as_json)


@bench.command()
@click.option("--row", "names", type=click.Choice(list(ROWS_BY_NAME)), multiple=True, metavar="NAME",
              help=f"Repeatable; of {', '.join(ROWS_BY_NAME)}.  [default: all]")  # fmt: skip
@click.option("--crossover", is_flag=True, help="Measure where v1 and v2 cross over the context instead.")
@click.option("--seqs", type=POSITIVE, metavar="N", help="Sequences of a batch of your own, with --context.")
@click.option("--context", type=POSITIVE, metavar="N", help="Tokens of each of its sequences.")
@click.option("--heads", type=POSITIVE, metavar="N", default=32, show_default=True, help="Its query heads.")
@click.option("--kv-heads", type=POSITIVE, metavar="N", default=8, show_default=True, help="Its key and value heads.")
@click.option("--op", "ops", type=click.Choice(["v1", "v2"]), multiple=True, help="Repeatable.  [default: both]")
@click.option("--layout", type=click.Choice(["packed", *FLASH_LAYOUTS]), default="packed", show_default=True,
              help="Of the cache.")  # fmt: skip
@click.option("--head-size", type=POSITIVE, metavar="N", default=128, show_default=True, help="Features of a head.")
@click.option("--block-size", type=POSITIVE, metavar="N", default=16, show_default=True, help="Slots of a block.")
@click.option("--dtype", type=click.Choice(list(BY_NAME)), default="bfloat16", show_default=True, help="Of queries.")
@click.option("--kv-cache-dtype", type=click.Choice(list(KV_CACHE_DTYPES)), default="auto", show_default=True,
              help="Format of the cache; auto: that of --dtype.")  # fmt: skip
@click.option("--repeats", type=POSITIVE, metavar="N", default=30, show_default=True, help="Replays per figure.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Where a record of all rows goes, as <card>/decode.json; none is kept without it.")  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Draw the ratios to the floor into a PNG file.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of its table.")
def decode(results: Path | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Time paged_attention_v1 and paged_attention_v2.

    Each beside a kernel that only reads the same blocks through a table. A result that is not right is not timed, and
    ends the run with exit code 1.
    """
    if results is not None and (options["names"] or options["seqs"] or options["ops"]):
        raise Mistake("--results keeps records of all rows and ops: leave out --row, --seqs and --op, or take --json")
    is_crossover = options["crossover"]
    rows = _decode_rows(options)
    if plot is not None:
        decode_plot.check_matplotlib()
    _check_gpu("decode")
    _check_layout(options.pop("layout"))
    folder = results or DEFAULT_RESULTS  # where the times of others are, kept or not
    record = _decode_record(rows, folder, **options)
    record["name"] = record_name(record["shape"], is_crossover)
    _deliver(record, results, as_json)
    if plot is not None:
        decode_plot.plot(record, plot)
        click.echo(f"plot: {plot}", err=True)


def _decode_rows(options: dict[str, Any]) -> list[DecodeRow]:
    """Takes the batches to measure out of all options."""
    names, crossover = options.pop("names"), options.pop("crossover")
    seqs, context, heads, kv_heads = sizes = [options.pop(name) for name in ("seqs", "context", "heads", "kv_heads")]
    if crossover:
        if names or seqs or context:
            raise Mistake("--crossover has rows of its own: leave out --row, --seqs and --context")
        return list(CROSSOVER)
    if seqs is None and context is None:
        return [ROWS_BY_NAME[name] for name in names or ROWS_BY_NAME]
    if names:
        raise Mistake("--row and --seqs with --context: expected one or the other")
    if seqs is None or context is None:
        raise Mistake("a batch of your own needs both --seqs and --context")
    if heads % kv_heads:
        raise Mistake(f"--heads {heads} is no multiple of --kv-heads {kv_heads}")
    return [DecodeRow(*sizes)]


def _check_layout(layout: str) -> None:
    if layout == "packed":
        return
    missing = not has_kernel("flash_attn_varlen_func", "cuda")
    why = "flash_attn_varlen_func has no kernel yet" if missing else "bench decode reads packed caches only so far"
    raise NotImplementedError(f"--layout {layout}: {why}")


def _decode_record(
    rows: list[DecodeRow], results: Path, ops: tuple[str, ...], dtype: str, repeats: int, **shape: Any
) -> Record:
    import cupy

    from .bench_decode import OPS, DecodeBench
    from .environment import environment
    from .timing import Stopwatch

    measuring = DecodeBench(cupy, Stopwatch(repeats), ops or OPS, BY_NAME[dtype], **shape)
    record = environment() | measuring.run(rows, _progress)
    plain_name = record_name({**record["shape"], "kv_cache_dtype": "auto"})
    plain, peers = (report.load(results, record["card"], name) for name in (plain_name, report.PEERS))
    return completed(record, plain, peers)


def _check_gpu(name: str) -> None:
    if machine.why_no_cuda() is not None:
        raise ValueError(f"bench {name} needs a GPU: {machine.why_no_cuda()}; see pagedkv info")


def _progress(line: str) -> None:
    click.echo(line, err=True)


def _deliver(record: Record, results: Path | None, as_json: bool) -> None:
    if results is not None:
        click.echo(f"record: {report.save(record, results)}", err=True)
    click.echo(json.dumps(record, indent=1) if as_json else report.MARKDOWN[record["bench"]](record))


@bench.command("report")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              default=DEFAULT_RESULTS, show_default=True, help="Folder of records.")  # fmt: skip
@click.option("--readme", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Put the tables between the markers of this file instead of printing them.")  # fmt: skip
def report_command(results: Path, readme: Path | None) -> None:
    """Generate the Markdown tables from the records."""
    if not report.records(results):
        raise ValueError(f"no records in {results}: pagedkv bench write --results {results} leaves one")
    sections = report.sections(results)
    if readme is None:
        click.echo("\n\n".join(sections.values()))
        return
    readme.write_text(report.filled(readme.read_text(encoding="utf-8"), sections), encoding="utf-8")
    click.echo(f"{readme}: {', '.join(sections)}")
