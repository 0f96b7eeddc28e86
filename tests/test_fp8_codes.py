"""fp8 codes: every float16 and bfloat16 pattern at many scales, all codes read back, the corners of float32."""

import ml_dtypes
import numpy as np
import pytest
from writes import FP8, poisoned_caches, write

BF16 = ml_dtypes.bfloat16
HEADS, HEAD_SIZE = 8, 128
# Short and long mantissas, powers of two, and both ends of the exponent range.
SCALES = [1.0, 0.01, 100.0, 0.75, 3.0, 1 / 448, 0.4999999701976776, 1.9999998807907104, 2.0**-126, 1.5 * 2.0**126, 1e38]


def codes_by_rounding_once(values, scale, kv_cache_dtype):
    """ml_dtypes after a clip; the quotient is IEEE float32."""
    fp8 = FP8[kv_cache_dtype]
    largest = np.float32(ml_dtypes.finfo(fp8).max)
    with np.errstate(all="ignore"):
        quotient = values.astype(np.float32) / np.float32(scale)
    return np.clip(quotient, -largest, largest).astype(fp8).view(np.uint8)


def all_patterns(dtype):
    patterns = np.arange(65536, dtype=np.uint16).view(dtype)
    return patterns.reshape(-1, HEADS, HEAD_SIZE)


def is_nan_code(codes, kv_cache_dtype):
    return np.isnan(codes.view(FP8[kv_cache_dtype]).astype(np.float32))


def written_codes(backend, layout, key, value, **options):
    """The codes of all tokens, written to consecutive slots: [num_tokens, num_kv_heads, head_size]."""
    num_blocks = -(-len(key) // 16)
    caches = poisoned_caches(layout, num_blocks, 16, *key.shape[1:], np.uint8)
    written = write(backend, key, value, caches, np.arange(len(key)), layout, **options)
    dense = []
    for cache in written:
        if layout == "HND":
            cache = cache.swapaxes(1, 2)
        elif layout == "packed":
            cache = np.moveaxis(cache, 3, 1)  # slots behind blocks; features of a head are then in order
        dense.append(cache.reshape(-1, *key.shape[1:])[: len(key)])
    return dense


def assert_codes(got, values, scale, kv_cache_dtype):
    want = codes_by_rounding_once(values, scale, kv_cache_dtype)
    nan = np.isnan(values.astype(np.float32))
    assert is_nan_code(got[nan], kv_cache_dtype).all()
    np.testing.assert_array_equal(got[~nan], want[~nan])


@pytest.mark.parametrize("layout", ["NHD", "packed"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_every_16_bit_pattern(backend, dtype, kv_cache_dtype, layout):
    """K and V take different scales of the list, so that one used for the other shows."""
    values = all_patterns(dtype)
    for k_scale, v_scale in zip(SCALES, SCALES[1:] + SCALES[:1], strict=True):
        options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": k_scale, "v_scale": v_scale}
        keys, codes = written_codes(backend, layout, values, values[::-1], **options)
        assert_codes(keys, values, k_scale, kv_cache_dtype)
        assert_codes(codes, values[::-1], v_scale, kv_cache_dtype)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_random_scales_per_head(backend, rng, layout, kv_cache_dtype):
    values = all_patterns(np.float16)
    k_scale, v_scale = (np.exp2(rng.uniform(-20, 20, HEADS)).astype(np.float32) for _ in "kv")
    options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": k_scale, "v_scale": v_scale}
    for codes, scale in zip(written_codes(backend, layout, values, values, **options), (k_scale, v_scale), strict=True):
        for head in range(HEADS):
            assert_codes(codes[:, head], values[:, head], scale[head], kv_cache_dtype)


def quotients_at_ties(rng, fp8, count):
    """float32 values and a scale such that quotients lie on and one step beside the middles between codes."""
    codes = np.sort(np.arange(256, dtype=np.uint8).view(fp8).astype(np.float32))
    finite = codes[np.isfinite(codes)]
    middles = (finite[1:] + finite[:-1]) / 2
    scale = np.float32(np.exp2(rng.uniform(-30, 30)))
    at = rng.choice(middles, count).astype(np.float32) * scale
    return np.stack([np.nextafter(at, np.float32(-np.inf)), at, np.nextafter(at, np.float32(np.inf))]), scale


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_float32_quotients_beside_ties(backend, rng, layout, kv_cache_dtype):
    for _ in range(8):
        values, scale = quotients_at_ties(rng, FP8[kv_cache_dtype], 16 * HEADS * HEAD_SIZE)
        values = values.reshape(-1, HEADS, HEAD_SIZE)
        options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": float(scale), "v_scale": 1.0}
        keys, codes = written_codes(backend, layout, values, values, **options)
        assert_codes(keys, values, scale, kv_cache_dtype)
        assert_codes(codes, values, 1.0, kv_cache_dtype)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_saturation_nan_and_subnormals_of_float32(backend, kv_cache_dtype):
    corners = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        1e-38,
        3e38,
        -3e38,
        448,
        464,
        465,
        57344,
        61440,
        61441,
    ]
    values = np.resize(np.array(corners, np.float32), (16, HEADS, HEAD_SIZE))
    for scale in (1.0, 1e-30, 1e30, 0.3):
        options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": scale, "v_scale": scale}
        for codes in written_codes(backend, "NHD", values, values, **options):
            assert_codes(codes, values, scale, kv_cache_dtype)
