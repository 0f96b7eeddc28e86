"""The sequences of a paged cache: their tokens, their blocks, and the steps that they are in."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from .blocks import BlockPool
from .checks import check_size, integer_row, wrong
from .dtypes import INT64
from .prefix import Key, PrefixHashes
from .step import Step
from .table import BlockTable

SERIALS = count(1)  # numbers of the steps of all caches: none takes the batch of another one for its own
NO_BOUND = np.iinfo(np.int64).max // 2


@dataclass(slots=True, eq=False, repr=False)
class Batch:
    """The new tokens of some sequences: what ``PagedKVCache.step`` makes, and ``write`` and ``attend`` take.

    seqs: the sequences, in the order of their tokens.
    host: the step's arrays on the host (see ``Step``).
    token_ids: int64 ``[num_tokens]``, the new tokens, or None where a sequence was added without.
    slot_mapping, query_start_loc, seq_lens, block_table: those of ``host``, where the cache lives.

    It is of no more use once one of its sequences has gone on, has been truncated or freed, or has lost blocks to its
    window.
    """

    seqs: np.ndarray
    host: Step
    token_ids: np.ndarray | None
    slot_mapping: Any
    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    _states: list[PrefixHashes | None]
    _serial: int
    _unwritten: set[int]  # layers

    def __repr__(self) -> str:
        return f"<Batch: {self.host.num_tokens} new tokens of {self.host.num_seqs} sequences>"

    @property
    def positions(self) -> np.ndarray:
        """Where the new tokens stand in their sequences, int64 ``[num_tokens]`` on the host."""
        return self.host.positions

    @property
    def last_tokens(self) -> np.ndarray:
        """Of each sequence the row of its last new token, on the host: where the next one is decided.

        A sequence without new tokens has the row before its place, which is another's.
        """
        return self.host.query_start_loc[1 : self.host.num_seqs + 1] - 1


class Sequences:
    """The part of ``PagedKVCache`` that knows sequences, and no arrays."""

    def __init__(self, pool: BlockPool, table: BlockTable) -> None:
        self.pool, self.table = pool, table
        self._prefixes: dict[int, PrefixHashes] = {}  # of sequences whose tokens are known
        # Of each sequence: the number of its last step, its tokens before that, whether layers of it are still to be
        # written, and how many of its tokens are known, computed or not.
        self._serials, self._written_lens, self._known_lens = np.zeros((3, table.max_seqs), INT64)
        self._is_open = np.zeros(table.max_seqs, bool)

    def add(self, token_ids: Any = None, *, salt: Key | None = None, extra_keys: Iterable[Key] = ()) -> int:
        """A new sequence; returns its number.

        token_ids: the tokens it begins with, signed integers. Blocks that still hold their keys and values, from any
            earlier sequence with the same beginning, are taken as they are, but for the last token's; the next
            ``step`` computes the others. None: tokens are not known, and nothing is shared.
        salt, extra_keys: see ``PrefixHashes``.

        ValueError if there are ``max_seqs`` sequences, or for more tokens than a row of the table holds.
        """
        if token_ids is None:
            seq = self.table.add()
            self._known_lens[seq] = NO_BOUND
            return seq
        self._check_room("token_ids", np.size(token_ids))
        prefix = PrefixHashes(token_ids, block_size=self.block_size, salt=salt, extra_keys=extra_keys)
        seq = self.table.add(self.pool.longest_prefix(prefix.reusable))
        self._prefixes[seq], self._known_lens[seq] = prefix, len(prefix)
        return seq

    def extend(self, seq: int, token_ids: Any) -> None:
        """Tells the tokens that follow in a sequence, whose keys and values the next ``step`` computes.

        ValueError for a sequence that was added without token ids, or more tokens than a row of the table holds.
        """
        prefix = self._prefix(seq)
        self._check_room("token_ids", len(prefix) + np.size(token_ids))
        prefix.extend(token_ids)
        self._known_lens[seq] = len(prefix)

    def extend_each(self, seqs: Any, token_ids: Any) -> None:
        """``extend`` by one token for each of many sequences, ``[num_seqs]``: what a decode step has made."""
        seqs, tokens = self.table.check_rows(seqs, "seqs"), integer_row(token_ids, "token_ids")
        if tokens.size != seqs.size:
            raise ValueError(wrong("token_ids", f"{seqs.size}, one for each sequence", tokens.size))
        prefixes = [self._prefixes.get(seq) for seq in seqs.tolist()]
        if None in prefixes:
            self._prefix(int(seqs[prefixes.index(None)]))  # raises
        self._check_room("token_ids", int(self._known_lens[seqs].max(initial=-1)) + 1)
        for prefix, token in zip(prefixes, tokens.tolist(), strict=True):
            prefix.append(token)
        self._known_lens[seqs] += 1

    def token_ids(self, seq: int) -> np.ndarray:
        """The tokens of a sequence, int64, those that are not computed yet included; ValueError if not known."""
        return self._prefix(seq).token_ids

    def num_tokens(self, seq: int) -> int:
        """Tokens of a sequence whose keys and values are in the cache, or will be when its last step is written."""
        return int(self.table.seq_lens[self.table.check_row(seq, "seq")])

    def num_pending(self, seq: int) -> int:
        """Tokens of a sequence that are known and not computed yet."""
        return len(self._prefix(seq)) - self.num_tokens(seq)

    def fork(self, seq: int) -> int:
        """A new sequence with the tokens of another one, in the same blocks; returns its number.

        Whichever of them first writes into a block that both have gets a copy of it.
        """
        self._check_written(self.table.check_rows(seq, "seq"))
        other = self.table.fork(seq)
        if seq in self._prefixes:
            self._prefixes[other] = self._prefixes[seq].copy()
        self._known_lens[other] = self._known_lens[seq]
        return other

    def truncate(self, seq: int, num_tokens: int) -> None:
        """Takes back the tokens of a sequence after the first ``num_tokens``, as speculative decoding rejects them.

        A step that was to be written and is not, because of an error, is undone by truncating to the length before it:
        its tokens are forgotten as well, and can be told again by ``extend``.
        """
        seq = self.table.check_row(seq, "seq")
        prefix, in_cache = self._prefixes.get(seq), self.num_tokens(seq)
        known = in_cache if prefix is None else len(prefix)
        if check_size(num_tokens, "num_tokens", minimum=0) > known:
            raise ValueError(wrong("num_tokens", f"at most {known}", num_tokens))
        self.table.truncate(seq, min(num_tokens, in_cache))
        is_undone = bool(self._is_open[seq]) and num_tokens <= self._written_lens[seq]
        if num_tokens < in_cache or is_undone:
            self._serials[seq] = 0
            self._is_open[seq] &= not is_undone
        if prefix is not None:
            prefix.truncate(num_tokens)
            self._known_lens[seq] = len(prefix)

    def free(self, seqs: Any) -> None:
        """Ends a sequence, or several. Full blocks stay known until others need them (``BlockPool``)."""
        seqs = self.table.check_rows(seqs, "seqs")
        self.table.free(seqs)
        self._serials[seqs], self._is_open[seqs] = 0, False
        for seq in seqs.tolist():
            self._prefixes.pop(seq, None)

    def drop_outside_window(self, seqs: Any, window_size: int) -> int:
        """Gives back the blocks of sequences that no further token sees; see ``BlockTable.drop_outside_window``.

        From then on ``attend`` needs a window that sees no more: ``window_size=(window_size - 1, 0)`` or less.
        """
        seqs = self.table.check_rows(seqs, "seqs")
        self._check_written(seqs)
        self._serials[seqs] = 0  # a batch of the past still names the blocks that others may get now
        return self.table.drop_outside_window(seqs, window_size)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.table.block_size

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _prefix(self, seq: int) -> PrefixHashes:
        seq = self.table.check_row(seq, "seq")
        if seq not in self._prefixes:
            raise ValueError(wrong("seq", "a sequence with token ids", f"sequence {seq}, added without"))
        return self._prefixes[seq]

    def _check_room(self, name: str, num_tokens: int) -> None:
        if num_tokens > self.table.capacity:
            raise ValueError(wrong(name, f"at most {self.table.capacity} tokens in a sequence", num_tokens))

    def _check_written(self, seqs: np.ndarray) -> None:
        is_open = self._is_open[seqs]
        if is_open.any():
            seq = int(seqs[is_open][0])
            left = f"sequence {seq}: write it in all layers, truncate to {self._written_lens[seq]} tokens, or free"
            raise ValueError(wrong("seqs", "sequences whose last step is written", left))

    def _check_current(self, batch: Batch) -> None:
        if not isinstance(batch, Batch):
            raise TypeError(wrong("batch", "what step() returned", type(batch).__name__))
        is_current = self._serials[batch.seqs] == batch._serial
        if not is_current.all():
            raise ValueError(
                wrong("batch", "the last step of its sequences", f"one that {batch.seqs[~is_current][0]} has left")
            )

    def _counts(self, seqs: np.ndarray, states: list[PrefixHashes | None], num_new: Any) -> np.ndarray:
        """New tokens of each sequence: as asked, if that many are pending."""
        if num_new is None and None in states:
            unknown = seqs[states.index(None)]
            raise ValueError(wrong("num_new", f"a number, since sequence {unknown} has no token ids", None))
        pending = self._known_lens[seqs] - self.table.seq_lens[seqs]
        if num_new is None:
            return pending
        counts = self.table.check_counts(num_new, seqs)
        if (counts > pending).any():
            i = int(np.argmax(counts > pending))
            raise ValueError(wrong("num_new", f"at most {pending[i]}, the pending tokens of {seqs[i]}", counts[i]))
        return counts

    def _make_known(self, batch: Batch) -> None:
        """Blocks that this batch filled hold a known prefix from now on."""
        starts, ends = self._written_lens[batch.seqs], self.table.seq_lens[batch.seqs]
        filled = np.flatnonzero(ends // self.block_size > starts // self.block_size)
        for i in filled.tolist():
            seq, state = int(batch.seqs[i]), batch._states[i]
            if state is not None:
                columns = slice(int(starts[i]) // self.block_size, int(ends[i]) // self.block_size)
                self.pool.register(self.table.block_table[seq, columns], state.hashes[columns])


def new_tokens(states: list[PrefixHashes | None], lens: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    """The tokens of a step, of sequences that have so many before them; None if some are not known."""
    if None in states:
        return None
    spans = zip(states, lens.tolist(), (lens + counts).tolist(), strict=True)
    return np.array([token for state, start, end in spans for token in state.between(start, end)], INT64)
