"""What only a GPU can show, in under four minutes: the decode kernel against its truth, and jobs through the engine.

    python -m benchmarks.gpu_check

Installs and downloads nothing; the model is a small Llama with random weights. Without a GPU it says so and exits with
0; with one it exits with 1 at the first thing that is wrong. Prints one JSON object as its last line.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.attention import BlockDecode, KVCache, PagedAttention
from engine.builder import build
from engine.config import EngineConfig
from engine.echo import write_model
from engine.models.fused import FusedDecoder
from engine.models.spec import LayerSpec, ModelSpec, Rope
from engine.models.verdict import Verdict, remember
from engine.models.weights import Checkpoint
from engine.request import Output, Request, Sampling
from engine.shape import Scoring, Shape
from engine.step import Chunk, pack
from kernels import attention, reference

SHAPES = [
    # lengths, query heads, KV heads, head_dim, block_size
    ([1, 31, 32, 33, 500], 9, 3, 64, 32),
    ([4097, 63, 781], 32, 8, 128, 16),
    ([129, 2], 8, 8, 80, 64),
    ([1000], 64, 2, 128, 32),
]
KERNEL_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""bf16 has 8 bits: a unit in the last place of a value below 2; the weights are rounded to bf16 before the sum, too."""
GAPS = {"float32": 1e-4, "bfloat16": 0.05}
"""How far below the likeliest a greedy token may lie, as a share of the range of its row's logits in fp32."""
CONFIG = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}


