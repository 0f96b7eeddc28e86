"""``pagedkv bench``: all benchmarks. Each checks before it times and measures its ceilings in the same run. With
``--results`` it leaves a record in ``<folder>/<card>/``, from which tables are generated."""

import json
from pathlib import Path

import click

from pagedkv.dtypes import BY_NAME

from . import machine, report

POSITIVE = click.IntRange(min=1)


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
    if machine.why_no_cuda() is not None:
        raise ValueError(f"bench write needs a GPU: {machine.why_no_cuda()}; see pagedkv info")
    from .bench_write import TOKENS, WriteBench

    record = WriteBench(dtype=BY_NAME[dtype], **sizes).run(
        tokens or TOKENS, progress=lambda line: click.echo(line, err=True)
    )
    if results is not None:
        path = report.save(record, results)
        click.echo(f"record: {path}", err=True)
    click.echo(json.dumps(record, indent=1) if as_json else report.write_markdown(record))


@bench.command("report")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              default=Path("results"), show_default=True, help="Folder of records.")  # fmt: skip
@click.option("--readme", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Put the tables between the markers of this file instead of printing them.")  # fmt: skip
def report_command(results: Path, readme: Path | None) -> None:
    """Generate the Markdown tables from the records."""
    sections = report.sections(results)
    if not sections:
        raise ValueError(f"no records in {results}: pagedkv bench write --results {results} leaves one")
    if readme is None:
        click.echo("\n\n".join(sections.values()))
        return
    readme.write_text(report.filled(readme.read_text(encoding="utf-8"), sections), encoding="utf-8")
    click.echo(f"{readme}: {', '.join(sections)}")
