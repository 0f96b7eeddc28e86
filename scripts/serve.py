"""Many prompts through SmolLM2-135M-Instruct at once, in a paged cache that is too small for all of them.

Continuous batching: a request is admitted when the pool has blocks for its prompt, less those that still hold the
beginning of it; a step computes whatever is pending, chunks of prompts beside the next tokens of answers; a finished
request gives its blocks to the next. When blocks run out, the newest request goes back to the queue. Texts are printed
as they grow, in the order of the prompts. `--check` compares each with the text of the same prompt alone.

    python scripts/serve.py
    python scripts/serve.py --prompts-file questions.txt --num-blocks 100 --check
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

try:
    import click
    import generate
    from paged_model import PagedModel, Sequence, blocks_for, check_lengths, make_cache
    from progress import Progress
    from scheduler import Scheduler
    from status_line import StatusLine
    from text_stream import OrderedTexts, Wrapper

    from pagedkv import PagedKVCache, use_backend
except ModuleNotFoundError as error:
    raise SystemExit(f"Error: {error.name} is not installed: pip install 'pagedkv[model]'") from None

import smollm2

GUIDE = (
    "You are the guide of a small museum of science. Visitors of every age ask you short questions. Answer in one or "
    "two plain sentences that a child can follow, without lists and without formulas. The question: "
)
DEFAULT_PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    *(
        GUIDE + question
        for question in (
            "Why is the sky blue?",
            "What is inside the Sun?",
            "Why do magnets attract iron?",
            "How do birds fly?",
            "What is an atom?",
            "Why is sea water salty?",
            "How old is the Earth?",
            "Why does ice float?",
        )
    ),
    "What is a page table? Answer in one sentence.",
    "Name three colours.",
    "Write one sentence about a lighthouse.",
    "What is 2 + 2?",
    "Say hello in French.",
)


def serve(paged_model: PagedModel, scheduler: Scheduler) -> Iterator[tuple[Sequence, int]]:
    """Runs the scheduler's sequences to their ends; yields each with every token of it, as it is made."""
    while not scheduler.is_done:
        seqs, batch = scheduler.schedule()
        grown = paged_model.compute(seqs, batch)
        scheduler.retire(grown)
        for seq in grown:
            yield seq, seq.token_ids[-1]


def print_texts(
    paged_model: PagedModel,
    scheduler: Scheduler,
    prompts: list[str],
    decode: Callable[[list[int]], str],
    status: StatusLine,
) -> Progress:
    """Serves what waits, prints the texts as they grow, and says how far it is."""
    numbers = {seq: i for i, seq in enumerate(scheduler.waiting)}
    headings = [f"\nprompt: {shortened(prompt)}\ntext:   " for prompt in prompts]
    texts = OrderedTexts(headings, decode, writer())
    progress = Progress(scheduler, len(prompts))
    status.show(progress.line())
    for seq, token_id in serve(paged_model, scheduler):
        progress.num_tokens += 1
        texts.push(numbers[seq], token_id, is_last=seq.is_finished)
        status.show(progress.line())
    return progress


def writer() -> Callable[[str], None]:
    """Writes to stdout, in lines that fit where that is a terminal."""
    write = partial(click.echo, nl=False)
    return Wrapper(write, get_terminal_size().columns - 1) if sys.stdout.isatty() else write


def shortened(prompt: str) -> str:
    """In one line, without the middle of a long one: of prompts with a common beginning the ends differ."""
    line = " ".join(prompt.split())
    return line if len(line) <= 90 else f"{line[:45].rsplit(' ', 1)[0]} ... {line[-40:].split(' ', 1)[-1]}"


def check(model: smollm2.SmolLM2, seqs: list[Sequence], status: StatusLine, *, dtype: str, **options: Any) -> bool:
    """Says how many texts equal those of their prompts alone, each in a pool of its own. In float32 all have to; in 16
    bits a near tie may go either way, since the rest of the model rounds differently in batches of other sizes."""
    different = []
    for i, seq in enumerate(seqs):
        status.show(f"check: {i}/{len(seqs)} prompts alone")
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        limits = {"max_new_tokens": seq.max_new_tokens, "dtype": dtype}
        (alone,) = generate.generate(model, [prompt], **limits, **options)
        if alone.generated != seq.generated:
            different.append(str(i + 1))
    others = f"; different: {', '.join(different)}" if different else ""
    click.echo(f"check:  {len(seqs) - len(different)} of {len(seqs)} texts equal those of their prompts alone{others}")
    return dtype != "float32" or not different


