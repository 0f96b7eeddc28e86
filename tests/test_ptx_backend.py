"""The PTX backend as a whole: what it needs and what it refuses. What it computes, the tests of the ops hold."""

import subprocess
import sys

import numpy as np
import pytest

import pagedkv

pytestmark = pytest.mark.ptx

WITHOUT_FRAMEWORKS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"cupy", "cupy_backends", "torch", "jax"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import numpy as np
import pagedkv

rng = np.random.default_rng(0)
key, value = rng.standard_normal((2, 5, 2, 64)).astype(np.float16)
caches = [[np.zeros((4, 16, 2, 64), np.float16) for _ in range(2)] for _ in range(2)]
slots = np.array([3, -1, 63, 16, 0])
for backend, (key_cache, value_cache) in zip(("ptx", "numpy"), caches):
    with pagedkv.use_backend(backend):
        pagedkv.reshape_and_cache_flash(key, value, key_cache, value_cache, slots)
print(all((ours == theirs).all() for ours, theirs in zip(*caches)) and bool(caches[0][0].any()))
"""


def test_needs_no_framework():
    ran = subprocess.run([sys.executable, "-c", WITHOUT_FRAMEWORKS], check=True, capture_output=True, text=True)
    assert ran.stdout == "True\n"


def test_an_op_without_a_kernel_says_so(monkeypatch):
    monkeypatch.delattr("pagedkv.ptx_ops.flash_attn_varlen_func")
    cache, lens = np.zeros((1, 16, 2, 64), np.float16), np.ones(1, np.int32)
    arguments = {
        "cu_seqlens_q": np.arange(2, dtype=np.int32),
        "seqused_k": lens,
        "block_table": np.zeros((1, 1), np.int32),
    }
    with pagedkv.use_backend("ptx"), pytest.raises(NotImplementedError, match="flash_attn_varlen_func: no kernel yet"):
        pagedkv.flash_attn_varlen_func(np.zeros((1, 2, 64), np.float16), cache, cache, **arguments)
