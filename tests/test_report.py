"""Records of benchmarks: kept whole, and the README's tables generated from them."""

import copy
import json
from pathlib import Path

import click
import pytest

import pagedkv
from pagedkv.cli import report

CHECKOUT = Path(__file__).parent.parent
BENCHES = ("write", "decode", "decode NHD", "decode HND", "prefill", "mixed", "pool", "gather")
SECTIONS = {f"bench {bench}" for bench in BENCHES}


def record():
    row = {"layout": "NHD", "kv_cache_dtype": "auto", "slots": "consecutive", "us": 4.25, "empty_us": 3.0}
    return {
        "bench": "write",
        "card": "NVIDIA H200 (test)",
        "driver": "1.2.3",
        "versions": {"cupy": "14.2.0"},
        "date": "2026-01-02",
        "commit": "abc",
        "method": "medians",
        "shape": {"num_kv_heads": 8, "head_size": 128, "block_size": 16, "dtype": "bfloat16"},
        "ceilings": {"empty_us": 3.0, "copy_us": {"67108864": 18.0}, "read": {"nbytes": 268435456, "us": 60.0}},
        "rows": [
            {**row, "num_tokens": 1, "share_of_copy": None},
            {**row, "num_tokens": 8192, "us": 20.0, "empty_us": None, "share_of_copy": 0.9},
        ],
    }


def test_the_readme_says_what_the_records_say():
    """No figure is typed by hand: the sections between markers are what `pagedkv bench report` writes."""
    sections = report.sections(CHECKOUT / "results")
    assert sections.keys() == SECTIONS
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    assert report.filled(readme, sections) == readme


def test_every_record_says_where_it_comes_from():
    records = report.records(CHECKOUT / "results")
    assert records
    for stored in records:
        for name in ("card", "driver", "versions", "commit", "date", "method", "shape", "ceilings", "rows"):
            assert stored[name]
        assert "dirty" not in stored["commit"]


def test_markdown_of_a_write_record():
    text = report.write_markdown(record())
    assert "| layout | cache | slots | 1 | 8,192 |" in text
    assert "| NHD | auto | consecutive | 4.25 (+1.25) | 20.0 (90.0 %) |" in text
    assert "67.1 MB in 18.0" in text
    assert "4.47 TB/s" in text


def test_missing_cells_stay_empty():
    sparse = record()
    sparse["rows"].append(dict(sparse["rows"][0], layout="HND"))
    assert "| HND | auto | consecutive | 4.25 (+1.25) |  |" in report.write_markdown(sparse)


def test_records_are_replaced_whole(tmp_path):
    path = report.save(record(), tmp_path)
    assert path == tmp_path / "nvidia-h200-test" / "write.json"
    newer = copy.deepcopy(record()) | {"commit": "def"}
    assert report.save(newer, tmp_path) == path
    assert json.loads(path.read_text())["commit"] == "def"
    assert [file.name for file in path.parent.iterdir()] == ["write.json"]


def test_a_record_is_kept_under_its_own_name(tmp_path):
    path = report.save(record() | {"name": "write-more"}, tmp_path)
    assert path.name == "write-more.json"
    assert report.load(tmp_path, "NVIDIA H200 (test)", "write-more")["name"] == "write-more"
    assert report.load(tmp_path, "another card", "write-more") is None
    assert "| NHD | auto |" in report.sections(tmp_path)["bench write"]


def test_what_others_needed_is_no_record(tmp_path):
    path = report.save(record(), tmp_path)
    (path.parent / "peers.json").write_text("{}")
    assert [stored["bench"] for stored in report.records(tmp_path)] == ["write"]


def test_a_section_without_records_shows_nothing(tmp_path):
    assert report.sections(tmp_path) == dict.fromkeys(SECTIONS, "")
    text = "before\n<!-- bench write: begin -->\nold\n<!-- bench write: end -->\nafter\n"
    nothing = report.filled(text, {"bench write": ""})
    assert nothing == text.replace("old\n", "")
    assert report.filled(nothing, {"bench write": "old"}) == text


def test_filled_changes_only_what_is_between_markers():
    text = "before\n<!-- bench write: begin -->\nold\n<!-- bench write: end -->\nafter\n"
    filled = report.filled(text, {"bench write": "new"})
    assert filled == text.replace("old", "new")
    with pytest.raises(ValueError, match="no markers <!-- bench read: begin --> and"):
        report.filled(text, {"bench read": "new"})


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["reshape_and_cache_flash", "reshape_and_cache"])
def test_a_wrong_write_is_not_timed(monkeypatch, op):
    """An op that does nothing leaves the cache as it was: the bench says so and stops."""
    from pagedkv.cli.bench_write import WriteBench
    from pagedkv.dtypes import BFLOAT16

    monkeypatch.setattr(pagedkv, op, lambda *arrays, **options: None)
    bench = WriteBench(kv_heads=2, head_size=64, block_size=16, dtype=BFLOAT16, repeats=2)
    with pytest.raises(click.ClickException, match="key_cache is wrong, so its write is not timed"):
        bench.run((16,), progress=lambda line: None)
