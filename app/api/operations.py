"""What each route is, said beside it: of this /openapi.json is made.

@blueprint.post("")
@described(body=JobRequest, answers={202: shapes.Job})
def submit() -> Response: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from app.bodies import Body

View = TypeVar("View", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer that is no JSON object: its content type, and what it is."""

    content_type: str
    description: str


@dataclass(frozen=True, slots=True)
class Operation:
    """What one route takes and answers."""

    answers: Mapping[int, Any]
    """By status: the shape of its JSON, a Stream, a tuple of these, or () where there is no body.

    Errors are the same everywhere.
    """
    body: type[Body] | None = None
    form: Any = None
    """The shape of a multipart form."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """The types of the query's parameters; each may be left out, as may each header."""
    headers: Mapping[str, Any] = field(default_factory=dict)
    is_public: bool = False
    """Whether it wants no key."""

    def answered(self, status: int) -> tuple[Any, ...]:
        """What it answers with that status: shapes and streams."""
        answer = self.answers[status]
        return answer if isinstance(answer, tuple) else (answer,)


_operations: dict[Any, Operation] = {}


def described(**said: Any) -> Callable[[View], View]:
    """Say what the view takes and answers: the fields of Operation."""

    def note(view: View) -> View:
        _operations[view] = Operation(**said)
        return view

    return note


def operation_of(view: Any) -> Operation | None:
    return _operations.get(view)
