"""Whose turn it is: where each thread of a grid stands, and what it waits for.

The threads at the lowest place in the program go first, and with them all that stand there: threads that went apart at
a branch meet again at its end. One that has jumped back often rests until the others have had their turns, so a thread
that spins on a flag or a lock does not keep from running the one that it waits for.
"""

import numpy as np

from .warp import LANES, WARP_SIZE, WHOLE_WARP, as_words

RUNNING, RESTING, AT_BARRIER, AT_WARP, DONE = range(5)
LAPS = 32  # jumps back before a rest: a loop of fewer rounds keeps its threads together


class Schedule:
    """Program counter and state of each thread; of one that waits for lanes of its warp also for which."""

    def __init__(self, num_threads: int) -> None:
        self.pc, self.laps = np.zeros(num_threads, np.int64), np.zeros(num_threads, np.int64)
        self.state = np.full(num_threads, RUNNING)
        self.masks = np.zeros(num_threads, np.uint32)

    def turn(self) -> tuple[int, np.ndarray] | None:
        """The place in the program whose turn it is and the threads there; None if nobody can run."""
        running = self.state == RUNNING
        if not running.any():
            running = self.state == RESTING
            if not running.any():
                return None
            self.state[running] = RUNNING
        at = int(self.pc[running].min())
        return at, np.flatnonzero(running & (self.pc == at))

    def jump(self, threads: np.ndarray, target: int) -> bool:
        """Threads go on at the target; whether that is back."""
        back = threads.size > 0 and target < self.pc[threads[0]]
        self.pc[threads] = target
        if back:
            self.laps[threads] += 1
            self.state[threads[self.laps[threads] % LAPS == 0]] = RESTING
        return bool(back)

    def meet(self, at: int, active: np.ndarray, taking: np.ndarray, masks: np.ndarray) -> np.ndarray:
        """Threads wait at an instruction for the lanes that their masks name; those for whom all are there now."""
        self.pc[active] = at + 1
        if _whole_warps(taking) and (masks == WHOLE_WARP).all():
            return taking
        self.pc[taking], self.state[taking], self.masks[taking] = at, AT_WARP, masks
        rows = np.unique(taking // WARP_SIZE)[:, None] * WARP_SIZE + LANES
        waiting = (self.state[rows] == AT_WARP) & (self.pc[rows] == at)
        same = waiting[:, None, :] & (self.masks[rows][:, :, None] == self.masks[rows][:, None, :])
        complete = waiting & (as_words(same) == self.masks[rows])
        threads = rows[complete]
        self.pc[threads], self.state[threads] = at + 1, RUNNING
        return threads


def _whole_warps(threads: np.ndarray) -> bool:
    """Whether ascending threads are all the lanes of some warps."""
    if threads.size % WARP_SIZE:
        return False
    rows = threads.reshape(-1, WARP_SIZE)
    return bool(((rows[:, 0] % WARP_SIZE == 0) & (rows[:, -1] - rows[:, 0] == WARP_SIZE - 1)).all())
