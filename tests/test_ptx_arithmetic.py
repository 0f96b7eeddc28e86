"""The interpreter's arithmetic on floats: what is rounded once, and what the device approximates.

What only a card can tell is compared with recordings in ``test_ptx_golden.py``; here fractions and float64 say what is
right.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from small_kernels import launch, run

from pagedkv.ptx import halves
from pagedkv.ptx.faults import UnknownInstruction
from pagedkv.ptx.rounding import down, odd_float32, odd_sum, toward_zero

pytestmark = pytest.mark.ptx


# ---- rounding -------------------------------------------------------------------------------------------------------

LARGEST = float(np.finfo(np.float32).max)
ROUNDED = {
    # function: float64, float32
    toward_zero: {
        1 + 2.0**-24: 1,
        1 + 2.0**-23 - 2.0**-52: 1,
        -1 - 2.0**-23 - 2.0**-24: -1 - 2.0**-23,
        2.0**-150: 0,
        3 * 2.0**-150: 2.0**-149,
        2.0**128 - 2.0**80: LARGEST,
        2.0**128: np.inf,
        -np.inf: -np.inf,
    },
    odd_float32: {
        1.0: 1,
        1 + 2.0**-52: 1 + 2.0**-23,
        1 + 2.0**-23 + 2.0**-52: 1 + 2.0**-23,
        -1 - 2.0**-23 * 2.5: -1 - 2.0**-23 * 3,
        2.0**-200: 2.0**-149,
        2.0**128 - 2.0**80: LARGEST,
        -(2.0**128): -np.inf,
    },
    down: {
        1 - 2.0**-30: 1 - 2.0**-24,
        1 + 2.0**-30: 1,
        -1 + 2.0**-30: -1,
        -1 - 2.0**-30: -1 - 2.0**-23,
        1.0: 1,
        2.0**-200: 0,
        -(2.0**-200): -(2.0**-149),
    },
}


@pytest.mark.parametrize("function", ROUNDED)
def test_rounding_to_float32(function):
    given, want = zip(*ROUNDED[function].items(), strict=True)
    with np.errstate(over="ignore"):
        got = function(np.array(given))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.array(want, np.float32))


def test_a_sum_rounded_to_odd():
    x, y = np.array([[1, 2.0**-60], [1, -(2.0**-60)], [1, 2.0**-52], [1, 2.0**-53 * 3], [np.inf, 1]]).T
    want = [1 + 2.0**-52, 1 - 2.0**-53, 1 + 2.0**-52, 1 + 2.0**-52, np.inf]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(odd_sum(x, y), want)


# ---- 16-bit floats --------------------------------------------------------------------------------------------------

TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
EXACT = {
    "add": lambda x, y, z: x + y,
    "sub": lambda x, y, z: x - y,
    "mul": lambda x, y, z: x * y,
    "fma": lambda x, y, z: x * y + z,
}


def nearest(exact, dtype):
    """The number nearest to a fraction, the one with an even code of two, by trying all around a guess."""
    top = ml_dtypes.finfo(dtype).max
    largest, guess = (int(np.array(x, dtype).view(np.uint16)) for x in (top, min(abs(float(exact)), float(top))))
    codes = range(max(guess - 2, 0), min(guess + 2, largest) + 1)
    values = {code: Fraction(float(np.uint16(code).view(dtype))) for code in codes}
    if largest in values:  # what would come next is infinite
        values[largest + 1] = 2 * values[largest] - values[largest - 1]
    code = min(values, key=lambda code: (abs(values[code] - abs(exact)), code & 1))
    return float(np.uint16(code).view(dtype)) * (-1 if exact < 0 else 1)


def codes(rng, dtype, exponents, count):
    """Numbers of any mantissa whose exponents lie within a range."""
    numbers = rng.uniform(1, 2, count) * rng.choice([-1, 1], count) * 2.0 ** rng.integers(*exponents, count)
    return numbers.astype(np.float32).astype(dtype).view(np.uint16)


# Exponents of the factors, and of the addend: near each other, far apart, at the ends of the format.
RANGES = {
    "f16": [((-3, 3), (-3, 3)), ((-3, 3), (-24, -12)), ((-12, -4), (-24, -14)), ((6, 8), (10, 16))],
    "bf16": [((-3, 3), (-3, 3)), ((-3, 3), (-40, -8)), ((-68, -60), (-133, -120)), ((60, 64), (110, 128))],
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("form", TYPES)
def test_16_bit_floats_are_rounded_once(form, name, rng):
    dtype = TYPES[form]
    for factors, addends in RANGES[form]:
        x, y, z = (codes(rng, dtype, exponents, 300) for exponents in (factors, factors, addends))
        if name in ("add", "sub"):
            y = z
        operands = (x, y, z)[: 3 if name == "fma" else 2]
        with np.errstate(over="ignore"):
            got = halves.HANDLERS[name]((name, form), *operands)
        numbers = [[Fraction(float(code.view(dtype))) for code in each] for each in (x, y, z)]
        want = [nearest(EXACT[name](*each), dtype) for each in zip(*numbers, strict=True)]
        np.testing.assert_array_equal(got.view(dtype).astype(np.float64), want)


@pytest.mark.parametrize(
    ("addend", "want"), [(2.0**-100, 1.5 + 2.0**-6), (-(2.0**-100), 1.5 + 2.0**-7), (0, 1.5 + 2.0**-6)]
)
def test_an_addend_far_below_decides_a_tie(addend, want):
    """1.5 * (1 + 2**-7) lies between two bfloat16."""
    x, y, z = (np.array([value], ml_dtypes.bfloat16).view(np.uint16) for value in (1.5, 1 + 2.0**-7, addend))
    got = halves.HANDLERS["fma"](("fma", "rn", "bf16"), x, y, z).view(ml_dtypes.bfloat16)
    assert got.astype(np.float64).tolist() == [want]


def test_pairs_are_two_numbers_and_constants_are_any_threads():
    x = np.array([[1, 2], [3, -4], [0.5, np.nan]], np.float16).view(np.uint32)[:, 0]
    y = np.array([10, 100], np.float16).view(np.uint32)[0]
    got = halves.HANDLERS["mul"](("mul", "f16x2"), x, y).view(np.float16).reshape(-1, 2)
    np.testing.assert_array_equal(got, np.array([[10, 200], [30, -400], [5, np.nan]], np.float16))


@pytest.mark.parametrize(
    ("name", "x", "y", "want"),
    [
        ("min", np.nan, 1, 1),
        ("max", 1, np.nan, 1),
        ("min", 0.0, -0.0, -0.0),
        ("max", -0.0, 0.0, 0.0),
        ("min", -1, 2**-24, -1),
        ("max", -1, 2**-24, 2**-24),
        ("add", np.inf, -np.inf, np.nan),
        ("mul", 2**-14, 2**-10, 2**-24),
    ],
)
def test_special_16_bit_floats(name, x, y, want):
    given = (np.array([value], np.float16).view(np.uint16) for value in (x, y))
    with np.errstate(invalid="ignore"):
        (got,) = halves.HANDLERS[name]((name, "f16"), *given)
    assert got == (0x7FFF if np.isnan(want) else np.float16(want).view(np.uint16))


# ---- float32 --------------------------------------------------------------------------------------------------------

POSITIVE = np.linspace(0.01, 30, 64).astype(np.float32)
SIGNED = np.linspace(-20, 20, 64).astype(np.float32)
FUNCTIONS = {
    # name: what is stored for x, the numbers x, the same in float64
    "exp2": ("exp2f(x)", SIGNED, np.exp2),
    "log2": ("asm_lg2(x)", POSITIVE, np.log2),
    "tanh": ("asm_tanh(x)", SIGNED, np.tanh),
    "square root": ("sqrtf(x)", POSITIVE, np.sqrt),
    "approximate square root": ("asm_sqrt(x)", POSITIVE, np.sqrt),
    "reciprocal square root": ("rsqrtf(x)", POSITIVE, lambda x: 1 / np.sqrt(x)),
    "quotient": ("x / 3.f", SIGNED, lambda x: x / 3),
    "approximate quotient": ("__fdividef(x, 3.f)", SIGNED, lambda x: x / 3),
    "full quotient": ("asm_div(x, 3.f)", SIGNED, lambda x: x / 3),
}
FUNCTION_CODE = """
  __device__ float asm_lg2(float x) { float z; asm("lg2.approx.f32 %0, %1;" : "=f"(z) : "f"(x)); return z; }
  __device__ float asm_tanh(float x) { float z; asm("tanh.approx.f32 %0, %1;" : "=f"(z) : "f"(x)); return z; }
  __device__ float asm_sqrt(float x) { float z; asm("sqrt.approx.f32 %0, %1;" : "=f"(z) : "f"(x)); return z; }
  __device__ float asm_div(float x, float y) {
    float z; asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z;
  }
