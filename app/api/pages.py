"""Lists in pages: which one was asked for, and how it is answered."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from flask import Response, jsonify, request
from pydantic import Field

from app.errors import InvalidRequest, NotFound
from app.ids import is_id

T = TypeVar("T")


def page_query(kind: str, *, max_limit: int) -> dict[str, Any]:
    """The parameters of asked_page, for /openapi.json."""
    return {
        "after": Annotated[str, Field(pattern=f"^{kind}_[0-9a-f]{{32}}$")],
        "limit": Annotated[int, Field(ge=1, le=max_limit)],
    }


def checked_id(kind: str, text: str) -> str:
    """The id of a path, if it can be one of that kind at all. Raises NotFound."""
    if not is_id(kind, text):
        raise NotFound(f"There is no {kind} '{text[:64]}'", param="id")
    return text


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list: at most limit objects from behind the one named after."""

    after: str | None
    limit: int

    @property
    def to_fetch(self) -> int:
        """One object more than is shown says whether there are more."""
        return self.limit + 1


def asked_page(kind: str, *, limit: int, max_limit: int) -> Page:
    """The page that the query asks for, limit where it names none. Raises InvalidRequest."""
    after = request.args.get("after")
    if after is not None and not is_id(kind, after):
        raise InvalidRequest(f"after must be the id of a {kind}", param="after")
    text = request.args.get("limit", str(limit))
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= max_limit:
        raise InvalidRequest(f"limit must be an integer from 1 to {max_limit}", param="limit")
    return Page(after, int(text))


def listing(found: Sequence[T], page: Page, show: Callable[[T], dict[str, Any]]) -> Response:
    """The list object of a page; found holds up to page.to_fetch objects."""
    data = [show(each) for each in found[: page.limit]]
    return jsonify(
        object="list",
        data=data,
        has_more=len(found) > page.limit,
        first_id=data[0]["id"] if data else None,
        last_id=data[-1]["id"] if data else None,
    )
