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
VARLEN = (
    "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k=None seqused_k=None q_v=None dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=None softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False block_table=None return_softmax_lse=False out=None scheduler_metadata=None q_descale=None "
    "k_descale=None v_descale=None num_splits=0 fa_version=2 s_aux=None cp_world_size=1 cp_rank=0 cp_tot_seqused_k=None"
)
LISTS = {
    "copy_blocks": "key_caches value_caches block_mapping",
    "flash_attn_varlen_func": VARLEN,
    "merge_attn_states": (
        "output prefix_output prefix_lse suffix_output suffix_lse output_lse=None prefill_tokens_with_context=None "
        "output_scale=None"
    ),
    "reshape_and_cache": WRITE,
    "reshape_and_cache_flash": WRITE,
    "swap_blocks": "src dst block_size_in_bytes block_mapping",
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


# ---- varlen and merging ---------------------------------------------------------------------------------------------


def varlen_arguments(rng, kv_cache_dtype="auto", **options):
    """What vLLM's op takes, and what pagedkv's takes for the same. A quantised cache says its format by its dtype."""
    plain = cases.varlen(rng, [3, 1, 17], [9, 30, 17], kv_cache_dtype=kv_cache_dtype) | options
    given = {name: value for name, value in plain.items() if name not in ("layout", "kv_cache_dtype")}
    if kv_cache_dtype != "auto":
        given |= {name: given[name].view(cases.oracle.FP8_FORMATS[kv_cache_dtype]) for name in "kv"}
    return given | {"max_seqlen_q": 17, "max_seqlen_k": 30}, plain


@pytest.mark.parametrize("kv_cache_dtype", ["auto", *cases.FP8_NAMES])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "softcap": 5.0}, {"window_size": (5, 0), "num_splits": 2}], ids=str
)
def test_varlen(rng, kv_cache_dtype, options):
    given, plain = varlen_arguments(rng, kv_cache_dtype, **options)
    expected = pagedkv.flash_attn_varlen_func(**plain, return_softmax_lse=True)
    for got, want in zip(vllm.flash_attn_varlen_func(**given, return_softmax_lse=True), expected, strict=True):
        cases.assert_same_bits(got, want)
    out = np.full_like(expected[0], np.nan)
    assert vllm.flash_attn_varlen_func(**given, out=out) is out
    cases.assert_same_bits(out, expected[0])


def test_varlen_by_position_with_all_that_is_not_used(rng):
    given, plain = varlen_arguments(rng, causal=True)
    names = [name.partition("=") for name in VARLEN.split()]
    unused = {"deterministic": True, "scheduler_metadata": object(), "q_descale": 2.0, "fa_version": 3, "cp_rank": 1}
    defaults = {"None": None, "False": False, "0.0": 0.0, "0": 0, "1": 1, "2": 2}
    arguments = [(given | unused).get(name, defaults.get(default)) for name, _, default in names]
    cases.assert_same_bits(vllm.flash_attn_varlen_func(*arguments), pagedkv.flash_attn_varlen_func(**plain))


@pytest.mark.parametrize("scales", [(0.04, 0.11), ([0.02, 0.07], [0.3, 0.05])], ids=["one", "of_heads"])
def test_descales_of_every_sequence(framework, rng, scales):
    """``[num_seqs, num_kv_heads]``, as vLLM expands its scales."""
    rows = [np.array(scale, np.float32) for scale in scales]
    given, plain = varlen_arguments(rng, "fp8")
    if isinstance(framework, Torch):
        pytest.importorskip("ml_dtypes")
        given |= {name: plain[name] for name in "kv"}
    plain |= {name: row.reshape(-1) for name, row in zip(("k_descale", "v_descale"), rows, strict=True)}
    expected = pagedkv.flash_attn_varlen_func(**plain)
    if isinstance(framework, Torch):
        torch = pytest.importorskip("torch")
        given = put_all(framework, given)
        given |= {name: given[name].view(torch.float8_e4m3fn) for name in "kv"}
        expanded = [framework.put(row).expand(3, 2) for row in rows]
    else:
        expanded = [np.broadcast_to(row, (3, 2)) for row in rows]
    given |= dict(zip(("k_descale", "v_descale"), expanded, strict=True))
    cases.assert_same_bits(framework.get(vllm.flash_attn_varlen_func(**given)), expected)


def test_descales_of_each_sequence_are_not_built(rng):
    given, _ = varlen_arguments(rng, "fp8")
    for name in ("k_descale", "v_descale"):
        with pytest.raises(NotImplementedError, match=f"^{name}: expected one row of scales for all sequences"):
            vllm.flash_attn_varlen_func(**given | {name: np.full((3, 2), 0.1, np.float32)})
    alone = {"cu_seqlens_q": np.array([0, 3], np.int32), "q": given["q"][:3]}
    alone |= {name: given[name][:1] for name in ("seqused_k", "block_table")}
    alone |= dict.fromkeys(("k_descale", "v_descale"), np.full((1, 2), 0.1, np.float32))
    assert vllm.flash_attn_varlen_func(**given | alone).shape == (3, 4, 64)


