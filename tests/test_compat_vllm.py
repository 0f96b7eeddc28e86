"""Code written for vLLM's ops: the same argument lists, by position and by name, and the results of the plain ops."""

import inspect

import cases
import numpy as np
import pytest

import pagedkv
from pagedkv.compat import vllm

SEQ_LENS = [1, 16, 17, 40]
WRITE = "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale"
READ = (
    "query key_cache value_cache num_kv_heads scale block_tables seq_lens block_size max_seq_len alibi_slopes "
    "kv_cache_dtype k_scale v_scale tp_rank=0 blocksparse_local_blocks=0 blocksparse_vert_stride=0 "
    "blocksparse_block_size=64 blocksparse_head_sliding_step=0"
)
LISTS = {
    "reshape_and_cache": WRITE,
    "reshape_and_cache_flash": WRITE,
    "paged_attention_v1": f"out {READ}",
    "paged_attention_v2": f"out exp_sum max_logits tmp_out {READ}",
}
READS = ["paged_attention_v1", "paged_attention_v2"]
SCALES = {
    "none": (None, None),
    "numbers": (0.04, 0.11),
    "one_element": (np.full(1, 0.04, np.float32), np.full(1, 0.11, np.float32)),
    "without_axes": (np.array(0.04, np.float32), np.array(0.11, np.float32)),
}


class NumPy:
    def put(self, array):
        return array.copy()

    def get(self, array):
        return array


class Torch:
    def put(self, array):
        return pytest.importorskip("torch").from_numpy(array.copy())

    def get(self, tensor):
        return tensor.numpy()


@pytest.fixture(params=[NumPy, Torch], ids=["numpy", "torch"])
def framework(request):
    return request.param()


