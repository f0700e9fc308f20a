"""What changes the logits before a token is drawn: bias, penalties, and masks over what must not come.

Rows that ask for nothing are not looked at. What a row asks for names a few tokens of many, so that single cells of
the logits are changed, those of all rows at once; only allowed_ids and masks touch whole rows.

Letters in shapes: R rows, V vocabulary, N cells of all rows together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from engine.request import Sampling
from engine.step import Ints, Past

_Cells = list[tuple[int, npt.NDArray[np.integer]]]
"""(row, token ids)"""


def adjust(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    *,
    pasts: Mapping[int, Past],
    masks: Mapping[int, Ints],
    eos_ids: frozenset[int],
) -> torch.Tensor:
    """[R, V] The logits as each row's sampling wants them, -inf where a token must not come; `logits` are unchanged.

    logits     [R, V], any floating dtype; returned themselves where there is nothing to do, else a copy in fp32
    samplings  one per row
    pasts      by row, for those whose sampling needs one
    masks      by row, for some: as in StepPlan.masks
    eos_ids    what ends a text

    In the order of Sampling: bias, repetition, frequency, presence; then the masks.
    """
    rows = [row for row, sampling in enumerate(samplings) if sampling.changes_logits or row in masks]
    if not rows:
        return logits
    logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
    _add_bias(logits, [(row, samplings[row]) for row in rows if samplings[row].logit_bias])
    _penalize(logits, [(samplings[row], row, pasts[row]) for row in rows if samplings[row].needs_counts])
    for row in rows:
        if (allowed_ids := samplings[row].allowed_ids) is not None:
            _keep(logits[row], allowed_ids)
    _mask(logits, masks)
    forbidden: _Cells = []
    for row in rows:
        if samplings[row].needs_past:
            ids = forbidden_ids(samplings[row], pasts[row], eos_ids=eos_ids)
            forbidden.append((row, np.array(ids, dtype=np.int64)))
    if forbidden:
        logits.view(-1)[_flat(logits, forbidden)] = -torch.inf
    return logits


def forbidden_ids(sampling: Sampling, past: Past, *, eos_ids: frozenset[int]) -> list[int]:
    """Tokens that must not come next: ends before min_tokens, and the last one of each bad word that is begun."""
    ids = [word[-1] for word in sampling.bad_words if len(word) == 1 or past.tail[1 - len(word) :] == word[:-1]]
    if past.num_generated < sampling.min_tokens:
        ids += sampling.end_ids(eos_ids)
    return ids


def _add_bias(logits: torch.Tensor, rows: Sequence[tuple[int, Sampling]]) -> None:
    if not rows:
        return
    index = _flat(logits, [(row, _array([token_id for token_id, _ in s.logit_bias])) for row, s in rows])
    biases = np.array([bias for _, sampling in rows for _, bias in sampling.logit_bias], dtype=np.float32)
    logits.view(-1)[index] += torch.from_numpy(biases).to(logits.device)


def _penalize(logits: torch.Tensor, rows: Sequence[tuple[Sampling, int, Past]]) -> None:
    if not rows:
        return

    def spread(values: Iterable[float]) -> torch.Tensor:  # a row's number to its cells: [N]
        repeated = np.repeat(np.array(list(values), dtype=np.float32), [len(past.token_ids) for *_, past in rows])
        return torch.from_numpy(repeated).to(logits.device)

    index = _flat(logits, [(row, past.token_ids) for _, row, past in rows])
    counts = torch.from_numpy(np.concatenate([past.counts for *_, past in rows])).to(logits.device)
    repetition = spread(sampling.repetition_penalty for sampling, *_ in rows)
    cells = logits.view(-1)[index]
    cells = torch.where(cells > 0, cells / repetition, cells * repetition)
    cells -= counts * spread(sampling.frequency_penalty for sampling, *_ in rows)
    cells -= (counts > 0) * spread(sampling.presence_penalty for sampling, *_ in rows)
    logits.view(-1)[index] = cells


def _keep(row: torch.Tensor, allowed_ids: tuple[int, ...]) -> None:
    """Mask all of a row [V] but these."""
    index = torch.from_numpy(_allowed(allowed_ids)).to(row.device)
    kept = row[index]
    row.fill_(-torch.inf)
    row[index] = kept


def _mask(logits: torch.Tensor, masks: Mapping[int, Ints]) -> None:
    """Mask what the bits say; tokens behind the last word of a mask must not come."""
    if not masks:
        return
    size = logits.shape[-1]
    may_come = np.zeros((len(masks), size), dtype=bool)
    for row, mask in zip(may_come, masks.values(), strict=True):
        words = np.ascontiguousarray(mask, dtype="<i4").view(np.uint8)
        bits = np.unpackbits(words, bitorder="little")[:size]
        row[: len(bits)] = bits
    index = torch.tensor(list(masks), device=logits.device)
    logits[index] = logits[index].masked_fill_(~torch.from_numpy(may_come).to(logits.device), -torch.inf)


def _flat(logits: torch.Tensor, cells: _Cells) -> torch.Tensor:
    """[N] Where they lie in the logits seen as one line."""
    size = logits.shape[-1]
    index = np.concatenate([ids.astype(np.int64) + row * size for row, ids in cells])
    return torch.from_numpy(index).to(logits.device)


def _array(ids: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(ids, dtype=np.int64)


@lru_cache(maxsize=256)
def _allowed(allowed_ids: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """A list may be long, and comes again with every token: 1 ms for 10 000 where it is not kept."""
    return _array(allowed_ids)
