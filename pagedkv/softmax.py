"""The state of an online softmax in NumPy: partial results of attention, and how they merge."""

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class SoftmaxState:
    """Attention over some of the keys: ``out = acc / exp_sum`` with exponents relative to ``max_logit``.

    max_logit, exp_sum: ``[..., rows]`` float32. acc: ``[..., rows, head_size]`` float32.
    A row that has seen no key holds -inf, 0 and 0.
    """

    max_logit: np.ndarray
    exp_sum: np.ndarray
    acc: np.ndarray

    @classmethod
    def of_scores(cls, scores: np.ndarray, values: np.ndarray) -> "SoftmaxState":
        """The state after the keys with these scores ``[..., rows, keys]`` and values ``[..., keys, head_size]``."""
        max_logit = scores.max(axis=-1, initial=-np.inf)
        weights = np.exp(scores - _finite(max_logit)[..., None])
        return cls(max_logit, weights.sum(axis=-1), weights @ values)

    def rescaled(self, max_logit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``exp_sum`` and ``acc`` relative to another maximum, one that is at least this state's own."""
        factor = np.exp(self.max_logit - _finite(max_logit))
        return self.exp_sum * factor, self.acc * factor[..., None]

    def with_sink(self, sinks: np.ndarray) -> "SoftmaxState":
        """One more logit per row in the denominator, without a value."""
        max_logit = np.maximum(self.max_logit, sinks)
        exp_sum, acc = self.rescaled(max_logit)
        return SoftmaxState(max_logit, exp_sum + np.exp(sinks - _finite(max_logit)), acc)

    def normalize(self) -> tuple[np.ndarray, np.ndarray]:
        """Output and natural log of the denominator: 0 and -inf where nothing was seen."""
        seen = self.exp_sum != 0  # NaN is not nothing
        out = self.acc / np.where(seen, self.exp_sum, 1)[..., None]
        lse = np.where(seen, _finite(self.max_logit) + np.log(np.where(seen, self.exp_sum, 1)), -np.inf)
        return out, lse.astype(np.float32)


def merge(max_logits: np.ndarray, exp_sums: np.ndarray, accs: np.ndarray, axis: int) -> SoftmaxState:
    """One state from the many along ``axis``, in their order. Empty ones (-inf, 0, 0) add nothing."""
    max_logit = max_logits.max(axis=axis, initial=-np.inf)
    factor = np.exp(max_logits - np.expand_dims(_finite(max_logit), axis))
    return SoftmaxState(max_logit, (exp_sums * factor).sum(axis=axis), (accs * factor[..., None]).sum(axis=axis))


def _finite(max_logit: np.ndarray) -> np.ndarray:
    # -inf - -inf is NaN: a row without keys is shifted by 0 instead.
    return np.where(np.isneginf(max_logit), np.float32(0), max_logit)
