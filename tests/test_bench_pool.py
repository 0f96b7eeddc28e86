"""``pagedkv bench pool``: loops beside a step, moves beside plain copies, a check before each time; without a card."""

import json
import os
import platform
import sys
import time
from types import SimpleNamespace

import click
import numpy as np
import pytest
from bench_fakes import ORIGIN, StillClock, pretend_card
from click.testing import CliRunner

import pagedkv
from pagedkv import BlockPool, BlockTable
from pagedkv.cli import machine, pool_clock, pool_command, report
from pagedkv.cli.main import main
from pagedkv.cli.pool_clock import WARMUPS, HostClock, cpu_model, on_cores
from pagedkv.cli.pool_host import CORES, HostBench
from pagedkv.cli.pool_loops import LoopTable
from pagedkv.cli.pool_moves import MovesBench
from pagedkv.cli.pool_rows import (
    HOST_ROWS,
    MOVE_ROWS,
    TO_DEVICE,
    TO_HOST,
    CacheForm,
    CopyRow,
    PrefixRow,
    StepRow,
    SwapRow,
)
from pagedkv.cli.pool_table import pool_markdown
from pagedkv.dtypes import BFLOAT16

STEP, PREFIX = StepRow(5, 100, least_context=10, most_context=60), PrefixRow(num_tokens=192)
MOVES = (CopyRow(4), SwapRow(TO_HOST, 3), SwapRow(TO_DEVICE, 3))
LONGEST_PREFIX = BlockPool.longest_prefix
FORM = CacheForm(num_layers=2, num_kv_heads=2, head_size=8)


class StillHostClock:
    """Runs what it is given once and says what it likes."""

    repeats = 7

    def __init__(self, times=()):
        self.times = iter(times)

    def num_calls(self, rounds=1):
        return 1

    def microseconds(self, call, *, before=lambda: None, rounds=1):
        before()
        call()
        us = next(self.times, 50.0)
        return {"us": us, "best_us": us - 1}


class CopyClock(StillClock):
    """Says of plain copies on the card that they take 9 us."""

    def copy(self, nbytes):
        self.copied = nbytes
        return 9.0


class HostMemory:
    """NumPy in the place of ``pool_memory``, which notes what is copied plainly."""

    def __init__(self):
        self.copied = []

    def empty_pinned(self, shape, dtype):
        return np.full(shape, 7, dtype)

    def copy(self, target, source):
        np.copyto(target, source)
        self.copied.append((target, source))

    def wait(self):
        pass


def moves_bench(times=()):
    return MovesBench(np, CopyClock(times), HostMemory(), FORM)


def no_line(line):
    pass


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_the_rows_are_those_whose_targets_were_set():
    assert [(row.name, row.target_us) for row in HOST_ROWS] == [
        ("prefix", 3000),
        ("step-1024", 100),
        ("step-8192", 1000),
    ]
    assert (HOST_ROWS[0].num_tokens, HOST_ROWS[0].num_blocks) == (131072, 8192)
    assert (HOST_ROWS[1].least_context, HOST_ROWS[1].most_context) == (1000, 4000)
    assert [row.name for row in MOVE_ROWS] == ["copy-256", "copy-2048", "swap-to-host", "swap-to-device"]


def test_blocks_of_32_kb_and_half_a_gb_to_the_host():
    form = CacheForm()
    assert (form.num_caches, form.block_bytes) == (64, 32768)
    assert MOVE_ROWS[2].num_pairs * form.num_caches * form.block_bytes == 512 << 20


# ---- on the host ----------------------------------------------------------------------------------------------------


def test_what_loops_say_of_a_step():
    loops = LoopTable([4, 7, 0], [5, 3, 8, 1, 0], block_size=4)
    assert loops.blocks == [[5], [3, 8], []]
    step = loops.step()
    assert step["slot_mapping"].tolist() == [1 * 4, 8 * 4 + 3, 0]
    assert step["positions"].tolist() == [4, 7, 0]
    assert step["query_start_loc"].tolist() == [0, 1, 2, 3]
    assert step["seq_lens"].tolist() == [5, 8, 1]
    assert loops.block_table().tolist() == [[5, 1], [3, 8], [0, -1]]


