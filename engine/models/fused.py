"""The fast path: one decoder for the families that Llama began, with merged projections and no module objects.

What it computes is described by a ModelSpec. Letters in shapes as in engine.models.decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from engine.models.decoder import Attention
from engine.models.linear import Linear, make_linear
from engine.models.rotary import Rotary, rotate
from engine.models.spec import Activation, LayerSpec, ModelSpec, Norms
from engine.models.weights import Weights

NORM_NAMES: Mapping[Norms, tuple[str | None, str | None, str | None, str | None]] = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""What the norms before and behind attention, before and behind the MLP, are called in the checkpoints."""

ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}

Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, its projections merged where one product can stand for several."""

    spec: LayerSpec
    before_attention: Norm
    qkv: Linear
    head_norm: Norm | None
    """[T, Q+K, D] → the same"""
    output: Linear
    after_attention: Norm
    before_mlp: Norm
    gate_up: Linear
    down: Linear
    after_mlp: Norm


class FusedDecoder:
    """A models.decoder.Decoder of a ModelSpec."""

    def __init__(self, spec: ModelSpec, weights: Weights, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError if the weights are not those that the spec describes."""
        self.spec = spec
        self.shape = spec.shape
        loader = _Loader(spec, weights, dtype, device)
        vocabulary = (spec.shape.vocab_size, spec.shape.hidden_size)
        self._embedding = loader.tensor("model.embed_tokens.weight", vocabulary)
        # Rounded to the dtype as transformers does: in bf16, Gemma's √H is not the one of fp32.
        self._embedding_multiplier = torch.tensor(spec.embedding_multiplier, dtype=dtype, device=device)
        self._layers = [loader.layer(index) for index in range(spec.shape.layers)]
        self._norm = loader.norm("model.norm", spec.shape.hidden_size)
        self._head = make_linear(self._embedding if spec.is_tied else loader.tensor("lm_head.weight", vocabulary))
        weights.expect_all_taken(but=["lm_head.weight"] if spec.is_tied else [])
        self._activation = ACTIVATIONS[spec.activation]
        self._rotaries = [Rotary(rope, dtype=dtype, device=device) for rope in spec.ropes]

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """As models.decoder.Decoder has it."""
        hidden = self._forward(tokens, positions, attention)
        logits = self._head(self._norm(hidden[rows]))
        if self.spec.logits_multiplier != 1:
            logits *= self.spec.logits_multiplier
        return logits if self.spec.logits_cap is None else soft_cap(logits, self.spec.logits_cap)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Hidden states before the last norm, [T, H]."""
        heads, rotated = self.shape.heads, self.shape.heads + self.shape.kv_heads
        residual, count = self.spec.residual_multiplier, len(tokens)
        turns = [rotary(positions) for rotary in self._rotaries]
        hidden = F.embedding(tokens, self._embedding)
        if self.spec.embedding_multiplier != 1:
            hidden *= self._embedding_multiplier
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.before_attention(hidden)).view(count, -1, self.shape.head_dim)  # [T, Q+2K, D]
            qk = qkv[:, :rotated]
            if layer.head_norm is not None:
                qk = layer.head_norm(qk)
            if layer.spec.rope is not None:
                qk = rotate(qk, *turns[layer.spec.rope])
            attended = attention(index, qk[:, :heads], qk[:, heads:], qkv[:, rotated:], layer.spec.scoring)
            added = layer.output(attended.reshape(count, -1))
            hidden.add_(layer.after_attention(added), alpha=residual)
            gate, up = layer.gate_up(layer.before_mlp(hidden)).chunk(2, dim=-1)  # [T, I] each
            added = layer.down(self._activation(gate).mul_(up))
            hidden.add_(layer.after_mlp(added), alpha=residual)
        return hidden


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap · tanh(x / cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


class _Loader:
    """Takes tensors from a checkpoint, merges them and brings them to their dtype and device."""

    def __init__(self, spec: ModelSpec, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._weights = weights
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights.take(name, shape).to(self._device, self._dtype).contiguous()

    def norm(self, name: str | None, size: int) -> Norm:
        """RMS norm over the last dimension; without a name, none at all."""
        if name is None:
            return _same
        weight, eps = self.tensor(f"{name}.weight", (size,)), self._spec.norm_eps
        if not self._spec.norm_offset:
            return lambda x: F.rms_norm(x, (size,), weight, eps)
        # In fp32: 1 plus a small weight would lose the weight in bf16.
        wide = weight.float() + self._spec.norm_offset
        return lambda x: F.rms_norm(x.float(), (size,), wide, eps).to(x.dtype)

    def layer(self, index: int) -> Layer:
        spec, shape, prefix = self._spec, self._spec.shape, f"model.layers.{index}."
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        gate_up = {"gate_proj": shape.intermediate_size, "up_proj": shape.intermediate_size}
        if spec.is_merged:
            qkv, gate_up = {"qkv_proj": sum(qkv.values())}, {"gate_up_proj": sum(gate_up.values())}
        output, down = {"o_proj": shape.hidden_size}, {"down_proj": shape.hidden_size}
        norms = [self.norm(name and prefix + name, shape.hidden_size) for name in NORM_NAMES[spec.norms]]
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            spec=spec.layers[index],
            before_attention=norms[0],
            qkv=self._linear(attention, qkv, shape.hidden_size, spec.qkv_bias),
            head_norm=self._head_norm(attention),
            output=self._linear(attention, output, q_size, spec.output_bias),
            after_attention=norms[1],
            before_mlp=norms[2],
            gate_up=self._linear(mlp, gate_up, shape.hidden_size, spec.mlp_bias),
            down=self._linear(mlp, down, shape.intermediate_size, spec.mlp_bias),
            after_mlp=norms[3],
        )

    def _head_norm(self, prefix: str) -> Norm | None:
        if self._spec.head_norm is None:
            return None
        shape = self._spec.shape
        is_wide = self._spec.head_norm == "all"
        query = self.norm(prefix + "q_norm", shape.head_dim * (shape.heads if is_wide else 1))
        key = self.norm(prefix + "k_norm", shape.head_dim * (shape.kv_heads if is_wide else 1))

        def norm(qk: torch.Tensor) -> torch.Tensor:
            q, k = qk[:, : shape.heads], qk[:, shape.heads :]
            if is_wide:
                return torch.cat([query(q.flatten(1)).view(q.shape), key(k.flatten(1)).view(k.shape)], dim=1)
            return torch.cat([query(q), key(k)], dim=1)

        return norm

    def _linear(self, prefix: str, outputs: dict[str, int], inputs: int, has_bias: bool) -> Linear:
        """The projections named in `outputs`, with their sizes, as one: their rows one below the other."""
        weights = [self.tensor(f"{prefix}{name}.weight", (size, inputs)) for name, size in outputs.items()]
        biases = [self.tensor(f"{prefix}{name}.bias", (size,)) for name, size in outputs.items() if has_bias]
        return make_linear(torch.cat(weights), torch.cat(biases) if biases else None)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x
