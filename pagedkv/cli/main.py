"""The command ``pagedkv``. Commands load on use, so that each needs only what it works with."""

from importlib import import_module

import click

import pagedkv

from .errors import Mistake, one_line_errors, unknown

# Name: where the command is, and its line in the help, which is kept here so that ``--help`` imports none of them.
COMMANDS = {
    "info": ("pagedkv.cli.info:info", "What is here, what is missing, and the command that installs it."),
    "run": ("pagedkv.cli.run:run", "Run ops on random inputs and check every result."),
    "check": ("pagedkv.cli.check:check", "Run random cases of ops and compare every byte that they write."),
    "compile": ("pagedkv.cli.compile:compile_command", "Compile the kernels; registers, shared memory and spills."),
    "profile": ("pagedkv.cli.profile:profile", "Count what a kernel asks of the hardware, line by line; needs no GPU."),
    "bench": ("pagedkv.cli.bench:bench", "Measure the kernels against what the card allows."),
}


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Commands(click.Group):
    """A group whose commands are imported when one is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        return getattr(import_module(module), name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise Mistake(unknown("command", args[0], COMMANDS))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def make_context(self, *args: object, **extra: object) -> click.Context:
        with one_line_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> object:
        with one_line_errors():
            return super().invoke(ctx)


@click.group(cls=Commands, invoke_without_command=True, context_settings=SETTINGS)
@click.version_option(pagedkv.__version__, prog_name="pagedkv")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Paged KV cache kernels in CUDA C++, with a NumPy side that runs anywhere.

    Begin with `pagedkv info`, then `pagedkv run`.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


if __name__ == "__main__":
    main(prog_name="pagedkv")