def test_the_host_records_what_it_measured(monkeypatch):
    lines = []
    record = HostBench(StillHostClock((90.0, 300.0, 4000.0, 3500.0, 9000.0))).run([STEP, PREFIX], lines.append)
    assert (record["cpu"], record["method"]) == (cpu_model(), "medians and bests of 7 calls, 70 of a step")
    step, prefix = record["rows"]
    assert step == {
        "row": "step-5",
        "what": "`BlockTable.step`, a token for each of 5 sequences",
        "block_size": 16,
        "num_seqs": 5,
        "context": [10, 60],
        "us": 90.0,
        "best_us": 89.0,
        "loops": {"us": 300.0, "best_us": 299.0},
        "loops_block_table": {"us": 4000.0, "best_us": 3999.0},
        "target_us": 100,
        "met": True,
    }
    assert (prefix["num_tokens"], prefix["num_hits"]) == (192, 11)
    assert (prefix["us"], prefix["target_us"], prefix["met"]) == (3500.0, 3000, False)
    assert prefix["hashing"] == {"what": "`PrefixHashes` of 192 tokens", "us": 9000.0, "best_us": 8999.0}
    assert lines == ["step-5              90.0 us  best      89.0 us", "prefix            3500.0 us  best    3499.0 us"]


def test_room_for_all_steps_that_are_timed():
    """Sequences grow with every call."""
    record = HostBench(HostClock(repeats=3)).run([STEP], no_line)
    (row,) = record["rows"]
    assert 0 < row["best_us"] <= row["us"]


@pytest.mark.parametrize("field", ["slot_mapping", "positions", "query_start_loc", "seq_lens", "block_table"])
def test_a_wrong_step_is_not_timed(monkeypatch, field):
    right = BlockTable.step

    def wrong(*arguments):
        step = right(*arguments)
        array = getattr(step, field).copy()
        array[-1] += 1
        setattr(step, field, array)
        return step

    monkeypatch.setattr(BlockTable, "step", wrong)
    clock = StillHostClock()
    monkeypatch.setattr(clock, "microseconds", lambda *call, **options: pytest.fail("it was timed"))
    with pytest.raises(click.ClickException, match=f"step-5: {field} is not what plain loops make of it, so it is not"):
        HostBench(clock).run([STEP], no_line)


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        (
            "longest_prefix",
            lambda pool, hashes: LONGEST_PREFIX(pool, hashes)[:3],
            "prefix: 3 blocks found, not all but the last",
        ),
        ("free", lambda pool, block_ids: None, "prefix: <BlockPool: 12 of 24 blocks used, .*after all were given back"),
    ],
)
def test_a_prefix_that_is_not_found_is_not_timed(monkeypatch, method, wrong, message):
    clock = StillHostClock()
    monkeypatch.setattr(clock, "microseconds", lambda *call, **options: pytest.fail("it was timed"))
    monkeypatch.setattr(BlockPool, method, wrong)
    with pytest.raises(click.ClickException, match=message):
        HostBench(clock).run([PREFIX], no_line)


def test_hashes_are_made_anew_for_each_time(monkeypatch):
    seen = []

    def noted(pool, hashes):
        seen.append(hashes)
        return LONGEST_PREFIX(pool, hashes)

    monkeypatch.setattr(BlockPool, "longest_prefix", noted)
    HostBench(HostClock(repeats=2)).run([PREFIX], no_line)
    assert len(seen) == 1 + WARMUPS + 2
    assert all(hashes == seen[0] for hashes in seen)
    assert len({id(hashes[0]) for hashes in seen}) == len(seen)


def test_median_and_best_of_a_call():
    calls, waits = [], iter([0.05, 0.05, 0.05, 0.002, 0.001, 0.02])
    clock = HostClock(repeats=3)

    def call():
        calls.append("call")
        time.sleep(next(waits))

    times = clock.microseconds(call, before=lambda: calls.append("before"))
    assert calls == ["before", "call"] * clock.num_calls()
    assert 1000 <= times["best_us"] < times["us"]
    assert 2000 <= times["us"] < 20000
    assert clock.num_calls(10) == WARMUPS + 30


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no way to choose cores here")
def test_some_cores_for_a_while():
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), on_cores(1) as count:
        assert count == len(os.sched_getaffinity(0)) == 1
        _ = 1 / 0
    assert os.sched_getaffinity(0) == before
    with on_cores(4096) as count:
        assert (count, os.sched_getaffinity(0)) == (len(before), before)


