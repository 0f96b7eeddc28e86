"""Greedy text from SmolLM2-135M-Instruct, its keys and values held in a paged cache.

All prompts run as one batch: a first step writes and reads every prompt token, each later step one token per sequence.
A `pagedkv.PagedKVCache` finds the blocks, scattered over its pool. In every layer its `write` puts the step's keys and
values into them, and `attend` reads each sequence back through its block table. `--check` compares with a dense run.
With `--backend cuda` queries, keys, values and the cache are CuPy's, on a GPU; the rest of the model stays in NumPy.

    python scripts/generate.py --prompt "Why is the sky blue?" --check
"""

import time
from typing import Any

try:
    import click
    import numpy as np
    from paged_model import PagedModel, Sequence, blocks_for, check_lengths, make_cache

    from pagedkv import PagedKVCache, use_backend
    from pagedkv.cli.execute import check_backend
except ModuleNotFoundError as error:
    raise SystemExit(f"Error: {error.name} is not installed: pip install 'pagedkv[model]'") from None

import smollm2

DEFAULT_PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Why is the sky blue?",
    "What is a page table? Answer in one sentence.",
)
DTYPES = ("float32", "float16", "bfloat16")
CLEAR_LEAD = 0.1  # of a dense run's likeliest token over the next, in logits, that rounding to 16 bits leaves


def generate(
    model: smollm2.SmolLM2,
    prompts: list[list[int]],
    *,
    max_new_tokens: int = 64,
    ignore_eos: bool = False,
    **cache_options: Any,
) -> list[Sequence]:
    """Greedy continuations of tokenised prompts, all in one batch until each ends or has `max_new_tokens`."""
    stop_token_id = None if ignore_eos else model.config.eos_token_id
    limits = {"max_new_tokens": max_new_tokens, "stop_token_id": stop_token_id}
    seqs = [Sequence.from_prompt(prompt, **limits) for prompt in prompts]
    with cache_for(seqs, model.config, **cache_options) as cache:
        for seq in seqs:
            seq.number = cache.add(seq.token_ids)
        run_to_end(PagedModel(model, cache), seqs)
        for seq in seqs:
            seq.block_table = cache.table.blocks(seq.number).tolist()
    return seqs


def run_to_end(paged_model: PagedModel, seqs: list[Sequence]) -> None:
    """The first step computes all prompts, each later one a token of every sequence that is not finished."""
    while running := [seq for seq in seqs if not seq.is_finished]:
        batch = paged_model.cache.step([seq.number for seq in running])
        paged_model.compute(running, batch)


def cache_for(seqs: list[Sequence], config: smollm2.Config, *, block_size: int = 16, **options: Any) -> PagedKVCache:
    """A pool twice as large as the sequences can become, so that their blocks lie among unused ones."""
    check_lengths(seqs, config)
    num_blocks = 2 * sum(blocks_for(seq.max_len, block_size) for seq in seqs)
    return make_cache(config, num_blocks, max_seqs=len(seqs), block_size=block_size, **options)


def dense_logits(model: smollm2.SmolLM2, seq: Sequence) -> np.ndarray:
    """What a run without a cache makes of the prompt and of each generated token but the last: [num_generated, vocab].

    One forward over the finished sequence: attention is causal, so its rows are those of the token-by-token run for
    as long as both runs agree, and the first difference is found either way.
    """
    token_ids = np.array(seq.token_ids[:-1])
    hidden = model.forward(token_ids, np.arange(len(token_ids)), smollm2.dense_attention)
    return model.logits(hidden[seq.num_prompt_tokens - 1 :])


