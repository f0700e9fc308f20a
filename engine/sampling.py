"""The next token from the logits: a pure function of (logits, sampling, past, position) for each row by itself.

One uniform number per (seed, choice, position) picks the token on the inverse of the cumulative distribution. There is
no generator and no state: a resumed sequence, a preempted one, and one with other neighbours keep their random stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from engine.adjustments import adjust
from engine.logprobs import logprobs_of
from engine.request import Sampling, TokenLogprob
from engine.step import Ints, Past, Sampled

CANDIDATES = 256
"""Likeliest tokens that are ranked first; where they decide top_k and top_p, the vocabulary is not sorted."""
MORE_CANDIDATES = 4096
"""And so many where those do not decide: flat distributions take more, and a whole one takes four times as long."""
_GROUP = 8
"""Rows that a CPU works on together: what is made of them stays in its cache."""
_BLOCK = 256
"""Tokens whose weights are summed up before one of them is looked for."""
_NONE_LEFT = "No token may follow: allowed_ids, bad_words, min_tokens and grammar leave none."
_NO_NUMBERS = "The model's logits are not finite numbers."
_COLDEST = 1e-30
"""Temperatures in fp32 are no lower, nor do they differ there: the likeliest token alone has a weight."""


def sample(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    *,
    pasts: Mapping[int, Past] = MappingProxyType({}),
    masks: Mapping[int, Ints] = MappingProxyType({}),
    eos_ids: frozenset[int] = frozenset(),
) -> Sampled:
    """One token for each row, or why there is none.

    logits     [R, V], any floating dtype
    samplings  one per row; temperature 0 takes the likeliest token, the first of equals
    positions  absolute position of the token that is chosen, one per row
    pasts      by row, for those whose sampling needs one
    masks      by row, for some: as in StepPlan.masks
    eos_ids    what ends a text

    Order as in Sampling. Each row takes a way that depends on itself alone, so that neighbours change nothing.
    """
    group = len(samplings) if logits.is_cuda else _GROUP
    token_ids, logprobs, errors = list[int](), dict[int, TokenLogprob](), dict[int, str]()
    for start in range(0, len(samplings), group):
        rows = range(start, min(start + group, len(samplings)))
        part = _sample_group(
            logits[rows.start : rows.stop],
            samplings[rows.start : rows.stop],
            positions[rows.start : rows.stop],
            pasts={row - start: pasts[row] for row in rows if row in pasts},
            masks={row - start: masks[row] for row in rows if row in masks},
            eos_ids=eos_ids,
        )
        token_ids += part.token_ids
        logprobs |= {start + row: logprob for row, logprob in part.logprobs.items()}
        errors |= {start + row: error for row, error in part.errors.items()}
    return Sampled(token_ids, logprobs, errors)


def _sample_group(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    *,
    pasts: Mapping[int, Past],
    masks: Mapping[int, Ints],
    eos_ids: frozenset[int],
) -> Sampled:
    """As sample, of rows that are worked on together."""
    adjusted = adjust(logits, samplings, pasts=pasts, masks=masks, eos_ids=eos_ids)
    # max, not argmax: 1.7 against 7.9 ms for 48 rows of 49152 in bf16 on one core.
    most, chosen = adjusted.max(dim=-1)
    errors = {row: _problem_of(value) for row, value in enumerate(most.tolist()) if not math.isfinite(value)}
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0 and row not in errors]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        chosen[rows] = _draw(
            _rows(adjusted, rows), [samplings[row] for row in drawn], [positions[row] for row in drawn]
        )
    token_ids: list[int] = chosen.tolist()
    return Sampled(token_ids, logprobs_of(logits, token_ids, samplings), errors)


def _problem_of(most: float) -> str:
    """Why nothing can be drawn from a row with this maximum."""
    return _NONE_LEFT if most == -math.inf else _NO_NUMBERS


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], choices: Sequence[int] | None = None
) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each (seed, choice, position), with 53 random bits; without choices, all are 0.

    SplitMix64 (Steele et al. 2014) over a counter: seed and choice are mixed before the position is added, so that
    their streams do not overlap.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix(np.asarray(seeds, dtype=np.uint64) + golden)
    if choices is not None:
        mixed ^= _mix(np.asarray(choices, dtype=np.uint64) * golden)  # 0 for choice 0
    mixed = _mix(mixed + np.asarray(positions, dtype=np.uint64) * golden)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer, on uint64 that wrap."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _draw(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
    """Token ids [R] of rows with a temperature above 0."""
    device, size = logits.device, logits.shape[-1]
    temperature = torch.tensor([max(s.temperature, _COLDEST) for s in samplings], device=device)[:, None]
    # Relative to the likeliest, so that no temperature, however small, makes inf - inf. In place: new memory costs more
    # than what is computed in it.
    logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperature).exp_()  # [R, V]
    for row, sampling in zip(weights, samplings, strict=True):
        if sampling.min_p:
            # What is not above a number is set to 0, and min_p itself is to stay. 0.9 ms for 64 rows of 49152 on one
            # core, where a mask took 14.
            torch.threshold_(row, float(np.nextafter(np.float32(sampling.min_p), np.float32(-1))), 0.0)
    numbers = uniforms([s.seed for s in samplings], positions, [s.choice for s in samplings])
    uniform = torch.from_numpy(numbers).to(device)
    top_k = torch.tensor([s.top_k if 0 < s.top_k < size else size for s in samplings], device=device)
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)

    chosen = torch.empty(len(samplings), dtype=torch.int64, device=device)
    plain = (top_k == size) & (top_p >= 1)
    if (rows := plain.nonzero().flatten()).numel():
        chosen[rows] = _invert(_rows(weights, rows), uniform[rows])
    if (rows := (~plain).nonzero().flatten()).numel():
        chosen[rows] = _draw_ranked(_rows(weights, rows), uniform[rows], top_k[rows], top_p[rows])
    return chosen


def _rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """These rows, each at most once and in order: no copy where they are all."""
    return table if len(rows) == len(table) else table[rows]


def _draw_ranked(
    weights: torch.Tensor, uniform: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Token ids [R] of rows that keep only their likeliest tokens, from unnormalised weights [R, V]."""
    size = weights.shape[-1]
    chosen = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    left = torch.arange(len(weights), device=weights.device)
    for most in (CANDIDATES, MORE_CANDIDATES, size):
        if not len(left):
            break
        rows, k, p = _rows(weights, left), top_k[left], top_p[left]
        ranked, tokens, sure = _rank(rows, most)
        # The mass that top_p is a share of: of the top_k tokens, of which all or none may lie among the ranked.
        few = k <= sure
        whole = torch.where(
            few, _kept(ranked, k).sum(dim=-1, dtype=torch.float64), rows.sum(dim=-1, dtype=torch.float64)
        )
        reached = _kept(ranked, sure).sum(dim=-1, dtype=torch.float64)
        is_decided = few | ((k == size) & (reached >= p * whole))
        if (decided := is_decided.nonzero().flatten()).numel():
            picked = _pick(_kept(ranked[decided], k[decided]), uniform[left[decided]], p[decided] * whole[decided])
            chosen[left[decided]] = tokens[decided].gather(-1, picked[:, None])[:, 0]
        left = left[~is_decided]
    return chosen


