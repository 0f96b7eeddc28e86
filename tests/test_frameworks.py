"""torch and JAX arrays: the same results as NumPy's, without a copy, and each query gets its own kind back."""

import time

import numpy as np
import pytest
from cases import FLOATS, put_all
from conftest import make_backend
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


def padded(case):
    """The same with two more rows of q, of no sequence."""
    return case | {"q": np.concatenate([case["q"], np.full_like(case["q"], np.nan)])}


def cascade_case(rng, dtype):
    """Two sequences whose first block is the same one, and padding."""
    case = {"seqused_k": np.array([20, 25], np.int32), "block_table": np.array([[3, 1], [3, 0]], np.int32)}
    return padded(paged_case(rng, dtype) | case)


def states_case(rng, dtype):
    """Two states of five tokens, of which one saw nothing of the prefix."""
    outputs = rng.standard_normal((2, 5, 4, 32)).astype(dtype)
    lses = rng.standard_normal((2, 4, 5)).astype(np.float32)
    lses[0, :, 3] = -np.inf
    return {
        "prefix_output": outputs[0],
        "prefix_lse": lses[0],
        "suffix_output": outputs[1],
        "suffix_lse": lses[1],
    }


# Of each op that returns arrays: its arguments, and the options with which it returns an output and an LSE.
READS = {
    "flash_attn_varlen_func": (paged_case, {"causal": True, "return_softmax_lse": True}),
    "merge_attn_states": (states_case, {}),
    "cascade_attention": (cascade_case, {"common_prefix_len": 16, "return_softmax_lse": True}),
}


def read_case(rng, op, dtype, device):
    """Arrays and options of a call, and what it gives in NumPy, or on a device in CuPy."""
    make, options = READS[op]
    case, backend = make(rng, FLOATS[dtype]), make_backend("cuda" if device == "cuda" else "numpy")
    return case, options, list(map(backend.get, getattr(pagedkv, op)(**put_all(backend, case), **options)))


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", READS)
def test_torch_queries_get_tensors_back(torch, rng, op, dtype, device):
    case, options, want = read_case(rng, op, dtype, device)
    tensors = {name: to_torch(torch, array, device) for name, array in case.items()}
    for _ in range(2):  # planned, then repeated
        assert_tensors(torch, getattr(pagedkv, op)(**tensors, **options), want, device)


