"""Continuous batching: whatever is admitted, chunked, preempted and reused, every text is that of its prompt alone."""

import io
import os
import re
import struct
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import BACKENDS, CUDA, why_no_gpu
from test_generate import random_model

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import generate
import serve
import smollm2
from paged_model import PagedModel, Sequence, make_cache
from scheduler import Scheduler
from status_line import StatusLine
from text_stream import OrderedTexts, TextStream, Wrapper

import pagedkv

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def model():
    return random_model()


def random_tokens(rng, count):
    return rng.integers(1, 101, count).tolist()


def random_prompts(rng, count):
    """Of 3 to 40 tokens, every other one with the same beginning of up to 24."""
    common = random_tokens(rng, 24)
    lengths = rng.integers(3, 41, count).tolist()
    return [
        common[: n - 1] + random_tokens(rng, n - len(common[: n - 1])) if i % 2 else random_tokens(rng, n)
        for i, n in enumerate(lengths)
    ]


def make_seqs(prompts, **limits):
    return [Sequence.from_prompt(prompt, **limits) for prompt in prompts]


def make_scheduler(model, num_blocks, *, max_seqs=8, max_batch_tokens=32, **options):
    options = {"block_size": BLOCK_SIZE} | options
    cache = make_cache(model.config, num_blocks, max_seqs=max_seqs, **options)
    return Scheduler(cache, max_batch_tokens=max_batch_tokens)


def run(model, scheduler, seqs):
    """All events, after a look at the scheduler and the pool at each."""
    scheduler.submit(seqs)
    events = []
    for event in serve.serve(PagedModel(model, scheduler.cache), scheduler):
        events.append(event)
        check_order(scheduler, seqs)
    assert scheduler.is_done
    assert scheduler.num_finished == len(seqs)
    assert len(scheduler.cache.table) == scheduler.cache.pool.num_used == 0
    assert scheduler.most_blocks_used <= scheduler.cache.num_blocks
    return events


def check_order(scheduler, seqs):
    """Whatever runs is older than all that wait, so that the oldest is never the one to go."""
    unfinished = [seq for seq in seqs if seq in scheduler.running or seq in scheduler.waiting]
    assert [*scheduler.running, *scheduler.waiting] == unfinished
    assert all(seq.number is not None for seq in scheduler.running)
    assert all(seq.number is None for seq in scheduler.waiting)
    assert scheduler.cache.pool.num_used <= scheduler.cache.num_blocks


def texts_alone(model, seqs, **options):
    """Of each prompt in a pool of its own, up to the same end."""
    prompts = [seq.token_ids[: seq.num_prompt_tokens] for seq in seqs]
    count = seqs[0].max_new_tokens
    alone = [generate.generate(model, [p], max_new_tokens=count, ignore_eos=True, **options)[0] for p in prompts]
    texts = [seq.generated for seq in alone]
    stops = [seq.stop_token_id for seq in seqs]
    return [text[: text.index(stop) + 1] if stop in text else text for text, stop in zip(texts, stops, strict=True)]


# ---- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [1, 4, 7])
@pytest.mark.parametrize(("max_seqs", "max_batch_tokens"), [(8, 32), (16, 200), (16, 5)])
def test_texts_from_a_small_pool_equal_those_alone(model, rng, layout, block_size, max_seqs, max_batch_tokens):
    """A quarter of the blocks that all need at once."""
    seqs = make_seqs(random_prompts(rng, 12), max_new_tokens=24)
    num_blocks = serve.choose_num_blocks(seqs, block_size)
    limits = {"max_seqs": max_seqs, "max_batch_tokens": max_batch_tokens}
    scheduler = make_scheduler(model, num_blocks, block_size=block_size, layout=layout, **limits)
    events = run(model, scheduler, seqs)
    assert [seq.generated for seq in seqs] == texts_alone(model, seqs)
    for seq in seqs:
        assert [token_id for other, token_id in events if other is seq] == seq.generated
    assert scheduler.num_preemptions > 0
    assert scheduler.num_reused_tokens > 0


