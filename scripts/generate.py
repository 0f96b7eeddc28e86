"""Greedy text from SmolLM2-135M-Instruct, its keys and values held in a paged cache.

All prompts run as one batch: a first step writes and reads every prompt token, each later step one token per sequence.
In every layer `reshape_and_cache_flash` writes the step's keys and values into blocks scattered over the pool, and
`flash_attn_varlen_func` reads each sequence back through its block table. `--check` compares with a dense run.
With `--backend cuda` queries, keys, values and the cache are CuPy's, on a GPU; the rest of the model stays in NumPy.

    python scripts/generate.py --prompt "Why is the sky blue?" --check
"""

import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

try:
    import click
    import ml_dtypes
    import numpy as np

    from pagedkv import flash_attn_varlen_func, reshape_and_cache_flash, use_backend
    from pagedkv.cli.execute import check_backend
except ModuleNotFoundError as error:
    raise SystemExit(f"Error: {error.name} is not installed: pip install 'pagedkv[model]'") from None

import smollm2

DEFAULT_PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Why is the sky blue?",
    "What is a page table? Answer in one sentence.",
)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CLEAR_LEAD = 0.1  # of a dense run's likeliest token over the next, in logits, that rounding to 16 bits leaves


@dataclass
class Sequence:
    token_ids: list[int]
    num_prompt_tokens: int
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    @classmethod
    def from_prompt(cls, prompt: list[int]) -> "Sequence":
        return cls(token_ids=list(prompt), num_prompt_tokens=len(prompt))

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def positions(self) -> np.ndarray:
        """Positions of the tokens whose keys and values are not in the cache yet."""
        return np.arange(self.num_cached_tokens, len(self.token_ids))


@dataclass(frozen=True)
class Batch:
    """What one step computes: the new tokens of all sequences packed, and where their cache is."""

    token_ids: np.ndarray  # [num_tokens]
    positions: np.ndarray  # [num_tokens]
    slot_mapping: np.ndarray  # [num_tokens]
    query_start_loc: np.ndarray  # [num_seqs + 1]
    seq_lens: np.ndarray  # [num_seqs]
    block_table: np.ndarray  # [num_seqs, max_blocks]
    max_query_len: int

    def put(self, arrays: Any) -> "Batch":
        """The same with what the ops take as arrays of NumPy or CuPy."""
        names = ("slot_mapping", "query_start_loc", "seq_lens", "block_table")
        return replace(self, **{name: arrays.asarray(getattr(self, name)) for name in names})


