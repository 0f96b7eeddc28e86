"""``python -m pagedkv``: the command line."""

from .cli.main import main

main(prog_name="python -m pagedkv")
