"""The interpreter gives what a card gave: the kernels of ``golden.py``, compared with their recordings bit by bit."""

from pathlib import Path

import golden
import numpy as np
import pytest
from small_kernels import launch

RECORDINGS = Path(__file__).parent / "golden"
ON_PTX = pytest.param("ptx", marks=pytest.mark.ptx)
ON_CARD = pytest.param("cuda", marks=pytest.mark.gpu)

# How far the card's approximations may be from the interpreter's rounded results, relative to them: 2 units in the last
# place, and what the PTX ISA says of tanh.
TOLERANCES = dict.fromkeys(golden.APPROXIMATE, 2.0**-22) | {"tanh.approx": 2.0**-11}


def interpreted(name, inputs):
    case = golden.CASES[name]
    out = np.full((len(inputs), len(case.outputs), golden.LANES), 0xDEADBEEF, np.uint32)
    launch(case.source, out, inputs, grid=len(inputs), threads=golden.LANES, arch="compute_90")
    return out


def recorded(name):
    with np.load(RECORDINGS / f"{name}.npz", allow_pickle=False) as recording:
        return recording["inputs"], recording["outputs"]


def results(name, where, inputs):
    return golden.on_card(name, inputs) if where == "cuda" else interpreted(name, inputs)


def test_every_case_is_recorded():
    assert {path.stem for path in RECORDINGS.glob("*.npz")} == set(golden.CASES)


@pytest.mark.parametrize("name", golden.CASES)
def test_a_recording_is_of_the_case(name):
    inputs, outputs = recorded(name)
    np.testing.assert_array_equal(inputs, golden.inputs_of(name))
    assert outputs.shape == (len(inputs), len(golden.CASES[name].outputs), golden.LANES)


@pytest.mark.parametrize("where", [ON_PTX, ON_CARD])
@pytest.mark.parametrize("name", [name for name in golden.CASES if name != "approximate"])
def test_results_are_the_recorded_bits(name, where):
    inputs, outputs = recorded(name)
    got = results(name, where, inputs)
    for i, output in enumerate(golden.CASES[name].outputs):
        np.testing.assert_array_equal(got[:, i], outputs[:, i], err_msg=output)


@pytest.mark.gpu
def test_approximations_are_the_recorded_bits():
    inputs, outputs = recorded("approximate")
    np.testing.assert_array_equal(golden.on_card("approximate", inputs), outputs)


@pytest.mark.ptx
@pytest.mark.parametrize("name", golden.APPROXIMATE)
def test_approximations_are_near_the_recorded_ones(name):
    inputs, outputs = recorded("approximate")
    place = golden.CASES["approximate"].outputs.index(name)
    got, want = (words[:, place].view(np.float32) for words in (interpreted("approximate", inputs), outputs))
    # A logarithm near 0 is that of a number near 1: exact to an absolute distance.
    near = 2.0**-22 if name.startswith("lg2") else 0
    np.testing.assert_allclose(want, got, rtol=TOLERANCES[name], atol=near)
