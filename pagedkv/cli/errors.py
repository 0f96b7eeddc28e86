"""Errors of the command line: one line that says what to do, never a traceback."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import click

from pagedkv.ptx.faults import Fault

# What the package raises for what it cannot do; anything else is a fault of its own and keeps its traceback.
MISTAKES = (ValueError, TypeError, NotImplementedError, IndexError, ImportError, MemoryError, Fault)
# A group called without a command: click 8.2 prints its help by way of an error, 8.1 without one.
HELP_INSTEAD = getattr(click.exceptions, "NoArgsIsHelpError", ())


class Mistake(click.ClickException):
    """A wrong command line: one line, without the usage that click prints before it."""

    exit_code = 2


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns what goes wrong inside into an error of one line."""
    try:
        yield
    except HELP_INSTEAD:
        raise
    except click.UsageError as error:
        raise Mistake(error.format_message()) from error
    except MISTAKES as error:
        raise click.ClickException(first_line(error)) from error


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The error for a name that is none of the known ones."""
    known = list(known)
    near = sorted(get_close_matches(name, known, n=2), key=known.index)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(known)}"
    return f"no {kind} {name!r}: {hint}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