"""


@pytest.mark.parametrize(("call", "source", "same"), FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_functions_are_rounded(call, source, same):
    code = f"""{FUNCTION_CODE} template <int N> __global__ void kernel(float* out, const float* in) {{
      const float x = in[threadIdx.x];
      out[threadIdx.x] = {call};
    }}"""
    out = np.zeros(64, np.float32)
    launch(code, out, source)
    np.testing.assert_array_equal(out, same(source.astype(np.float64)).astype(np.float32))


ON_FLOATS = {
    "exponential function": ("expf(x)", np.exp, 2.0**-22),
    "subnormal power of 2, flushed": ("exp2f(x - 130.f)", lambda x: np.where(x < 4, 0, 2 ** (x - 130)), 2.0**-16),
    "floor": ("floorf(x)", np.floor, 0),
    "ceiling": ("ceilf(x)", np.ceil, 0),
    "integer below": ("__float2int_rd(x)", np.floor, 0),
    "integer above": ("__float2int_ru(x)", np.ceil, 0),
    "held between 0 and 1": ("__saturatef(x / 10)", lambda x: np.clip(x / 10, 0, 1), 2.0**-23),
    "divisor too large": ("__fdividef(x, 0x1.8p126f)", np.zeros_like, 0),
    "sign of a quotient that is 0": (
        "1.f / __fdividef(x, -0x1.8p126f)",
        lambda x: np.where(x > 0, -np.inf, np.inf),
        0,
    ),
    "infinity by a divisor too large": (
        "__fdividef(x > 0 ? __int_as_float(0x7f800000) : x, 0x1.8p126f)",
        lambda x: np.where(x > 0, np.nan, 0),
        0,
    ),
    "largest divisor": ("__fdividef(x * 0x1p30f, 0x1p126f) * 0x1p96f", lambda x: x, 0),
    "rounded down": ("__fmaf_rd(x, 1.f, 0x1p-40f)", lambda x: x, 0),
    "below rounded down": (
        "__fmaf_rd(x, 1.f, -0x1p-40f)",
        lambda x: np.nextafter(x.astype(np.float32), np.float32(-np.inf)),
        0,
    ),
}


@pytest.mark.parametrize(("call", "same", "tolerance"), ON_FLOATS.values(), ids=ON_FLOATS.keys())
def test_floats(call, same, tolerance):
    got = run(f"const float x = in[t]; out[t] = {call};", SIGNED)
    np.testing.assert_allclose(got, same(SIGNED.astype(np.float64)), rtol=tolerance)


def test_what_is_no_number_is_held_at_0():
    got = run("out[t] = __saturatef(in[t]);", np.resize(np.array([np.nan, -1, 0.5, 2], np.float32), 64))
    np.testing.assert_array_equal(got, np.resize(np.array([0, 0, 0.5, 1], np.float32), 64))


# ---- what is not known ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instruction", "what"),
    [
        ("mul.ftz.f16x2 %0, %0, %0;", r"unknown modifier \.f16x2 in mul\.ftz\.f16x2"),
        ("fma.rn.relu.f16x2 %0, %0, %0, %0;", r"unknown modifier \.relu"),
        ("lop3.or.b32 %0|p, %0, %0, %0, 1, q;", r"unknown modifier \.or"),
        ("cvt.rn.satfinite.relu.e4m3x2.f32 h, f, f;", r"unknown modifier \.relu"),
    ],
)
def test_other_forms_are_refused(instruction, what):
    asm = f'asm volatile("{{ .reg .pred p, q; .reg .b16 h; .reg .f32 f; {instruction} }}" : "+r"(x));'
    code = f"template <int N> __global__ void kernel(unsigned* out) {{ unsigned x = out[0]; {asm} out[0] = x; }}"
    with pytest.raises(UnknownInstruction, match=what):
        launch(code, np.zeros(1, np.uint32), threads=32, arch="compute_89")
