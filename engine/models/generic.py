"""The general path: a model of transformers as it is, its attention replaced by ours.

transformers lets every layer call a registered function for attention. Ours hands queries, keys and values to the
attention of the step, which alone knows the sequences and the cache; it stands in a context variable, because not all
models pass arguments through. The model gets no cache and no mask. Which models may be served so is decided by
engine.models.contract.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before transformers is imported: nothing here may look for a network.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as transformers_logging

from engine.errors import ModelError
from engine.models.decoder import Attention
from engine.models.weights import weight_files
from engine.shape import Scoring, Shape

ATTENTION = "everbatch"
"""The name that our attention is registered under."""

_attention: ContextVar[Attention] = ContextVar("attention")


class GenericDecoder:
    """A models.decoder.Decoder of a module of transformers, made with ATTENTION for its attention."""

    def __init__(self, model: Any, *, context_length: int) -> None:
        """Raises ModelError, with the layer's name, if not each layer calls our attention exactly once a step."""
        self._model = model
        self._parameters = frozenset(inspect.signature(model.forward).parameters)
        self.shape = _probe(self, model.config, context_length=context_length)
        if "position_ids" not in self._parameters:
            raise ModelError(f"{type(model).__name__} takes no position_ids, without which sequences cannot be packed")

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """As models.decoder.Decoder has it."""
        wanted = {"position_ids": positions[None], "use_cache": False, "logits_to_keep": rows}
        given = {name: value for name, value in wanted.items() if name in self._parameters}
        token = _attention.set(attention)
        try:
            logits: torch.Tensor = self._model(input_ids=tokens[None], **given).logits[0]
        finally:
            _attention.reset(token)
        return logits if "logits_to_keep" in given else logits[rows]


def load_generic(directory: Path, *, context_length: int, dtype: torch.dtype, device: torch.device) -> GenericDecoder:
    """The model in `directory`. Raises ModelError if its weights are not those of its configuration."""
    weight_files(directory)
    silence()
    try:
        load: Any = AutoModelForCausalLM.from_pretrained
        model, loading = load(
            str(directory),
            dtype=dtype,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # whatever a broken file makes of it
        raise ModelError(f"{directory} cannot be loaded: {first_line(error)}") from error
    for kind, verb in (("missing_keys", "lack"), ("unexpected_keys", "hold"), ("mismatched_keys", "have another")):
        if loading[kind]:
            raise ModelError(f"{directory}: the weights {verb} {min(map(str, loading[kind]))}")
    return GenericDecoder(model.to(device).eval(), context_length=context_length)


def silence() -> None:
    """Have transformers report errors only: what it warns of is ours to decide."""
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def first_line(error: BaseException) -> str:
    """One sentence of an exception."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What the layers of transformers call; query [1, Q, T, D], key and value [1, K, T, D] → [1, T, Q, D], None."""
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    width = v.shape[-1]
    if width < k.shape[-1]:  # DeepSeek's values are narrower than its keys; the cache has one width
        v = F.pad(v, (0, k.shape[-1] - width))
    scoring = Scoring(q.shape[-1] ** -0.5 if scaling is None else float(scaling), sliding_window, softcap)
    attended = _attention.get()(_index(module), q, k, v, scoring, s_aux)
    return attended[None, ..., :width], None


def _index(module: Any) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ModelError(f"{type(module).__name__} does not know which layer it is of (layer_idx)")
    return index


AttentionInterface.register(ATTENTION, _attend)


@dataclass
class _Recorder:
    """An attention that notes who calls it, and with what."""

    calls: Counter[int] = field(default_factory=Counter)
    sizes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Of each layer: query heads, KV heads, head_dim."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls[layer] += 1
        self.sizes[layer] = (query.shape[1], key.shape[1], key.shape[2])
        return torch.zeros_like(query)


@torch.inference_mode()
def _probe(decoder: GenericDecoder, config: Any, *, context_length: int) -> Shape:
    """Compute one token, to see what each layer asks of attention."""
    device = next(decoder._model.parameters()).device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    recorder = _Recorder()
    vocab_size = decoder.logits(zero, zero, zero, recorder).shape[-1]
    layers = int(config.num_hidden_layers)
    sizes = recorder.sizes.get(0, (0, 0, 0))
    for layer in range(layers):
        if recorder.calls[layer] != 1:
            raise LayerError(layer, f"calls the registered attention {_times(recorder.calls[layer])}, not once")
        if recorder.sizes[layer] != sizes:
            raise LayerError(layer, f"keeps other keys than layer 0: (heads, KV heads, width) {recorder.sizes[layer]}")
    if extra := recorder.calls.keys() - set(range(layers)):
        raise LayerError(min(extra), f"calls the registered attention, but there are only {layers} layers")
    heads, kv_heads, head_dim = sizes
    return Shape(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context_length,
    )


class LayerError(ModelError):
    """A layer of a model that does something else than what we can serve."""

    def __init__(self, layer: int, fault: str) -> None:
        super().__init__(f"layer {layer} {fault}")
        self.layer = layer
        self.fault = fault


def _times(count: int) -> str:
    return {0: "never", 2: "twice"}.get(count, f"{count} times")