def read_prompts(prompts: tuple[str, ...], prompts_file: Path | None) -> list[str]:
    """Those given, those of the file, or the default ones."""
    if prompts_file is None:
        return list(prompts or DEFAULT_PROMPTS)
    try:
        lines = [line.strip() for line in prompts_file.read_text("utf-8").splitlines()]
    except UnicodeDecodeError:
        raise ValueError(f"prompts_file: expected UTF-8 text, got other bytes in {prompts_file}") from None
    prompts = [*prompts, *(line for line in lines if line)]
    if not prompts:
        raise ValueError(f"prompts_file: expected a prompt in each line, got none in {prompts_file}")
    return prompts


def choose_num_blocks(seqs: list[Sequence], block_size: int) -> int:
    """A quarter of the blocks that all could fill at once without sharing, but enough for each alone."""
    needs = blocks_of_each(seqs, block_size)
    return max(sum(needs) // 4, *needs)


def blocks_of_each(seqs: list[Sequence], block_size: int) -> list[int]:
    return [blocks_for(seq.max_cached_len, block_size) for seq in seqs]


def describe_pool(cache: PagedKVCache, seqs: list[Sequence]) -> str:
    of_all = sum(blocks_of_each(seqs, cache.block_size))
    return (
        f"pool:   {cache.num_blocks} blocks of {cache.block_size} tokens, {cache.num_blocks / of_all:.0%} of the "
        f"{of_all} that all {len(seqs)} requests could fill at once"
    )


def make_requests(
    model: smollm2.SmolLM2, tokenizer: smollm2.Tokenizer, prompts: list[str], max_new_tokens: int
) -> list[Sequence]:
    limits = {"max_new_tokens": max_new_tokens, "stop_token_id": model.config.eos_token_id}
    seqs = [Sequence.from_prompt(tokenizer.encode_chat(prompt), **limits) for prompt in prompts]
    check_lengths(seqs, model.config)
    return seqs


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--prompt", "prompts", multiple=True, help="A user message; may be given several times.")
@click.option(
    "--prompts-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with a user message in each line.",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=48, show_default=True, help="Of each answer.")
@click.option(
    "--num-blocks",
    type=click.IntRange(min=1),
    help="Of the pool.  [default: a quarter of what all requests would need at once, but enough for the largest]",
)
@click.option("--max-seqs", type=click.IntRange(min=1), default=8, show_default=True, help="That run at a time.")
@click.option("--max-batch-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Of a step.")
@generate.block_size_option
@generate.layout_option
@generate.dtype_option
@generate.backend_option
@click.option("--check", "check_alone", is_flag=True,
              help="Compare with each prompt alone; exit 1 if a text differs in float32.")  # fmt: skip
def main(
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    num_blocks: int | None,
    max_seqs: int,
    max_batch_tokens: int,
    max_new_tokens: int,
    check_alone: bool,
    **cache_options: Any,
) -> None:
    """Serve many prompts with SmolLM2-135M-Instruct through a paged KV cache that is too small for all at once."""
    try:
        with StatusLine(sys.stderr) as status, use_backend(cache_options["backend"]):
            prompts = read_prompts(prompts, prompts_file)
            status.show("loading the model")
            model, tokenizer = generate.load_model(cache_options["backend"])
            seqs = make_requests(model, tokenizer, prompts, max_new_tokens)
            num_blocks = num_blocks or choose_num_blocks(seqs, cache_options["block_size"])
            with make_cache(model.config, num_blocks, max_seqs=max_seqs, **cache_options) as cache:
                scheduler = Scheduler(cache, max_batch_tokens=max_batch_tokens)
                scheduler.submit(seqs)
                click.echo(describe_pool(cache, seqs))
                progress = print_texts(PagedModel(model, cache), scheduler, prompts, tokenizer.decode, status)
                click.echo(f"\n{progress.summary()} ({cache_options['backend']})")
            is_right = not check_alone or check(model, seqs, status, **cache_options)
    except (ValueError, TypeError, NotImplementedError, MemoryError) as error:
        raise click.ClickException(str(error)) from None
    if not is_right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
