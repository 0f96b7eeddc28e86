"""The same launches on a GPU and in the interpreter: every write instance, equal bits."""

import ml_dtypes
import numpy as np
import pytest
from writes import LAYOUTS, bits, op_of, poisoned_caches, random_rows

import pagedkv
from pagedkv import instances, validate
from pagedkv.write_plan import flash_write_instance, packed_write_instance

pytestmark = [pytest.mark.gpu, pytest.mark.ptx]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FEW, MANY = 37, 530  # tokens on both sides of where other instances take over
SCALES = {"k_scale": 0.037, "v_scale": 0.9}
FORMATS = ["auto", "fp8_e4m3", "fp8_e5m2"]


def instance_of(layout, arrays, options):
    packed = layout == "packed"
    options = options if packed else options | {"layout": layout}
    problem = validate.cache_write(packed=packed, **arguments(arrays), **options)
    return (packed_write_instance if packed else flash_write_instance)(problem)


def arguments(arrays):
    return dict(zip(("key", "value", "key_cache", "value_cache", "slot_mapping"), arrays, strict=True))


def draw(rng, layout, num_tokens, head_size, dtype, kv_cache_dtype, shift):
    """Arrays of a write; keys and values begin ``shift`` elements behind an aligned address."""
    num_blocks = -(-num_tokens // 16) + 2
    rows = [shifted(each, shift) for each in random_rows(rng, num_tokens, 2, head_size, dtype)]
    caches = poisoned_caches(layout, num_blocks, 16, 2, head_size, dtype if kv_cache_dtype == "auto" else np.uint8)
    slots = rng.permutation(num_blocks * 16)[:num_tokens]
    slots[num_tokens // 2 :] = np.sort(slots[num_tokens // 2 :])
    slots[3] = -1
    return [*rows, *caches, slots]


def shifted(array, shift):
    buffer = np.empty(array.size + shift, array.dtype)
    buffer[shift:] = array.ravel()
    return buffer[shift:].reshape(array.shape)


def check(rng, seen, layout, *sizes, scales=None, shift=0):
    """Both backends, the same bits in both caches."""
    cupy = pytest.importorskip("cupy")
    arrays = draw(rng, layout, *sizes, shift)
    kv_cache_dtype = sizes[-1]
    options = {"kv_cache_dtype": kv_cache_dtype} | ({} if kv_cache_dtype == "auto" else scales or SCALES)
    on_card = [shifted_on_card(cupy, array, shift) for array in arrays[:2]] + [cupy.asarray(a) for a in arrays[2:]]
    op_of(layout)(*on_card, **{name: put(cupy, value) for name, value in options.items()})
    with pagedkv.use_backend("ptx"):
        op_of(layout)(*arrays, **options)
    for ours, theirs in zip(arrays[2:4], on_card[2:4], strict=True):
        np.testing.assert_array_equal(bits(ours), bits(theirs.get()))
    seen.add(instance_of(layout, arrays, options))


def put(cupy, value):
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


def shifted_on_card(cupy, array, shift):
    buffer = cupy.empty(array.size + shift, array.dtype)
    buffer[shift:] = cupy.asarray(array).ravel()
    return buffer[shift:].reshape(array.shape)


def test_every_write_instance_has_the_bits_of_the_interpreter(rng):
    seen = set()
    for layout in LAYOUTS:
        for dtype in (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)):
            for kv_cache_dtype in FORMATS if dtype != np.float32 else FORMATS[:1]:
                for num_tokens in (FEW, MANY):
                    for head_size in (64, 128):
                        check(rng, seen, layout, num_tokens, head_size, dtype, kv_cache_dtype)
        check(rng, seen, layout, MANY, 128, BFLOAT16, "auto", shift=1)
    per_head = {"k_scale": np.array([0.3, 7], np.float32), "v_scale": np.array([0.01, 2], np.float32)}
    check(rng, seen, "HND", MANY, 128, BFLOAT16, "fp8_e4m3", scales=per_head)
    assert set(instances.FLASH_WRITES + instances.PACKED_WRITES) <= seen
