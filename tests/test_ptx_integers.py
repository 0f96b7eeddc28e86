"""The interpreter's instructions on integers and bits, and what the lanes of a warp find out together.

Python's integers say what is right.
"""

import numpy as np
import pytest
from small_kernels import launch, run

from pagedkv.ptx.faults import Fault

pytestmark = pytest.mark.ptx


# ---- integers -------------------------------------------------------------------------------------------------------

INTEGERS = {  # name in C: type in PTX, constraint of asm, type in NumPy
    "int": ("s32", "r", np.int32),
    "unsigned": ("u32", "r", np.uint32),
    "long long": ("s64", "l", np.int64),
    "unsigned long long": ("u64", "l", np.uint64),
}


def quotient(x, y):
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def field(x, y, bits, signed):
    """Bits of x from y's lowest seven bits on, as many as its next seven say."""
    start, length = y & 127, min(y >> 7 & 127, bits)
    places = range(start, start + length)
    taken = [x >> min(place, bits - 1) & 1 if signed or place < bits else 0 for place in places]
    return sum(bit << i for i, bit in enumerate(taken)) - (signed and length > 0 and taken[-1] << length)


def highest(x):
    """The place of the highest bit that differs from the sign."""
    return (~x if x < 0 else x).bit_length() - 1


def unsigned(x, bits):
    return x & (1 << bits) - 1


# Name: a statement that sets z, the same on Python's integers. Where z is compared, its bits are.
ON_INTEGERS = {
    "quotient": ('if (y) asm("div.{type} %0, %1, %2;" : "={c}"(z) : "{c}"(x), "{c}"(y));', quotient),
    "remainder": (
        'if (y) asm("rem.{type} %0, %1, %2;" : "={c}"(z) : "{c}"(x), "{c}"(y));',
        lambda x, y: x - quotient(x, y) * y,
    ),
    "quotient by 0": ('asm("div.{type} %0, %1, %2;" : "={c}"(z) : "{c}"(x), "{c}"(in[0]));', lambda x, y: -1),
    "remainder by 0": ('asm("rem.{type} %0, %1, %2;" : "={c}"(z) : "{c}"(x), "{c}"(in[0]));', lambda x, y: x),
    "multiplied and added": (
        'asm("mad.lo.{type} %0, %1, %2, %3;" : "={c}"(z) : "{c}"(x), "{c}"(y), "{c}"(x));',
        lambda x, y: x * y + x,
    ),
    "upper half, added to": (
        'asm("mad.hi.{type} %0, %1, %2, %3;" : "={c}"(z) : "{c}"(x), "{c}"(y), "{c}"(x));',
        lambda x, y, bits, signed: (x * y >> bits) + x,
    ),
    "field": (
        'asm("bfe.{type} %0, %1, %2, %3;" : "={c}"(z) : "{c}"(x), "r"(int(y) & 127), "r"(int(y) >> 7 & 127));',
        field,
    ),
    "highest bit": (
        'int n; asm("bfind.{type} %0, %1;" : "=r"(n) : "{c}"(x)); z = n;',
        lambda x, y: highest(x),
    ),
    "shift to the top": (
        'int n; asm("bfind.shiftamt.{type} %0, %1;" : "=r"(n) : "{c}"(x)); z = n;',
        lambda x, y, bits, signed: bits - 1 - highest(x) if highest(x) >= 0 else -1,
    ),
    "ones": (
        'int n; asm("popc.b{bits} %0, %1;" : "=r"(n) : "{c}"(x)); z = n;',
        lambda x, y, bits, signed: unsigned(x, bits).bit_count(),
    ),
    "zeros in front": (
        'int n; asm("clz.b{bits} %0, %1;" : "=r"(n) : "{c}"(x)); z = n;',
        lambda x, y, bits, signed: bits - unsigned(x, bits).bit_length(),
    ),
    "backwards": (
        'asm("brev.b{bits} %0, %1;" : "={c}"(z) : "{c}"(x));',
        lambda x, y, bits, signed: int(f"{unsigned(x, bits):0{bits}b}"[::-1], 2),
    ),
    "by a sign": (
        'asm("slct.{type}.s32 %0, %1, %2, %3;" : "={c}"(z) : "{c}"(x), "{c}"(y), "r"(t - 30));',
        lambda x, y, t: x if t >= 30 else y,
    ),
}


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize(("statement", "same"), ON_INTEGERS.values(), ids=ON_INTEGERS.keys())
def test_integers(statement, same, kind, rng):
    ptx_type, constraint, dtype = INTEGERS[kind]
    limits, bits = np.iinfo(dtype), np.iinfo(dtype).bits
    statement = statement.format(type=ptx_type, c=constraint, bits=bits)
    code = f"""template <int N> __global__ void kernel({kind}* out, const {kind}* in) {{
      const int t = threadIdx.x;
      {kind} x = in[t], y = in[63 - t], z = 0;
      {statement}
      out[t] = z;
    }}"""
    source = rng.integers(limits.min, limits.max, 64, dtype)
    source[:16] = source[:16] >> dtype(bits - 5)
    source[:6] = [0, 1, limits.max, limits.min, ~dtype(0), 6]
    source[-6:] = [7, ~dtype(2), ~dtype(0), 2, limits.max, 1]
    out = np.zeros_like(source)
    launch(code, out, source)
    known = {"bits": bits, "signed": ptx_type[0] == "s"}
    names = same.__code__.co_varnames[2 : same.__code__.co_argcount]
    for t, (x, y) in enumerate(zip(source.tolist(), source[::-1].tolist(), strict=True)):
        want = same(x, y, *((known | {"t": t})[name] for name in names)) if y or "if (y)" not in statement else 0
        assert unsigned(int(out[t]), bits) == unsigned(want, bits), (t, x, y)


