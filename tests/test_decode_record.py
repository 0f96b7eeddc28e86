"""Records of ``bench decode``: what follows from the times, the others beside them, the table and the picture."""

import copy
import json
import struct
from pathlib import Path

import pytest

from pagedkv.cli import report
from pagedkv.cli.bench_shape import DEFAULT_SHAPE
from pagedkv.cli.decode_plot import MISSING, check_matplotlib, plot
from pagedkv.cli.decode_record import PEER_SIZES, completed
from pagedkv.cli.decode_rows import CROSSOVER, ROWS, nbytes, record_name
from pagedkv.cli.decode_table import PEER_NAMES, decode_markdown

RESULTS = Path(__file__).parent.parent / "results"
NUMBERS = dict(zip(PEER_SIZES, (1, 1024, 32, 8), strict=True))
OTHERS = {
    "card": "NVIDIA H200",
    "date": "2026-01-01",
    "method": "as here",
    "versions": {"flashinfer": "0.6"},
    "decode_us": [{**NUMBERS, "read_floor": 5.0, "vllm_v1": None, "vllm_v2": 27.0, "flash_attn_3": 15.0}],
}


def times(floor_us, **us):
    return {"floor_us": floor_us, "floor_launch": "read_blocks<8>, 528 x 256", "us": us, "instance": {}}


def batch(row):
    sizes = {name: getattr(row, name) for name in (*PEER_SIZES, "is_ragged")}
    return {"row": row.name, **sizes, "nbytes": nbytes(row, 128, 2)}


def measured(rows=ROWS, **shape):
    """A record in which v2 is 1.03 times the floor, v1 1.08 times."""
    return {
        "bench": "decode",
        "name": "decode",
        "card": "NVIDIA H200",
        "driver": "1.2.3",
        "versions": {"cupy": "14.2.0"},
        "date": "2026-01-02",
        "commit": "abc",
        "method": "medians",
        "shape": {**DEFAULT_SHAPE, **shape},
        "ceilings": {"empty_us": 3.0, "read": {"nbytes": 268435456, "us": 60.0}},
        "host_us": {op: {"given": 12.3, "allocated": 23.4} for op in ("v2", "v1")},
        "rows": [{**batch(row), **times(100.0, v2=103.0, v1=108.0)} for row in rows],
    }


# ---- targets --------------------------------------------------------------------------------------------------------


def targets(record, op):
    return [row["target_ratio"][op] for row in record["rows"]]


def test_what_follows_from_times():
    record = completed(measured(), None, None)
    assert targets(record, "v2") == [row.target for row in ROWS]
    assert targets(record, "v1")[:6] == [None] * 6
    assert targets(record, "v1")[6:11] == [pytest.approx(1.1 * row.target) for row in ROWS[6:11]]
    assert targets(record, "v1")[11] is None
    assert [row["met"]["v2"] for row in record["rows"]] == [True] * 7 + [False] * 3 + [True] * 2
    assert record["rows"][8]["met"]["v1"] is True
    assert record["rows"][0]["met"]["v1"] is None
    assert record["rows"][0]["ratio"] == {"v2": 1.03, "v1": 1.08}
    assert record["rows"][0]["tb_per_s"]["v2"] == pytest.approx(4 * 2**20 / 103e6)
    assert record["rows"][0]["floor_tb_per_s"] == pytest.approx(4 * 2**20 / 100e6)
    assert record["peers"] is None


@pytest.mark.parametrize("shape", [{"head_size": 64}, {"block_size": 32}])
def test_targets_of_other_sizes(shape):
    assert set(targets(completed(measured(**shape), None, None), "v2")) == {1.1}


def test_what_has_no_target():
    assert set(targets(completed(measured(dtype="float32"), None, None), "v2")) == {None}
    own = measured()
    own["rows"][0] |= {"row": "1x1024-16/8", "num_heads": 16}
    assert targets(completed(own, None, None), "v2")[:2] == [None, 1.25]


def test_fp8_is_measured_by_a_plain_cache():
    """Half of the bytes in 1.15 / 2 of the time, but no less than the whole where latency decides."""
    fp8, plain = measured(kv_cache_dtype="fp8"), measured()
    plain["rows"][0] |= times(29.0, v2=40.0)
    plain["rows"][1] |= times(29.1, v2=40.0)
    for row in fp8["rows"]:
        row["floor_us"] = 20.0
    assert targets(completed(fp8, plain, None), "v2")[:2] == [pytest.approx(2.0), pytest.approx(1.15)]
    assert targets(completed(fp8, plain, None), "v1")[:2] == [None, None]
    assert set(targets(completed(fp8, None, None), "v2")) == {None}


def test_names_of_records():
    names = [
        record_name({**DEFAULT_SHAPE, **shape})
        for shape in (
            {},
            {"dtype": "float16"},
            {"kv_cache_dtype": "fp8"},
            {"head_size": 64},
            {"kv_cache_dtype": "fp8", "head_size": 256, "block_size": 8},
            {"layout": "NHD"},
            {"layout": "HND", "kv_cache_dtype": "fp8", "block_size": 8},
        )
    ]
    assert names == [
        "decode",
        "decode-float16-auto",
        "decode-bfloat16-fp8",
        "decode-h64",
        "decode-bfloat16-fp8-h256-b8",
        "decode-nhd",
        "decode-hnd-bfloat16-fp8-b8",
    ]