def put_all(framework, arguments):
    return {name: framework.put(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}


def call(op, arguments, by_position):
    """vLLM's op of that name, all arguments by position or all by name; it returns nothing."""
    names = [name.partition("=")[0] for name in LISTS[op].split()]
    function = getattr(vllm, op)
    if by_position:
        given = [arguments[name] for name in names if name in arguments]
        assert [*names[: len(given)]] == [name for name in names if name in arguments]  # no gap
        assert function(*given) is None
    else:
        assert function(**arguments) is None


@pytest.mark.parametrize("op", LISTS)
def test_argument_lists(op):
    assert [str(p).replace(": Any", "") for p in parameters(op)] == LISTS[op].split()


def parameters(op):
    """Without annotations."""
    for parameter in inspect.signature(getattr(vllm, op)).parameters.values():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        yield parameter.replace(annotation=parameter.empty)


@pytest.mark.parametrize("by_position", [True, False], ids=["by_position", "by_name"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *cases.FP8_NAMES])
@pytest.mark.parametrize("op", ["reshape_and_cache", "reshape_and_cache_flash"])
def test_writes(framework, rng, op, kv_cache_dtype, scales, by_position):
    key, value = rng.standard_normal((2, 6, 2, 32)).astype(np.float16)
    dtype = np.float16 if kv_cache_dtype == "auto" else np.uint8
    x = 16 // np.dtype(dtype).itemsize
    shapes = {
        "reshape_and_cache": [(3, 2, 32 // x, 16, x), (3, 2, 32, 16)],
        "reshape_and_cache_flash": [(3, 16, 2, 32)] * 2,
    }
    caches = [cases.poisoned(shape, dtype) for shape in shapes[op]]
    arguments = dict(zip(("key", "value", "key_cache", "value_cache"), (key, value, *caches), strict=True))
    arguments |= {"slot_mapping": np.array([5, 47, -1, 0, 16]), "kv_cache_dtype": kv_cache_dtype}
    arguments |= dict(zip(("k_scale", "v_scale"), SCALES[scales], strict=True))
    expected, given = (put_all(framework, arguments) for _ in range(2))
    getattr(pagedkv, op)(**expected)
    call(op, given, by_position)
    for name, poison in zip(("key_cache", "value_cache"), caches, strict=True):
        cases.assert_same_bits(framework.get(given[name]), framework.get(expected[name]))
        assert not np.array_equal(cases.bits(framework.get(given[name])), cases.bits(poison))


def read_arguments(rng, op, kv_cache_dtype="auto", scales="numbers", **options):
    """What vLLM's op of that name takes, but for its optional arguments; and what pagedkv's takes."""
    k_scale, v_scale = (1.0 if scale is None else scale for scale in SCALES[scales])
    plain = cases.decode(rng, SEQ_LENS, kv_cache_dtype=kv_cache_dtype, k_scale=k_scale, v_scale=v_scale)
    plain |= {"scale": 0.2, "max_seq_len": 40, "alibi_slopes": np.array([1.0, 0.5, 0.11, 0.02], np.float32)}
    plain |= {"kv_cache_dtype": kv_cache_dtype} | dict(zip(("k_scale", "v_scale"), SCALES[scales], strict=True))
    plain |= {"out": np.full_like(plain["query"], np.nan)} | options
    own = {"num_kv_heads": 2, "block_size": 16}
    if op == "paged_attention_v2":
        states = np.full((4, 4, 1), np.nan, np.float32)
        own |= {"exp_sum": states, "max_logits": states.copy(), "tmp_out": np.full((4, 4, 1, 64), np.nan, np.float16)}
    return plain | own, plain


@pytest.mark.parametrize("by_position", [True, False], ids=["by_position", "by_name"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *cases.FP8_NAMES])
@pytest.mark.parametrize("op", READS)
def test_reads(framework, rng, op, kv_cache_dtype, scales, by_position):
    arguments, plain = read_arguments(rng, op, kv_cache_dtype, scales)
    plain, given = put_all(framework, plain), put_all(framework, arguments)
    getattr(pagedkv, op)(**plain)
    call(op, given, by_position)
    out = framework.get(given["out"])
    assert np.isfinite(out.astype(np.float32)).all()
    cases.assert_same_bits(out, framework.get(plain["out"]))


@pytest.mark.parametrize("op", READS)
def test_all_optional_arguments_by_position(rng, op):
    """A rank of tensor parallelism changes nothing where attention is dense."""
    arguments, plain = read_arguments(rng, op, alibi_slopes=None)
    getattr(pagedkv, op)(**plain)
    expected = plain["out"].copy()
    plain["out"].fill(np.nan)
    optional = {name.partition("=")[0]: int(name.partition("=")[2]) for name in READ.split() if "=" in name}
    call(op, arguments | optional | {"tp_rank": 3}, by_position=True)
    cases.assert_same_bits(arguments["out"], expected)


def test_the_three_buffers_are_not_needed(rng):
    arguments, _ = read_arguments(rng, "paged_attention_v2")
    call("paged_attention_v2", arguments, by_position=True)
    expected = arguments["out"].copy()
    arguments["out"].fill(np.nan)
    call("paged_attention_v2", arguments | dict.fromkeys(vllm.BUFFERS), by_position=True)
    cases.assert_same_bits(arguments["out"], expected)


WRONG = {
    "block-sparse blocks": ({"blocksparse_local_blocks": 16}, NotImplementedError, "blocksparse_local_blocks"),
    "block-sparse stride": ({"blocksparse_vert_stride": 8}, NotImplementedError, "blocksparse_vert_stride"),
    "block-sparse size": ({"blocksparse_block_size": 32}, NotImplementedError, "blocksparse_block_size"),
    "block-sparse step": ({"blocksparse_head_sliding_step": 1}, NotImplementedError, "blocksparse_head_sliding_step"),
    "kv heads": ({"num_kv_heads": 4}, ValueError, "num_kv_heads"),
    "block size": ({"block_size": 32}, ValueError, "block_size"),
    "max_seq_len": ({"max_seq_len": 39}, ValueError, "max_seq_len"),
    "format": ({"kv_cache_dtype": "fp8_inc"}, ValueError, "kv_cache_dtype"),
    "cache without heads": ({"value_cache": np.zeros((3, 64, 16), np.float16)}, ValueError, "value_cache"),
}


@pytest.mark.parametrize(("change", "error", "name"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("op", READS)
def test_mistakes(rng, op, change, error, name):
    arguments, _ = read_arguments(rng, op)
    arguments["out"][:] = 7
    with pytest.raises(error, match=rf"^{name}: "):
        call(op, arguments | change, by_position=False)
    assert (arguments["out"] == 7).all()
