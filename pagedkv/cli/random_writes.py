"""A cache write from its spec: arrays in guarded memory, and what every byte of them must be afterwards."""

import ml_dtypes
import numpy as np

from pagedkv.dtypes import BY_NAME

from . import reference
from .compare import Comparison, compare_cache
from .dimension import Values
from .dimensions import Spec
from .dimensions_of_writes import PACKED, num_blocks
from .guarded import Guarded, holding, row_form, strided
from .guarded_caches import draw_scales, poisoned_caches, scale_argument
from .mistakes import WRITE_MISTAKES
from .trial import Outputs, Trial

SCALES = 0.003, 300.0
OUTPUTS = ("key_cache", "value_cache")


def write_trial(spec: Spec) -> Trial:
    """The arguments of one call and the check of its caches."""
    values, rng = spec.values, np.random.default_rng(spec.seed)
    layout = "packed" if spec.op == PACKED else values["layout"]
    scales = draw_scales(values, rng, SCALES)
    new = [_rows(values, side, scale, rng) for side, scale in zip(("key", "value"), scales, strict=True)]
    slots = _slots(values, rng)
    caches = poisoned_caches(values, layout, num_blocks(values))
    arguments = {
        **dict(zip(("key", "value", *OUTPUTS), (*new, *caches), strict=True)),
        "slot_mapping": holding(slots, strided(values["slot_stride"])),
        "kv_cache_dtype": values["cache"] if values["cache"].startswith("fp8") else "auto",
        **{name: scale_argument(scale) for name, scale in zip(("k_scale", "v_scale"), scales, strict=True)},
        **({} if layout == "packed" else {"layout": layout}),
    }

    def check(got: Outputs) -> list[Comparison]:
        sides = zip((side.array for side in new), scales, strict=True)
        expected = [reference.encoded(rows, values["cache"], scale) for rows, scale in sides]
        fp8 = reference.FP8.get(values["cache"])
        return [
            compare_cache(name, got[name], layout, values["block_size"], rows, slots, fp8)
            for name, rows in zip(OUTPUTS, expected, strict=True)
        ]

    return Trial(spec.op, arguments, OUTPUTS, check, WRITE_MISTAKES.get(values["mistake"]))


# ---- new tokens -----------------------------------------------------------------------------------------------------


def _rows(values: Values, side: str, scale: reference.Scale, rng: np.random.Generator) -> Guarded:
    shape = (values["tokens"] + values["padding"], values["kv_heads"], values["head_size"])
    offset = values["offset"] + (values["value_offset"] if side == "value" else 0)
    return holding(_content(values, shape, scale, rng), row_form(values[side], shape), offset)


def _content(values: Values, shape: tuple[int, ...], scale: reference.Scale, rng: np.random.Generator) -> np.ndarray:
    dtype = BY_NAME[values["dtype"]]
    if values["content"] == "bits":  # NaN, infinity and subnormal numbers among them
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)
    if values["content"] == "ties":
        numbers = _ties(values["cache"], shape, rng) * reference.per_head(scale)
    else:
        numbers = rng.standard_normal(shape, np.float32) * 3
    if values["content"] == "wide":  # of all sizes, from what fp8 rounds to 0 to what float16 cannot hold
        numbers *= np.exp2(rng.integers(-30, 16, shape))
    with np.errstate(over="ignore"):
        return numbers.astype(dtype)


def _ties(cache: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Numbers half-way between two fp8 codes, which only the rounding rule decides."""
    fp8 = reference.FP8.get(cache, ml_dtypes.float8_e4m3fn)
    numbers = np.arange(0x78, dtype=np.uint8).view(fp8).astype(np.float32)  # the positive finite ones of both formats
    middles = (numbers[1:] + numbers[:-1]) / 2
    return rng.choice(middles, shape) * rng.choice([-1, 1], shape).astype(np.float32)


# ---- slots ----------------------------------------------------------------------------------------------------------


def _slots(values: Values, rng: np.random.Generator) -> np.ndarray:
    count, num_slots = values["tokens"], num_blocks(values) * values["block_size"]
    if values["slots"] == "consecutive":
        first = rng.integers(num_slots - count, endpoint=True)
        slots = np.arange(first, first + count)
    elif values["slots"] == "runs":  # as a prefill writes them: whole blocks, in no order
        blocks = rng.permutation(num_blocks(values))[:, None] * values["block_size"]
        slots = (blocks + np.arange(values["block_size"])).reshape(-1)[:count]
    else:
        slots = rng.permutation(num_slots)[:count]
    slots = slots.astype(values["slot_dtype"])
    slots[_without_slot(values["negative"], count, rng)] = rng.choice([-1, -values["block_size"], -128])
    return slots


def _without_slot(which: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Which tokens have none."""
    tokens = np.arange(count)
    return {
        "none": tokens < 0,
        "some": rng.random(count) < 0.3,
        "first": tokens == 0,
        "last": tokens == count - 1,
        "all": tokens >= 0,
    }[which]
