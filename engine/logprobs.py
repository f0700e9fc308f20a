"""How likely the chosen tokens were by the model alone, and which ones were likeliest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.request import MAX_TOP_LOGPROBS, Sampling, TokenLogprob


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], samplings: Sequence[Sampling]
) -> dict[int, TokenLogprob]:
    """By row, for those whose sampling asks: natural logarithms of the softmax of `logits`, in fp32.

    logits     [R, V] as the model made them, before anything changed them
    token_ids  the token that was chosen, one per row
    samplings  one per row
    """
    rows = [row for row, sampling in enumerate(samplings) if sampling.top_logprobs is not None]
    if not rows:
        return {}
    asked = logits[rows].float()
    total = asked.logsumexp(dim=-1, keepdim=True)  # [rows, 1]
    chosen = torch.tensor([token_ids[row] for row in rows], device=logits.device)[:, None]
    chosen_logprobs = (asked.gather(-1, chosen) - total)[:, 0].tolist()
    # As many for each row, whoever asks: where tokens are equally likely, a row's order is then its own.
    top = asked.topk(min(MAX_TOP_LOGPROBS, asked.shape[-1]), dim=-1)
    top_ids, top_logprobs = top.indices.tolist(), (top.values - total).tolist()
    return {
        row: TokenLogprob(
            token_ids[row],
            chosen_logprobs[place],
            tuple(zip(top_ids[place], top_logprobs[place], strict=True))[: samplings[row].top_logprobs],
        )
        for place, row in enumerate(rows)
    }
