"""Which sequences run together, and what of each the next step computes: continuous batching over a paged cache.

After the schedulers of vLLM and nano-vllm: a queue, admission by free blocks, prompts computed in chunks beside the
sequences that already answer, preemption by recompute.
"""

from collections import deque

from paged_model import Sequence, blocks_for

from pagedkv import OutOfBlocks, PagedKVCache
from pagedkv.sequences import Batch


class Scheduler:
    """A queue of sequences and those that run, the oldest first.

    cache: where they run, at most as many at a time as it has room for sequences. max_batch_tokens: of a step.

    Sequences run in the order in which they came, and it is the newest that has to go when blocks run out. So whatever
    runs is older than all that wait, and the oldest is in every step: it ends, and another is the oldest then.
    """

    def __init__(self, cache: PagedKVCache, *, max_batch_tokens: int) -> None:
        if max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens: expected at least 1, got {max_batch_tokens}")
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.num_finished = 0
        self.num_preemptions = 0
        self.num_reused_tokens = 0  # whose keys and values were in the cache when their sequence was admitted
        self.num_computed_tokens = 0
        self.most_blocks_used = 0

    @property
    def is_done(self) -> bool:
        return not (self.waiting or self.running)

    def submit(self, seqs: list[Sequence]) -> None:
        """Puts sequences into the queue; ValueError, and none is in it, if one is too long for the whole pool."""
        longest = max((seq.max_cached_len for seq in seqs), default=0)
        need, have = blocks_for(longest, self.cache.block_size), self.cache.num_blocks
        if need > have:
            raise ValueError(f"num_blocks: expected at least {need}, for {longest} tokens of one request, got {have}")
        self.waiting.extend(seqs)

    def schedule(self) -> tuple[list[Sequence], Batch]:
        """The next step and the sequences in it. Where it lacks blocks the newest sequence makes room, and the next."""
        self._admit()
        while True:
            counts = self._token_counts()
            seqs = list(counts)
            try:
                batch = self.cache.step([seq.number for seq in seqs], list(counts.values()))
            except OutOfBlocks:
                if len(self.running) == 1:  # and has the pool for itself, unless blocks are somebody else's
                    raise
                self._preempt()
                continue
            self.num_computed_tokens += batch.host.num_tokens
            self.most_blocks_used = max(self.most_blocks_used, self.cache.pool.num_used)
            return seqs, batch

    def retire(self, seqs: list[Sequence]) -> None:
        """Gives back the blocks of those sequences that are finished."""
        for seq in seqs:
            if seq.is_finished:
                self.running.remove(seq)
                self._leave(seq)
                self.num_finished += 1

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.waiting and self._has_rows_and_tokens():
            seq = self.waiting[0]
            seq.number = self.cache.add(seq.token_ids)
            if self.running and self._blocks_missing(seq) > self.cache.pool.num_free:
                self._leave(seq)
                return
            self.running.append(self.waiting.popleft())
            self.num_reused_tokens += self.cache.num_tokens(seq.number)

    def _has_rows_and_tokens(self) -> bool:
        """Whoever is not in this step had better wait: the blocks that this step fills may be those it begins with."""
        num_pending = sum(self.cache.num_pending(seq.number) for seq in self.running)
        return self.cache.table.num_free_rows > 0 and num_pending < self.max_batch_tokens

    def _blocks_missing(self, newest: Sequence) -> int:
        """Blocks for all that is pending, and for each that runs one in reserve: the newest is not to go again soon."""
        return sum(self._missing(seq) for seq in [*self.running, newest]) + len(self.running)

    def _missing(self, seq: Sequence) -> int:
        return blocks_for(len(seq.token_ids), self.cache.block_size) - self.cache.table.blocks(seq.number).size

    def _token_counts(self) -> dict[Sequence, int]:
        """New tokens of each sequence in the step: all that are pending, from the oldest on, up to the budget."""
        counts, left = {}, self.max_batch_tokens
        for seq in self.running:
            if left:
                counts[seq] = min(self.cache.num_pending(seq.number), left)
                left -= counts[seq]
        return counts

    def _preempt(self) -> None:
        """The newest goes back to the front of the queue with all its tokens. Its full blocks stay known to the pool
        until others need them, so what has to be computed again may be little."""
        seq = self.running.pop()
        self._leave(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _leave(self, seq: Sequence) -> None:
        self.cache.free(seq.number)
        seq.number = None
