"""Results against what they should be: caches bit for bit, attention by relative L2 with a reasoned tolerance."""

from dataclasses import dataclass

import numpy as np

from .inputs import POISON_BYTE, slot_view

FEW_ULP = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output of an op against the truth. ``detail`` says what is wrong, where something is."""

    name: str
    error: float  # relative L2 of the worst row; of a cache, the number of wrong values
    tolerance: float
    detail: str

    @property
    def ok(self) -> bool:
        return bool(self.error <= self.tolerance)


def compare_cache(
    name: str,
    cache: np.ndarray,
    layout: str,
    block_size: int,
    expected: np.ndarray,
    slots: np.ndarray,
    fp8: type | None = None,
) -> Comparison:
    """A cache that was all poison, read back slot by slot. ``expected`` has a row per slot; all else must be poison.

    A negative slot is none. With an ``fp8`` format any of its NaNs will do for another. Overwrites the cache: a slot
    that has been looked at becomes poison again, so that in the end all must be.
    """
    unsigned = np.dtype(f"u{cache.itemsize}")
    cache, expected = cache.view(unsigned), np.ascontiguousarray(expected).view(unsigned)
    poison = unsigned.type(np.iinfo(unsigned).max // 0xFF * POISON_BYTE)
    wrong, first = 0, None
    for token, (slot, row) in enumerate(zip(slots.tolist(), expected, strict=False)):
        if slot < 0:
            continue
        stored = slot_view(cache, layout, *divmod(slot, block_size))
        differing = _differing(stored.reshape(row.shape), row, fp8)
        if differing.any() and first is None:
            head, feature = (int(index) for index in np.argwhere(differing)[0])
            first = f"first in token {token}, head {head}, feature {feature}, slot {slot}"
        wrong += int(np.count_nonzero(differing))
        stored[...] = poison
    stray = int(np.count_nonzero(cache != poison))
    return Comparison(name, wrong + stray, 0, _cache_detail(wrong, expected.size, first, stray))


def compare_bits(name: str, got: np.ndarray, expected: np.ndarray) -> Comparison:
    """Rows ``[tokens, heads, head_size]`` that are copies."""
    unsigned = np.dtype(f"u{got.itemsize}")
    wrong = np.argwhere(got.view(unsigned) != np.ascontiguousarray(expected).view(unsigned))
    first = "first in token {}, head {}, feature {}".format(*wrong[0]) if len(wrong) else None
    return Comparison(name, len(wrong), 0, _cache_detail(len(wrong), got.size, first, 0))


def _differing(stored: np.ndarray, row: np.ndarray, fp8: type | None) -> np.ndarray:
    differing = stored != row
    if fp8 is not None and differing.any():
        differing &= ~(np.isnan(stored.view(fp8)) & np.isnan(row.view(fp8)))
    return differing


def _cache_detail(wrong: int, size: int, first: str | None, stray: int) -> str:
    parts = [f"{wrong:,} of {size:,} values wrong ({first})"] if wrong else []
    parts += [f"{stray:,} values changed that belong to no token"] if stray else []
    return "; ".join(parts)


def compare_rows(
    name: str, got: np.ndarray, exact: np.ndarray, plain: np.ndarray, condition: np.ndarray | float = 1.0
) -> Comparison:
    """An output ``[tokens, heads, head_size]`` against the float64 one, given the plain float32 one, row by row."""
    error, plain_error = relative_l2(got, exact), relative_l2(plain.astype(got.dtype), exact)
    return _worst_row(name, error, plain_error, condition, ("token", "head"))


def compare_lse(
    name: str, got: np.ndarray, exact: np.ndarray, plain: np.ndarray, condition: np.ndarray | float = 1.0
) -> Comparison:
    """A log of denominators ``[heads, tokens]``. Sizes count as at least 1, since a logarithm may pass through 0."""
    with np.errstate(invalid="ignore"):
        size = np.maximum(np.abs(exact), 1)
        error, plain_error = (np.where(value == exact, 0, np.abs(value - exact) / size) for value in (got, plain))
    return _worst_row(name, error, plain_error, condition, ("head", "token"))


def _worst_row(
    name: str, error: np.ndarray, plain_error: np.ndarray, condition: np.ndarray | float, axes: tuple[str, str]
) -> Comparison:
    if error.size == 0:
        return Comparison(name, 0.0, 0.0, "")
    tolerance = np.broadcast_to(allowed(float(plain_error.max()), condition), error.shape)
    at = np.unravel_index(np.argmax(error / tolerance), error.shape)
    where = ", ".join(f"{axis} {index}" for axis, index in sorted(zip(axes, at, strict=True), reverse=True))
    worst, limit = float(error[at]), float(tolerance[at])
    return Comparison(name, worst, limit, _rows_detail(worst, limit, where))


def _rows_detail(error: float, tolerance: float, where: str) -> str:
    return "" if error <= tolerance else f"relative error {error:.2g} in {where}, at most {tolerance:.2g} is allowed"


def allowed(plain_error: float, condition: np.ndarray | float = 1.0) -> np.ndarray | float:
    """How far from float64 a result may be, given how far the plain float32 computation is at its worst.

    Both are float32 sums rounded once to the output's dtype, so neither is nearer the truth by right. Adding in another
    order may double the error and has no reason to do more. The few ulp are float32's: for inputs on which the plain
    computation happens to be exact, and for exponentials that hardware approximates; they count as often as
    ``condition`` says that the inputs magnify an error, for which a single plain computation may have been lucky.
    """
    return 2 * plain_error + FEW_ULP * float(np.finfo(np.float32).eps) * condition


def relative_l2(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Of each row, so that one wrong row cannot hide among many. A row of zeros must be met exactly."""
    error = np.linalg.norm(got.astype(np.float64) - exact, axis=-1)
    size = np.linalg.norm(exact, axis=-1)
    return np.divide(error, size, out=np.where(error == 0, 0.0, np.inf), where=size > 0)
