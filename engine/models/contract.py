"""The test that a model passes before it is served: which path computes it, or why none does.

A tiny random twin (engine.models.twin) computes a few sequences in fp32, as a busy engine would: packed beside each
other, in pieces, over a paged cache. What comes out must be what transformers computes for each sequence alone and
whole, in eager attention. The fused decoder is tried first, the general path next; a model that passes neither is
refused, with the layer named: it would be silently wrong. The test costs about a hundred tokens of the twin, and no
weights of the model are read for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.attention import BlockDecode, KVCache, PagedAttention
from engine.errors import ModelError
from engine.models.decoder import Attention
from engine.models.describe import NotDescribed, context_length, describe
from engine.models.fused import FusedDecoder
from engine.models.generic import ATTENTION, GenericDecoder, LayerError, first_line, silence
from engine.models.twin import VOCABULARY, Twin, make_twin
from engine.models.verdict import Verdict
from engine.models.weights import Weights
from engine.request import Sampling
from engine.shape import Shape
from engine.step import Chunk, pack

TOLERANCE = 1e-5
"""Of the largest logit. Both paths differ from transformers by a few 1e-7; the smallest leak known to us by 2e-4."""
BLOCK_SIZE = 4
TABLES = ((5, 0, 7, 3), (6, 2, 1), (8, 4))
"""Blocks of each sequence, scattered."""
STEPS: tuple[dict[int, int], ...] = (
    {1: 1, 0: 7},  # sequence: tokens; a sequence of one token so far, beside one whose prompt begins
    {0: 5, 1: 8, 2: 4},  # pieces that go on, and a whole block
    {0: 1, 2: 1, 1: 3},  # decodes beside a piece
    {0: 1, 2: 1},  # decodes alone
    {0: 1, 2: 1},  # over the edge of a block, and of the windows of twins
)

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Attention], torch.Tensor]
"""Tokens, positions, rows and attention, as Decoder.logits has them → [R, anything]."""


def judge(directory: Path) -> Verdict:
    """How the model in `directory` is computed, by its config.json. Raises ModelError if it cannot be."""
    try:
        config: Any = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes of it
        raise ModelError(f"transformers does not know this config.json: {first_line(error)}") from error
    return judge_config(config)


def judge_config(config: Any) -> Verdict:
    """How a model of this configuration of transformers is computed. Raises ModelError if it cannot be."""
    silence()
    kind = config.model_type
    _refuse_what_is_no_causal_model(config)
    try:
        twin = make_twin(config)
        truth = _alone(lambda tokens: twin.model(input_ids=tokens[None], use_cache=False).logits[0])
    except Exception as error:  # code of transformers, in a configuration that it was never run in
        raise ModelError(f"a tiny {kind} to test cannot be made: {first_line(error)}") from error
    length, eos = context_length(config), getattr(config, "eos_token_id", None)
    eos_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
    try:
        spec = describe(config, twin.model)
        _expect_fused(config, twin, truth)
        return Verdict("fused", "its description gives what transformers computes", length, eos_ids, spec)
    except NotDescribed as error:
        reason = str(error)
    try:
        _expect_generic(twin, truth)
    except LayerError as error:
        raise ModelError(f"{kind} is refused: layer {twin.layers[error.layer]} {error.fault}") from error
    except ModelError as error:
        raise ModelError(f"{kind} is refused: {error}") from error
    return Verdict("generic", reason, length, eos_ids, spec=None)


def _refuse_what_is_no_causal_model(config: Any) -> None:
    kind = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise ModelError(f"model type {kind!r} is not supported: it is no causal language model of transformers")
    if config.get_text_config() is not config:
        raise ModelError(f"model type {kind!r} is not supported: it takes more than text")
    expected: str = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__  # type: ignore[attr-defined]
    if config.num_hidden_layers < 1:
        raise ModelError(f"config.json: num_hidden_layers is {config.num_hidden_layers}")
    heads = getattr(config, "num_attention_heads", None) or 1
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} heads with {kv_heads} KV heads make no groups")
    if config.architectures and expected not in config.architectures:
        raise ModelError(f"model type {kind!r} is not supported as {config.architectures[0]}, only as {expected}")


def _expect_fused(config: Any, twin: Twin, truth: list[torch.Tensor]) -> None:
    """Raises NotDescribed if the fused decoder computes something else."""
    cpu = torch.device("cpu")
    tensors = {name: partial(torch.clone, tensor) for name, tensor in twin.model.state_dict().items()}
    try:
        spec = describe(twin.config, twin.model)
        decoder = FusedDecoder(spec, Weights(twin.config.model_type, tensors), dtype=torch.float32, device=cpu)
    except ModelError as error:
        raise NotDescribed(str(error)) from error
    gap = _gap(_scheduled(decoder.logits, decoder.shape), truth)
    if not gap <= TOLERANCE:
        raise NotDescribed(f"the fused decoder differs from transformers by {gap:.0e}")


def _expect_generic(twin: Twin, truth: list[torch.Tensor]) -> None:
    """Raises ModelError, LayerError where it can be told, if sequences in a batch are not what they are alone."""
    try:
        twin.model.set_attn_implementation(ATTENTION)
        decoder = GenericDecoder(twin.model, context_length=context_length(twin.config))
        gap = _gap(_scheduled(decoder.logits, decoder.shape), truth)
    except ModelError:
        raise
    except Exception as error:  # code of transformers, called in a way of our own
        raise ModelError(f"it cannot be computed in a batch: {first_line(error)}") from error
    if gap <= TOLERANCE:
        return
    fault = f"computes something else in a batch than alone (the logits differ by {gap:.0e})"
    layer = _first_that_differs(twin, decoder)
    raise ModelError(f"the model {fault}") if layer is None else LayerError(layer, fault)


def _first_that_differs(twin: Twin, decoder: GenericDecoder) -> int | None:
    """The first layer whose output in a batch is not what it is alone; None where the layers cannot be told."""
    lists = [module for module in twin.model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = next((modules for modules in lists if len(modules) == twin.config.num_hidden_layers), ())
    for index, module in enumerate(layers):
        with _output_of(module) as output:

            def alone(tokens: torch.Tensor, output: list[torch.Tensor] = output) -> torch.Tensor:
                twin.model(input_ids=tokens[None], use_cache=False)
                return output[-1]

            def batched(*arguments: Any, output: list[torch.Tensor] = output) -> torch.Tensor:
                decoder.logits(*arguments)
                return output[-1]

            twin.model.set_attn_implementation("eager")
            truth = _alone(alone)
            twin.model.set_attn_implementation(ATTENTION)
            if not _gap(_scheduled(batched, decoder.shape), truth) <= TOLERANCE:
                return index
    return None


@contextmanager
def _output_of(module: Any) -> Iterator[list[torch.Tensor]]:
    """What the module returns, [T, H] of each call."""
    outputs: list[torch.Tensor] = []

    def note(_module: object, _arguments: object, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        outputs.append(hidden.reshape(-1, hidden.shape[-1]))

    handle = module.register_forward_hook(note)
    try:
        yield outputs
    finally:
        handle.remove()


def _tokens() -> list[torch.Tensor]:
    """The sequences, [T] each."""
    generator = torch.Generator().manual_seed(1)
    lengths = [sum(step.get(index, 0) for step in STEPS) for index in range(len(TABLES))]
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


@torch.inference_mode()
def _alone(compute: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """What is computed of each sequence, [T, anything]."""
    return [compute(tokens) for tokens in _tokens()]


@torch.inference_mode()
def _scheduled(compute: Compute, shape: Shape) -> list[torch.Tensor]:
    """The same of all sequences together, in STEPS."""
    cache = KVCache(shape, num_blocks=9, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu"))
    sequences, done = _tokens(), [0] * len(TABLES)
    outputs: list[list[torch.Tensor]] = [[] for _ in TABLES]
    for step in STEPS:
        chunks = []
        for index, count in step.items():
            piece = tuple(sequences[index][done[index] : done[index] + count].tolist())
            chunks.append(Chunk(str(index), piece, done[index], TABLES[index], Sampling(max_tokens=1)))
            done[index] += count
        plan = pack(1, chunks, block_size=BLOCK_SIZE)
        tokens, positions = torch.from_numpy(plan.token_ids.astype(np.int64)), torch.from_numpy(plan.positions)
        output = compute(tokens, positions, torch.arange(len(tokens)), PagedAttention(cache, plan, BlockDecode))
        for index, rows in zip(step, torch.split(output, list(step.values())), strict=True):
            outputs[index].append(rows)
    return [torch.cat(rows) for rows in outputs]


def _gap(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest value; NaN is passed on."""
    return max(
        (float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, truth, strict=True)),
        key=lambda gap: (gap != gap, gap),
    )
