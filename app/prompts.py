"""Prompts → token ids, once, at submit: the model's tokenizer and its chat template in a sandbox. No torch.

User text is text, never control tokens: "<|im_end|>" in a message is encoded as ordinary text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from app.errors import InvalidRequest
from app.models import Model

Message = Mapping[str, str]
"""{role, content}"""


class Prompts:
    """Turns prompts for one model into token ids. Threads may share it."""

    def __init__(self, model: Model) -> None:
        path = str(model.directory / "tokenizer.json")
        self._model = model
        self._control: Tokenizer = Tokenizer.from_file(path)
        """Reads control tokens as such: for the template's own text."""
        self._plain: Tokenizer = Tokenizer.from_file(path)
        """Reads them as text: for whatever a user wrote."""
        self._plain.encode_special_tokens = True
        controls = {
            token_id: token.content
            for token_id, token in self._control.get_added_tokens_decoder().items()
            if token.special
        }
        self._control_ids, self._control_tokens = controls.keys(), list(controls.values())
        self._template_tokens = _special_tokens(model)
        self._template = _chat_template(model)

    def of_text(self, text: str) -> tuple[int, ...]:
        """The ids of a text prompt, with the tokenizer's own first token where it adds one.

        Raises InvalidRequest when it encodes to nothing.
        """
        ids = tuple(self._plain.encode(text).ids)
        if not ids:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        return ids

    def of_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Given ids, checked. Raises InvalidRequest for none, or for one outside the vocabulary."""
        if not ids:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        for position, token_id in enumerate(ids):
            if not 0 <= token_id < self._model.vocab_size:
                raise InvalidRequest(
                    f"prompt[{position}] is {token_id}, outside the vocabulary 0…{self._model.vocab_size - 1}",
                    param=f"prompt[{position}]",
                )
        return tuple(ids)

    def of_word(self, word: str) -> tuple[tuple[int, ...], ...]:
        """How a word may be spelled within a text: at its start, and behind a space if that does not end alike.

        Empty for a word that has no tokens.
        """
        bare = word.lstrip(" ") or word
        start, behind_space = (
            tuple(self._plain.encode(text, add_special_tokens=False).ids) for text in (bare, f" {bare}")
        )
        if not start:
            return ()
        return (start,) if behind_space[-len(start) :] == start else (start, behind_space)

    def of_more(self, text: str) -> tuple[int, ...]:
        """The ids of a text that goes on behind others."""
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def of_output(self, ids: Sequence[int], text: str) -> tuple[int, ...]:
        """The ids of a job's output that its text is made of, those that it was generated with where they spell it.

        What ended it is left out: an end-of-sequence token, and a stop string with all that stands behind it.
        """
        for spelled in (ids, ids[:-1]):
            if self._plain.decode(list(spelled), skip_special_tokens=True) == text:
                return self._without_last_controls(spelled)
        return self.of_more(text)

    def _without_last_controls(self, ids: Sequence[int]) -> tuple[int, ...]:
        end = len(ids)
        while end and ids[end - 1] in self._control_ids:
            end -= 1
        return tuple(ids[:end])

    def of_next_turn(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids of messages behind the text of an assistant's turn: what closes that turn, too.

        Raises as of_messages does.
        """
        marks = [secrets.token_hex(16) for _ in range(2)]
        before = [{"role": role, "content": mark} for role, mark in zip(("user", "assistant"), marks, strict=True)]
        return self._render_apart([*before, *messages], behind=marks[-1])

    def of_messages(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids of a chat, rendered by the model's template with the assistant's turn opened.

        Raises InvalidRequest when the model has no chat template, or when the template refuses the messages.
        """
        if any(token in message["content"] for message in messages for token in self._control_tokens):
            return self._render_apart(messages)
        return tuple(self._control.encode(self._render(messages), add_special_tokens=False).ids)

    def _render_apart(self, messages: Sequence[Message], *, behind: str | None = None) -> tuple[int, ...]:
        """Encode contents apart from the template's text, so that control tokens in them stay text.

        Each content is rendered as a mark that nobody can guess; the text between the marks is the template's own.
        What stands behind the message with this very content is encoded alone.
        """
        marks = [secrets.token_hex(16) for _ in messages]
        rendered = self._render([{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)])
        ids: list[int] = []
        for message, mark in zip(messages, marks, strict=True):
            own, found, rendered = rendered.partition(mark)
            if not found:
                raise InvalidRequest("messages: the model's chat template leaves a message out", param="messages")
            ids += self._control.encode(own, add_special_tokens=False).ids
            ids += self._plain.encode(message["content"], add_special_tokens=False).ids
            if message["content"] == behind:
                ids.clear()
        ids += self._control.encode(rendered, add_special_tokens=False).ids
        return tuple(ids)

    def _render(self, messages: Sequence[Message]) -> str:
        if self._template is None:
            raise InvalidRequest(
                f"messages: model '{self._model.name}' has no chat template; send a prompt", param="messages"
            )
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._template_tokens)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"messages: the model's chat template says: {error}", param="messages") from error


def _refuse(message: str) -> None:
    """The template's raise_exception()."""
    raise jinja2.TemplateError(message)


def _chat_template(model: Model) -> jinja2.Template | None:
    source = _template_source(model)
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now(UTC).strftime(layout)
    return environment.from_string(source)


def _template_source(model: Model) -> str | None:
    path = model.directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = _tokenizer_config(model).get("chat_template")
    return template if isinstance(template, str) else None


def _special_tokens(model: Model) -> dict[str, str]:
    """bos_token and eos_token, which templates may name."""
    config = _tokenizer_config(model)
    return {name: _content(config.get(name)) for name in ("bos_token", "eos_token")}


def _content(token: Any) -> str:
    """A special token is written as a string, or as an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _tokenizer_config(model: Model) -> dict[str, Any]:
    path = model.directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    return config if isinstance(config, dict) else {}