def assert_tensors(torch, results, want, device):
    for got, array in zip(results, want, strict=True):
        assert isinstance(got, torch.Tensor)
        assert (got.device.type, got.dtype) == (device, getattr(torch, array.dtype.name))
        assert got.shape == array.shape
        np.testing.assert_array_equal(raw_bytes(torch, got).reshape(-1), bits(array).reshape(-1).view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("op", READS)
def test_torch_queries_over_a_cupy_cache(torch, rng, op):
    """What is returned follows the first argument alone."""
    case, options, want = read_case(rng, op, "float16", "cuda")
    arrays = put_all(make_backend("cuda"), case)
    first = next(iter(case))
    for _ in range(2):
        results = getattr(pagedkv, op)(**arrays | {first: to_torch(torch, case[first], "cuda")}, **options)
        assert_tensors(torch, results, want, "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_torch_rows_of_padding_are_not_written(torch, rng, device):
    case, _, want = read_case(rng, "flash_attn_varlen_func", "float16", device)
    tensors = {name: to_torch(torch, array, device) for name, array in padded(case).items()}
    out = torch.full_like(tensors["q"], 7)
    for _ in range(2):
        assert pagedkv.flash_attn_varlen_func(**tensors, causal=True, out=out) is out
        assert_tensors(torch, [out[:2]], want[:1], device)
        assert (out[2:] == 7).all()


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
@pytest.mark.parametrize("op", READS)
def test_torch_streams_of_reads(torch, rng, op):
    """They run on torch's current stream, and the host waits for none of what is queued there."""
    case, options, want = read_case(rng, op, "float16", "cuda")
    ready = {name: to_torch(torch, array, "cuda") for name, array in case.items()}
    late = {name: tensor.clone() for name, tensor in ready.items()}
    first = next(iter(case))
    late[first].zero_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        getattr(pagedkv, op)(**late, **options)  # loads what torch computes with
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late[first].copy_(ready[first])
            results = getattr(pagedkv, op)(**late, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not stream.query()
    stream.synchronize()
    assert_tensors(torch, results, want, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [0, 1])
def test_a_torch_call_costs_the_host_little_more_than_a_cupy_call(torch, rng, num_splits):
    """All memory is given. Batches take turns and the best of each counts: what else the machine does is not asked."""
    import cupy

    case = paged_case(rng, np.float16)
    sizes = {"num_tokens": 2, "num_heads": 4, "head_size": 32, "max_seq_len": 32, "num_splits": num_splits}
    nbytes = pagedkv.workspace_nbytes("flash_attn_varlen_func", **sizes)
    buffers = {"out": case["q"], "lse_out": np.zeros((4, 2), np.float32), "workspace": np.zeros(nbytes, np.uint8)}
    kinds = (cupy.asarray, lambda array: to_torch(torch, array, "cuda"))
    given = [{name: put(array) for name, array in (case | buffers).items()} for put in kinds]
    options = {"causal": True, "max_seqlen_q": 1, "num_splits": num_splits}
    medians = [[host_microseconds(cupy, arrays, options) for arrays in given] for _ in range(20)]
    of_cupy, of_torch = np.min(medians, axis=0)
    assert of_torch <= of_cupy + 10


def host_microseconds(cupy, arrays, options):
    """Median time until a call returns, of few calls at a time, since a full queue would hold the host up."""
    times = []
    pagedkv.flash_attn_varlen_func(**arrays, **options)
    cupy.cuda.Device().synchronize()
    for _ in range(50):
        start = time.perf_counter()
        pagedkv.flash_attn_varlen_func(**arrays, **options)
        times.append(time.perf_counter() - start)
    cupy.cuda.Device().synchronize()
    return np.median(times) * 1e6


@pytest.mark.gpu
def test_mixed_devices(torch, rng):
    key, value = random_rows(rng, 20, 2, 32, np.float16)
    caches = poisoned_caches("NHD", 4, 8, 2, 32, np.float16)
    tensors = [to_torch(torch, array, "cuda") for array in (key, value, *caches)]
    with pytest.raises(TypeError, match="slot_mapping: expected an array on cuda:0 like key, got cpu"):
        pagedkv.reshape_and_cache_flash(*tensors, np.arange(20))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", READS)
def test_jax_queries_get_jax_arrays_back(jax, rng, op, dtype, device):
    """On a device over a cache in CuPy, which can be written."""
    case, options, want = read_case(rng, op, dtype, device)
    platform = jax.devices("cpu" if device == "cpu" else "gpu")[0]
    arrays = {name: jax.device_put(array, platform) for name, array in case.items()}
    if device == "cuda":
        arrays |= put_all(make_backend("cuda"), {name: case[name] for name in {"k", "v"} & set(case)})
    for got, array in zip(getattr(pagedkv, op)(**arrays, **options), want, strict=True):
        assert isinstance(got, jax.Array)
        assert (got.devices(), got.dtype) == ({platform}, array.dtype)
        np.testing.assert_array_equal(bits(np.asarray(got)), bits(array))


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", READS)
def test_other_frameworks_get_numpy_or_cupy_back(rng, op, device):
    """NumPy and CuPy themselves, and what is known by its protocol alone."""
    case, options, want = read_case(rng, op, "float32", device)
    arrays = put_all(make_backend("cuda" if device == "cuda" else "numpy"), case)
    kind = type(arrays[next(iter(case))])
    for given in (arrays, {name: OnlyDlpack(array) for name, array in arrays.items()}):
        for got, array in zip(getattr(pagedkv, op)(**given, **options), want, strict=True):
            assert type(got) is kind
            np.testing.assert_array_equal(got if device == "cpu" else got.get(), array)
