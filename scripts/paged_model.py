"""What text over a paged cache takes, whoever schedules it: sequences, the cache, and a model's step over it.

seq = Sequence.from_prompt(token_ids)
with make_cache(model.config, num_blocks=64, max_seqs=1) as cache:
    paged_model = PagedModel(model, cache)
    seq.number = cache.add(seq.token_ids)
    while not seq.is_finished:
        paged_model.compute([seq], cache.step([seq.number]))
"""

from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import smollm2

from pagedkv import PagedKVCache
from pagedkv.sequences import Batch


@dataclass(eq=False)  # two requests for the same text are two
class Sequence:
    """The tokens of a prompt and of its answer so far, which ends with `stop_token_id` or after `max_new_tokens`."""

    token_ids: list[int]
    num_prompt_tokens: int
    max_new_tokens: int = 64
    stop_token_id: int | None = None
    number: int | None = None  # in the cache, while it has blocks there
    block_table: list[int] = field(default_factory=list)  # its blocks, as far as somebody noted them

    @classmethod
    def from_prompt(cls, prompt: list[int], **limits: int | None) -> "Sequence":
        return cls(list(prompt), len(prompt), **limits)

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return len(self.generated) >= self.max_new_tokens or self.generated[-1:] == [self.stop_token_id]

    @property
    def max_len(self) -> int:
        return self.num_prompt_tokens + self.max_new_tokens

    @property
    def max_cached_len(self) -> int:
        """Of the last token no keys and values are computed: nothing comes after it."""
        return self.max_len - 1


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def check_lengths(seqs: list[Sequence], config: smollm2.Config) -> None:
    longest = max(seq.max_len for seq in seqs)
    if longest > config.context_length:
        raise ValueError(
            f"max_new_tokens: expected at most {config.context_length} tokens with the prompt, got {longest}"
        )


def make_cache(
    config: smollm2.Config,
    num_blocks: int,
    *,
    max_seqs: int,
    block_size: int = 16,
    dtype: str = "float32",
    backend: str = "numpy",
    seed: int = 0,
    **options: str,
) -> PagedKVCache:
    """A cache for a model, its blocks handed out in an order that `seed` shuffles; options: those of `PagedKVCache`."""
    cache = PagedKVCache(
        config.num_layers,
        num_blocks,
        block_size,
        config.num_kv_heads,
        config.head_size,
        dtype,
        device="cuda" if backend == "cuda" else "cpu",
        max_seqs=max_seqs,
        block_order=np.random.default_rng(seed).permutation(num_blocks),
        **options,
    )
    # All bits set is NaN in every format: a read of a slot that nobody wrote shows in the text.
    for layer in cache:
        layer.k.view(np.uint8).fill(0xFF)
        layer.v.view(np.uint8).fill(0xFF)
    return cache


class PagedModel:
    """A model whose keys and values are in a paged cache. Queries, keys and values go where the cache is, the rest of
    the model computes on the host."""

    def __init__(self, model: smollm2.SmolLM2, cache: PagedKVCache) -> None:
        self.model = model
        self.cache = cache
        self.arrays = np if cache.device == "cpu" else import_module("cupy")

    def compute(self, seqs: list[Sequence], batch: Batch) -> list[Sequence]:
        """Computes a step of `seqs`. Those of which nothing is pending then get their next token, and are returned."""
        hidden = self.model.forward(batch.token_ids, batch.positions, partial(self._attention, batch))
        ready = [i for i, seq in enumerate(seqs) if self.cache.num_pending(seq.number) == 0]
        next_tokens = self.model.greedy_tokens(hidden[batch.last_tokens[ready]])
        for i, token_id in zip(ready, next_tokens.tolist(), strict=True):
            self._append(seqs[i], token_id)
        return [seqs[i] for i in ready]

    def _append(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        if not seq.is_finished:
            self.cache.extend(seq.number, [token_id])

    def _attention(self, batch: Batch, layer: int, *qkv: np.ndarray) -> np.ndarray:
        """One layer of one step: writes the new keys and values, then reads everything up to each query."""
        q, k, v = (self.arrays.asarray(x.astype(self.cache.dtype, copy=False)) for x in qkv)
        self.cache.write(layer, k, v, batch)
        # In one split, so that a sequence's output does not depend on what else is in the batch.
        out = self.cache.attend(layer, q, batch, num_splits=1)
        return to_host(out).astype(np.float32, copy=False)


def to_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()