def check_kernel(device: torch.device) -> int:
    """Every shape in every dtype, with NaN wherever nothing may be read; the number of cases."""
    cases = 0
    for dtype, tolerance in KERNEL_TOLERANCE.items():
        for lengths, heads, kv_heads, dim, size in SHAPES:
            counts = [-(-length // size) for length in lengths]
            order = torch.randperm(sum(counts)).to(torch.int32)
            tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
            keys = torch.full((sum(counts), kv_heads, size, dim), torch.nan, dtype=dtype)
            values = keys.clone()
            for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
                tables[row, :count], order = order[:count], order[count:]
                for position in range(length):
                    place = int(tables[row, position // size]), slice(None), position % size
                    keys[place], values[place] = torch.randn(2, kv_heads, dim).to(dtype)
            query = torch.randn(len(lengths), heads, dim).to(dtype)
            inputs = [query, keys, values, tables, torch.tensor(lengths, dtype=torch.int32)]
            inputs = [tensor.to(device) for tensor in inputs]
            sinks = torch.linspace(-2, 2, heads, device=device).to(dtype)
            for options in ({}, {"window": 100, "soft_cap": 5.0, "sinks": sinks}):
                out, truth = (torch.full_like(inputs[0], torch.nan) for _ in range(2))
                attention.paged_decode(*inputs, scale=dim**-0.5, out=out, **options)
                reference.paged_decode(*inputs, scale=dim**-0.5, out=truth, **options)
                torch.testing.assert_close(out, truth, atol=tolerance, rtol=tolerance)
                cases += 1
    return cases


def llama_spec() -> ModelSpec:
    """What CONFIG describes. Written down, because transformers, which would tell it, need not be on this machine."""
    dim = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    shape = Shape(
        vocab_size=CONFIG["vocab_size"],
        hidden_size=CONFIG["hidden_size"],
        intermediate_size=CONFIG["intermediate_size"],
        layers=CONFIG["num_hidden_layers"],
        heads=CONFIG["num_attention_heads"],
        kv_heads=CONFIG["num_key_value_heads"],
        head_dim=dim,
        context_length=CONFIG["max_position_embeddings"],
    )
    frequencies = CONFIG["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return ModelSpec(
        shape=shape,
        layers=(LayerSpec(Scoring(dim**-0.5), rope=0),) * shape.layers,
        ropes=(Rope(tuple(frequencies.tolist())),),
        norms="pre",
        norm_eps=CONFIG["rms_norm_eps"],
        norm_offset=0.0,
        head_norm=None,
        activation="silu",
        is_tied=CONFIG["tie_word_embeddings"],
        is_merged=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_multiplier=1.0,
        logits_cap=None,
    )


def write_llama(directory: Path) -> None:
    """A random Llama in fp32 with a byte tokenizer, whose logits are spread over several units."""
    write_model(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    spec = llama_spec()
    remember(directory, Verdict("fused", "a Llama", spec.shape.context_length, frozenset(), spec))
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    kv_size = hidden * CONFIG["num_key_value_heads"] // CONFIG["num_attention_heads"]
    tensors = {"model.embed_tokens.weight": torch.randn(CONFIG["vocab_size"], hidden) * 0.1}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes = {"q_proj": (hidden, hidden), "k_proj": (kv_size, hidden), "v_proj": (kv_size, hidden)}
        shapes = {f"self_attn.{name}": shape for name, shape in (shapes | {"o_proj": (hidden, hidden)}).items()}
        shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        for name, (rows, columns) in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(rows, columns) * columns**-0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    save_file(tensors, directory / "model.safetensors")


def make_jobs() -> list[Request]:
    draw = torch.Generator().manual_seed(8)
    lengths = [3, 40, 33, 170, 9, 64, 300, 1]
    prompts = [torch.randint(300, CONFIG["vocab_size"], (length,), generator=draw).tolist() for length in lengths]
    return [
        Request(str(index), tuple(prompt), Sampling(20 + index, temperature=0.0, ignore_eos=True))
        for index, prompt in enumerate(prompts)
    ]


def run_jobs(directory: Path, jobs: Sequence[Request], dtype: str) -> dict[str, list[int]]:
    """The jobs' tokens; the batch is smaller than the jobs are many, and long prompts come in pieces."""
    engine = build(
        EngineConfig(directory, dtype=dtype, max_num_seqs=5, max_num_batched_tokens=96, gpu_memory_utilization=0.5)
    )
    tokens: dict[str, list[int]] = {job.id: [] for job in jobs}
    ended = threading.Semaphore(0)

    def collect(outputs: Sequence[Output]) -> None:
        for output in outputs:
            tokens[output.request_id] += output.token_ids
            if output.finish:
                ended.release()

    engine.start(collect)
    try:
        for job in jobs:
            engine.submit(job)
        for _ in jobs:
            while not ended.acquire(timeout=1):
                assert engine.failure is None, engine.failure
    finally:
        engine.close()
    return tokens


def check_engine() -> dict[str, float]:
    """Jobs on the GPU, judged by one fp32 forward of each on the CPU; the largest gap in each dtype."""
    jobs, gaps = make_jobs(), {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_llama(directory)
        cpu = torch.device("cpu")
        decoder = FusedDecoder(llama_spec(), Checkpoint(directory), dtype=torch.float32, device=cpu)
        for dtype, allowed in GAPS.items():
            tokens = run_jobs(directory, jobs, dtype)
            for job in jobs:
                assert len(tokens[job.id]) == job.sampling.max_tokens, f"{dtype}: job {job.id} ended early"
            gaps[dtype] = max(greedy_gap(decoder, job, tokens[job.id]) for job in jobs)
            assert gaps[dtype] <= allowed, f"{dtype}: a token lies {gaps[dtype]:.1e} of its row's range below the best"
    return gaps


@torch.inference_mode()
def greedy_gap(decoder: FusedDecoder, job: Request, generated: list[int]) -> float:
    """How far a job's tokens lie below the likeliest after the tokens before them, as a share of the logits' range."""
    ids = [*job.prompt_ids, *generated[:-1]]
    cache = KVCache(decoder.shape, num_blocks=1, block_size=len(ids), dtype=torch.float32, device=torch.device("cpu"))
    whole = pack(1, [Chunk(job.id, tuple(ids), 0, (0,), None)], block_size=len(ids))
    positions = torch.arange(len(ids))
    rows = positions[len(job.prompt_ids) - 1 :]
    logits = decoder.logits(torch.tensor(ids), positions, rows, PagedAttention(cache, whole, BlockDecode))
    chosen = logits.gather(-1, torch.tensor(generated)[:, None])[:, 0]
    return float(((logits.amax(-1) - chosen) / (logits.amax(-1) - logits.amin(-1))).max())


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu-check skipped: torch sees no GPU here; nothing was checked")
        print(json.dumps({"benchmark": "gpu_check", "skipped": True}))
        return 0
    device = torch.device("cuda")
    torch.manual_seed(0)
    cases = check_kernel(device)
    print(f"the decode kernel agrees with its truth in {cases} cases", flush=True)
    gaps = check_engine()
    print(f"{len(make_jobs())} jobs through the engine made the tokens that the CPU would have made")
    versions = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    print(json.dumps({"benchmark": "gpu_check", "skipped": False, **versions, "cases": cases, "greedy_gaps": gaps}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
