"""Hashes that name the contents of a sequence's blocks: equal only where everything up to there is equal."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from .checks import check_size, wrong
from .dtypes import INT64

Key = str | bytes | int  # what a salt or an extra key may be


class PrefixHashes:
    """The token ids of a sequence and a hash of each of its full blocks, computed once as tokens are added.

    A block's hash is the SHA-256 of its parent's, the block before, and of its own tokens and extra keys; the first
    block's parent is made of the salt. So equal hashes mean equal tokens from the sequence's start on, under one salt.

    token_ids: signed integers, a list or an array.
    block_size: tokens of a block.
    salt: str, bytes, int or None; sequences of different salts share nothing.
    extra_keys: what else the contents depend on (an adapter, an image), each a str, bytes or int; in every block.

    >>> prefix = PrefixHashes(token_ids, block_size=16)
    >>> hits = pool.longest_prefix(prefix.reusable)
    """

    def __init__(
        self, token_ids: Any = (), *, block_size: int, salt: Key | None = None, extra_keys: Iterable[Key] = ()
    ) -> None:
        self.block_size = check_size(block_size, "block_size", minimum=1)
        self._root = hashlib.sha256(b"" if salt is None else _encoded(salt)).digest()
        self._keys = b"".join(map(_encoded, extra_keys))
        self._token_ids = np.empty(0, INT64)
        self._num_tokens = 0
        self.hashes: list[bytes] = []  # of the full blocks
        self.extend(token_ids)

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens so far, int64 ``[num_tokens]``."""
        return self._token_ids[: self._num_tokens]

    @property
    def reusable(self) -> list[bytes]:
        """The hashes of blocks that need not be computed again: all but that of the last token, whose output is what
        the next token comes from."""
        return self.hashes[: max(0, self._num_tokens - 1) // self.block_size]

    def extend(self, token_ids: Any) -> None:
        """Adds tokens at the end and hashes the blocks that they fill."""
        ids = _token_ids(token_ids)
        end = self._num_tokens + ids.size
        if end > self._token_ids.size:
            grown = np.empty(max(end, 2 * self._token_ids.size), INT64)
            grown[: self._num_tokens] = self.token_ids
            self._token_ids = grown
        self._token_ids[self._num_tokens : end] = ids
        self._num_tokens = end
        self._hash_blocks(len(self.hashes), end // self.block_size)

    def truncate(self, num_tokens: int) -> None:
        """Takes back all tokens but the first ``num_tokens``."""
        self._num_tokens = min(self._num_tokens, num_tokens)
        del self.hashes[self._num_tokens // self.block_size :]

    def copy(self) -> "PrefixHashes":
        """The same, to be extended apart."""
        other = PrefixHashes(block_size=self.block_size)
        other._root, other._keys = self._root, self._keys
        other._token_ids, other._num_tokens = self.token_ids.copy(), self._num_tokens
        other.hashes = list(self.hashes)
        return other

    def _hash_blocks(self, first: int, end: int) -> None:
        """Adds the hashes of blocks. Parent and tokens have one length in all blocks of one size, so no two contents
        make the same bytes."""
        parent, keys, sha256 = self.hashes[-1] if self.hashes else self._root, self._keys, hashlib.sha256
        contents = self._token_ids[first * self.block_size : end * self.block_size].astype("<i8", copy=False).tobytes()
        block_bytes = self.block_size * INT64.itemsize
        for start in range(0, len(contents), block_bytes):
            parent = sha256(parent + contents[start : start + block_bytes] + keys).digest()
            self.hashes.append(parent)


def _token_ids(token_ids: Any) -> np.ndarray:
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return ids.astype(INT64).reshape(-1)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise TypeError(wrong("token_ids", "integers in one row", f"{ids.dtype.name} of shape {ids.shape}"))
    return ids


def _encoded(key: Key) -> bytes:
    """The key with its kind and length before it: no two lists of keys make the same bytes."""
    if isinstance(key, bool) or not isinstance(key, str | bytes | int):
        raise TypeError(wrong("salt and extra_keys", "str, bytes or int", repr(key)))
    kind = type(key).__name__.encode()
    content = key if isinstance(key, bytes) else str(key).encode()
    return kind + b" " + str(len(content)).encode() + b" " + content
