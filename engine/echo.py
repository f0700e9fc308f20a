"""The engine's runner without a model: instant to load, deterministic, for tests, drills and load tests.

A token depends on nothing but the request's seed, its choice and the token's position, so that a resumed request goes
on exactly as it would have, on whichever worker. It is a letter or a space; no request ends before max_tokens, a stop
string or one of its stop_ids.

There are no logits: the token is certain, its log-probability 0 and no other is likely. So temperature, top_k, top_p,
min_p, penalties, logit_bias, allowed_ids and bad_words change nothing. All that ends a text is kept, min_tokens too: a
stop token before it is a token with text. A grammar is kept to: of the tokens that may come each is as likely, and
seed, choice and position draw one.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.detokenizer import BYTE_ALPHABET
from engine.request import TokenLogprob
from engine.step import Ints, Sampled, StepPlan

CONTEXT_LENGTH = 8192
"""Positions of an echo sequence, prompt and output together."""
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(_SPECIAL_TOKENS)
_EOS = "<|im_end|>"
_EOS_ID = 256 + _SPECIAL_TOKENS.index(_EOS)
_LETTERS = b"abcdefghijklmnopqrstuvwxyz      "  # 32 characters; words have five letters on average
_CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


class EchoRunner:
    """Computes steps of `write_model`'s model in `step_ms` milliseconds each, whatever is in them."""

    def __init__(
        self, *, step_ms: float = 0.0, block_size: int = 16, num_blocks: int = 32768, num_host_blocks: int = 1024
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.context_length = CONTEXT_LENGTH
        self.vocab_size = VOCAB_SIZE
        self.eos_ids = frozenset({_EOS_ID})
        self._step_s = step_ms / 1000

    def execute(self, plan: StepPlan) -> Sampled:
        if self._step_s:
            time.sleep(self._step_s)
        token_ids, logprobs = list[int](), dict[int, TokenLogprob]()
        ends = (plan.starts + plan.counts).tolist()
        for chunk, (sampling, end) in enumerate(zip(plan.samplings, ends, strict=True)):
            if sampling is None:
                continue
            token_id = echo_token(sampling.seed, end, choice=sampling.choice)
            if chunk in plan.masks:
                token_id = _masked(plan.masks[chunk], sampling.seed, end, choice=sampling.choice)
            if sampling.top_logprobs is not None:
                top = ((token_id, 0.0),)[: sampling.top_logprobs]
                logprobs[len(token_ids)] = TokenLogprob(token_id, 0.0, top)
            token_ids.append(token_id)
        return Sampled(token_ids, logprobs)

    def close(self) -> None:
        """Nothing to give back."""


def echo_token(seed: int, position: int, *, choice: int = 0) -> int:
    """The token id, a byte, that the echo model has at an absolute position."""
    return _LETTERS[_mixed(seed, position, choice) >> 59]


def _masked(mask: Ints, seed: int, position: int, *, choice: int) -> int:
    """One of the tokens that may come, each as likely."""
    may_come = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(may_come[_mixed(seed, position, choice) % len(may_come)])


def _mixed(seed: int, position: int, choice: int) -> int:
    """64 bits."""
    mixed = seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + choice * 0xA0761D6478BD642F + 1
    mixed &= 2**64 - 1
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)


def write_model(model_dir: Path) -> None:
    """Write the echo model as a Hugging Face directory, made where missing: configuration, tokenizer, chat template.

    A token is a byte and its id is its value, so that prompts of any text are counted in UTF-8 bytes; three special
    tokens follow. Writing it again changes nothing.
    """
    model_dir.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "echo",
        "max_position_embeddings": CONTEXT_LENGTH,
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": _EOS_ID,
    }
    tokenizer_config = {"eos_token": _EOS}
    (model_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (model_dir / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    (model_dir / "chat_template.jinja").write_text(_CHATML)
    _byte_tokenizer().save(str(model_dir / "tokenizer.json"))


def _byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(vocab={character: byte for byte, character in enumerate(BYTE_ALPHABET)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    return tokenizer
