"""``pagedkv profile``: what a kernel asks of the hardware, source line by source line, without a GPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import ParameterSource

import pagedkv
from pagedkv import ptx_ops
from pagedkv.dtypes import BY_NAME
from pagedkv.layout import FLASH_LAYOUTS

from . import own_kernel
from .cases import OPS, Case
from .errors import Mistake, unknown
from .execute import check_backend, has_kernel
from .inputs import Sizes, aligned
from .options import POSITIVE, input_options
from .profile_record import Record, launch_record, package_source
from .profile_table import LEGEND, comparison_text, launch_text

SHORT_NAMES = {"v1": "paged_attention_v1", "v2": "paged_attention_v2"}
FLASH_OPS = (
    *("reshape_and_cache_flash", "flash_attn_varlen_func", "gather_cache", "convert_layout"),
    *("copy_blocks", "swap_blocks"),
)
WRITES = {"packed": "reshape_and_cache", "NHD": "reshape_and_cache_flash", "HND": "reshape_and_cache_flash"}

HELP = """Count what a kernel asks of the hardware, source line by source line. Needs no GPU.

TARGET is an op, `write` for the one that writes --layout, `v1` or `v2` for that paged_attention, or a file of your own:

\b
  pagedkv profile write --compare layout=NHD,HND
  pagedkv profile v2 --compare kv-cache-dtype=auto,fp8
  pagedkv profile mine.cu --kernel 'scale<float>' --grid 4 --block 128 \\
      --arg 'float32[1024]' --arg 'float32[1024]' --arg int32=1024

The kernel runs in the PTX interpreter, which also reports accesses out of bounds, misaligned ones, and races on shared
memory and between CTAs.
"""


@click.command(help=HELP)
@click.argument("target", metavar="TARGET")
@click.option("--seqs", type=POSITIVE, metavar="N", default=4, show_default=True, help="Sequences.")
@click.option("--context", type=POSITIVE, metavar="N", default=64, show_default=True, help="Tokens of the longest one.")
@input_options(layouts=(*FLASH_LAYOUTS, "packed"), layout_help="Blocks of the cache.")
@click.option("--compare", metavar="NAME=A,B", help="Two values of one of the options above, and where they differ.")
@own_kernel.options
@click.option("--json", "as_json", is_flag=True, help="Print all counts as JSON.")
def profile(target: str, compare: str | None, as_json: bool, **options: Any) -> None:
    """Runs a launch in the interpreter and prints what it counted."""
    check_backend("ptx")
    own = own_kernel.taken(options)
    if target.endswith(".cu"):
        if compare is not None:
            raise Mistake("--compare: expected an op, got a file")
        settings, runs = ("",), [[own_kernel.profile(Path(target), **own)]]
    else:
        own_kernel.reject(own, target)
        settings, choices = _settings(compare, options)
        runs = [_profile_op(target, choice) for choice in choices]
    if as_json:
        click.echo(json.dumps(dict(zip(settings, runs, strict=True)) if compare else runs[0], indent=1))
    elif compare:
        click.echo("\n\n".join(comparison_text(settings, pair) for pair in zip(*runs, strict=True)))
        click.echo(f"\n{LEGEND}")
    else:
        click.echo("\n\n".join([*map(launch_text, runs[0]), LEGEND]))


def _settings(compare: str | None, options: dict[str, Any]) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """The values that are compared, and the options with each of them."""
    if compare is None:
        return ("",), [options]
    name, _, values = compare.partition("=")
    name, pair = name.replace("-", "_"), tuple(value.strip() for value in values.split(","))
    if name not in options:
        raise Mistake(unknown("option", name.replace("_", "-"), [each.replace("_", "-") for each in options]))
    if len(pair) != 2:
        raise Mistake(f"--compare: expected {name.replace('_', '-')}=A,B, got {compare!r}")
    (parameter,) = [each for each in click.get_current_context().command.params if each.name == name]
    context = click.get_current_context()
    return pair, [{**options, name: parameter.type.convert(value, parameter, context)} for value in pair]


def _profile_op(target: str, options: dict[str, Any]) -> list[Record]:
    op = WRITES[options["layout"]] if target == "write" else SHORT_NAMES.get(target, target)
    if op not in OPS:
        raise Mistake(unknown("op", op, ["write", *SHORT_NAMES, *OPS]))
    if not has_kernel(op, "ptx"):
        raise NotImplementedError(f"{op} has no kernel yet")
    _check_layout(op, options["layout"])
    sizes = Sizes(**options | {"dtype": BY_NAME[options["dtype"]]})
    sizes.check()
    case = OPS[op](op, sizes)
    case = replace(
        case,
        arguments={
            name: aligned(value) if isinstance(value, np.ndarray) else value for name, value in case.arguments.items()
        },
    )
    with pagedkv.use_backend("ptx"), ptx_ops.profiled() as launches:
        getattr(pagedkv, op)(**case.arguments)
    _check(case)
    return [
        launch_record(
            str(launch.planned.instance), launch.planned.grid, launch.planned.threads, launch.counters, package_source
        )
        for launch in launches
    ]


def _check_layout(op: str, layout: str) -> None:
    """Mistake if a layout was asked for that the op does not have."""
    has = FLASH_LAYOUTS if op in FLASH_OPS else ("packed",)
    context = click.get_current_context()
    asked = context.get_parameter_source("layout") is not ParameterSource.DEFAULT
    asked |= (context.params["compare"] or "").startswith("layout")
    if asked and layout not in has:
        raise Mistake(f"--layout: {op} has {' and '.join(has)}, got {layout}")


def _check(case: Case) -> None:
    """Counts of a wrong result would mean nothing."""
    wrong = [each for each in case.check({name: case.arguments[name] for name in case.outputs}) if not each.ok]
    if wrong:
        raise click.ClickException(f"{case.op} is wrong: {wrong[0].name}: {wrong[0].detail}")