def test_a_platform_without_a_choice_of_cores(monkeypatch):
    monkeypatch.setattr(pool_clock, "os", SimpleNamespace())
    with on_cores(2) as count:
        assert count is None
    record = HostBench(StillHostClock()).run([STEP], no_line)
    assert record["num_cores"] is None
    text = pool_markdown({"host": record, "card": None, "versions": {"numpy": "2"}, "date": "then", "rows": []})
    assert f"NumPy 2, then: on the host, {cpu_model()}, Python {platform.python_version()}, blocks of 16, " in text


# ---- moves ----------------------------------------------------------------------------------------------------------


def test_moves_are_recorded_beside_plain_copies():
    lines = []
    bench = moves_bench(times=(9.5, 10.0, 8.0, 20.0, 18.0))
    record = bench.run(MOVES, lines.append)
    assert record["shape"] == {
        "dtype": "bfloat16",
        "layout": "NHD",
        "num_layers": 2,
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 8,
    }
    assert record["ceilings"]["empty_us"] == 3.0
    copy, to_host, to_device = record["rows"]
    assert copy == {
        "row": "copy-4",
        "what": "`copy_blocks`",
        "num_pairs": 4,
        "num_caches": 4,
        "nbytes": 4 * 4 * 512,
        "us": 9.5,
        "plain_us": 9.0,
        "share": 9.0 / 9.5,
        "target_share": 0.9,
        "met": True,
    }
    assert bench.stopwatch.copied == 4 * 4 * 512
    assert (to_host["what"], to_host["us"], to_host["plain_us"]) == ("`swap_blocks`, to host", 10.0, 8.0)
    assert (to_host["share"], to_host["met"], to_host["nbytes"]) == (0.8, False, 3 * 4 * 512)
    assert (to_device["share"], to_device["met"]) == (0.9, True)
    assert lines[1] == "swap-to-host        10.0 us  plain copy       8.0 us  (80.0 %)"


def test_the_ops_get_all_caches_and_blocks_that_differ(monkeypatch):
    calls, right = [], pagedkv.copy_blocks
    monkeypatch.setattr(pagedkv, "copy_blocks", lambda *given: calls.append(given) or right(*given))
    moves_bench().run(MOVES[:1], no_line)
    (caches, pairs), (again, same) = calls  # checked, timed
    assert pairs is same and caches is again
    assert [cache.shape for cache in caches] == [(11, 16, 2, 8)] * 4
    assert all(cache.dtype == BFLOAT16 for cache in caches)
    assert (pairs.shape, pairs.dtype, np.unique(pairs).size) == ((4, 2), np.int64, 8)


@pytest.mark.parametrize("direction", [TO_HOST, TO_DEVICE])
def test_the_link_is_measured_in_the_direction_of_the_swap(monkeypatch, direction):
    """By the same bytes in one piece, whose host side is pinned as that of the swap."""
    pinned, calls, right = [], [], pagedkv.swap_blocks
    bench = moves_bench()
    empty = bench.memory.empty_pinned
    bench.memory.empty_pinned = lambda *form: pinned.append(empty(*form)) or pinned[-1]
    monkeypatch.setattr(pagedkv, "swap_blocks", lambda *given: calls.append(given) or right(*given))
    bench.run([SwapRow(direction, 3)], no_line)
    (source, target, pairs), _ = calls
    on_host = target if direction == TO_HOST else source
    assert all(np.shares_memory(cache, pinned[0]) for cache in on_host)
    assert not any(np.shares_memory(cache, pinned[0]) for cache in (source if direction == TO_HOST else target))
    assert [cache.shape for cache in source] == [cache.shape for cache in target] == [(6, 16, 2, 8)] * 4
    assert all(np.unique(side).size == 3 for side in pairs.T)
    link_target, link_source = bench.memory.copied[-1]
    assert (link_target if direction == TO_HOST else link_source) is pinned[1]
    assert link_target.nbytes == link_source.nbytes == 3 * 4 * 512


def spoiled(arrays, block=2):
    """Another bit in one block of the last layer's keys."""
    arrays[2].view(np.uint16)[block, 3, 1, 4] ^= 1


