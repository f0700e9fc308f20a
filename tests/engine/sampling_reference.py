"""What sampling is, a row at a time and in numpy: the engine's is vectorised, and compared with this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from engine.request import Request, Sampling
from engine.sequence import Sequence
from engine.step import Past

Floats = npt.NDArray[np.floating]


def past_of(request: Request) -> Past:
    """As the scheduler makes it, for a line that was resumed."""
    return Sequence(
        request, number=1, rank=0, queue=0, place=0.0, arrived_s=0.0, token_limit=99, end_ids=frozenset()
    ).past


def adjusted(
    logits: Floats,
    sampling: Sampling,
    *,
    prompt_ids: Items[int] = (),
    generated_ids: Items[int] = (),
    eos_ids: Iterable[int] = (),
    allowed_by_mask: Iterable[int] | None = None,
) -> Floats:
    """[V] The logits after bias, penalties and masks, in the dtype of `logits`, one operation after another."""
    logits, number = logits.copy(), logits.dtype.type
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += number(bias)
    counts = Counter(generated_ids)
    for token_id in {*prompt_ids, *generated_ids}:
        penalty = number(sampling.repetition_penalty)
        logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
        logits[token_id] -= number(counts[token_id]) * number(sampling.frequency_penalty)
        logits[token_id] -= number(sampling.presence_penalty) if counts[token_id] else number(0)
    for allowed in (sampling.allowed_ids, allowed_by_mask):
        if allowed is not None:
            logits[np.setdiff1d(np.arange(len(logits)), list(allowed))] = -np.inf
    line = [*prompt_ids, *generated_ids]
    for *beginning, last in sampling.bad_words:
        if line[len(line) - len(beginning) :] == beginning and len(line) >= len(beginning):
            logits[last] = -np.inf
    if len(generated_ids) < sampling.min_tokens:
        ends = {*sampling.stop_ids, *(() if sampling.ignore_eos else eos_ids)}
        logits[list(ends)] = -np.inf
    return logits


def distribution(logits: Floats, sampling: Sampling) -> npt.NDArray[np.float64]:
    """[V] How likely each token is: temperature, min_p, top_k, top_p, each over what is left. Temperature above 0."""
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < sampling.min_p] = 0  # the likeliest has weight 1
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    share = weights[order] / weights.sum()
    count = int((share.cumsum() < sampling.top_p).sum()) + 1
    weights[order[count:]] = 0
    return weights / weights.sum()


def chi_square_deviation(found: npt.NDArray[np.integer], expected: npt.NDArray[np.float64]) -> float:
    """How far counts [V] are from a distribution [V], in standard deviations of what chance would make of them.

    Above 3.5 once in 4000 times. Nothing may have been found where the distribution has nothing.
    """
    count = found.sum()
    assert found[expected == 0].sum() == 0
    # χ² wants 5 of a kind: the rarest tokens, in groups that are as likely.
    groups = np.floor(np.cumsum(np.sort(expected)) * count / 5).astype(int)
    order = np.argsort(expected)
    of_kind = np.bincount(groups, weights=count * expected[order])
    found_of_kind = np.bincount(groups, weights=found[order])
    is_kind = of_kind >= 2.5
    squares = ((found_of_kind - of_kind)[is_kind] ** 2 / of_kind[is_kind]).sum()
    freedom = is_kind.sum() - 1
    # Wilson and Hilferty: the cube root of χ² / freedom is nearly normal.
    return float(((squares / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5)
