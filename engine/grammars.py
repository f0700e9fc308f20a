"""Which tokens may come next, by a grammar: llguidance, whose parser knows the tokenizer. No torch.

Letters in shapes: R rows, W = ceil(vocabulary / 32) words of a mask: bit t % 32 of word t // 32 is token t's.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from engine.step import Ints

_MAX_KEPT = 64
"""Compiled grammars that are kept: the rows of a batch tend to share theirs."""
_MAX_COPIES = 256
"""So often a compiled grammar is used; its copies share the states of its lexer, which only grow: 1 to 2 kB each."""


class GrammarError(Exception):
    """The grammar cannot be kept to; the message is one sentence for the request's caller."""


class Guide:
    """Where one line of tokens stands in its grammar: a pure function of the grammar and the tokens."""

    def __init__(self, grammar: str, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.mask: Ints | None = None
        """[W] Which tokens may come next, while there is more to come."""
        self.problem: str | None = None
        """Why it cannot go on, in one sentence."""

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and no token may follow."""
        return self.problem is None and self.matcher.is_stopped()


@dataclass(slots=True)
class _Compiled:
    matcher: LLMatcher
    num_copies: int = 0


class Grammars:
    """Compiles grammars for one tokenizer. Threads may share it, each guide being one thread's."""

    def __init__(self, tokenizer: LLTokenizer, special_ids: Iterable[int], eos_ids: Iterable[int]) -> None:
        """special_ids, eos_ids: control tokens, which have no text, and what ends a text."""
        self._tokenizer = tokenizer
        self._executor = LLExecutor()
        self._limits = LLParserLimits(verbose_errors=False)  # an error would quote the grammar
        self._num_words = -(-tokenizer.vocab_size // 32)
        eos = _bits(eos_ids, self._num_words)
        self._text_bits = ~(_bits(special_ids, self._num_words) | eos)
        self._last_bits = self._text_bits | eos
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, model_dir: Path, *, vocab_size: int, eos_ids: Iterable[int]) -> Grammars:
        """For a model directory's tokenizer.json. Raises GrammarError where its kind is not known.

        It takes 0.3 s on one core, with the interpreter's lock: not beside an engine that runs.
        """
        ends = sorted(eos_ids)
        try:
            described = json.loads((model_dir / "tokenizer.json").read_text())
            special_ids = _make_unspeakable(described)
            tokenizer = LLTokenizer(json.dumps(described), n_vocab=vocab_size, eos_token=ends or None)
        except (OSError, KeyError, ValueError) as error:
            raise GrammarError(f"The model's tokenizer cannot be used with grammars: {error}.") from error
        return cls(tokenizer, special_ids, ends)

    def compile(self, grammar: str, token_ids: Sequence[int]) -> Guide:
        """The guide of a line with these tokens so far; 1 ms for most grammars, and up to a second for large ones.

        Raises GrammarError. From any thread; the interpreter's lock is not held.
        """
        guide = Guide(grammar, self._matcher(grammar))
        if guide.matcher.is_error():
            raise GrammarError(_told("The grammar cannot be compiled", guide.matcher))
        if token_ids and not guide.matcher.consume_tokens(list(token_ids)):
            raise GrammarError(_told("The tokens so far do not fit the grammar", guide.matcher))
        self._look_ahead([guide])
        if guide.problem is not None:
            raise GrammarError(guide.problem)
        return guide

    def advance(self, gained: Sequence[tuple[Guide, int]]) -> None:
        """Each guide's line has gained a token: know what may follow, or the guide's problem."""
        for guide, token_id in gained:
            if not guide.matcher.consume_token(token_id):
                guide.problem = _told("The token does not fit the grammar", guide.matcher)
        self._look_ahead([guide for guide, _ in gained if guide.problem is None and not guide.is_complete])

    def _look_ahead(self, guides: Sequence[Guide]) -> None:
        """Make the masks of these: one call for all, on several threads. 0.05 ms each, for JSON and 49 152 tokens."""
        if not guides:
            return
        masks = np.zeros((len(guides), self._num_words), dtype=np.int32)
        fill_next_token_bitmask_par(self._executor, [(guide.matcher, row) for row, guide in enumerate(guides)], masks)
        for guide, mask in zip(guides, masks, strict=True):
            if guide.matcher.is_error():
                guide.problem = _told("The grammar cannot be kept to", guide.matcher)
                with self._lock:
                    self._compiled.pop(guide.grammar, None)  # the lexer that it shares with others may be full
            else:
                # A grammar may name control tokens; none may come but an end where the text may end.
                mask &= self._last_bits if guide.matcher.is_accepting() else self._text_bits
                guide.mask = mask
                if not mask.any() and not guide.is_complete:
                    guide.problem = "No token may follow by the grammar."

    def _matcher(self, grammar: str) -> LLMatcher:
        with self._lock:
            kept = self._compiled.get(grammar)
            if kept is not None and kept.num_copies < _MAX_COPIES:
                kept.num_copies += 1
                self._compiled.move_to_end(grammar)
                return kept.matcher.deep_copy()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            with self._lock:
                self._compiled[grammar] = _Compiled(matcher.deep_copy())
                self._compiled.move_to_end(grammar)
                if len(self._compiled) > _MAX_KEPT:
                    self._compiled.popitem(last=False)
        return matcher


def _make_unspeakable(described: dict[str, Any]) -> list[int]:
    """Give a tokenizer's control tokens names that no text holds; their ids.

    Where a grammar leaves a single text, llguidance has the tokenizer encode it: "<|im_end|>" in a string would be one.
    """
    special = {token["content"]: token for token in described["added_tokens"] if token["special"]}
    names = {content: f"<|{secrets.token_hex(16)}|>" for content in special}
    for content, token in special.items():
        token["content"] = names[content]
    model = described["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in model["vocab"].items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return [token["id"] for token in special.values()]


def _bits(token_ids: Iterable[int], num_words: int) -> Ints:
    """[W] A mask of these tokens."""
    flags = np.zeros(32 * num_words, dtype=bool)
    flags[list(token_ids)] = True
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


def _told(what: str, matcher: LLMatcher) -> str:
    """One sentence with what llguidance says."""
    return f"{what}: {matcher.get_error().splitlines()[0]}."
