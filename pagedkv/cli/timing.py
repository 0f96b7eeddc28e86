"""Timing on a card: CUDA events around graph replays, L2 flushed before each by a read, and the ceilings beside it.

A flush that writes would leave dirty lines whose write-back is timed with the kernel.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from pagedkv.kernels import Instance, load
from pagedkv.launch import Launch
from pagedkv.layout import PACK_BYTES
from pagedkv.params import STREAM_PARAMS

from .read_floor import NEVER

FLUSH_BYTES = 256 << 20
WARMUPS = 3
HOST_BATCHES, HOST_CALLS = 10, 50  # few calls at a time, since a full queue would hold the host up

IN_FLIGHT = (1, 2, 4, 8)
CEILINGS = {
    "read": [Instance("ceilings.cu", "read_packs", (count,)) for count in IN_FLIGHT],
    "copy": [Instance("ceilings.cu", "copy_packs", (count,)) for count in IN_FLIGHT],
    "empty": [Instance("ceilings.cu", "empty_kernel", (0,))],
}
GRIDS = ((256, 4), (512, 4), (1024, 2), (128, 0), (256, 0), (512, 0))  # threads, CTAs per SM (0: a thread per pack)


def random_bytes(nbytes: int) -> cupy.ndarray:
    """Random device memory: zeros would be measured too fast."""
    words = cupy.random.default_rng(0).integers(0, 2**32, -(-nbytes // 4), dtype=cupy.uint32)
    return words.view(cupy.uint8)[:nbytes]


@dataclass
class Stopwatch:
    """Times launches on the current device; holds the buffer whose reading flushes L2."""

    repeats: int = 20

    def __post_init__(self) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.flush_buffer = random_bytes(FLUSH_BYTES)
        self.sms = cupy.cuda.Device().attributes["MultiProcessorCount"]

    def microseconds(self, launch: Callable[[], None]) -> float:
        """Median time of one replay of ``launch`` captured in a graph, L2 cold."""
        cupy.cuda.runtime.deviceSynchronize()  # the inputs may come from another stream
        with self.stream:
            launch()  # compiles, so that the capture finds its kernels loaded
            cupy.cuda.runtime.deviceSynchronize()
            self.stream.begin_capture()
            launch()
            graph = self.stream.end_capture()
            times = [self._replay(graph) for _ in range(WARMUPS + self.repeats)]
        return float(np.median(times[WARMUPS:]))

    def _replay(self, graph: cupy.cuda.Graph) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        launch_read(self.flush_buffer, CEILINGS["read"][-1], 512, 2 * self.sms)
        start.record()
        graph.launch()
        end.record()
        end.synchronize()
        return cupy.cuda.get_elapsed_time(start, end) * 1e3

    def best(self, launches: Sequence[Launch], arrays: Sequence[cupy.ndarray]) -> tuple[float, Launch]:
        """The fastest of some launches on the same arrays, and its microseconds."""
        device = cupy.cuda.Device().id
        times = []
        for launch in launches:
            kernel = load(launch.instance, device, launch.shared_bytes)
            arguments = (launch.grid, (launch.threads,), (*arrays, launch.params), launch.shared_bytes)
            times.append(self.microseconds(lambda kernel=kernel, arguments=arguments: kernel(*arguments)))
        fastest = int(np.argmin(times))
        return times[fastest], launches[fastest]

    def host_microseconds(self, call: Callable[[], Any]) -> float:
        """Median time until a call returns, whatever its kernels still do."""
        cupy.cuda.runtime.deviceSynchronize()  # the inputs may come from another stream
        times = []
        with self.stream:
            for _ in range(HOST_BATCHES):
                call()
                cupy.cuda.runtime.deviceSynchronize()
                for _ in range(HOST_CALLS):
                    start = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - start)
        return float(np.median(times)) * 1e6

    def empty(self) -> float:
        """Microseconds of a kernel that does nothing."""
        kernel = load(CEILINGS["empty"][0], cupy.cuda.Device().id)
        return self.microseconds(lambda: kernel((self.sms,), (128,), ()))

    def read(self, nbytes: int) -> float:
        """Microseconds of the best kernel that reads this many bytes."""
        source = random_bytes(nbytes)
        return self._best("read", nbytes, lambda *grid: launch_read(source, *grid))

    def copy(self, nbytes: int) -> float:
        """Microseconds of the best plain copy of this many bytes: copy kernels and the driver's own."""
        source, target = random_bytes(nbytes), random_bytes(nbytes)
        by_kernel = self._best("copy", nbytes, lambda *grid: launch_copy(target, source, *grid))
        memcpy = self.microseconds(lambda: target.data.copy_from_device_async(source.data, nbytes))
        return min(by_kernel, memcpy)

    def _best(self, ceiling: str, nbytes: int, launch: Callable[[Instance, int, int], None]) -> float:
        times = []
        for instance in CEILINGS[ceiling]:
            for threads, per_sm in GRIDS:
                ctas = -(-nbytes // (PACK_BYTES * threads * instance.arguments[0]))
                grid = min(ctas, per_sm * self.sms) if per_sm else ctas
                times.append(self.microseconds(lambda i=instance, t=threads, g=grid: launch(i, t, g)))
        return min(times)


def launch_read(source: cupy.ndarray, instance: Instance, threads: int, ctas: int) -> None:
    """Reads a buffer on the current stream."""
    params = np.array((source.nbytes // PACK_BYTES, NEVER), STREAM_PARAMS)
    load(instance, source.device.id)((ctas,), (threads,), (source, source, params))


def launch_copy(target: cupy.ndarray, source: cupy.ndarray, instance: Instance, threads: int, ctas: int) -> None:
    """Copies a buffer on the current stream."""
    params = np.array((source.nbytes // PACK_BYTES, NEVER), STREAM_PARAMS)
    load(instance, source.device.id)((ctas,), (threads,), (target, source, params))
