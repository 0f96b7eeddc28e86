"""Instructions whose results only a GPU can tell: kernels of one warp, run on a card once and recorded.

``python -m tests.golden tests/golden`` on a machine with CuPy and a GPU writes a file for each case: the words that
every lane was given, and the words it got. ``test_ptx_golden.py`` gives the same words to the same kernels in the
interpreter.
"""

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LANES = 32
KERNEL = """
#define GIVEN(word) in[(blockIdx.x * {num_inputs} + word) * 32 + lane]
#define RESULT(word) out[(blockIdx.x * {num_outputs} + word) * 32 + lane]
template <int UNUSED>
__global__ void kernel(unsigned* out, const unsigned* in) {{  // [num_warps, words, 32] each
  const int lane = threadIdx.x;
  const unsigned ALL = 0xffffffffu;
{body}
}}
"""


@dataclass(frozen=True)
class Case:
    """A kernel, how many words a lane is given, what each word of its result is, and what the lanes are given."""

    body: str
    num_inputs: int
    outputs: tuple[str, ...]
    samples: Callable[[np.random.Generator], list[np.ndarray]]  # ``[num_inputs, 32]`` words for each warp

    @property
    def source(self) -> str:
        return KERNEL.format(body=self.body, num_inputs=self.num_inputs, num_outputs=len(self.outputs))


def inputs_of(name: str) -> np.ndarray:
    """``[num_warps, num_inputs, 32]``, the same in every run."""
    return np.stack(CASES[name].samples(np.random.default_rng(zlib.crc32(name.encode())))).astype(np.uint32)


# ---- values ---------------------------------------------------------------------------------------------------------

# Format: bits of the exponent, bits of the mantissa, codes that are infinite or no number.
FORMATS = {
    "f16": (5, 10, (0x7C00, 0xFC00, 0x7E01)),
    "bf16": (8, 7, (0x7F80, 0xFF80, 0x7FC1)),
    "e4m3": (4, 3, (0x7F, 0xFF)),
    "e5m2": (5, 2, (0x7C, 0xFC, 0x7F)),
    "f32": (8, 23, (0x7F800000, 0xFF800000, 0x7FC00001)),
}