def _rank(weights: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The likeliest tokens in falling order: weights [R, C], token ids [R, C], and how many are surely those [R].

    Behind the first CANDIDATES equals come in the order of their ids, whether or not all are ranked; so those as light
    as the last one ranked are not sure, for others like them may be missing.
    """
    size = weights.shape[-1]
    if most >= size:
        ranked, tokens = weights.sort(dim=-1, descending=True, stable=True)
        return ranked, tokens, torch.full((len(weights),), size, device=weights.device)
    ranked, tokens = weights.topk(most, dim=-1)
    if most == CANDIDATES:
        return ranked, tokens, torch.full((len(weights),), most, device=weights.device)
    tokens, order = tokens.sort(dim=-1)
    ranked, order = ranked.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return ranked, tokens.gather(-1, order), (ranked > ranked[:, -1:]).sum(dim=-1)


def _kept(ranked: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Weights in falling order [R, C], with those behind the first top_k [R] set to 0."""
    return ranked.masked_fill(torch.arange(ranked.shape[-1], device=ranked.device) >= top_k[:, None], 0.0)


def _pick(ranked: torch.Tensor, uniform: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Indices [R] into weights in falling order [R, C], among the fewest that reach `mass` [R]: at least one."""
    before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
    kept = ranked.masked_fill(before >= mass[:, None], 0.0)
    kept[:, 0] = ranked[:, 0]
    return _invert(kept, uniform)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """For each row the first index whose cumulated weight exceeds uniform × the row's sum; its weight is above 0.

    weights  2 0 1 1      sums  2 2 3 4      uniform 0 … 0.49 → 0, 0.5 … 0.74 → 2, 0.75 … → 3

    Long rows by blocks, then within one: a sum of each costs a twentieth of a running one.
    """
    size = weights.shape[-1]
    if size <= 2 * _BLOCK:
        sums = weights.cumsum(dim=-1, dtype=torch.float64)
        return _first_above(sums, uniform[:, None] * sums[:, -1:])[:, 0]
    even = size // _BLOCK * _BLOCK
    blocks = weights[:, :even].view(len(weights), -1, _BLOCK).sum(dim=-1, dtype=torch.float64)
    blocks = torch.cat([blocks, weights[:, even:].sum(dim=-1, keepdim=True, dtype=torch.float64)], dim=-1)
    sums = blocks.cumsum(dim=-1)
    target = uniform[:, None] * sums[:, -1:]
    block = _first_above(sums, target)  # [R, 1]
    columns = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)  # [R, _BLOCK]
    inside = weights.gather(-1, columns.clamp(max=size - 1)).masked_fill_(columns >= size, 0.0)
    before = sums.gather(-1, block) - blocks.gather(-1, block)
    return (block * _BLOCK + _first_above(inside.cumsum(dim=-1, dtype=torch.float64), target - before))[:, 0]


def _first_above(sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """For each row of rising sums [R, N] the index [R, 1] of the first that is above target [R, 1]."""
    # Rounding may bring the target to the last sum; the last index with a weight is where the sums reach it.
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(sums, target, right=True), last)
