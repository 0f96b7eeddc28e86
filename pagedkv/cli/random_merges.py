"""A merge of attention states from its spec."""

from typing import Any

import numpy as np

from pagedkv.dtypes import BY_NAME

from . import reference
from .compare import Comparison, compare_lse, compare_rows
from .dimension import Values
from .dimensions import Spec
from .guarded import Form, guarded_results, holding, make_poison, row_form
from .mistakes_of_reads import MERGE_MISTAKES
from .trial import Outputs, Trial

OUTPUTS = ("out", "lse_out")
LARGE = 6e4
LSE_FORMS = {"usual": Form(), "swapped": Form(order=(1, 0)), "backwards": Form(backwards=(0, 1))}


def merge_trial(spec: Spec) -> Trial:
    """Two states, some without keys, whose outputs are poison then."""
    values, rng = spec.values, np.random.default_rng(spec.seed)
    shape = (values["tokens"], values["heads"], values["head_size"])
    outputs = rng.standard_normal((2, *shape), np.float32).astype(BY_NAME[values["dtype"]])
    lses = _lses(values, rng)
    for output, lse in zip(outputs, lses, strict=True):
        output[np.isinf(lse).T] = np.nan
    arguments = _results(values, outputs[0])
    for side, output, lse in zip(("prefix", "suffix"), outputs, lses, strict=True):
        arguments[f"{side}_output"] = holding(output, row_form(values["outputs"], shape), values["offset"])
        arguments[f"{side}_lse"] = holding(lse, LSE_FORMS[values["lse_axes"]])

    def check(got: Outputs) -> list[Comparison]:
        seen = np.where(np.isposinf(lses), -np.inf, lses)
        exact, plain = (reference.merged(outputs.astype(real), seen.astype(real)) for real in (np.float64, np.float32))
        comparisons = [
            compare_rows("out", got["out"], exact[0], plain[0]),
            compare_lse("lse_out", got["lse_out"], exact[1], plain[1]),
        ]
        for name in OUTPUTS:
            make_poison(got[name])
        return comparisons

    return Trial(spec.op, arguments, OUTPUTS, check, MERGE_MISTAKES.get(values["mistake"]))


def _lses(values: Values, rng: np.random.Generator) -> np.ndarray:
    """Of both sides, ``[2, heads, tokens]``."""
    lses = rng.normal(0, 3, (2, values["heads"], values["tokens"]))
    if values["lse"] == "large":
        lses += LARGE
    elif values["lse"] == "apart":
        lses[0] += rng.choice([-LARGE, LARGE], lses[0].shape)
    some, side = rng.random(lses.shape) < 0.3, np.arange(2)[:, None, None]
    empty = {"none": side < 0, "some": some, "prefix": side == 0, "suffix": side == 1, "both": side >= 0}
    lses[np.broadcast_to(empty[values["empty"]], lses.shape)] = np.inf if values["infinity"] == "plus" else -np.inf
    return lses.astype(np.float32)


def _results(values: Values, output: np.ndarray) -> dict[str, Any]:
    if values["results"] == "returned":
        return {}
    return guarded_results(values["results"], output.shape, output.dtype)