def numbers(rng: np.random.Generator, form: str, what: str, count: int) -> np.ndarray:
    """Codes of a format: numbers of the kinds that set apart one way of adding them from another."""
    exponent_bits, mantissa_bits, specials = FORMATS[form]
    bias, top = (1 << exponent_bits - 1) - 1, (1 << exponent_bits) - 2
    far = min(bias - 1, 14)  # products of such numbers are still numbers
    low, high = {
        "plain": (bias - 3, bias),
        "spread": (bias - far, bias + far),
        "cancelling": (bias, bias),
        "subnormal": (0, 1),
        "huge": (top - 1, top),
        "sparse": (bias - far, bias + far),
        "special": (bias - 3, bias),
    }[what]
    exponent = rng.integers(low, high + 1, count)
    mantissa = rng.integers(0, 1 << mantissa_bits, count)
    if what == "cancelling":  # few values, so that sums lose their leading bits
        exponent = rng.choice([bias, bias + far // 2], count)
        mantissa = rng.choice([0, 1], count)
    if what == "subnormal":  # beside larger ones, or all products would be 0
        exponent = np.where(rng.random(count) < 0.3, bias, exponent)
    codes = rng.integers(0, 2, count) << exponent_bits + mantissa_bits | exponent << mantissa_bits | mantissa
    if what == "sparse":  # does the exponent of a product with 0 matter?
        codes = np.where(rng.random(count) < 0.6, 0, codes)
    if what == "special":
        codes = np.where(rng.random(count) < 0.05, rng.choice(specials, count), codes)
    return codes


def packed(codes: np.ndarray, form: str) -> np.ndarray:
    """Codes as 32-bit words, the first in the low bits, a row for each word of a lane."""
    size = (sum(FORMATS[form][:2]) + 1) // 8
    return codes.astype(f"<u{size}").view("<u4").reshape(-1, LANES)


def words(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 1 << 32, (count, LANES))


# ---- warps ----------------------------------------------------------------------------------------------------------


def _expressions(prologue: str, expressions: dict[str, str], num_inputs: int, samples: Callable) -> Case:
    stores = [f"  RESULT({i}) = {text};" for i, text in enumerate(expressions.values())]
    return Case("\n".join([prologue, *stores]), num_inputs, tuple(expressions), samples)


WHETHER_THERE = """
  unsigned there;
  asm("{ .reg .pred p; .reg .b32 x; shfl.sync.down.b32 x|p, %1, %2, 0x1803, -1; selp.u32 %0, 1, 0, p; }"
      : "=r"(there) : "r"(GIVEN(0)), "r"(GIVEN(1) % 4));
"""
SHUFFLES = {
    "idx": "__shfl_sync(ALL, x, y)",
    "idx of 8": "__shfl_sync(ALL, x, y, 8)",
    "idx of 2": "__shfl_sync(ALL, x, y, 2)",
    "up": "__shfl_up_sync(ALL, x, 1)",
    "up by lane": "__shfl_up_sync(ALL, x, y)",
    "up of 16": "__shfl_up_sync(ALL, x, y % 16, 16)",
    "up of 4": "__shfl_up_sync(ALL, x, 3, 4)",
    "down": "__shfl_down_sync(ALL, x, 7)",
    "down by lane": "__shfl_down_sync(ALL, x, y)",
    "down of 8": "__shfl_down_sync(ALL, x, 3, 8)",
    "bfly 1": "__shfl_xor_sync(ALL, x, 1)",
    "bfly 16": "__shfl_xor_sync(ALL, x, 16)",
    "bfly by lane": "__shfl_xor_sync(ALL, x, y)",
    "bfly of 8": "__shfl_xor_sync(ALL, x, 12, 8)",
    "bfly of 4": "__shfl_xor_sync(ALL, x, y % 4, 4)",
    "whether there": "there",
}
VOTES = {
    "any": "__any_sync(ALL, x & 1)",
    "all": "__all_sync(ALL, x & 1)",
    "ballot": "__ballot_sync(ALL, x & 1)",
    "active": "__activemask()",
    "match any": "__match_any_sync(ALL, x & 3)",
    "match all": "__match_all_sync(ALL, x & 1, &same)",
    "same": "unsigned(same)",
}
REDUCTIONS = {
    "add": "__reduce_add_sync(ALL, x)",
    "min": "__reduce_min_sync(ALL, x)",
    "max": "__reduce_max_sync(ALL, x)",
    "signed min": "__reduce_min_sync(ALL, int(x))",
    "signed max": "__reduce_max_sync(ALL, int(x))",
    "and": "__reduce_and_sync(ALL, x | 0x00ff00ff)",
    "or": "__reduce_or_sync(ALL, x & 0x0000ffff & y)",
    "xor": "__reduce_xor_sync(ALL, x)",
}


def _ballots(rng: np.random.Generator) -> list[np.ndarray]:
    few = rng.random((1, LANES)) < 0.1
    return [np.zeros((1, LANES)), np.ones((1, LANES)), few, ~few, *words(rng, 3)[:, None]]


# ---- matrices -------------------------------------------------------------------------------------------------------

# Four 8 x 8 matrices of 16-bit numbers, in rows of 16 bytes; which row a lane names is drawn.
LOAD_MATRICES = """
  __shared__ alignas(16) unsigned rows[32][4];
  for (int i = 0; i < 4; i++) rows[lane][i] = GIVEN(i);
  __syncwarp();
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(rows[GIVEN(4) % 32]));
  unsigned a, b, c, d;
"""


def _load_matrices(modifier: str) -> Case:
    text, names = LOAD_MATRICES, iter(range(7))
    for count, registers in ((1, "a"), (2, "ab"), (4, "abcd")):
        targets = ", ".join(f"%{i}" for i in range(count))
        results = ", ".join(f'"=r"({register})' for register in registers)
        opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{modifier}.shared.b16"
        text += f'  asm volatile("{opcode} {{{targets}}}, [%{count}];" : {results} : "r"(row) : "memory");\n'
        text += "".join(f"  RESULT({next(names)}) = {register};\n" for register in registers)
    outputs = tuple(f"x{count} register {i}" for count in (1, 2, 4) for i in range(count))
    return Case(text, 5, outputs, lambda rng: [words(rng, 5), words(rng, 5)])


MOVE_MATRIX = """
  unsigned moved;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(moved) : "r"(GIVEN(0)));
  RESULT(0) = moved;
"""


def _multiply(shape: str, a: str, b: str, kinds: tuple[str, ...]) -> Case:
    """D = A B + C, with A, B and C as their fragments lie in the registers of a warp."""
    k = int(shape.partition("k")[2])
    per_word = 4 if a.startswith("e") else 2
    num_a, num_b = 16 * k // LANES // per_word, 8 * k // LANES // per_word
    registers = [f"%{i}" for i in range(8 + num_a + num_b)]
    groups = (registers[:4], registers[4 : 4 + num_a], registers[4 + num_a : 4 + num_a + num_b], registers[-4:])
    operands = ", ".join("{" + ", ".join(group) + "}" for group in groups)
    given = [f'"r"(GIVEN({i}))' for i in range(num_a + num_b)]
    given += [f'"f"(__uint_as_float(GIVEN({num_a + num_b + i})))' for i in range(4)]
    body = f"""
  float d[4];
  asm("mma.sync.aligned.{shape}.row.col.f32.{a}.{b}.f32 {operands};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : {", ".join(given)});
  for (int i = 0; i < 4; i++) RESULT(i) = __float_as_uint(d[i]);
"""

    def sample(rng: np.random.Generator, what: str) -> np.ndarray:
        forms = ((a, num_a * per_word), (b, num_b * per_word), ("f32", 4))
        return np.concatenate([packed(numbers(rng, form, what, n * LANES), form) for form, n in forms])

    outputs = tuple(f"d{i}" for i in range(4))
    return Case(body, num_a + num_b + 4, outputs, lambda rng: [sample(rng, what) for what in kinds])


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def _asm(result: str, opcode: str, *sources: str) -> str:
    """An expression of one instruction. Constraints: r and h are 32 and 16 bits, f is a float's bits."""
    constraint = {"r": '"{}"({})', "h": '"{}"(static_cast<unsigned short>({}))', "f": '"{}"(__uint_as_float({}))'}
    given = ", ".join(constraint[kind].format(kind, f"GIVEN({i})") for i, kind in enumerate(sources))
    registers = ", ".join(f"%{i}" for i in range(1 + len(sources)))
    kind = {"r": "unsigned", "h": "unsigned short", "f": "float"}[result]
    value = "__float_as_uint(z)" if result == "f" else "unsigned(z)"
    return f'[&] {{ {kind} z; asm("{opcode} {registers};" : "={result}"(z) : {given}); return {value}; }}()'


HALF_OPERATIONS = {"fma.rn": 3, "add": 2, "sub": 2, "mul": 2, "min": 2, "max": 2, "neg": 1, "abs": 1}


def _half_arithmetic(form: str) -> Case:
    pairs = {f"{name}.{form}x2": _asm("r", f"{name}.{form}x2", *"r" * n) for name, n in HALF_OPERATIONS.items()}
    single = {f"{name}.{form}": _asm("h", f"{name}.{form}", *"h" * n) for name, n in HALF_OPERATIONS.items()}

    def samples(rng: np.random.Generator) -> list[np.ndarray]:
        kinds = ("spread", "subnormal", "special")
        return [words(rng, 3), *(packed(numbers(rng, form, what, 6 * LANES), form) for what in kinds)]

    return _expressions("", pairs | single, 3, samples)


CONVERSIONS = {
    "f16x2 of f32": _asm("r", "cvt.rn.f16x2.f32", "f", "f"),
    "bf16x2 of f32": _asm("r", "cvt.rn.bf16x2.f32", "f", "f"),
    "f16x2 of e4m3x2": _asm("r", "cvt.rn.f16x2.e4m3x2", "h"),
    "f16x2 of e5m2x2": _asm("r", "cvt.rn.f16x2.e5m2x2", "h"),
    "e4m3x2 of f32": _asm("h", "cvt.rn.satfinite.e4m3x2.f32", "f", "f"),
    "e5m2x2 of f32": _asm("h", "cvt.rn.satfinite.e5m2x2.f32", "f", "f"),
}
ROUNDED_ONCE = {
    name: _asm("f", f"{name}.f32", *"f" * n) for name, n in {"sqrt.rn": 1, "div.rn": 2, "rcp.rn": 1}.items()
}
APPROXIMATE = {
    name: _asm("f", f"{name}.f32", *"f" * n)
    for name, n in {
        "ex2.approx.ftz": 1,
        "ex2.approx": 1,
        "lg2.approx.ftz": 1,
        "lg2.approx": 1,
        "tanh.approx": 1,
        "sqrt.approx.ftz": 1,
        "rsqrt.approx.ftz": 1,
        "rcp.approx.ftz": 1,
        "div.approx.ftz": 2,
        "div.full.ftz": 2,
    }.items()
}


def _halves_of_range(rng: np.random.Generator) -> list[np.ndarray]:
    """float32 near those that 16 and 8 bits can hold, and any bits at all."""
    kinds = ("plain", "spread", "subnormal", "special")
    return [words(rng, 2), *(packed(numbers(rng, "f32", what, 2 * LANES), "f32") for what in kinds)]


ALL_KINDS = ("plain", "spread", "cancelling", "subnormal", "huge", "sparse", "special")
FP8_KINDS = ("plain", "spread", "subnormal", "sparse", "special")
CASES = {
    "shuffle": _expressions(
        f"  const unsigned x = GIVEN(0), y = GIVEN(1);{WHETHER_THERE}", SHUFFLES, 2, lambda rng: [words(rng, 2)]
    ),
    "vote": _expressions("  const unsigned x = GIVEN(0);\n  int same = 0;", VOTES, 1, _ballots),
    "redux": _expressions(
        "  const unsigned x = GIVEN(0), y = GIVEN(1);", REDUCTIONS, 2, lambda rng: [words(rng, 2), words(rng, 2)]
    ),
    "ldmatrix": _load_matrices(""),
    "ldmatrix_trans": _load_matrices(".trans"),
    "movmatrix": Case(MOVE_MATRIX, 1, ("moved",), lambda rng: [words(rng, 1)]),
    "mma_m16n8k16_f16": _multiply("m16n8k16", "f16", "f16", ALL_KINDS),
    "mma_m16n8k16_bf16": _multiply("m16n8k16", "bf16", "bf16", ALL_KINDS),
    "mma_m16n8k8_f16": _multiply("m16n8k8", "f16", "f16", ALL_KINDS),
    "mma_m16n8k8_bf16": _multiply("m16n8k8", "bf16", "bf16", ALL_KINDS),
    "mma_m16n8k32_e4m3": _multiply("m16n8k32", "e4m3", "e4m3", FP8_KINDS),
    "mma_m16n8k32_e5m2": _multiply("m16n8k32", "e5m2", "e5m2", FP8_KINDS),
    "mma_m16n8k32_e4m3_e5m2": _multiply("m16n8k32", "e4m3", "e5m2", ("spread", "special")),
    "mma_m16n8k32_e5m2_e4m3": _multiply("m16n8k32", "e5m2", "e4m3", ("spread", "special")),
    "arithmetic_f16": _half_arithmetic("f16"),
    "arithmetic_bf16": _half_arithmetic("bf16"),
    "conversions": _expressions("", CONVERSIONS, 2, _halves_of_range),
    "rounded_once": _expressions("", ROUNDED_ONCE, 2, _halves_of_range),
    "approximate": _expressions("", APPROXIMATE, 2, _halves_of_range),
}


# ---- recording ------------------------------------------------------------------------------------------------------


def on_card(name: str, inputs: np.ndarray) -> np.ndarray:
    """``[num_warps, words, 32]``: what the current device gives."""
    import cupy

    case = CASES[name]
    module = cupy.RawModule(code=case.source, options=("-std=c++17",), name_expressions=("kernel<0>",))
    out = cupy.zeros((len(inputs), len(case.outputs), LANES), np.uint32)
    module.get_function("kernel<0>")((len(inputs),), (LANES,), (out, cupy.asarray(inputs)))
    return cupy.asnumpy(out)


def record(folder: Path) -> None:
    """Writes a file for each case."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        inputs = inputs_of(name)
        np.savez_compressed(folder / f"{name}.npz", inputs=inputs, outputs=on_card(name, inputs))


if __name__ == "__main__":
    record(Path(sys.argv[1]))
