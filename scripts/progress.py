"""How far serving is."""

import time

from scheduler import Scheduler


class Progress:
    """What has been done so far, in one line while it runs and in some at the end."""

    def __init__(self, scheduler: Scheduler, num_requests: int) -> None:
        self.scheduler = scheduler
        self.num_requests = num_requests
        self.num_tokens = 0
        self.start = time.perf_counter()

    def line(self) -> str:
        scheduler, pool = self.scheduler, self.scheduler.cache.pool
        return (
            f"{scheduler.num_finished}/{self.num_requests} requests, {self.num_tokens} tokens, {self._speed()} | "
            f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting | "
            f"{pool.num_used}/{pool.num_blocks} blocks | preemptions: {scheduler.num_preemptions}"
        )

    def summary(self) -> str:
        scheduler, seconds = self.scheduler, time.perf_counter() - self.start
        return (
            f"pool:   at most {scheduler.most_blocks_used} of {scheduler.cache.num_blocks} blocks used; "
            f"preemptions: {scheduler.num_preemptions}\n"
            f"cache:  {scheduler.num_reused_tokens} tokens reused of known prefixes, "
            f"{scheduler.num_computed_tokens} computed\n"
            f"speed:  {self.num_requests} requests, {self.num_tokens} tokens in {seconds:.2f} s, {self._speed()}"
        )

    def _speed(self) -> str:
        return f"{self.num_tokens / (time.perf_counter() - self.start):.1f} tokens/s"
