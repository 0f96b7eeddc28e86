"""Dtypes: the floating kinds of queries and caches, the fp8 formats, and their CUDA names."""

import ml_dtypes
import numpy as np

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
UINT8 = np.dtype(np.uint8)
UINT32 = np.dtype(np.uint32)
UINT64 = np.dtype(np.uint64)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
LARGEST_INT32 = 2**31 - 1

FLOATS = (FLOAT16, BFLOAT16, FLOAT32)
FP8 = (E4M3, E5M2)

# What `kv_cache_dtype` may say, and the format it names; "auto" takes the key's dtype.
KV_CACHE_DTYPES = {"auto": None, "fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2}

CUDA_NAMES = {
    FLOAT16: "__half",
    BFLOAT16: "__nv_bfloat16",
    FLOAT32: "float",
    E4M3: "__nv_fp8_e4m3",
    E5M2: "__nv_fp8_e5m2",
}

BY_NAME = {dtype.name: dtype for dtype in FLOATS}


def is_fp8(dtype: np.dtype) -> bool:
    """Whether a cache of this format is quantised."""
    return dtype in FP8


def storage_dtype(dtype: np.dtype, kv_cache_dtype: str) -> np.dtype:
    """Of a cache for keys of ``dtype``: fp8 codes travel as uint8."""
    return dtype if kv_cache_dtype == "auto" else UINT8


def is_signed_integer(dtype: np.dtype) -> bool:
    """Whether slots, ids or lengths may have this dtype."""
    return dtype.kind == "i"


def to_float32(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values of ``array``, read as ``dtype`` (fp8 storage is uint8), in float32."""
    if dtype == BFLOAT16:  # a shift is several times faster than the element-wise cast
        return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if is_fp8(dtype):
        return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)[array.view(np.uint8)]
    return array.astype(np.float32)


def quantize(array: np.ndarray, scale: np.ndarray | float, dtype: np.dtype) -> np.ndarray:
    """fp8 codes (uint8) of ``saturate(array / scale)``: IEEE float32 division, round to nearest even, NaN to NaN."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = to_float32(array, array.dtype) / np.asarray(scale, np.float32)
    largest = np.float32(ml_dtypes.finfo(dtype).max)  # ml_dtypes overflows to NaN or inf where CUDA saturates
    return np.clip(quotient, -largest, largest).astype(dtype).view(np.uint8)
