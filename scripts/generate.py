"""Greedy text from SmolLM2-135M-Instruct, its keys and values held in a paged cache.

All prompts run as one batch: a first step writes and reads every prompt token, each later step one token per sequence.
In every layer `reshape_and_cache_flash` writes the step's keys and values into blocks scattered over the pool, and
`flash_attn_varlen_func` reads each sequence back through its block table. `--check` compares with a dense run.

    python scripts/generate.py --prompt "Why is the sky blue?" --check
"""

import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

try:
    import click
    import ml_dtypes
    import numpy as np

    from pagedkv import flash_attn_varlen_func, reshape_and_cache_flash, use_backend
except ModuleNotFoundError as error:
    raise SystemExit(f"Error: {error.name} is not installed: pip install 'pagedkv[model]'") from None

import smollm2

DEFAULT_PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Why is the sky blue?",
    "What is a page table? Answer in one sentence.",
)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


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
        seed: int = 0,
    ) -> None:
        self.block_size = block_size
        self.layout = layout
        self.dtype = np.dtype(DTYPES[dtype])
        self.kv_cache_dtype = kv_cache_dtype
        self.free_blocks = deque(np.random.default_rng(seed).permutation(num_blocks).tolist())
        heads, tokens = config.num_kv_heads, block_size
        block_shape = (tokens, heads) if layout == "NHD" else (heads, tokens)
        shape = (config.num_layers, num_blocks, *block_shape, config.head_size)
        self.key_cache, self.value_cache = self._allocate(shape), self._allocate(shape)

    def _allocate(self, shape: tuple[int, ...]) -> np.ndarray:
        cache = np.empty(shape, self.dtype if self.kv_cache_dtype == "auto" else np.uint8)
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
        )

    def _grow(self, seq: Sequence) -> None:
        num_missing = blocks_for(len(seq.token_ids), self.block_size) - len(seq.block_table)
        seq.block_table += [self.free_blocks.popleft() for _ in range(num_missing)]

    def _slots(self, seq: Sequence) -> np.ndarray:
        block_ids = np.array(seq.block_table, np.int64)[seq.positions // self.block_size]
        return block_ids * self.block_size + seq.positions % self.block_size

    def attention(self, batch: Batch, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """One layer of one step: write the new keys and values, then read everything up to each query."""
        q, k, v = (x.astype(self.dtype, copy=False) for x in (q, k, v))
        caches = self.key_cache[layer], self.value_cache[layer]
        storage = {"kv_cache_dtype": self.kv_cache_dtype, "layout": self.layout}
        reshape_and_cache_flash(k, v, *caches, batch.slot_mapping, **storage)
        out = flash_attn_varlen_func(
            q,
            *caches,
            cu_seqlens_q=batch.query_start_loc,
            seqused_k=batch.seq_lens,
            block_table=batch.block_table,
            causal=True,
            **storage,
        )
        return out.astype(np.float32, copy=False)


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
    hidden = model.forward(batch.token_ids, batch.positions, partial(cache.attention, batch))
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


def dense_tokens(model: smollm2.SmolLM2, seq: Sequence) -> list[int]:
    """What greedy decoding without a cache picks after the prompt and after each generated token but the last.

    One forward over the finished sequence: attention is causal, so its rows are those of the token-by-token run for
    as long as both runs agree, and the first difference is found either way.
    """
    token_ids = np.array(seq.token_ids[:-1])
    hidden = model.forward(token_ids, np.arange(len(token_ids)), smollm2.dense_attention)
    return model.greedy_tokens(hidden[seq.num_prompt_tokens - 1 :]).tolist()


def count_equal(model: smollm2.SmolLM2, seq: Sequence) -> int:
    return sum(paged == dense for paged, dense in zip(seq.generated, dense_tokens(model, seq), strict=True))


def show(prompt: str, text: str, seq: Sequence) -> None:
    click.echo(f"\nprompt: {prompt}\ntext:   {text.strip()}")
    click.echo(f"blocks: {len(seq.block_table)} for {seq.num_cached_tokens} tokens, block table {seq.block_table}")


def check(model: smollm2.SmolLM2, seqs: list[Sequence]) -> bool:
    num_tokens = sum(len(seq.generated) for seq in seqs)
    num_equal = sum(count_equal(model, seq) for seq in seqs)
    click.echo(f"check:  {num_equal} of {num_tokens} tokens equal those of a dense run without a cache")
    return num_equal == num_tokens


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
@click.option("--backend", type=click.Choice(["numpy", "ptx"]), default="numpy", show_default=True,
              help="ptx interprets the kernels, some ten seconds a token.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Shuffles the free blocks.")
@click.option("--check", "check_dense", is_flag=True, help="Compare with a dense run; a float32 difference is exit 1.")
def main(
    prompts: tuple[str, ...], max_new_tokens: int, backend: str, check_dense: bool, **cache_options: str | int
) -> None:
    """Generate greedy text with SmolLM2-135M-Instruct through a paged KV cache."""
    if cache_options["kv_cache_dtype"] != "auto" and cache_options["dtype"] == "float32":
        raise click.ClickException("an fp8 cache needs 16-bit queries: add --dtype float16 or --dtype bfloat16")
    model, tokenizer = load_model()
    prompts = prompts or DEFAULT_PROMPTS
    start = time.perf_counter()
    try:
        prompt_ids = [tokenizer.encode_chat(prompt) for prompt in prompts]
        with use_backend(backend):
            seqs = generate(model, prompt_ids, max_new_tokens=max_new_tokens, **cache_options)
    except (ValueError, TypeError, NotImplementedError, MemoryError) as error:
        raise click.ClickException(str(error)) from None
    seconds = time.perf_counter() - start
    for prompt, seq in zip(prompts, seqs, strict=True):
        show(prompt, tokenizer.decode(seq.generated), seq)
    num_tokens = sum(len(seq.generated) for seq in seqs)
    click.echo(f"\nspeed:  {num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s ({backend})")
    if check_dense and not check(model, seqs) and cache_options["dtype"] == "float32":
        raise SystemExit(1)


if __name__ == "__main__":
    main()