# ---- varlen ---------------------------------------------------------------------------------------------------------


def measured_flash(layout="NHD", **shape):
    """A record in which varlen is 1.04 times the floor, v2 1.01 times."""
    record = measured(layout=layout, **shape)
    record["host_us"] = {"varlen": {"given": 12.3, "allocated": 23.4}}
    for row in record["rows"]:
        row["us"] = {"varlen": 104.0, "v2": 101.0}
    return record | {"name": record_name(record["shape"])}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_varlen_has_the_target_of_v2_and_v2_beside_it(layout):
    flash = completed(measured_flash(layout), None, OTHERS)
    assert targets(flash, "varlen") == targets(flash, "v2") == [row.target for row in ROWS]
    assert flash["rows"][0]["against_v2"] == {"ratio": 104 / 101, "target_ratio": 1.03, "met": True}
    assert flash["rows"][0]["peers"]["us"] == {"vllm_v2": 27.0, "flash_attn_3": 15.0}
    flash["rows"][0]["us"]["varlen"] = 104.1
    assert completed(flash, None, None)["rows"][0]["against_v2"]["met"] is False
    assert "against_v2" not in completed(measured(), None, None)["rows"][0]


def test_varlen_on_fp8_is_measured_by_itself():
    plain = measured_flash()
    for row in plain["rows"]:
        row |= times(29.1, varlen=40.0)
    fp8 = completed(measured_flash(kv_cache_dtype="fp8"), plain, None)
    assert targets(fp8, "varlen") == pytest.approx([0.23] * len(ROWS))
    assert set(targets(fp8, "v2")) == {None}


def test_the_table_of_varlen():
    lines = decode_markdown(completed(measured_flash("HND"), None, OTHERS)).splitlines()
    assert "bfloat16, HND cache auto, heads of 128" in lines[0]
    assert lines[2].endswith("`v2` reads a packed cache of its own in the same run.")
    titles = "| sequences | context | heads | bytes | floor | varlen | varlen / floor | v2 | v2 / floor | varlen / v2 |"
    assert lines[4].startswith(titles)
    first = "| 1 | 1,024 | 32/8 | 4.19 MB | 100.0 (0.04) | 104.0 (0.04) | **1.040** (1.450) | 101.0 (0.04) | "
    assert lines[6].startswith(first + "**1.010** (1.450) | **1.030** (1.030) |  | 27.0 |")


def test_layouts_have_sections_of_their_own(tmp_path):
    stored = [measured(), measured_flash("NHD"), measured_flash("HND"), measured_flash("HND", head_size=64)]
    for record in stored:
        report.save(completed(record, None, None), tmp_path)
    sections = report.sections(tmp_path)
    assert "packed cache" in sections["bench decode"] and "NHD" not in sections["bench decode"]
    assert "NHD cache" in sections["bench decode NHD"] and "HND" not in sections["bench decode NHD"]
    whole, others = sections["bench decode HND"].split("\n\n`varlen` of other dtypes")
    assert "HND cache" in whole
    assert "| 1 | 1,024 | 32/8 | 104.0 (**1.040**) |" in others


# ---- others ---------------------------------------------------------------------------------------------------------


def test_others_stand_beside_the_same_sizes():
    record = completed(measured(), None, OTHERS)
    assert record["peers"] == {name: OTHERS[name] for name in ("card", "date", "method", "versions")}
    first, *rest = [row["peers"] for row in record["rows"]]
    assert first == {"floor_us": 5.0, "us": {"vllm_v2": 27.0, "flash_attn_3": 15.0}}
    assert rest == [None] * 11


@pytest.mark.parametrize(
    "shape", [{"kv_cache_dtype": "fp8"}, {"head_size": 64}, {"block_size": 8}, {"dtype": "float32"}]
)
def test_others_were_not_measured_in_other_shapes(shape):
    record = completed(measured(**shape), None, OTHERS)
    assert record["peers"] is None
    assert all(row["peers"] is None for row in record["rows"])


def test_a_ragged_batch_is_another_batch():
    others = copy.deepcopy(OTHERS)
    others["decode_us"][0] |= {name: getattr(ROWS[-1], name) for name in PEER_SIZES}
    assert completed(measured(), None, others)["rows"][-1]["peers"] is None


def test_what_is_kept_of_others():
    """Every row whose target was set has a floor and the times of all others but one."""
    others = report.load(RESULTS, "NVIDIA H200", report.PEERS)
    record = completed(measured(), None, others)
    found = [row["peers"]["us"].keys() for row in record["rows"] if row["peers"]]
    assert len(found) == 11
    assert sum(us == PEER_NAMES.keys() for us in found) == 10
    assert all(5 < row["peers"]["floor_us"] < 1000 for row in record["rows"][:11])