def test_requests_that_come_while_others_run(model, rng):
    seqs = make_seqs(random_prompts(rng, 12), max_new_tokens=16)
    scheduler = make_scheduler(model, serve.choose_num_blocks(seqs, BLOCK_SIZE))
    coming = list(seqs)
    scheduler.submit([coming.pop(0)])
    for _ in serve.serve(PagedModel(model, scheduler.cache), scheduler):
        if coming and rng.random() < 0.3:
            scheduler.submit([coming.pop(0)])
        check_order(scheduler, seqs)
    assert not coming
    assert [seq.generated for seq in seqs] == texts_alone(model, seqs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_serves(model, rng, backend):
    """A preemption, a reused prefix and chunks of prompts, in a few steps."""
    beginning = random_tokens(rng, 5)
    seqs = make_seqs([[*beginning, *random_tokens(rng, 3)] for _ in range(3)], max_new_tokens=4)
    with pagedkv.use_backend(backend):
        scheduler = make_scheduler(model, 5, max_batch_tokens=10, backend=backend)
        run(model, scheduler, seqs)
    assert [seq.generated for seq in seqs] == texts_alone(model, seqs)
    assert scheduler.num_preemptions > 0
    assert scheduler.num_reused_tokens > 0


def test_an_answer_ends_with_its_stop_token(model, rng):
    """Of each prompt the third token of its answer, or where that came before."""
    seqs = make_seqs(random_prompts(rng, 6), max_new_tokens=12)
    for seq, text in zip(seqs, texts_alone(model, seqs), strict=True):
        seq.stop_token_id = text[2]
    events = run(model, make_scheduler(model, serve.choose_num_blocks(seqs, BLOCK_SIZE)), seqs)
    assert [seq.generated for seq in seqs] == texts_alone(model, seqs)
    assert all(seq.generated[-1] == seq.stop_token_id for seq in seqs)
    assert len(events) <= 3 * len(seqs)


def test_a_stop_token_in_a_prompt_ends_nothing(model, rng):
    (prompt,) = random_prompts(rng, 1)
    seqs = make_seqs([[*prompt, 0]], max_new_tokens=1, stop_token_id=0)
    assert not seqs[0].is_finished
    assert len(run(model, make_scheduler(model, 20), seqs)) == 1


# ---- what is reused and computed ------------------------------------------------------------------------------------


def test_a_common_beginning_is_computed_once(model, rng):
    """The first step has tokens for the first prompt alone; the other three begin with its full blocks."""
    beginning = random_tokens(rng, 13)
    seqs = make_seqs([[*beginning, *random_tokens(rng, 2)] for _ in range(4)], max_new_tokens=5)
    scheduler = make_scheduler(model, 40, max_batch_tokens=15)
    run(model, scheduler, seqs)
    assert scheduler.num_reused_tokens == 3 * 12
    assert scheduler.num_computed_tokens == 15 + 3 * (15 - 12) + 4 * (5 - 1)
    assert scheduler.num_preemptions == 0
    assert scheduler.most_blocks_used == 3 + 4 * 2  # the common ones, and of each the tokens from 12 to 18


def test_of_a_prompt_that_is_known_the_last_token_is_computed(model, rng):
    seqs = make_seqs([random_tokens(rng, 16)] * 3, max_new_tokens=2)
    scheduler = make_scheduler(model, 40, max_seqs=1)
    run(model, scheduler, seqs)
    assert scheduler.num_reused_tokens == 2 * 12
    assert scheduler.num_computed_tokens == 16 + 2 * 4 + 3


def test_what_is_left_of_a_preempted_request_is_reused(model, rng):
    """Both prompts fill two blocks, both answers want a third, and there are five: the second request goes. The first
    takes the later one of its blocks; the other is there when it comes back with the first token of its answer."""
    seqs = make_seqs([random_tokens(rng, 8) for _ in range(2)], max_new_tokens=8)
    scheduler = make_scheduler(model, 5)
    run(model, scheduler, seqs)
    assert scheduler.num_preemptions == 1
    assert scheduler.num_reused_tokens == 4
    assert scheduler.num_computed_tokens == (8 + 7) + 8 + (9 - 4) + 6
    assert scheduler.most_blocks_used == 4
    assert [seq.generated for seq in seqs] == texts_alone(model, seqs)


# ---- limits ---------------------------------------------------------------------------------------------------------


def steps_of(model, scheduler, seqs):
    """Of each step its sequences, how many ran, and its tokens."""
    scheduler.submit(seqs)
    paged_model = PagedModel(model, scheduler.cache)
    while not scheduler.is_done:
        step_seqs, batch = scheduler.schedule()
        yield step_seqs, len(scheduler.running), batch.host.num_tokens
        scheduler.retire(paged_model.compute(step_seqs, batch))


def test_rows_and_tokens_of_a_step_are_limited(model, rng):
    seqs = make_seqs(random_prompts(rng, 10), max_new_tokens=8)
    scheduler = make_scheduler(model, 500, max_seqs=3, max_batch_tokens=16)
    _, rows, tokens = zip(*steps_of(model, scheduler, seqs), strict=True)
    assert max(rows) == 3
    assert max(tokens) == 16
    assert scheduler.num_preemptions == 0


def test_prompts_are_computed_beside_answers(model, rng):
    """In chunks: the second prompt is longer than a step."""
    seqs = make_seqs([random_tokens(rng, 4), random_tokens(rng, 20)], max_new_tokens=8)
    steps = list(steps_of(model, make_scheduler(model, 100, max_batch_tokens=8), seqs))
    assert [tokens for _, _, tokens in steps[:5]] == [4 + 4, 1 + 7, 1 + 7, 1 + 2, 1 + 1]
    assert all(step_seqs == seqs for step_seqs, _, _ in steps[:5])


def test_a_step_of_one_token_makes_progress(model, rng):
    seqs = make_seqs(random_prompts(rng, 3), max_new_tokens=3)
    steps = list(steps_of(model, make_scheduler(model, 40, max_batch_tokens=1), seqs))
    assert {tokens for _, _, tokens in steps} == {1}
    assert [seq.generated for seq in seqs] == texts_alone(model, seqs)


def test_the_oldest_is_in_every_step(model, rng):
    seqs = make_seqs(random_prompts(rng, 10), max_new_tokens=12)
    scheduler = make_scheduler(model, 13, max_batch_tokens=6)
    for step_seqs, _, _ in steps_of(model, scheduler, seqs):
        assert step_seqs[0] is next(seq for seq in seqs if not seq.is_finished)
    assert scheduler.num_preemptions > 0


def test_a_request_waits_for_the_blocks_of_its_prompt(model, rng):
    """And one for each that runs already: the second would fit without, and have to go again soon."""
    seqs = make_seqs([random_tokens(rng, 8) for _ in range(2)], max_new_tokens=8)
    assert next(steps_of(model, make_scheduler(model, 5), seqs))[0] == seqs
    seqs = make_seqs([seq.token_ids[:8] for seq in seqs], max_new_tokens=8)
    assert next(steps_of(model, make_scheduler(model, 4), seqs))[0] == seqs[:1]


def test_a_request_that_never_fits_is_an_error_before_anything_starts(model, rng):
    short, long = make_seqs([random_tokens(rng, 4), random_tokens(rng, 30)], max_new_tokens=8)
    scheduler = make_scheduler(model, 9)
    with pytest.raises(ValueError, match=r"^num_blocks: expected at least 10, for 37 tokens of one request, got 9$"):
        scheduler.submit([short, long])
    assert scheduler.is_done
    run(model, make_scheduler(model, 10), [short, long])


def test_blocks_that_somebody_else_holds_end_it(model, rng):
    """Nobody is left to make room."""
    scheduler = make_scheduler(model, 10)
    scheduler.cache.pool.allocate(8)
    with pytest.raises(pagedkv.OutOfBlocks):
        run(model, scheduler, make_seqs([random_tokens(rng, 30)], max_new_tokens=8))


def test_a_step_without_tokens_is_an_error(model):
    with pytest.raises(ValueError, match=r"^max_batch_tokens: expected at least 1, got 0$"):
        make_scheduler(model, 10, max_batch_tokens=0)


# ---- streams of text ------------------------------------------------------------------------------------------------


def decode_bytes(token_ids):
    """A token is a byte."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def pieces_of(text):
    stream = TextStream(decode_bytes)
    return [*map(stream.push, text), stream.finish()]


def test_a_character_comes_when_it_is_complete():
    assert pieces_of("aß東🙂".encode()) == ["a", "", "ß", "", "", "東", "", "", "", "🙂", ""]


def test_bytes_that_stay_incomplete_come_at_the_end():
    assert pieces_of("東".encode()[:2]) == ["", "", "\ufffd"]
    assert "".join(pieces_of(b"\xe6a\xff b")) == "\ufffda\ufffd b"


def test_white_space_comes_with_what_follows_it():
    assert pieces_of(b" a \nb \n") == ["", "a", "", "", " \nb", "", "", ""]
    assert "".join(pieces_of(b" \n ")) == ""


def test_pieces_are_the_text_of_all_tokens(rng):
    alphabet = "a \nß東🙂\ufffd".encode() + b"\xff\xe6\xf0"
    for _ in range(300):
        text = bytes(rng.choice(list(alphabet), size=rng.integers(0, 20)).tolist())
        assert "".join(pieces_of(text)) == decode_bytes(text).strip()


def test_texts_come_in_the_order_of_their_prompts():
    written = []
    texts = OrderedTexts(["<1>", "<2>", "<3>"], decode_bytes, written.append)
    for i, token, is_last in [(2, "z", True), (0, "a", False), (1, "m", False), (0, "b", True), (1, "n", False)]:
        texts.push(i, ord(token), is_last=is_last)
    assert written == ["<1>", "a", "b\n", "<2>m", "n"]
    texts.push(1, ord("o"), is_last=True)
    assert "".join(written) == "<1>ab\n<2>mno\n<3>z\n"


@pytest.mark.parametrize("width", [4, 9, 30])
def test_lines_are_broken_before_words(rng, width):
    words = [chr(ord("a") + i % 26) * n for i, n in enumerate(rng.integers(1, 5, 60).tolist())]
    written = []
    wrapper = Wrapper(written.append, width)
    for word in words:
        wrapper(f" {word}")
    text = "".join(written)
    assert text.split() == words
    assert max(map(len, text.split("\n"))) <= width


def test_words_longer_than_a_line_are_broken_too():
    written = []
    Wrapper(written.append, 4)("abcdefghi 東京都\nxy")
    assert "".join(written) == "abcd\nefgh\ni \n東京\n都\nxy"


# ---- the status line ------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Keeps what is written; its size is that of a real one."""

    def __init__(self, number):
        super().__init__()
        self.fileno = lambda: number

    def isatty(self):
        return True

    def resize(self, num_columns, num_rows):
        import fcntl
        import termios

        fcntl.ioctl(self.fileno(), termios.TIOCSWINSZ, struct.pack("4H", num_rows, num_columns, 0, 0))

    def take(self):
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


@pytest.fixture
def terminal(monkeypatch):
    """Of 40 columns and 5 rows."""
    pytest.importorskip("termios")
    monkeypatch.setenv("TERM", "xterm")
    controller, number = os.openpty()
    terminal = Terminal(number)
    terminal.resize(40, 5)
    yield terminal
    os.close(controller)
    os.close(number)


def test_the_status_stays_in_the_last_row(terminal):
    with StatusLine(terminal) as status:
        assert terminal.take() == "\n\x1b[A"
        status.show("x" * 99)
        assert terminal.take() == f"\x1b7\x1b[1;4r\x1b[5;1H\x1b[2K{'x' * 39}\x1b8"
        status.show("done")
        assert terminal.take() == "\x1b7\x1b[5;1H\x1b[2Kdone\x1b8"
    assert terminal.take() == "\x1b7\x1b[r\x1b[5;1H\x1b[2K\x1b8"


def test_the_last_row_after_a_change_of_size(terminal):
    with StatusLine(terminal) as status:
        status.show("a")
        terminal.take()
        terminal.resize(40, 9)
        status.show("b")
        assert terminal.take() == "\x1b7\x1b[1;8r\x1b[9;1H\x1b[2Kb\x1b8"
    assert "\x1b[9;1H" in terminal.take()


def test_a_terminal_that_does_not_know_its_size(terminal):
    terminal.resize(0, 0)
    with StatusLine(terminal) as status:
        status.show("x")
    assert terminal.take() == "\n\x1b[A"


def test_the_terminal_is_given_back_after_an_error(terminal):
    with pytest.raises(KeyboardInterrupt), StatusLine(terminal) as status:
        status.show("x")
        raise KeyboardInterrupt
    assert terminal.take().endswith("\x1b[r\x1b[5;1H\x1b[2K\x1b8")


def test_no_status_without_a_terminal(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    for stream in (terminal, io.StringIO()):
        with StatusLine(stream) as status:
            status.show("x")
        assert stream.getvalue() == ""


def test_text_and_status_on_one_terminal(command, terminal, monkeypatch):
    """The text is whole and in lines that fit, once the status is taken out."""
    monkeypatch.setattr(serve.sys, "stderr", terminal)
    monkeypatch.setattr(serve.sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    serve.main(["--prompt", "one", "--prompt", "two", "--block-size", "4"], standalone_mode=False)
    written = terminal.take()
    assert "\x1b[2K1/2 requests, " in written
    text = re.sub(r"\x1b7.*?\x1b8", "", written)
    lines = text.removeprefix("\n\x1b[A").splitlines()
    assert len(lines[3]) == len(lines[7]) == 39
    prompts = make_seqs(map(LetterTokenizer().encode_chat, ["one", "two"]), max_new_tokens=48, stop_token_id=0)
    texts = map(LetterTokenizer().decode, texts_alone(random_model(), prompts))
    assert [f"{lines[i][8:]}{lines[i + 1]}" for i in (3, 7)] == list(texts)


# ---- the command ----------------------------------------------------------------------------------------------------


class LetterTokenizer:
    """A token is a letter, or several: it makes text of the random model's tokens."""

    def encode_chat(self, prompt):
        return [1 + byte % 100 for byte in b"BEGIN OF CHAT: " + prompt.encode()]

    def decode(self, token_ids):
        return "".join(chr(ord("A") + token_id % 26) for token_id in token_ids)


@pytest.fixture
def command(model, monkeypatch):
    """The command line with a random model."""
    monkeypatch.setattr(smollm2, "load", lambda: (model, LetterTokenizer()))
    return lambda *args: CliRunner().invoke(serve.main, ["--block-size", "4", "--max-new-tokens", "12", *args])


def texts_of(output):
    lines = output.splitlines()
    return {a[8:]: b[8:] for a, b in pairwise(lines) if a.startswith("prompt: ")}


def test_command_prints_texts_pool_and_check(command, model):
    prompts = ["one", "two and more", "three", "four", "five", "six is longer"]
    result = command(*(arg for prompt in prompts for arg in ("--prompt", prompt)), "--check")
    assert result.exit_code == 0, result.output
    seqs = make_seqs(map(LetterTokenizer().encode_chat, prompts), max_new_tokens=12, stop_token_id=0)
    texts = map(LetterTokenizer().decode, texts_alone(model, seqs))
    assert list(texts_of(result.output).items()) == list(zip(prompts, texts, strict=True))
    num_blocks = serve.choose_num_blocks(seqs, 4)
    of_all = sum(serve.blocks_of_each(seqs, 4))
    assert of_all // 4 == num_blocks
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"pool:   {num_blocks} blocks of 4 tokens, 25% of the {of_all} that all 6 requests")
    assert lines[-4].startswith(f"pool:   at most {num_blocks} of {num_blocks} blocks used; preemptions: ")
    assert lines[-2].startswith("speed:  6 requests, 72 tokens in ")
    assert lines[-2].endswith(" tokens/s (numpy)")
    assert lines[-1] == "check:  6 of 6 texts equal those of their prompts alone"
    assert result.stderr == ""


def test_command_without_options_reuses_the_common_beginning(command):
    result = command("--max-new-tokens", "2", "--num-blocks", "1000")
    assert result.exit_code == 0, result.output
    assert len(texts_of(result.output)) == len(serve.DEFAULT_PROMPTS) >= 12
    (cache_line,) = (line for line in result.output.splitlines() if line.startswith("cache:"))
    assert int(cache_line.split()[1]) > 3 * len(serve.GUIDE)
    assert "of 1000 blocks used; preemptions: 0" in result.output


@pytest.mark.parametrize(("dtype", "exit_code"), [("float32", 1), ("bfloat16", 0)])
def test_check_sees_another_text(command, monkeypatch, dtype, exit_code):
    def generate_wrongly(*args, **options):
        (seq,) = generate_rightly(*args, **options)
        seq.token_ids[-1] += wrong.pop()
        return [seq]

    generate_rightly, wrong = generate.generate, [0, 1, 0]
    monkeypatch.setattr(generate, "generate", generate_wrongly)
    result = command("--prompt", "one", "--prompt", "two", "--prompt", "three", "--check", "--dtype", dtype)
    assert result.exit_code == exit_code
    assert result.output.endswith("check:  2 of 3 texts equal those of their prompts alone; different: 2\n")


def test_prompts_of_a_file(command, tmp_path):
    (tmp_path / "prompts").write_text("one\n\n  two: Größe \n", "utf-8")
    result = command("--prompts-file", str(tmp_path / "prompts"), "--prompt", "zero", "--layout", "HND")
    assert result.exit_code == 0, result.output
    assert list(texts_of(result.output)) == ["zero", "one", "two: Größe"]


def test_a_long_prompt_is_shown_in_one_line():
    shown = serve.shortened(f"{serve.GUIDE}\nWhy is\tthe sky blue?")
    assert shown == "You are the guide of a small museum of ... The question: Why is the sky blue?"
    assert serve.shortened("x" * 90) == "x" * 90


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        (("--num-blocks", "3"), "num_blocks: expected at least 8, for 30 tokens of one request, got 3"),
        (("--max-new-tokens", "900"), "max_new_tokens: expected at most 256 tokens with the prompt, got 919"),
        (("--prompts-file", os.devnull), "expected a prompt in each line, got none"),
    ],
)
def test_mistakes_get_one_line(command, args, advice):
    result = command(*(args if "--prompts-file" in args else ("--prompt", "four", *args)))
    assert result.exit_code == 1
    assert advice in result.stderr
    assert result.output.count("\n") == 1


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_cuda_without_a_gpu_gets_one_line(monkeypatch):
    """Before the model is loaded."""
    monkeypatch.setattr(smollm2, "load", lambda: pytest.fail("the model is loaded"))
    result = CliRunner().invoke(serve.main, ["--backend", "cuda"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: --backend cuda: ")
    assert result.output.count("\n") == 1


# ---- the real model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded():
    try:
        return smollm2.load()
    except smollm2.MissingPackageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("backend", ["numpy", CUDA])
def test_the_real_model_answers(loaded, monkeypatch, backend):
    monkeypatch.setattr(smollm2, "load", lambda: loaded)
    prompts = (*generate.DEFAULT_PROMPTS[::2], *serve.DEFAULT_PROMPTS[-2:])
    options = ["--max-new-tokens", "10", "--num-blocks", "9", "--backend", backend, "--check"]
    result = CliRunner().invoke(serve.main, [*(arg for prompt in prompts for arg in ("--prompt", prompt)), *options])
    assert result.exit_code == 0, result.output
    assert texts_of(result.output)[prompts[0]] == "The capital of France is Paris."
    assert "4 of 4 texts equal" in result.output
    assert int(result.output.split("cache:")[1].split()[0]) >= 16  # the template's first block
