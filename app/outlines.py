"""Outlines: what the prompt of a job with parents is made of, its own texts and the places where theirs will stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from app.bodies import Body, text_or_list
from app.prompts import Prompts

MAX_PARTS = 1024
"""Of one prompt, or of one message."""


class Quote(Body):
    """The place of another job's output: its first choice, as plain text."""

    quote: str


TEXT, QUOTE = "a text", "a quote"
"""Kinds of parts; no field of a body is named like that."""


def _kind_of_part(value: Any) -> str:
    return QUOTE if isinstance(value, dict | Quote) else TEXT


def _quote_something(parts: list[str | Quote]) -> list[str | Quote]:
    if not any(isinstance(part, Quote) for part in parts):
        raise PydanticCustomError("no_quote", "Input should be a string where nothing is quoted")
    return parts


_Parts = Annotated[
    list[Annotated[Annotated[str, Tag(TEXT)] | Annotated[Quote, Tag(QUOTE)], Discriminator(_kind_of_part)]],
    Field(max_length=MAX_PARTS),
    AfterValidator(_quote_something),
]


def _text_ids_or_parts(value: Any) -> str | None:
    if isinstance(value, list) and any(isinstance(part, dict | Quote) for part in value):
        return "parts"
    return text_or_list(value)


Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[int], Tag("list")] | Annotated[_Parts, Tag("parts")],
    Discriminator(
        _text_ids_or_parts,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, a list of token ids, or a list of texts and quotes",
    ),
]


Named = Sequence[tuple[str, str]]
"""Each field that names a parent, and the id in it; one parent may be named by several."""


def quotes_in(content: str | Sequence[Any], field: str) -> Iterator[tuple[str, str]]:
    """The quotes in a prompt or content, as Named has them."""
    for place, part in enumerate(() if isinstance(content, str) else content):
        if isinstance(part, Quote):
            yield f"{field}[{place}].quote", part.quote


@dataclass(frozen=True, slots=True)
class Outline:
    """What a child's prompt is made of, in JSON."""

    continues: str | None
    prompt: str | list[Any] | None
    """A list holds token ids, or texts and quotes."""
    messages: list[dict[str, Any]] | None
    """As the model's template takes them, but for their contents: texts and quotes."""
    max_tokens: int | None
    """None: as many as will fit, up to the default."""

    @property
    def quoted(self) -> list[str]:
        """The job of each quote, in their order."""
        contents = [message["content"] for message in self.messages or ()]
        lists = [content for content in (self.prompt, *contents) if isinstance(content, list)]
        return [part["quote"] for parts in lists for part in parts if isinstance(part, dict)]


def own_ids(outline: Outline, prompts: Prompts) -> tuple[int, ...]:
    """The ids of a child's prompt without what its parents give. Raises InvalidRequest where it cannot be rendered."""
    quoted = dict.fromkeys(outline.quoted, "")
    if outline.continues is None and outline.messages is None and not _joined(outline.prompt, quoted):
        return ()  # no prompt is empty, but this one is not whole yet
    return prompt_ids(outline, quoted, (), prompts)


def prompt_ids(outline: Outline, texts: Mapping[str, str], before: Sequence[int], prompts: Prompts) -> tuple[int, ...]:
    """The ids of a child's prompt: behind `before`, those of the job that it continues, with the quoted jobs' texts.

    Raises InvalidRequest where it cannot be rendered.
    """
    if outline.messages is not None:
        chat = [{**message, "content": _joined(message["content"], texts)} for message in outline.messages]
        return prompts.of_messages(chat) if outline.continues is None else (*before, *prompts.of_next_turn(chat))
    if isinstance(outline.prompt, list) and outline.prompt and isinstance(outline.prompt[0], int):
        return (*before, *prompts.of_ids(outline.prompt))
    own = _joined(outline.prompt, texts)
    return prompts.of_text(own) if outline.continues is None else (*before, *prompts.of_more(own))


def _joined(content: str | Sequence[Any] | None, texts: Mapping[str, str]) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part if isinstance(part, str) else texts[part["quote"]] for part in content)
