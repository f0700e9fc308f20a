"""What sampling is, a row at a time and in numpy: the engine's is vectorised, and compared with this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from engine.request import Sampling

Floats = npt.NDArray[np.floating]


def adjusted(
    logits: Floats,
    sampling: Sampling,
    *,
    prompt_ids: Sequence[int] = (),
    generated_ids: Sequence[int] = (),
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