ON_WORDS = {
    # name: instruction on x, y and z, the same on Python's integers
    "shf.l.wrap": ("shf.l.wrap.b32 %0, %1, %2, %3;", lambda x, y, z: (y << 32 | x) << (z & 31) >> 32),
    "shf.r.wrap": ("shf.r.wrap.b32 %0, %1, %2, %3;", lambda x, y, z: (y << 32 | x) >> (z & 31)),
    "shf.l.clamp": ("shf.l.clamp.b32 %0, %1, %2, %3;", lambda x, y, z: (y << 32 | x) << min(z, 32) >> 32),
    "shf.r.clamp": ("shf.r.clamp.b32 %0, %1, %2, %3;", lambda x, y, z: (y << 32 | x) >> min(z, 32)),
    "lop3 and, or": ("lop3.b32 %0, %1, %2, %3, 0xEA;", lambda x, y, z: x & y | z),
    "lop3 choice": ("lop3.b32 %0, %1, %2, %3, 0xCA;", lambda x, y, z: x & y | ~x & z),
    "lop3 first but not others": ("lop3.b32 %0, %1, %2, %3, 0x10;", lambda x, y, z: x & ~y & ~z),
    "lop3 none": ("lop3.b32 %0, %1, %2, %3, 0;", lambda x, y, z: 0),
}


@pytest.mark.parametrize(("instruction", "same"), ON_WORDS.values(), ids=ON_WORDS.keys())
def test_words(instruction, same, rng):
    """z counts up, past the size of a word."""
    code = f"""template <int N> __global__ void kernel(unsigned* out, const unsigned* in) {{
      const int t = threadIdx.x;
      asm("{instruction}" : "=r"(out[t]) : "r"(in[t]), "r"(in[64 + t]), "r"(in[128 + t]));
    }}"""
    given = rng.integers(0, 2**32, (3, 64), np.uint32)
    given[2] = np.arange(64)
    out = np.zeros(64, np.uint32)
    launch(code, out, given)
    assert out.tolist() == [same(*each) & 0xFFFFFFFF for each in zip(*given.tolist(), strict=True)]


def test_mad_wide_adds_to_twice_the_bits():
    code = """template <int N> __global__ void kernel(long long* out, const int* in) {
      const int x = in[threadIdx.x];
      asm("mad.wide.s32 %0, %1, %1, %2;" : "=l"(out[threadIdx.x]) : "r"(x), "l"(-5ll << 40));
    }"""
    given, out = np.arange(-32, 32, dtype=np.int32) << 26, np.zeros(64, np.int64)
    launch(code, out, given)
    np.testing.assert_array_equal(out, given.astype(np.int64) ** 2 - (5 << 40))


@pytest.mark.parametrize("count", [2, 4])
def test_vectors_of_16_bit_words(count):
    names = [f"h{i}" for i in range(count)]
    group = "{" + ", ".join(names) + "}"
    code = f"""template <int N> __global__ void kernel(unsigned short* out, const unsigned short* in) {{
      asm volatile("{{ .reg .b16 {", ".join(names)}; ld.global.v{count}.b16 {group}, [%1]; add.u16 h1, h1, 7;"
          "st.global.v{count}.b16 [%0], {group}; }}"
          :: "l"(out + threadIdx.x * {count}), "l"(in + threadIdx.x * {count}) : "memory");
    }}"""
    given = np.arange(64 * count, dtype=np.uint16).reshape(64, count)
    out = np.zeros_like(given)
    launch(code, out, given)
    np.testing.assert_array_equal(out, given + np.where(np.arange(count) == 1, 7, 0).astype(np.uint16))


# ---- a warp's lanes together ----------------------------------------------------------------------------------------


def test_match_and_redux_see_one_warp():
    """The second warp holds what the first does not."""
    body = """
      const unsigned x = t / 32 * 100 + t % 5;
      row[t] = __popc(__match_any_sync(~0u, x)) + 1000 * __reduce_add_sync(~0u, x);
      int same; const unsigned all = __match_all_sync(~0u, t / 32, &same), none = __match_all_sync(~0u, x, &same);
      out[t] = row[t] + (all == ~0u && none == 0 && !same ? 0.5f : 0);
    """
    x = [[100 * warp + t % 5 for t in range(32 * warp, 32 * warp + 32)] for warp in (0, 1)]
    want = [each.count(value) + 1000 * sum(each) + 0.5 for each in x for value in each]
    np.testing.assert_array_equal(run(body), np.array(want, np.float32))


def test_activemask_is_of_those_who_run_together():
    body = "unsigned mask = 0; if (t % 3 == 0 && t < 40) mask = __activemask(); out[t] = mask >> 16; row[t] = mask;"
    active = [t for t in range(40) if t % 3 == 0]
    masks = [sum(1 << t % 32 for t in active if t // 32 == warp) for warp in (0, 1)]
    want = [masks[t // 32] >> 16 if t in active else 0 for t in range(64)]
    np.testing.assert_array_equal(run(body), want)


@pytest.mark.parametrize("call", ["__reduce_max_sync(~0u, t)", "__match_any_sync(~0u, t)"])
def test_part_of_a_warp_is_a_fault(call):
    with pytest.raises(Fault, match="only part of a warp reaches"):
        run(f"float x = in[t]; if (t % 32 < 16) x += {call}; out[t] = x;")
