"""Stand-ins for CuPy and for kernels: what the CUDA backend does around a launch can be seen without a GPU."""

import importlib
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np

import pagedkv
from pagedkv import kernels, repeats

ANY = -1  # the device of the null stream
CURRENT, SIDE = 1, 77  # addresses of streams: CuPy's current one, and any that is made
MODULES = ("counters", "move_tables", "cuda_streams", "cuda_replay", "cuda_moves", "cuda_ops")  # that have CuPy inside
# Pointer parameters of each kernel.
DECODE = ["query", "key_cache", "value_cache", "block_tables", "seq_lens", "alibi_slopes", "sinks"]
DECODE += ["k_scale", "v_scale", "out", "lse_out", "workspace", "counters"]
VARLEN = ["q", "k", "v", "block_table", "seqused_k", "cu_seqlens_q", "alibi_slopes", "s_aux"]
VARLEN += ["k_descale", "v_descale", "out", "lse_out", "workspace"]
PARAMETERS = {
    "paged_attention": DECODE,
    "varlen_attention": VARLEN,
    "varlen_decode": [*VARLEN, "counters"],
    "merge_splits": ["workspace", "cu_seqlens_q", "s_aux", "v_descale", "out", "lse_out"],
    "merge_attn_states": ["prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "out", "lse_out"],
    "gather_cache": [
        *("key_cache", "value_cache", "block_table", "cu_seq_lens", "seq_starts"),
        *("k_scale", "v_scale", "key_out", "value_out"),
    ],
    "convert_layout": ["key_cache", "value_cache", "key_out", "value_out"],
}


class DeviceArray:
    """What is read of a CuPy array, over host memory."""

    shape = dtype = None

    def __init__(self, host, device=0):
        self.host, self.shape, self.strides = host, host.shape, host.strides
        self.dtype, self.size = host.dtype, host.size
        self.data, self.device = SimpleNamespace(ptr=host.ctypes.data, device_id=device), SimpleNamespace(id=device)

    def astype(self, dtype):
        return DeviceArray(self.host.astype(dtype))

    def get(self):
        return self.host


DeviceArray.__module__, DeviceArray.__name__ = "cupy", "ndarray"


class Current:
    """Something that is current inside a ``with``."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Device(Current):
    def __init__(self, number):
        self.attributes = {"MultiProcessorCount": 3}


class Stream(Current):
    def __init__(self, ptr):
        self.ptr = ptr

    def synchronize(self):
        pass


class NotedStream(Stream):
    """Notes where it is current and when it is waited for; refuses another device than its own, as CuPy's do."""

    def __init__(self, notes, ptr, device):
        super().__init__(ptr)
        self.notes, self.device = notes, device

    def __enter__(self):
        if self.device not in (ANY, self.notes.device):
            raise RuntimeError(f"stream of device {self.device}, current is {self.notes.device}")
        self.notes.entered.append(self.ptr)
        self.notes.current.append(self.ptr)
        return self

    def __exit__(self, *error):
        self.notes.current.pop()

    def synchronize(self):
        self.notes.events.append(("wait", self.ptr, self.notes.device))


class NotedDevice(Device):
    def __init__(self, notes, number):
        super().__init__(number)
        self.notes, self.number = notes, number

    def __enter__(self):
        self.before, self.notes.device = self.notes.device, self.number
        return self

    def __exit__(self, *error):
        self.notes.device = self.before


class Card:
    """A stand-in for the module cupy, which notes what is loaded, allocated and launched."""

    ndarray, int32 = DeviceArray, np.int32

    def __init__(self):
        self.allocated, self.launched, self.loaded = [], [], []
        self.stream, self.is_capturing = Stream(1), False
        runtime = SimpleNamespace(streamIsCapturing=lambda ptr: self.is_capturing, getDevice=lambda: 0)
        self.cuda = SimpleNamespace(runtime=runtime, Device=Device, get_current_stream=lambda device: self.stream)

    def asarray(self, array):
        return DeviceArray(array.copy())

    def empty(self, shape, dtype):
        self.allocated.append(DeviceArray(np.empty(shape, dtype)))
        return self.allocated[-1]

    def zeros(self, shape, dtype):
        self.allocated.append(DeviceArray(np.zeros(shape, dtype)))
        return self.allocated[-1]

    def load(self, instance, device, shared_bytes=0):
        self.loaded.append((instance, device, shared_bytes))
        return partial(self.launch, instance.kernel)

    def launch(self, kernel, grid, threads, arguments, shared_bytes, stream):
        *pointers, params = arguments
        self.launched.append(dict(zip(PARAMETERS[kernel], pointers, strict=True)) | {"kernel": kernel})
        self.launched[-1] |= {"grid": grid, "params": params, "threads": threads, "shared_bytes": shared_bytes}


def stand_in(monkeypatch):
    """A generator for a fixture: a card in the place of CuPy, and of kernels."""
    card = Card()
    monkeypatch.setitem(sys.modules, "cupy", card)
    for name in MODULES:  # of this test alone, with the stand-in inside
        monkeypatch.delitem(sys.modules, f"pagedkv.{name}", raising=False)
        monkeypatch.setattr(pagedkv, name, None, raising=False)
    monkeypatch.setattr(kernels, "load", card.load)
    monkeypatch.setattr(repeats, "_replays", {})
    for name in MODULES:
        setattr(pagedkv, name, importlib.import_module(f"pagedkv.{name}"))
    yield card
    for name in MODULES:
        sys.modules.pop(f"pagedkv.{name}", None)


def note_streams(card, launcher):
    """What from now on happens on which stream and device: uploads, allocations, launches and waits in order, and the
    streams that were made current. ``launcher.launch`` runs the kernels, on the stream that is its last argument."""
    notes = SimpleNamespace(events=[], entered=[], current=[None], device=0)

    def stream(pointer, device=None):
        return NotedStream(notes, pointer, notes.device if device is None else device)

    def noted(what, call, stream_of=lambda arguments: notes.current[-1]):
        def wrapped(*arguments):
            notes.events.append((what, stream_of(arguments), notes.device))
            return call(*arguments)

        return wrapped

    cuda = card.cuda
    cuda.Device, cuda.runtime.getDevice = partial(NotedDevice, notes), lambda: notes.device
    cuda.get_current_stream = partial(stream, CURRENT)
    cuda.Stream = lambda non_blocking: stream(SIDE)
    # Of the device that is current, as CuPy has it: the protocol does not tell.
    cuda.Stream.from_external = lambda foreign: stream(foreign.__cuda_stream__()[1])
    cuda.Stream.null = stream(0, ANY)
    card.asarray, card.empty = (noted(*each) for each in (("upload", card.asarray), ("allocate", card.empty)))
    launcher.launch = noted("launch", launcher.launch, lambda arguments: arguments[-1].ptr)
    return notes


def put(arguments):
    """Copies of the NumPy arrays among the arguments on the card."""
    return {name: DeviceArray(a.copy()) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}


def pointers(arguments):
    """Addresses of the arrays among the arguments."""
    return {name: array.data.ptr for name, array in arguments.items() if isinstance(array, DeviceArray)}