NOT_BUILT = {
    "cu_seqlens_k": np.zeros(4, np.int32),
    "q_v": np.zeros(3),
    "dropout_p": 0.1,
    "return_attn_probs": True,
    "cp_world_size": 2,
    "seqused_k": None,
    "block_table": None,
}


@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_varlen_has_not(rng, name):
    given, _ = varlen_arguments(rng)
    out = np.full_like(given["q"], 7)
    with pytest.raises(NotImplementedError, match=f"^{name}: expected "):
        vllm.flash_attn_varlen_func(**given | {name: NOT_BUILT[name], "out": out})
    assert (out == 7).all()


@pytest.mark.parametrize("by_position", [True, False], ids=["by_position", "by_name"])
@pytest.mark.parametrize("has_lse", [True, False])
def test_merging(framework, rng, has_lse, by_position):
    outputs, lses = (
        rng.standard_normal((2, 5, 4, 64)).astype(np.float16),
        rng.standard_normal((2, 4, 5)).astype(np.float32),
    )
    expected = pagedkv.merge_attn_states(outputs[0], lses[0], outputs[1], lses[1])
    arguments = {"output": np.full_like(outputs[0], np.nan), "prefix_output": outputs[0], "prefix_lse": lses[0]}
    arguments |= {"suffix_output": outputs[1], "suffix_lse": lses[1]}
    arguments |= {"output_lse": np.full_like(lses[0], np.nan)} if has_lse else {}
    given = put_all(framework, arguments)
    call("merge_attn_states", given, by_position)
    cases.assert_same_bits(framework.get(given["output"]), expected[0])
    if has_lse:
        cases.assert_same_bits(framework.get(given["output_lse"]), expected[1])


@pytest.mark.parametrize("name", ["prefill_tokens_with_context", "output_scale"])
def test_what_merging_has_not(rng, name):
    states = rng.standard_normal((2, 5, 4, 64)).astype(np.float16), np.zeros((2, 4, 5), np.float32)
    arguments = (states[0][0], states[1][0], states[0][1], states[1][1])
    with pytest.raises(NotImplementedError, match=f"^{name}: expected None"):
        vllm.merge_attn_states(np.zeros_like(arguments[0]), *arguments, **{name: 1})


# ---- moves ----------------------------------------------------------------------------------------------------------

MAPPING = np.array([(0, 3), (3, 1), (4, 5)])


@pytest.mark.parametrize("by_position", [True, False], ids=["by_position", "by_name"])
def test_copying_blocks(framework, rng, by_position):
    caches = rng.standard_normal((2, 3, 6, 4, 2, 8)).astype(np.float16)  # K and V, layers
    expected, given = caches.copy(), [[framework.put(cache) for cache in side] for side in caches]
    expected[:, :, MAPPING[:, 1]] = caches[:, :, MAPPING[:, 0]]
    arguments = {"key_caches": given[0], "value_caches": given[1], "block_mapping": framework.put(MAPPING)}
    call("copy_blocks", arguments, by_position)
    for got, want in zip([*given[0], *given[1]], [*expected[0], *expected[1]], strict=True):
        cases.assert_same_bits(framework.get(got), want)


def test_copying_takes_as_many_keys_as_values():
    caches = [np.full((6, 4), 7, np.float16) for _ in range(3)]
    with pytest.raises(ValueError, match=r"^value_caches: expected 2 caches like key_caches, got 1"):
        vllm.copy_blocks(caches[:2], caches[2:], MAPPING)


@pytest.mark.parametrize("by_position", [True, False], ids=["by_position", "by_name"])
def test_swapping_blocks(framework, rng, by_position):
    src = rng.standard_normal((6, 4, 2, 8)).astype(np.float16)
    dst = rng.standard_normal((9, 4, 2, 8)).astype(np.float16)
    given = {"src": framework.put(src), "dst": framework.put(dst)}
    given |= {"block_size_in_bytes": 128, "block_mapping": framework.put(MAPPING)}
    call("swap_blocks", given, by_position)
    dst[MAPPING[:, 1]] = src[MAPPING[:, 0]]
    cases.assert_same_bits(framework.get(given["dst"]), dst)
    cases.assert_same_bits(framework.get(given["src"]), src)


@pytest.mark.parametrize("nbytes", [64, 127, 256])
def test_the_size_of_a_swapped_block(nbytes):
    src, dst = np.zeros((6, 4, 2, 8), np.float16), np.full((6, 4, 2, 8), 7, np.float16)
    with pytest.raises(ValueError, match=rf"^block_size_in_bytes: expected 128, as src has, got {nbytes}"):
        vllm.swap_blocks(src, dst, nbytes, MAPPING)
    assert (dst == 7).all()


def test_the_size_of_a_strided_block():
    """What is moved of it: not what lies between its rows."""
    src, dst = np.arange(6 * 4 * 2 * 16).reshape(6, 4, 2, 16).astype(np.float16)[..., :8], np.zeros((6, 4, 2, 8), "f2")
    with pytest.raises(ValueError, match=r"^block_size_in_bytes: expected 128, as src has, got 256"):
        vllm.swap_blocks(src, dst, 256, [(0, 1)])
    vllm.swap_blocks(src, dst, 128, [(0, 1)])
    cases.assert_same_bits(dst[1], np.ascontiguousarray(src[0]))