def compare(model: smollm2.SmolLM2, seq: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Of each generated token whether the dense run picks it as well, and by how much its pick leads the next."""
    logits = dense_logits(model, seq)
    second, first = np.partition(logits, -2)[:, -2:].T
    return logits.argmax(axis=-1) == seq.generated, first - second


def show(prompt: str, text: str, seq: Sequence) -> None:
    click.echo(f"\nprompt: {prompt}\ntext:   {text.strip()}")
    num_cached = len(seq.token_ids) - 1  # the last token was never computed
    click.echo(f"blocks: {len(seq.block_table)} for {num_cached} tokens, block table {seq.block_table}")


def check(model: smollm2.SmolLM2, seqs: list[Sequence], *, dtype: str, kv_cache_dtype: str, **_: Any) -> bool:
    """Says how many tokens equal the dense run's, and whether those do that have to: in float32 all, in 16 bits those
    that are picked clearly, in an fp8 cache none."""
    equal, lead = map(np.concatenate, zip(*(compare(model, seq) for seq in seqs), strict=True))
    click.echo(f"check:  {equal.sum()} of {equal.size} tokens equal those of a dense run without a cache")
    if dtype == "float32":
        return bool(equal.all())
    clear = lead > CLEAR_LEAD
    click.echo(f"        {equal[clear].sum()} of the {clear.sum()} that it picks by more than {CLEAR_LEAD}")
    return kv_cache_dtype != "auto" or bool(equal[clear].all())


def load_model(backend: str) -> tuple[smollm2.SmolLM2, smollm2.Tokenizer]:
    """The model, if the backend it is meant for can run here."""
    try:
        check_backend(backend)
        return smollm2.load()
    except (ValueError, smollm2.MissingPackageError) as error:
        raise click.ClickException(str(error)) from None


# Options that scripts/serve.py has as well.
block_size_option = click.option(
    "--block-size", type=click.IntRange(1, 1024), default=16, show_default=True, help="Tokens per block."
)
layout_option = click.option("--layout", type=click.Choice(["NHD", "HND"]), default="NHD", show_default=True)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Of queries, keys and values; the rest of the model computes in float32.",
)
backend_option = click.option(
    "--backend",
    type=click.Choice(["numpy", "ptx", "cuda"]),
    default="numpy",
    show_default=True,
    help="cuda needs a GPU; ptx interprets the kernels, some ten seconds a token.",
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--prompt", "prompts", multiple=True, help="A user message; may be given several times.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of each answer.")
@block_size_option
@layout_option
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]),
    default="auto",
    show_default=True,
    help="How keys and values are stored; auto keeps --dtype.",
)
@dtype_option
@backend_option
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Shuffles the free blocks.")
@click.option("--check", "check_dense", is_flag=True,
              help="Compare with a dense run; exit 1 if a token differs, with 16 bits a clear one.")  # fmt: skip
def main(
    prompts: tuple[str, ...], max_new_tokens: int, backend: str, check_dense: bool, **cache_options: str | int
) -> None:
    """Generate greedy text with SmolLM2-135M-Instruct through a paged KV cache."""
    if cache_options["kv_cache_dtype"] != "auto" and cache_options["dtype"] == "float32":
        raise click.ClickException("an fp8 cache needs 16-bit queries: add --dtype float16 or --dtype bfloat16")
    model, tokenizer = load_model(backend)
    prompts = prompts or DEFAULT_PROMPTS
    start = time.perf_counter()
    try:
        prompt_ids = [tokenizer.encode_chat(prompt) for prompt in prompts]
        with use_backend(backend):
            seqs = generate(model, prompt_ids, max_new_tokens=max_new_tokens, backend=backend, **cache_options)
    except (ValueError, TypeError, NotImplementedError, MemoryError) as error:
        raise click.ClickException(str(error)) from None
    seconds = time.perf_counter() - start
    for prompt, seq in zip(prompts, seqs, strict=True):
        show(prompt, tokenizer.decode(seq.generated), seq)
    num_tokens = sum(len(seq.generated) for seq in seqs)
    click.echo(f"\nspeed:  {num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s ({backend})")
    if check_dense and not check(model, seqs, **cache_options):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