@pytest.mark.parametrize(("row", "side"), [(MOVES[0], 0), (MOVES[1], 0), (MOVES[1], 1), (MOVES[2], 0), (MOVES[2], 1)])
def test_a_wrong_move_is_not_timed(monkeypatch, row, side):
    """Whichever block is wrong, of the source too."""
    op = "copy_blocks" if isinstance(row, CopyRow) else "swap_blocks"
    right = getattr(pagedkv, op)

    def wrong(*given):
        right(*given)
        spoiled(given[side])

    monkeypatch.setattr(pagedkv, op, wrong)
    bench = moves_bench()
    monkeypatch.setattr(bench.stopwatch, "microseconds", lambda launch: pytest.fail("it was timed"))
    with pytest.raises(click.ClickException, match=f"{row.name}: block 2 of layer 1's key cache is wrong, so it is"):
        bench.run([row], no_line)


@pytest.mark.parametrize("row", MOVES)
def test_a_move_of_nothing_is_not_timed(monkeypatch, row):
    for op in ("copy_blocks", "swap_blocks"):
        monkeypatch.setattr(pagedkv, op, lambda *given: None)
    with pytest.raises(click.ClickException, match=rf"{row.name}: block \d+ of layer 0's key cache is wrong"):
        moves_bench().run([row], no_line)


# ---- record and table -----------------------------------------------------------------------------------------------


def whole_record():
    host = HostBench(StillHostClock((90.0, 276.4, 14000.0, 3500.0, 9000.0))).run([STEP, PREFIX], no_line)
    host |= {"cpu": "A processor", "num_cores": 2, "python": "3.11.7"}
    moves = moves_bench((9.5, 10.0, 8.0, 20.0, 18.0)).run(MOVES, no_line)
    return {**ORIGIN, **moves, "host": host}


def test_the_tables(tmp_path):
    record = whole_record()
    lines = pool_markdown(record).splitlines()
    origin = "A card, driver 1.2, CuPy 14.2.0, 2026-01-02, commit `abc`"
    assert lines[0] == (
        f"{origin}: on the host, A processor, 2 cores, Python 3.11.7, blocks of 16, "
        "medians and bests of 7 calls, 70 of a step."
    )
    assert lines[4:9] == [
        "| what | us | best | loops | and their block table |",
        "|---|---:|---:|---:|---:|",
        "| `BlockTable.step`, a token for each of 5 sequences | **90.0** (100) | 89.0 | 276 | 14,000 |",
        "| `longest_prefix`, `touch` and `free` of 12 blocks, hashes given | 3,500 (3,000) | 3,499 |  |  |",
        "| `PrefixHashes` of 192 tokens | 9,000 | 8,999 |  |  |",
    ]
    assert lines[10] == (
        f"{origin}: moves in 2 layers of bfloat16 NHD caches, blocks of 16 x 2 x 8, "
        "medians of graph replays, L2 cold, 7 each."
    )
    assert lines[14:19] == [
        "| what | blocks | bytes | us | GB/s | plain copy | share |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| `copy_blocks` | 4 x 4 | 8.19 kB | 9.5 | 0.9 | 9.0 | **94.7 %** (90 %) |",
        "| `swap_blocks`, to host | 3 x 4 | 6.14 kB | 10.0 | 0.6 | 8.0 | 80.0 % (90 %) |",
        "| `swap_blocks`, to device | 3 x 4 | 6.14 kB | 20.0 | 0.3 | 18.0 | **90.0 %** (90 %) |",
    ]
    assert lines[-1].endswith("in us: empty kernel 3.00; best read 268 MB in 59.7 (4.50 TB/s).")
    report.save(record, tmp_path)
    assert report.sections(tmp_path)["bench pool"] == "\n".join(lines)


# ---- the command ----------------------------------------------------------------------------------------------------


def call(*arguments):
    return CliRunner().invoke(main, ["bench", "pool", *arguments])


@pytest.fixture(autouse=True)
def small_rows(monkeypatch):
    """Under the names of others, which are all that the option takes."""
    monkeypatch.setattr(pool_command, "HOST_BY_NAME", {"step-1024": STEP, "prefix": PREFIX})
    names = ("copy-256", "swap-to-host", "swap-to-device")
    monkeypatch.setattr(pool_command, "MOVES_BY_NAME", dict(zip(names, MOVES, strict=True)))


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(machine, "why_no_cuda", lambda: "no NVIDIA driver")


@pytest.fixture
def card(monkeypatch):
    pretend_card(monkeypatch)
    stopwatch = SimpleNamespace(Stopwatch=lambda repeats: CopyClock())
    monkeypatch.setitem(sys.modules, "pagedkv.cli.timing", stopwatch)
    monkeypatch.setitem(sys.modules, "pagedkv.cli.pool_memory", HostMemory())
    monkeypatch.setattr(pagedkv.cli, "pool_memory", sys.modules["pagedkv.cli.pool_memory"], raising=False)


