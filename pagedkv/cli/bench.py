"""``pagedkv bench``: all benchmarks. Each checks before it times and measures its ceilings in the same run. With
``--results`` it leaves a record in ``<folder>/<card>/``, from which tables are generated."""

from pathlib import Path

import click

from pagedkv.dtypes import BY_NAME

from . import report
from .bench_options import DEFAULT_RESULTS, check_gpu, deliver, progress, record_options
from .decode_command import decode
from .gather_command import gather
from .mixed_command import mixed
from .options import POSITIVE
from .pool_command import pool
from .prefill_command import prefill


@click.group()
def bench() -> None:
    """Measure the kernels against what the card allows."""


@bench.command()
@click.option("--tokens", type=POSITIVE, metavar="N", multiple=True, help="Repeatable.  [default: 1 to 65,536]")
@click.option("--kv-heads", type=POSITIVE, metavar="N", default=8, show_default=True, help="Key and value heads.")
@click.option("--head-size", type=POSITIVE, metavar="N", default=128, show_default=True, help="Features of a head.")
@click.option("--block-size", type=POSITIVE, metavar="N", default=16, show_default=True, help="Slots of a block.")
@click.option("--dtype", type=click.Choice(list(BY_NAME)), default="bfloat16", show_default=True, help="Of new tokens.")
@record_options("write", "records go")
def write(results: Path | None, as_json: bool, tokens: tuple[int, ...], dtype: str, **sizes: int) -> None:
    """Time reshape_and_cache and reshape_and_cache_flash.

    Every layout, plain and fp8, few tokens against an empty kernel and many against a plain copy of the same bytes.
    A write whose bytes are not right is not timed, and ends the run with exit code 1.
    """
    check_gpu("write")
    from .bench_write import TOKENS, WriteBench

    record = WriteBench(dtype=BY_NAME[dtype], **sizes).run(tokens or TOKENS, progress)
    deliver(record, results, as_json)


for command in (decode, prefill, mixed, pool, gather):
    bench.add_command(command)


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
        click.echo("\n\n".join(filter(None, sections.values())))
        return
    readme.write_text(report.filled(readme.read_text(encoding="utf-8"), sections), encoding="utf-8")
    click.echo(f"{readme}: {', '.join(sections)}")