class ScatteredCache:
    """Key and value blocks of every layer, handed out in random order.

    A block id means the same block in all layers, so a sequence has one block table.
    """

    def __init__(
        self,
        config: smollm2.Config,
        num_blocks: int,
        *,
        block_size: int = 16,
        layout: str = "NHD",
        dtype: str = "float32",
        kv_cache_dtype: str = "auto",
        backend: str = "numpy",
        seed: int = 0,
    ) -> None:
        self.arrays = import_module("cupy") if backend == "cuda" else np
        self.block_size = block_size
        self.layout = layout
        self.dtype = np.dtype(DTYPES[dtype])
        self.kv_cache_dtype = kv_cache_dtype
        self.free_blocks = deque(np.random.default_rng(seed).permutation(num_blocks).tolist())
        heads, tokens = config.num_kv_heads, block_size
        block_shape = (tokens, heads) if layout == "NHD" else (heads, tokens)
        shape = (config.num_layers, num_blocks, *block_shape, config.head_size)
        self.key_cache, self.value_cache = self._allocate(shape), self._allocate(shape)

    def _allocate(self, shape: tuple[int, ...]) -> Any:
        cache = self.arrays.empty(shape, self.dtype if self.kv_cache_dtype == "auto" else np.uint8)
        # All bits set is NaN in every format: a read of a slot that nobody wrote shows in the text.
        cache.view(np.uint8).fill(0xFF)
        return cache

    def schedule(self, seqs: list[Sequence]) -> Batch:
        """Give every sequence the blocks for its new tokens and lay out the step that computes them."""
        for seq in seqs:
            self._grow(seq)
        query_lens = [len(seq.positions) for seq in seqs]
        return Batch(
            token_ids=np.concatenate([seq.token_ids[seq.num_cached_tokens :] for seq in seqs]),
            positions=np.concatenate([seq.positions for seq in seqs]),
            slot_mapping=np.concatenate([self._slots(seq) for seq in seqs]),
            query_start_loc=np.cumsum([0, *query_lens], dtype=np.int32),
            seq_lens=np.array([len(seq.token_ids) for seq in seqs], np.int32),
            block_table=pad_block_tables(seqs),
            max_query_len=max(query_lens),
        )

    def _grow(self, seq: Sequence) -> None:
        num_missing = blocks_for(len(seq.token_ids), self.block_size) - len(seq.block_table)
        seq.block_table += [self.free_blocks.popleft() for _ in range(num_missing)]

    def _slots(self, seq: Sequence) -> np.ndarray:
        block_ids = np.array(seq.block_table, np.int64)[seq.positions // self.block_size]
        return block_ids * self.block_size + seq.positions % self.block_size

    def attention(self, batch: Batch, layer: int, *qkv: np.ndarray) -> np.ndarray:
        """One layer of one step: write the new keys and values, then read everything up to each query."""
        q, k, v = (self.arrays.asarray(x.astype(self.dtype, copy=False)) for x in qkv)
        caches = self.key_cache[layer], self.value_cache[layer]
        storage = {"kv_cache_dtype": self.kv_cache_dtype, "layout": self.layout}
        reshape_and_cache_flash(k, v, *caches, batch.slot_mapping, **storage)
        out = flash_attn_varlen_func(
            q,
            *caches,
            cu_seqlens_q=batch.query_start_loc,
            seqused_k=batch.seq_lens,
            block_table=batch.block_table,
            max_seqlen_q=batch.max_query_len,
            causal=True,
            **storage,
        )
        return to_host(out).astype(np.float32, copy=False)


def to_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def pad_block_tables(seqs: list[Sequence]) -> np.ndarray:
    """One row per sequence; entries past a sequence's blocks are never followed, so they hold no id."""
    table = np.full((len(seqs), max(len(seq.block_table) for seq in seqs)), -1, np.int32)
    for row, seq in zip(table, seqs, strict=True):
        row[: len(seq.block_table)] = seq.block_table
    return table


def step(model: smollm2.SmolLM2, cache: ScatteredCache, seqs: list[Sequence]) -> None:
    """Compute the tokens that are not in the cache and append the next one to every sequence."""
    batch = cache.schedule(seqs)
    attention = partial(cache.attention, batch.put(cache.arrays))
    hidden = model.forward(batch.token_ids, batch.positions, attention)
    last_tokens = hidden[batch.query_start_loc[1:] - 1]
    for seq, token_id in zip(seqs, model.greedy_tokens(last_tokens).tolist(), strict=True):
        seq.num_cached_tokens = len(seq.token_ids)
        seq.token_ids.append(token_id)


def generate(
    model: smollm2.SmolLM2,
    prompts: list[list[int]],
    *,
    max_new_tokens: int = 64,
    ignore_eos: bool = False,
    **cache_options,
) -> list[Sequence]:
    """Greedy continuations of tokenised prompts, all in one batch until each ends or has `max_new_tokens`."""
    seqs = [Sequence.from_prompt(prompt) for prompt in prompts]
    cache = cache_for(seqs, model.config, max_new_tokens, **cache_options)

    def unfinished(seq: Sequence) -> bool:
        ended = not ignore_eos and seq.token_ids[-1] == model.config.eos_token_id
        return len(seq.generated) < max_new_tokens and not ended

    running = seqs
    while running:
        step(model, cache, running)
        running = [seq for seq in running if unfinished(seq)]
    return seqs


def cache_for(
    seqs: list[Sequence], config: smollm2.Config, max_new_tokens: int, *, block_size: int = 16, **options
) -> ScatteredCache:
    """A pool twice as large as the sequences can become, so that their blocks lie among unused ones."""
    max_lens = [seq.num_prompt_tokens + max_new_tokens for seq in seqs]
    if max(max_lens) > config.context_length:
        raise ValueError(
            f"max_new_tokens: expected at most {config.context_length} tokens with the prompt, got {max(max_lens)}"
        )
    num_blocks = 2 * sum(blocks_for(max_len, block_size) for max_len in max_lens)
    return ScatteredCache(config, num_blocks, block_size=block_size, **options)


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
    click.echo(f"blocks: {len(seq.block_table)} for {seq.num_cached_tokens} tokens, block table {seq.block_table}")


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


def load_model() -> tuple[smollm2.SmolLM2, smollm2.Tokenizer]:
    try:
        return smollm2.load()
    except smollm2.MissingPackageError as error:
        raise click.ClickException(str(error)) from None


@click.command()
@click.option("--prompt", "prompts", multiple=True, help="A user message; may be given several times.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--block-size", type=click.IntRange(1, 1024), default=16, show_default=True, help="Tokens per block.")
@click.option("--layout", type=click.Choice(["NHD", "HND"]), default="NHD", show_default=True)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]),
    default="auto",
    show_default=True,
    help="How keys and values are stored; auto keeps --dtype.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    default="float32",
    show_default=True,
    help="Of queries, keys and values; the rest of the model computes in float32.",
)
@click.option("--backend", type=click.Choice(["numpy", "ptx", "cuda"]), default="numpy", show_default=True,
              help="cuda needs a GPU; ptx interprets the kernels, some ten seconds a token.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Shuffles the free blocks.")
@click.option("--check", "check_dense", is_flag=True,
              help="Compare with a dense run; exit 1 if a token differs, with 16 bits a clear one.")  # fmt: skip
def main(
    prompts: tuple[str, ...], max_new_tokens: int, backend: str, check_dense: bool, **cache_options: str | int
) -> None:
    """Generate greedy text with SmolLM2-135M-Instruct through a paged KV cache."""
    if cache_options["kv_cache_dtype"] != "auto" and cache_options["dtype"] == "float32":
        raise click.ClickException("an fp8 cache needs 16-bit queries: add --dtype float16 or --dtype bfloat16")
    try:
        check_backend(backend)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    model, tokenizer = load_model()
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
