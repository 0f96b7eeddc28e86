"""Options that several commands share: what the random inputs of an op are like."""

from collections.abc import Callable
from typing import Any

import click

from pagedkv.dtypes import BY_NAME, KV_CACHE_DTYPES
from pagedkv.layout import FLASH_LAYOUTS

POSITIVE = click.IntRange(min=1)


def input_options(layouts: tuple[str, ...] = FLASH_LAYOUTS, layout_help: str = "") -> Callable[[Any], Any]:
    """The options behind the fields of ``Sizes``, but for how many sequences there are and how long they get."""
    return all_of(
        click.option("--heads", type=POSITIVE, metavar="N", default=32, show_default=True, help="Query heads."),
        click.option(
            "--kv-heads", type=POSITIVE, metavar="N", default=8, show_default=True, help="Key and value heads."
        ),
        click.option(
            "--head-size", type=POSITIVE, metavar="N", default=128, show_default=True, help="Features of a head."
        ),
        click.option(
            "--block-size", type=POSITIVE, metavar="N", default=16, show_default=True, help="Slots of a block."
        ),
        click.option(
            "--dtype", type=click.Choice(list(BY_NAME)), default="float16", show_default=True, help="Of new tokens."
        ),
        click.option(
            "--kv-cache-dtype",
            type=click.Choice(list(KV_CACHE_DTYPES)),
            default="auto",
            show_default=True,
            help="Format of the cache; auto: that of --dtype.",
        ),
        click.option("--layout", type=click.Choice(layouts), default="NHD", show_default=True, help=layout_help),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            metavar="N",
            default=0,
            show_default=True,
            help="Of the random inputs.",
        ),
    )


def all_of(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator; help lists them in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
