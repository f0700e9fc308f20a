"""What crosses the engine's border: a Request goes in, Outputs come out. Plain and frozen, no torch.

Token ids only: the engine knows no text but what the detokenizer shows, no plans, no prices, no database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

MAX_TOP_LOGPROBS = 20
"""Log-probabilities of the likeliest tokens that may be asked for with each token."""


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """The model ended its text, or a stop string appeared."""
    LENGTH = "length"
    """max_tokens were generated, or the model's context is full."""
    ABORTED = "aborted"
    """The caller took the request back."""
    EXPIRED = "expired"
    """Its deadline passed."""
    ERROR = "error"
    """This request cannot be computed; Output.error says why."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. A pure function of (logits, tokens so far, seed, choice, position).

    In this order: logit_bias, repetition_penalty, frequency_penalty and presence_penalty change the logits; what
    allowed_ids, grammar, bad_words and min_tokens forbid is masked; then temperature, min_p, top_k, top_p, each over
    what is left. "Generated" is over all attempts: resumed tokens are. Token ids are below the model's vocabulary.
    """

    max_tokens: int
    """Tokens generated over all attempts, the end-of-sequence token included; at least 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p, in (0, 1]."""
    seed: int = 0
    """Names the random stream; 0 ≤ seed < 2**63."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these that is complete behind min_tokens tokens; none is empty."""
    ignore_eos: bool = False
    """Generate on past the end-of-sequence token, which is a token like others then; stop_ids still end."""
    min_p: float = 0.0
    """Keep the tokens that are at least min_p times as likely as the likeliest, in [0, 1]; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Above 0. Logits of tokens in prompt or output are divided by it where positive, multiplied where negative."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that were generated; finite."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time that it was generated; finite."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit): finite, each token at most once."""
    allowed_ids: tuple[int, ...] | None = None
    """No other token is generated, the end of sequence neither; at least one. None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that no generated token completes, wherever they begin, be it in the prompt; none is empty."""
    min_tokens: int = 0
    """Before so many were generated, no token that would end the text is, and a stop string that is complete is text
    like any other."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the text as the end of sequence does: they are counted and have no text."""
    choice: int = 0
    """Which of several continuations of a prompt: each has a random stream of its own; 0 ≤ choice < 2**31."""
    top_logprobs: int | None = None
    """Give each token's log-probability and so many of the likeliest, up to MAX_TOP_LOGPROBS; None: none."""
    grammar: str | None = None
    """A llguidance grammar as text: tokens outside it are masked."""

    @property
    def needs_counts(self) -> bool:
        """Whether it matters which tokens were generated, and how often."""
        return self.repetition_penalty != 1 or bool(self.frequency_penalty or self.presence_penalty)

    @property
    def needs_past(self) -> bool:
        """Whether the sampler must know of the tokens so far."""
        return bool(self.bad_words or self.min_tokens) or self.needs_counts

    @property
    def changes_logits(self) -> bool:
        """Whether a token is not drawn from the logits as they are."""
        return bool(self.logit_bias) or self.allowed_ids is not None or self.needs_past

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end the text, of a model with these ends of sequence."""
        if self.stop_ids:
            return frozenset(self.stop_ids) if self.ignore_eos else eos_ids.union(self.stop_ids)
        return frozenset() if self.ignore_eos else eos_ids

    def __reduce__(self) -> tuple[Any, ...]:
        # Every step carries one for each of its rows to another process: 4 μs there and back, instead of 29.
        return Sampling, _fields_of(self)


_fields_of = attrgetter(*(field.name for field in fields(Sampling)))


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued."""

    id: str
    prompt_ids: tuple[int, ...]
    """At least one token id."""
    sampling: Sampling
    resumed_ids: tuple[int, ...] = ()
    """Tokens that earlier attempts generated and persisted: prefilled, never sampled or shown again."""
    rank: int = 0
    """Tier rank: 0 goes first, and takes slots from higher ranks."""
    tenant: str = ""
    """Whose it is: tenants share fairly, and never each other's cached blocks."""
    weight: float = 1.0
    """The tenant's share beside others of its tier, above 0."""
    counter: float = 0.0
    """What the tenant was served in this tier elsewhere: the tiered policy's counter of one that is new here starts
    from it. No counter over all tiers: to other policies it means nothing."""
    deadline: float | None = None
    """When it is too late, in seconds of the engine's clock; it then ends as expired."""
    kind: str = ""
    """A name for requests whose outputs are of like lengths; "" is one of its own."""
    expected_tokens: int | None = None
    """Tokens that somebody predicts it to generate; None: what its kind has taught."""


class TokenLogprob(NamedTuple):
    """How likely a token was by the model alone: before penalties, masks and temperature. Natural logarithms."""

    token_id: int
    """The token that was generated."""
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest, in falling order; the generated one need not be among them."""


@dataclass(frozen=True, slots=True)
class Output:
    """What one step did for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    """Generated since the request's last Output."""
    text: str
    """What may be shown now: half characters and possible stop strings are held back until they are decided."""
    step: int
    """The number of the step that made it."""
    finish: Finish | None = None
    """Set on a request's last Output, and on no other."""
    error: str | None = None
    """One sentence, with Finish.ERROR."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of token_ids, where Sampling.top_logprobs asks for them."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine at one instant; counters run from its start."""

    steps: int
    """Forward passes done."""
    running: int
    """Sequences in the running batch."""
    waiting: int
    """Requests accepted and not in the running batch."""
    slots: int
    """Places in the running batch."""
    blocks_used: int
    """KV blocks referenced."""
    blocks_total: int
    prompt_tokens: int
    """Prompt tokens prefilled for the first time."""
    generated_tokens: int
    recomputed_tokens: int
    """Tokens prefilled again after a preemption or for a resumed request."""
    cached_tokens: int
    """Tokens that were found in the prefix cache, and not computed."""
    preemptions: int
    slot_steps: int
    """Sum over all steps of the sequences in the running batch; over steps × slots it is the slot use."""
    running_by_rank: tuple[int, ...]
    """Sequences in the running batch, by tier rank."""
    waiting_by_rank: tuple[int, ...]
    compiling: int = 0
    """Of those that wait, the ones whose grammar is being compiled: no step is to be expected for them."""


class Engine(Protocol):
    """Continuous batching behind one interface: the real engine and the echo engine alike."""

    def start(self, on_outputs: Callable[[Sequence[Output]], None]) -> None:
        """Run steps on a thread of its own; on_outputs gets each step's outputs there, and must not block."""

    def submit(self, request: Request) -> None:
        """Take a request from any thread. It ends in exactly one Output with a finish."""

    def abort(self, request_id: str) -> None:
        """Take a request back from any thread, in any state, within one step; unknown ids are ignored."""

    def stats(self) -> Stats: ...

    @property
    def failure(self) -> str | None:
        """Why the engine's thread ended by itself, or None."""

    def close(self) -> None:
        """End the thread within a step; what is left ends as aborted. May be called twice."""
