"""Hashes that name the contents of a sequence's blocks: equal only where everything up to there is equal."""

import hashlib
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from .checks import check_size, integer_row, wrong
from .dtypes import INT64

Key = str | bytes | int  # what a salt or an extra key may be


class PrefixHashes:
    """The token ids of a sequence and a hash of each of its full blocks, computed once as tokens are added.

    A block's hash is the SHA-256 of its parent's, the block before, and of its own tokens and extra keys; the first
    block's parent is made of the salt. So equal hashes mean equal tokens from the sequence's start on, under one salt.
    ``hashes`` has those of all full blocks, to be registered, ``reusable`` those to look for.

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
        if isinstance(extra_keys, str | bytes):
            raise TypeError(wrong("extra_keys", "a sequence of keys", repr(extra_keys)))
        self._root = hashlib.sha256(b"" if salt is None else _encoded(salt)).digest()
        self._keys = b"".join(map(_encoded, extra_keys))
        self._token_ids = array("q")  # 64 bits each; grows like a list and is read like an array
        self.hashes: list[bytes] = []  # of the full blocks
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def __repr__(self) -> str:
        return f"<PrefixHashes: {len(self)} tokens, {len(self.hashes)} full blocks of {self.block_size}>"

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens so far, int64 ``[num_tokens]``."""
        return np.array(self._token_ids, INT64)

    @property
    def reusable(self) -> list[bytes]:
        """The hashes of blocks that need not be computed again: all but that of the last token, whose output is what
        the next token comes from."""
        return self.hashes[: max(0, len(self) - 1) // self.block_size]

    def between(self, start: int, end: int) -> list[int]:
        """The tokens from one position to another, exclusive."""
        return self._token_ids[start:end].tolist()

    def extend(self, token_ids: Any) -> None:
        """Adds tokens at the end and hashes the blocks that they fill."""
        self._token_ids.frombytes(integer_row(token_ids, "token_ids").tobytes())
        self._hash_full_blocks()

    def append(self, token_id: int) -> None:
        """Adds one token, an int, as ``extend`` does, in a fraction of its time."""
        self._token_ids.append(token_id)
        if len(self._token_ids) % self.block_size == 0:
            self._hash_full_blocks()

    def truncate(self, num_tokens: int) -> None:
        """Takes back all tokens but the first ``num_tokens``."""
        del self._token_ids[check_size(num_tokens, "num_tokens", minimum=0) :]
        del self.hashes[len(self) // self.block_size :]

    def copy(self) -> "PrefixHashes":
        """The same, to be extended apart."""
        other = PrefixHashes(block_size=self.block_size)
        other._root, other._keys = self._root, self._keys
        other._token_ids, other.hashes = self._token_ids[:], self.hashes.copy()
        return other

    def _hash_full_blocks(self) -> None:
        """Parent and tokens have one length in all blocks of one size, so no two contents make the same bytes."""
        first, end = len(self.hashes), len(self) // self.block_size
        parent, keys, sha256 = self.hashes[-1] if self.hashes else self._root, self._keys, hashlib.sha256
        contents = np.array(self._token_ids[first * self.block_size : end * self.block_size], "<i8").tobytes()
        block_bytes = self.block_size * INT64.itemsize
        for start in range(0, len(contents), block_bytes):
            parent = sha256(parent + contents[start : start + block_bytes] + keys).digest()
            self.hashes.append(parent)


def _encoded(key: Key) -> bytes:
    """The key with its kind and length before it: no two lists of keys make the same bytes."""
    kinds = [kind for kind in (str, bytes, int) if isinstance(key, kind)]
    if isinstance(key, bool) or not kinds:
        raise TypeError(wrong("salt and extra_keys", "str, bytes or int", repr(key)))
    content = key if isinstance(key, bytes) else str(key).encode()
    return f"{kinds[0].__name__} {len(content)} ".encode() + content
