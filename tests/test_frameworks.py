"""torch and JAX arrays: the same results as NumPy's, without a copy, and each query gets its own kind back."""

import numpy as np
import pytest
from writes import bits, expected_caches, op_of, poisoned_caches, random_rows, scattered_slots

import pagedkv

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def jax():
    return pytest.importorskip("jax", reason="JAX is not installed")


def to_torch(torch, array, device):
    """The array in torch, bfloat16 and fp8 included."""
    names = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    if array.dtype.name in names:
        carrier = {1: np.uint8, 2: np.int16}[array.itemsize]
        return torch.from_numpy(array.view(carrier).copy()).view(names[array.dtype.name]).to(device)
    return torch.from_numpy(array.copy()).to(device)


def raw_bytes(torch, tensor):
    return tensor.contiguous().view(torch.uint8).cpu().numpy()


def paged_case(rng, dtype):
    """Two sequences of 20 and 9 tokens in an NHD cache, and one query token each."""
    query = rng.standard_normal((2, 4, 32)).astype(dtype)
    k, v = (rng.standard_normal((4, 16, 2, 32)).astype(dtype) for _ in "kv")
    return {
        "q": query,
        "k": k,
        "v": v,
        "cu_seqlens_q": np.arange(3, dtype=np.int32),
        "seqused_k": np.array([20, 9], np.int32),
        "block_table": np.array([[3, 1], [0, -1]], np.int32),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_torch_writes(torch, rng, dtype, device, layout):
    import ml_dtypes

    numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    key, value = random_rows(rng, 20, 2, 32, numpy_dtype)
    caches = poisoned_caches(layout, 4, 8, 2, 32, numpy_dtype)
    slots = scattered_slots(rng, 20, 32)
    expected = expected_caches(key, value, caches, slots, layout)
    tensors = [to_torch(torch, array, device) for array in (key, value, *caches, slots)]
    op_of(layout)(*tensors)
    for got, want in zip(tensors[2:4], expected, strict=True):
        np.testing.assert_array_equal(raw_bytes(torch, got).reshape(-1), bits(want).reshape(-1).view(np.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_torch_float8_carries_its_format(torch, rng, device):
    key, value = random_rows(rng, 20, 2, 32, np.float16)
    caches = poisoned_caches("NHD", 4, 8, 2, 32, np.uint8)
    slots = scattered_slots(rng, 20, 32)
    expected = expected_caches(key, value, caches, slots, "NHD", kv_cache_dtype="fp8", k_scale=0.5)
    tensors = [to_torch(torch, array, device) for array in (key, value, *caches, slots)]
    tensors[2:4] = [tensor.view(torch.float8_e4m3fn) for tensor in tensors[2:4]]
    pagedkv.reshape_and_cache_flash(*tensors, k_scale=0.5)
    for got, want in zip(tensors[2:4], expected, strict=True):
        np.testing.assert_array_equal(raw_bytes(torch, got).reshape(want.shape), want)
    with pytest.raises(TypeError, match="key_cache: expected float8_e5m2 or uint8"):
        pagedkv.reshape_and_cache_flash(*tensors, kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch_queries_get_tensors_back(torch, rng, dtype):
    import ml_dtypes

    case = paged_case(rng, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    want, want_lse = pagedkv.flash_attn_varlen_func(**case, causal=True, return_softmax_lse=True)
    tensors = {name: to_torch(torch, array, "cpu") for name, array in case.items()}
    got, lse = pagedkv.flash_attn_varlen_func(**tensors, causal=True, return_softmax_lse=True)
    assert isinstance(got, torch.Tensor)
    assert got.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(raw_bytes(torch, got).reshape(-1), want.reshape(-1).view(np.uint8))
    np.testing.assert_array_equal(lse.numpy(), want_lse)


def test_torch_out_is_returned_itself(torch, rng):
    tensors = {name: to_torch(torch, array, "cpu") for name, array in paged_case(rng, np.float32).items()}
    out = torch.zeros_like(tensors["q"])
    assert pagedkv.flash_attn_varlen_func(**tensors, out=out) is out
    assert out.abs().sum() > 0


def test_torch_views_and_parameters(torch, rng):
    """A strided view is read as it lies; a subclass is read as the tensor it is."""
    case = paged_case(rng, np.float32)
    want = pagedkv.flash_attn_varlen_func(**case)
    tensors = {name: to_torch(torch, array, "cpu") for name, array in case.items()}
    wide = torch.zeros(2, 4, 96)
    wide[..., 32:64] = tensors["q"]
    tensors["q"] = torch.nn.Parameter(wide)[..., 32:64].detach()
    np.testing.assert_array_equal(pagedkv.flash_attn_varlen_func(**tensors).numpy(), want)


def test_torch_mistakes(torch, rng):
    tensors = {name: to_torch(torch, array, "cpu") for name, array in paged_case(rng, np.float32).items()}
    with pytest.raises(TypeError, match=r"q: expected a float, fp8 or integer dtype, got torch.complex64"):
        pagedkv.flash_attn_varlen_func(**{**tensors, "q": tensors["q"].to(torch.complex64)})
    with pytest.raises(TypeError, match="q: expected a cpu or cuda tensor, got meta"):
        pagedkv.flash_attn_varlen_func(**{**tensors, "q": tensors["q"].to("meta")})


@pytest.mark.gpu
def test_torch_streams(torch, rng):
    """The write runs on torch's current stream: behind the work that fills its inputs."""
    key, value = random_rows(rng, 20, 2, 32, np.float16)
    caches = poisoned_caches("NHD", 4, 8, 2, 32, np.float16)
    slots = scattered_slots(rng, 20, 32)
    expected = expected_caches(key, value, caches, slots, "NHD")
    ready = [to_torch(torch, array, "cuda") for array in (key, value, *caches, slots)]
    late = [torch.zeros_like(tensor) for tensor in ready]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(2):  # planned, then repeated
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for target, source in zip(late, ready, strict=True):
                target.copy_(source)
            pagedkv.reshape_and_cache_flash(*late)
        stream.synchronize()
        for got, want in zip(late[2:4], expected, strict=True):
            np.testing.assert_array_equal(got.cpu().numpy(), want)


@pytest.mark.gpu
def test_mixed_devices(torch, rng):
    key, value = random_rows(rng, 20, 2, 32, np.float16)
    caches = poisoned_caches("NHD", 4, 8, 2, 32, np.float16)
    tensors = [to_torch(torch, array, "cuda") for array in (key, value, *caches)]
    with pytest.raises(TypeError, match="slot_mapping: expected an array on cuda:0 like key, got cpu"):
        pagedkv.reshape_and_cache_flash(*tensors, np.arange(20))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_queries_get_jax_arrays_back(jax, rng, dtype):
    import ml_dtypes

    case = paged_case(rng, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    want, want_lse = pagedkv.flash_attn_varlen_func(**case, return_softmax_lse=True)
    host = jax.devices("cpu")[0]
    arrays = {name: jax.device_put(array, host) for name, array in case.items()}
    got, lse = pagedkv.flash_attn_varlen_func(**arrays, return_softmax_lse=True)
    assert isinstance(got, jax.Array)
    assert got.dtype == case["q"].dtype
    np.testing.assert_array_equal(bits(np.asarray(got)), bits(want))
    np.testing.assert_array_equal(np.asarray(lse), want_lse)


def test_jax_arrays_are_not_written(jax, rng):
    key, value = random_rows(rng, 4, 2, 32, np.float16)
    caches = [jax.device_put(cache, jax.devices("cpu")[0]) for cache in poisoned_caches("NHD", 4, 8, 2, 32, np.float16)]
    with pytest.raises(TypeError, match=r"key_cache: .* immutable JAX array; keep the cache in CuPy"):
        pagedkv.reshape_and_cache_flash(key, value, *caches, np.arange(4))


def test_jax_arrays_inside_jit(jax, rng):
    case = paged_case(rng, np.float32)

    def attend(query):
        return pagedkv.flash_attn_varlen_func(**{**case, "q": query})

    with pytest.raises(TypeError, match="q: expected a concrete JAX array outside jit"):
        jax.jit(attend)(case["q"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_keys_into_a_cupy_cache(jax, rng, dtype):
    import ml_dtypes

    cupy = pytest.importorskip("cupy")
    numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    key, value = random_rows(rng, 20, 2, 32, numpy_dtype)
    caches = poisoned_caches("NHD", 4, 8, 2, 32, numpy_dtype)
    slots = scattered_slots(rng, 20, 32)
    expected = expected_caches(key, value, caches, slots, "NHD")
    gpu = jax.devices("gpu")[0]
    on_device = [cupy.asarray(cache) for cache in caches]
    pagedkv.reshape_and_cache_flash(
        *(jax.device_put(rows, gpu) for rows in (key, value)), *on_device, cupy.asarray(slots)
    )
    for got, want in zip(on_device, expected, strict=True):
        np.testing.assert_array_equal(bits(got.get()), bits(want))


class OnlyDlpack:
    """An array of a framework that is not known by name."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_unknown_frameworks_get_numpy_back(rng):
    case = paged_case(rng, np.float32)
    want = pagedkv.flash_attn_varlen_func(**case)
    got = pagedkv.flash_attn_varlen_func(**{name: OnlyDlpack(array) for name, array in case.items()})
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, want)
