"""The fast path: a Llama decoder over packed tokens, with merged projections and no module objects.

The tokens of all sequences of a step stand in one row, [T]; nothing is padded. Attention alone knows which token
belongs to which sequence, and comes in as a function. Letters in shapes: T tokens, R rows that sample, H hidden,
I intermediate, V vocabulary, Q query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from engine.models.linear import Linear, make_linear
from engine.models.spec import Llama3Scaling, ModelSpec
from engine.models.weights import Checkpoint


class Attention(Protocol):
    """What the decoder asks of attention, once per layer."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store key and value [T, K, D] of `layer`, then attend: query [T, Q, D] → [T, Q, D]. Positions are applied."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, its projections merged where one product can stand for several."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class FusedDecoder:
    """A Llama decoder: token ids and positions in, hidden states out, logits for the rows that are asked for."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError if the weights are not those that the spec describes."""
        self.spec = spec
        self.dtype = dtype
        self.device = device
        loader = _Loader(spec, checkpoint, dtype, device)
        vocabulary = (spec.vocab_size, spec.hidden_size)
        self._embedding = loader.tensor("model.embed_tokens.weight", vocabulary)
        self._layers = [loader.layer(index) for index in range(spec.layers)]
        self._norm = loader.tensor("model.norm.weight", (spec.hidden_size,))
        self._head = make_linear(self._embedding if spec.tied else loader.tensor("lm_head.weight", vocabulary))
        checkpoint.expect_all_taken(but=["lm_head.weight"] if spec.tied else [])
        self._cos, self._sin = rotary_table(spec, dtype=dtype, device=device)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Hidden states before the last norm, [T, H], of `tokens` [T] at `positions` [T] (both int64)."""
        heads, rotated = self.spec.heads, self.spec.heads + self.spec.kv_heads
        count, size = len(tokens), (self.spec.hidden_size,)
        cos, sin = self._cos[positions], self._sin[positions]  # [T, 1, D]
        hidden = F.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(hidden, size, layer.attention_norm, self.spec.norm_eps)
            qkv = layer.qkv(normed).view(count, -1, self.spec.head_dim)  # [T, Q+2K, D]
            qk = rotate(qkv[:, :rotated], cos, sin)
            attended = attention(index, qk[:, :heads], qk[:, heads:], qkv[:, rotated:])
            hidden += layer.output(attended.view(count, -1))
            normed = F.rms_norm(hidden, size, layer.mlp_norm, self.spec.norm_eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)  # [T, I] each
            hidden += layer.down(F.silu(gate).mul_(up))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, V] in the model's dtype, from rows of what forward returned, [R, H]."""
        return self._head(F.rms_norm(hidden, (self.spec.hidden_size,), self._norm, self.spec.norm_eps))


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `heads` [T, N, D] by the rows [T, 1, D] of rotary_table.

    Dimension i turns with dimension i + D/2 by the same angle a: (x, y) → (x cos a - y sin a, y cos a + x sin a).
    Rolling by D/2 brings each its partner, and the table's sine carries the sign, so three operations do it.
    Source: Su et al. 2021, eq. 34, in the half-split order of the Llama checkpoints on Hugging Face.
    """
    return (heads * cos).addcmul_(heads.roll(heads.shape[-1] // 2, dims=-1), sin)


def rotary_table(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of every position, [max_positions, 1, D] each; angles in fp32."""
    frequencies = spec.rope_theta ** -(torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim)
    if spec.rope_scaling is not None:
        frequencies = stretch(frequencies, spec.rope_scaling)
    angles = torch.arange(spec.max_positions, dtype=torch.float32)[:, None, None] * frequencies  # [positions, 1, D/2]
    cos = torch.cat([angles.cos(), angles.cos()], dim=-1)
    sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
    return cos.to(device, dtype), sin.to(device, dtype)


def stretch(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3.1's frequencies [D/2]: long waves slowed by the factor, short ones kept, a ramp between.

    With r = original_positions / wavelength (turns over the original context): r ≤ low_freq_factor is long,
    r ≥ high_freq_factor is short.
    """
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class _Loader:
    """Takes tensors from a checkpoint, merges them and brings them to their dtype and device."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._checkpoint.take(name, shape).to(self._device, self._dtype).contiguous()

    def layer(self, index: int) -> Layer:
        spec, prefix = self._spec, f"model.layers.{index}."
        q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        gate_up = {"mlp.gate_proj": spec.intermediate_size, "mlp.up_proj": spec.intermediate_size}
        output, down = {"self_attn.o_proj": spec.hidden_size}, {"mlp.down_proj": spec.hidden_size}
        return Layer(
            attention_norm=self.tensor(prefix + "input_layernorm.weight", (spec.hidden_size,)),
            qkv=self._linear(prefix, qkv, spec.hidden_size, spec.attention_bias),
            output=self._linear(prefix, output, q_size, spec.attention_bias),
            mlp_norm=self.tensor(prefix + "post_attention_layernorm.weight", (spec.hidden_size,)),
            gate_up=self._linear(prefix, gate_up, spec.hidden_size, spec.mlp_bias),
            down=self._linear(prefix, down, spec.intermediate_size, spec.mlp_bias),
        )

    def _linear(self, prefix: str, outputs: dict[str, int], inputs: int, has_bias: bool) -> Linear:
        """The projections named in `outputs`, with their sizes, as one: their rows one below the other."""
        weights = [self.tensor(f"{prefix}{name}.weight", (size, inputs)) for name, size in outputs.items()]
        biases = [self.tensor(f"{prefix}{name}.bias", (size,)) for name, size in outputs.items() if has_bias]
        return make_linear(torch.cat(weights), torch.cat(biases) if biases else None)
