"""Caches of random cases in guarded memory, and the scales that go with them."""

import numpy as np

from pagedkv.layout import cache_shapes

from . import reference
from .dimension import Values
from .dimensions_of_writes import cache_dtype
from .guarded import GAP, RAGGED_GAP, Form, Guarded, guarded, holding


def poisoned_caches(values: Values, layout: str, num_blocks: int) -> list[Guarded]:
    """A key and a value cache, as the case wants them to lie."""
    dtype = np.dtype(reference.FP8[values["cache"]]) if values["cache"].startswith("float8") else cache_dtype(values)
    sizes = (num_blocks, values["block_size"], values["kv_heads"], values["head_size"])
    shapes = cache_shapes(layout, *sizes, dtype)
    offset = values["offset"] + values["cache_offset"]
    block, head = int(np.prod(sizes[1:])), values["head_size"]
    if values["caches"] == "halves" and layout != "packed":  # [num_blocks, 2, ...]
        return guarded(shapes[0], dtype, Form(gaps=((0, block),)), offset, neighbour=block)
    if values["caches"] == "joined":  # [.., 2 * head_size]
        return guarded(shapes[0], dtype, Form(gaps=((2, head),)), offset, neighbour=head)
    key_form, value_form = _cache_forms(values["caches"], layout, block)
    offsets = offset, offset + values.get("value_offset", 0)
    forms = (shapes[0], key_form, offsets[0]), (shapes[1], value_form, offsets[1])
    return [guarded(shape, dtype, form, first)[0] for shape, form, first in forms]


def _cache_forms(name: str, layout: str, block: int) -> tuple[Form, Form]:
    """How keys and values lie. The two inner axes of packed values are contiguous, and the three of packed keys."""
    packed = layout == "packed"
    row = 1 if packed else 2  # the innermost axis that may have gaps behind each step
    orders = ((1, 0, 2, 3, 4), (1, 0, 2, 3)) if packed else ((0, 2, 1, 3), (0, 2, 1, 3))
    padded, ragged = Form(gaps=((row, GAP),)), Form(gaps=((row, RAGGED_GAP),))
    return {
        "contiguous": (Form(), Form()),
        "padded": (padded, padded),
        "ragged": (ragged, ragged),
        "halves": (Form(gaps=((0, block),)),) * 2,
        "swapped": tuple(Form(order=order) for order in orders),
        "backwards": (Form(backwards=(0, 1)),) * 2,
        "own": (Form(gaps=((row, 2 * GAP),)), Form(order=orders[1], gaps=((0, GAP),))),
    }[name]


def draw_scales(values: Values, rng: np.random.Generator, bounds: tuple[float, float]) -> list[reference.Scale]:
    """A scale for keys and another for values."""
    if values["scales"] == "none":
        return [None, None]
    shape = {"scalar": (), "head": (values["kv_heads"],)}.get(values["scales"], (1,))
    arrays = [np.exp(rng.uniform(*np.log(bounds), shape)).astype(np.float32).reshape(shape) for _ in "kv"]
    if values["scales"] == "number":
        return [float(array[0]) for array in arrays]
    return [None, arrays[1]] if values["scales"] == "mixed" else arrays


def scale_argument(scale: reference.Scale) -> Guarded | float | None:
    """The scale as an op takes it."""
    return holding(scale) if isinstance(scale, np.ndarray) else scale