def test_without_a_card_the_host_is_measured(no_card):
    result = call("--repeats", "2")
    assert result.exit_code == 0, result.output
    assert "| `BlockTable.step`, a token for each of 5 sequences |" in result.stdout
    assert result.stdout.splitlines()[-1] == "Moves of blocks need a GPU: no NVIDIA driver; see pagedkv info."
    record = json.loads(call("--repeats", "2", "--json").stdout)
    assert [row["row"] for row in record["host"]["rows"]] == ["step-5", "prefix"]
    assert (record["bench"], record["card"], record["rows"]) == ("pool", None, [])
    assert record["versions"]["pagedkv"] == pagedkv.__version__


def test_without_a_card_no_record_is_kept(no_card, tmp_path):
    result = call("--results", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr == "Error: bench pool --results needs a GPU: no NVIDIA driver; see pagedkv info\n"
    assert not list(tmp_path.iterdir())


def test_a_move_by_name_needs_a_card(no_card):
    result = call("--row", "copy-256")
    assert result.exit_code == 1
    assert "bench pool needs a GPU: no NVIDIA driver" in result.stderr


def test_a_part_replaces_no_record(tmp_path):
    result = call("--row", "prefix", "--results", str(tmp_path))
    assert result.exit_code == 2
    assert "leave out --row, or take --json" in result.stderr


def test_a_wrong_result_ends_the_run(no_card, monkeypatch):
    monkeypatch.setattr(BlockPool, "longest_prefix", lambda pool, hashes: np.arange(0))
    result = call("--repeats", "2")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == ("Error: prefix: 0 blocks found, not all but the last, so it is not timed")
    assert result.stdout == ""


def test_from_options_to_record(card, tmp_path):
    result = call("--repeats", "2", "--results", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "| `swap_blocks`, to device | 3 x 64 | 6.29 MB | 12.0 |" in result.stdout
    (path,) = tmp_path.glob("*/*")
    assert path == tmp_path / "a-card" / "pool.json"
    record = json.loads(path.read_text())
    assert {"card", "driver", "versions", "commit", "date", "method", "shape", "ceilings"} <= record.keys()
    assert record["host"]["num_cores"] in (1, CORES, None)
    assert [row["row"] for row in record["rows"]] == [row.name for row in MOVES]
    readme = tmp_path / "README.md"
    readme.write_text("".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in report.sections(tmp_path)))
    filled = CliRunner().invoke(main, ["bench", "report", "--results", str(tmp_path), "--readme", str(readme)])
    assert filled.exit_code == 0, filled.output
    assert f"<!-- bench pool: begin -->\n{pool_markdown(record)}\n<!-- bench pool: end -->" in readme.read_text()


def test_rows_by_name(card):
    record = json.loads(call("--row", "copy-256", "--json").stdout)
    assert (record["host"], [row["share"] for row in record["rows"]]) == (None, [9.0 / 12.0])
    assert "on the host" not in call("--row", "copy-256").stdout
    record = json.loads(call("--row", "prefix", "--repeats", "2", "--json").stdout)
    assert ([row["row"] for row in record["host"]["rows"]], record["rows"]) == (["prefix"], [])
    assert call("--row", "prefix", "--repeats", "2").stdout.endswith("|  |  |\n")


@pytest.mark.gpu
def test_small_rows_on_a_card():
    result = call("--repeats", "3", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["row"] for row in rows] == [row.name for row in MOVES]
    assert all(0 < row["plain_us"] < 1000 and 0 < row["us"] < 1000 for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", [TO_HOST, TO_DEVICE])
def test_the_plain_copy_between_card_and_host(cupy, direction):
    from pagedkv.cli import pool_memory

    on_card = cupy.random.default_rng(0).integers(0, 2**32, 1 << 20, dtype=np.uint32)
    on_host = pool_memory.empty_pinned(on_card.shape, on_card.dtype)
    on_host[...] = np.arange(on_host.size)
    source, target = (on_card, on_host) if direction == TO_HOST else (on_host, on_card)
    pool_memory.copy(target, source)
    pool_memory.wait()
    np.testing.assert_array_equal(on_card.get(), on_host)
    assert (on_host[7] == 7) == (direction == TO_DEVICE)
