"""Loads a model on the path that the contract chose."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import ModelError
from engine.models.decoder import Decoder
from engine.models.fused import FusedDecoder
from engine.models.spec import read_config, read_eos_ids
from engine.models.verdict import Verdict, recall, remember
from engine.models.weights import Checkpoint

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model."""

    decoder: Decoder
    eos_ids: frozenset[int]


def load_model(directory: Path, *, dtype: torch.dtype, device: torch.device) -> Model:
    """The model in `directory`. Raises ModelError if it cannot be served, or has not passed the contract."""
    verdict = find_verdict(directory)
    _log.info("%s is computed on the %s path: %s", directory, verdict.path, verdict.reason)
    eos_ids = read_eos_ids(directory)
    return Model(
        decoder=_decoder(directory, verdict, dtype=dtype, device=device),
        eos_ids=verdict.eos_ids if eos_ids is None else eos_ids,
    )


def find_verdict(directory: Path) -> Verdict:
    """How the model is computed: as was found out before, or by the contract. Raises ModelError if it is refused."""
    read_config(directory)
    if (verdict := recall(directory)) is not None:
        return verdict
    # Here, not above: it imports transformers, which takes seconds.
    from engine.models.contract import judge

    try:
        verdict = judge(directory)
    except ModelError as refusal:
        remember(directory, refusal)
        raise ModelError(f"{directory}: {refusal}") from refusal
    remember(directory, verdict)
    return verdict


def _decoder(directory: Path, verdict: Verdict, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    if verdict.spec is not None:
        return FusedDecoder(verdict.spec, Checkpoint(directory), dtype=dtype, device=device)
    # Here, not above: it imports transformers.
    from engine.models.generic import LayerError, load_generic

    try:
        return load_generic(directory, context_length=verdict.context_length, dtype=dtype, device=device)
    except LayerError as error:
        raise ModelError(f"{directory} is refused: {error}") from error
