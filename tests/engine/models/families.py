"""Tiny configurations of every kind that the engine serves or refuses; docs/models.md has a row for each family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TINY: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD_16 = {"head_dim": 16}
MOE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
DEEPSEEK = {
    **{"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 12},
    **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 6},
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 24,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 24}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 48, "factor": 2.0},
    **{"short_factor": [1.1, 1.2, 1.3, 1.4], "long_factor": [2.0, 3.0, 4.0, 5.0]},
}
SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass(frozen=True)
class Case:
    """One configuration."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    fault: str = ""
    """What the refusal says; empty if the model is served."""
    is_fast: bool = False
    """In every run of the tests, not only in those of all."""

    @property
    def config(self) -> dict[str, Any]:
        return TINY | self.changes


FUSED = {
    "llama": Case("llama", {"tie_word_embeddings": True}),
    "llama, untied": Case("llama"),
    "llama, no groups": Case("llama", {"num_key_value_heads": 6}),
    "llama, one KV head": Case("llama", {"num_key_value_heads": 1}),
    "llama, wide heads": Case("llama", {"head_dim": 20}),
    "llama, biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, theta": Case("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama, llama3 rope": Case("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": Case("llama", {"rope_parameters": YARN}, is_fast=True),
    "llama, linear": Case("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, dynamic": Case("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": Case("mistral", {"sliding_window": 6}),
    "ministral": Case("ministral", {"sliding_window": 6, "layer_types": [SLIDING, FULL, SLIDING], **HEAD_16}),
    "qwen2": Case("qwen2"),
    "qwen2, sliding": Case("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": Case("qwen3", HEAD_16, is_fast=True),
    "gemma": Case("gemma", HEAD_16),
    "gemma2": Case("gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 24, **HEAD_16}, is_fast=True),
    "gemma3_text": Case(
        "gemma3_text",
        {"sliding_window": 6, "layer_types": [SLIDING, SLIDING, FULL], "query_pre_attn_scalar": 24, **HEAD_16},
    ),
    "phi3": Case("phi3"),
    "phi3, partial rotary": Case(
        "phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    ),
    "phi3, longrope": Case("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48}),
    "granite": Case(
        "granite",
        {
            **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
            "logits_scaling": 5.0,
        },
        is_fast=True,
    ),
    "olmo2": Case("olmo2"),
    "olmo3": Case("olmo3", {"sliding_window": 6, "layer_types": [SLIDING, FULL, SLIDING]}),
    "smollm3": Case("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "seed_oss": Case("seed_oss", {**HEAD_16, "attention_bias": True, "attention_out_bias": False}),
}
GENERIC = {
    "llama, relu": Case("llama", {"hidden_act": "relu"}),
    "apertus": Case("apertus"),
    "arcee": Case("arcee"),
    "biogpt": Case("biogpt"),
    "codegen": Case("codegen", {"num_attention_heads": 4, "rotary_dim": 4}),
    "cohere": Case("cohere"),
    "cohere2": Case("cohere2", {"sliding_window": 6, "layer_types": [SLIDING, SLIDING, FULL]}),
    "deepseek_v3": Case("deepseek_v3", DEEPSEEK),
    "ernie4_5": Case("ernie4_5", HEAD_16),
    "exaone4": Case("exaone4", {"sliding_window": 6, "layer_types": [SLIDING, SLIDING, FULL]}),
    "glm": Case("glm", HEAD_16),
    "glm4": Case("glm4", HEAD_16),
    "gpt2": Case("gpt2", is_fast=True),
    "gpt_bigcode": Case("gpt_bigcode"),
    "gpt_neox": Case("gpt_neox"),
    "gpt_oss": Case(
        "gpt_oss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, **HEAD_16},
            **{"layer_types": [SLIDING, FULL, SLIDING], "rope_parameters": YARN},
        },
        is_fast=True,
    ),
    "gptj": Case("gptj", {"rotary_dim": 4}),
    "granitemoe": Case("granitemoe", {"num_local_experts": 4, "attention_multiplier": 0.2}),
    "helium": Case("helium", {"head_dim": 8}),
    "hunyuan_v1_dense": Case("hunyuan_v1_dense", HEAD_16),
    "lfm2, attention only": Case("lfm2", {"layer_types": [FULL] * 3}),
    "ministral3": Case("ministral3", {"head_dim": 16}),
    "mixtral": Case("mixtral", {"num_local_experts": 4}),
    "nemotron": Case("nemotron", {"head_dim": 8}),
    "olmo": Case("olmo"),
    "olmoe": Case("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": Case("opt", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "persimmon": Case("persimmon"),
    "phi": Case("phi"),
    "phimoe": Case("phimoe", {"num_local_experts": 4}),
    "qwen2_moe": Case("qwen2_moe", MOE | {"shared_expert_intermediate_size": 24}),
    "qwen3_moe": Case("qwen3_moe", MOE | HEAD_16),
    "stablelm": Case("stablelm"),
    "starcoder2": Case("starcoder2", {"sliding_window": 6}),
}
NEVER = "calls the registered attention never"
BATCHED = "computes something else in a batch than alone"
REFUSED = {
    # Their layers hold state, or attention, that knows no sequences: packed, they would leak into each other.
    "bloom": Case("bloom", fault=f"layer 0 {NEVER}", is_fast=True),
    "mpt": Case("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 96}, fault=f"layer 0 {NEVER}"),
    "xglm": Case("xglm", {"ffn_dim": 80}, fault=f"layer 0 {NEVER}"),
    "jamba": Case("jamba", {"attn_layer_offset": 1, "attn_layer_period": 2}, fault=f"layer 0 {NEVER}"),
    "mamba": Case("mamba", {"state_size": 4}, fault=f"layer 0 {NEVER}"),
    "qwen3_next": Case(
        "qwen3_next", {"layer_types": [FULL, FULL, "linear_attention"], **MOE}, fault=f"layer 2 {NEVER}"
    ),
    "qwen3_5_text": Case(
        "qwen3_5_text", {"layer_types": [FULL, "linear_attention", FULL], **HEAD_16}, fault=f"layer 1 {NEVER}"
    ),
    "granitemoehybrid": Case(
        "granitemoehybrid",
        {
            **{"layer_types": ["attention", "mamba", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 24},
            **{"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 8},
        },
        fault=f"layer 1 {NEVER}",
    ),
    "lfm2": Case("lfm2", {"layer_types": [FULL, FULL, "conv"]}, fault=f"layer 2 {NEVER}", is_fast=True),
    # They never ask for the registered attention: there would be no paged cache.
    "falcon": Case("falcon", fault=f"layer 0 {NEVER}"),
    "gpt_neo": Case("gpt_neo", {"attention_types": [[["global", "local", "global"], 1]]}, fault=f"layer 0 {NEVER}"),
    # Their attention is another one than they ask for.
    "bert": Case("bert", fault=f"layer 0 {BATCHED}"),
    "doge": Case("doge", fault=f"layer 0 {BATCHED}"),
    "diffllama": Case("diffllama", fault="layer 0 calls the registered attention twice"),
    "llama4_text": Case(
        "llama4_text",
        {
            **{"attention_chunk_size": 8, "layer_types": [FULL, "chunked_attention", FULL], "num_local_experts": 2},
            **{"intermediate_size_mlp": 80, "no_rope_layers": [0, 1, 0], "moe_layers": [], **HEAD_16},
        },
        fault=f"layer 1 {BATCHED}",
    ),
}