# ---- what is made of a record ---------------------------------------------------------------------------------------


def test_the_table():
    lines = decode_markdown(completed(measured(), None, OTHERS)).splitlines()
    titles = "| sequences | context | heads | bytes | floor | v2 | v2 / floor | v1 | v1 / floor | vLLM v1 | vLLM v2 |"
    assert lines[4].startswith(titles)
    assert lines[5] == "|---|---|---|" + "---:|" * 11
    first = "| 1 | 1,024 | 32/8 | 4.19 MB | 100.0 (0.04) | 103.0 (0.04) | **1.030** (1.450) | 108.0 (0.04) | 1.080 | "
    assert lines[6] == first + " | 27.0 |  |  | 15.0 |"
    assert "| 64 | 8,192 | 32/8 | 2.15 GB | 100.0 (21.47) | 103.0 (20.85) | 1.030 (1.015) |" in lines[14]
    assert "| 108.0 (19.88) | **1.080** (1.117) |" in lines[14]
    assert lines[17].startswith("| 256 | 2,048 on average | 64/8 |")
    text = "\n".join(lines)
    assert "bfloat16, packed cache auto, heads of 128, blocks of 16, medians." in text
    assert "at most 25, v2 12.3 with all memory given, 23.4 with none; v1 12.3" in text
    assert "best read 268 MB in 60.0 (4.47 TB/s)" in text
    assert "Others as recorded on 2026-01-01, NVIDIA H200: as here; flashinfer 0.6." in text


def test_the_table_of_the_crossover_says_so():
    record = completed(measured(CROSSOVER), None, None)
    sentence = "v1 against v2 over the context, for batches of several sizes."
    assert sentence not in decode_markdown(record)
    assert sentence in decode_markdown(record | {"name": record_name(DEFAULT_SHAPE, is_crossover=True)})


def test_the_table_of_one_op_without_others():
    record = measured()
    for row in record["rows"]:
        del row["us"]["v1"]
    del record["host_us"]["v1"]
    text = decode_markdown(completed(record, None, None))
    assert "| floor | v2 | v2 / floor |\n" in text
    assert "v1" not in text
    assert "Others" not in text


def test_records_of_a_card_stand_side_by_side(tmp_path):
    """That of the default shape whole; of the others what v2 needed, other formats first, then sizes in order."""
    shapes = [{"head_size": 64}, {"block_size": 128}, {"block_size": 8}, {"kv_cache_dtype": "fp8"}, {}]
    for i, shape in enumerate(shapes):
        record = measured(**shape)
        for row in record["rows"]:
            row["us"]["v2"] = 101.0 + i
        name = record_name({**DEFAULT_SHAPE, **shape})
        report.save(completed(record, measured(), None) | {"name": name}, tmp_path)
    crossover = completed(measured(CROSSOVER[:3]), None, None)
    crossover["rows"][2]["us"]["v1"] = 102.5
    report.save(crossover | {"name": record_name(DEFAULT_SHAPE, is_crossover=True)}, tmp_path)
    whole, others, both = report.sections(tmp_path)["bench decode"].split("| sequences |")[1:]
    assert "| 1 | 1,024 | 32/8 | 4.19 MB | 100.0 (0.04) | 105.0 (0.04) | **1.050** (1.450) | 108.0 (0.04) |" in whole
    assert others.startswith(" context | heads | fp8 cache | blocks of 8 | blocks of 128 | heads of 64 |\n")
    assert "| 1 | 1,024 | 32/8 | 104.0 (1.040) | 103.0 (**1.030**) | 102.0 (**1.020**) | 101.0 (**1.010**) |" in others
    assert both.startswith(" 256 | 1,024 | 4,096 |\n")
    assert "| 1 | 108.0 / **103.0** | 108.0 / **103.0** | **102.5** / 103.0 |" in both


def test_cards_have_sections_of_their_own(tmp_path):
    for card in ("NVIDIA H200", "NVIDIA L4"):
        report.save(completed(measured(), None, None) | {"card": card}, tmp_path)
    section = report.sections(tmp_path)["bench decode"]
    assert section.count("| sequences |") == 2
    assert section.index("NVIDIA H200, ") < section.index("NVIDIA L4, ")


@pytest.mark.parametrize("peers", [OTHERS, None])
@pytest.mark.parametrize("ops", [("v2", "v1"), ("v1",), ("varlen", "v2")])
def test_the_picture(tmp_path, peers, ops):
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    record = measured_flash() if "varlen" in ops else measured()
    for row in record["rows"]:
        row["us"] = {op: row["us"][op] for op in ops}
    plot(completed(record, None, peers), tmp_path / "decode.picture")
    content = (tmp_path / "decode.picture").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert 1000 <= width <= 2000
    assert 800 <= height <= 2000
    assert 20_000 < len(content) < 400_000


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError) as caught:
        check_matplotlib()
    assert str(caught.value) == MISSING
    assert "pip install 'pagedkv[plot]'" in MISSING


def test_a_record_is_plain_json():
    record = completed(measured(), measured(), OTHERS)
    assert json.loads(json.dumps(record)) == record
