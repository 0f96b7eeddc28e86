"""What the interpreter counts: small kernels whose requests are known by hand, and what a GPU counted for writes."""

import json
from pathlib import Path

import hardware_counters
import numpy as np
import pytest
from small_kernels import launch

from pagedkv.ptx.counters import Traffic

pytestmark = pytest.mark.ptx

RECORD = json.loads((Path(__file__).parent / "golden" / "hardware_counters.json").read_text(encoding="utf-8"))
HEAD = """
template <int UNUSED>
__global__ void kernel(float* out, const float* in) {
  const int t = threadIdx.x;
  __shared__ alignas(16) float row[2048];
"""


def aligned(count):
    """float32 zeros that begin at a sector."""
    buffer = np.zeros(count + 8, np.float32)
    return buffer[-buffer.ctypes.data % 32 // 4 :][:count]


def traffic(body, kind, threads=32, **options):
    """What a body of one line asked for."""
    counters = launch(f"{HEAD}  {body}\n}}\n", aligned(4096), aligned(4096), threads=threads, counted=True, **options)
    return counters.total().traffic[kind]


@pytest.mark.parametrize(
    ("index", "sectors", "ideal", "runs"),
    [
        ("t", 4, 4, 1),  # adjacent
        ("t + 1", 5, 4, 1),  # adjacent, from the middle of a sector
        ("2 * t", 8, 4, 32),  # every second
        ("8 * t", 32, 4, 32),  # a sector each
        ("0", 1, 1, 1),  # all the same
        ("31 - t", 4, 4, 1),  # order does not matter
        ("t / 16 * 1000 + t % 16", 4, 4, 2),  # two stretches
    ],
)
def test_sectors_of_a_load(index, sectors, ideal, runs):
    nbytes = 4 if index == "0" else 128
    assert traffic(f"out[t] = in[{index}];", "global load") == Traffic(1, sectors, ideal, nbytes, runs)


def test_a_wide_store_is_one_request():
    body = "reinterpret_cast<float4*>(out)[t] = reinterpret_cast<const float4*>(in)[t];"
    assert traffic(body, "global store") == Traffic(1, 16, 16, 512, 1)


def test_lanes_that_are_off_ask_for_nothing():
    assert traffic("if (t < 3) out[t] = in[t];", "global store") == Traffic(1, 1, 1, 12, 1)


def test_warps_ask_apart():
    assert traffic("out[blockIdx.x * 64 + t] = in[t];", "global load", threads=64, grid=2) == Traffic(4, 16, 16, 512, 4)


@pytest.mark.parametrize(
    ("index", "wavefronts"),
    [
        ("t", 1),
        ("2 * t", 2),
        ("32 * t", 32),  # all in one bank
        ("33 * t", 1),  # skewed
        ("t / 2", 1),  # words that are shared
        ("0", 1),
    ],
)
def test_wavefronts_of_a_shared_load(index, wavefronts):
    body = f"for (int i = t; i < 2048; i += 32) row[i] = i; __syncthreads(); out[t] = row[{index}];"
    assert traffic(body, "shared load").units == wavefronts


@pytest.mark.parametrize(("stride", "wavefronts"), [(4, 4), (36, 4), (8, 8), (32, 32)])
def test_wavefronts_of_16_byte_loads(stride, wavefronts):
    """Quarter warps are served one after the other."""
    body = f"""for (int i = t; i < 2048; i += 32) row[i] = i; __syncthreads();
  reinterpret_cast<float4*>(out)[t] = *reinterpret_cast<float4*>(row + {stride} * t);"""
    found = traffic(body, "shared load")
    assert (found.requests, found.units, found.ideal_units) == (1, wavefronts, 4)


def test_atomics_and_copies_are_counted_apart():
    counted = traffic("atomicAdd(out + t % 8, in[t]);", "global atomic")
    assert (counted.requests, counted.units) == (1, 1)
    body = """const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(row + 4 * t));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16; cp.async.wait_all;" ::"r"(to), "l"(in + 4 * t));"""
    assert traffic(body, "global copy") == Traffic(1, 16, 16, 512, 1)
    assert traffic(body, "shared copy").units == 4


def test_generic_addresses_are_counted_by_the_memory_they_name():
    """The same three instructions on shared memory in even threads, on global memory in odd ones."""
    body = "row[t] = 0; float* p = in[t] > 64 ? out + t + 1 : t % 2 ? out + t : row + t; *p += 1; atomicAdd(p, 0.5f);"
    requests_and_units = {
        "global load": (2, 8),  # of in[t] and of *p
        "shared load": (1, 1),
        "global store": (1, 4),
        "shared store": (2, 2),  # to row[t] and to *p
        "global atomic": (1, 4),
        "shared atomic": (1, 1),
    }
    for kind, wanted in requests_and_units.items():
        counted = traffic(body, kind)
        assert (counted.requests, counted.units) == wanted, kind


def test_instructions_by_line_lanes_and_class():
    code = f"{HEAD}\n  if (t < 8)\n    out[t] = in[t] * 2.0f;\n}}\n"
    counters = launch(code, aligned(64), aligned(64), threads=64, counted=True)
    lines = {line.number: tally for line, tally in counters.by_line().items()}
    number = code[: code.index("out[t] =")].count("\n") + 1
    assert lines[number].traffic["global load"].requests == 1
    assert lines[number].lanes / lines[number].warps < 32
    mix = counters.mix()
    assert mix["float"] == 1 and mix["memory"] >= 2 and mix["control"] >= 2
    assert sum(mix.values()) == counters.total().warps == sum(tally.warps for tally in lines.values())


@pytest.mark.parametrize("record", RECORD, ids=lambda record: "-".join(map(str, record["case"])))
def test_writes_ask_for_what_the_hardware_counted(record):
    """Requests and sectors are equal; a wavefront more now and then is the hardware's own."""
    counted = hardware_counters.interpreted(hardware_counters.case_of(*record["case"]))
    for figure, measured in record["figures"].items():
        assert counted[figure] == pytest.approx(measured, rel=0.01 if "wavefronts" in figure else 0), figure


def test_the_record_is_of_the_cases():
    assert [tuple(record["case"]) for record in RECORD] == hardware_counters.CASES
