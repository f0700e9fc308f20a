"""/openapi.json: this interface, made from its routes and pydantic models. /docs: the same to be read and tried."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from importlib import resources
from importlib.metadata import version
from typing import Any

from flask import Blueprint, Flask, Response, current_app, jsonify
from pydantic import TypeAdapter
from werkzeug.routing import Rule

from app.api import shapes
from app.api.errors import CONTENT_TYPE
from app.api.operations import Operation, Stream, described, operation_of
from app.errors import NotFound

blueprint = Blueprint("openapi", __name__)

_REF = "#/components/schemas/{model}"
_ASSETS = {"swagger-ui.css": ("css", "text/css"), "swagger-ui-bundle.js": ("js", "text/javascript")}
_START = "window.ui = SwaggerUIBundle({url: '/openapi.json', dom_id: '#ui', deepLinking: true});"
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Everbatch</title><link rel="stylesheet" href="/docs/swagger-ui.css"></head>
<body><div id="ui"></div><script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/start.js"></script></body>
</html>
"""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'"
)


@blueprint.get("/openapi.json")
@described(answers={200: Stream("application/json", "This document.")}, is_public=True)
def read() -> Response:
    """This interface in OpenAPI 3.1."""
    return jsonify(_document_of(current_app._get_current_object()))  # type: ignore[attr-defined]


@blueprint.get("/docs")
@described(answers={200: Stream("text/html", "A page.")}, is_public=True)
def page() -> Response:
    """A page on which this interface can be read and tried. It loads nothing from elsewhere."""
    answer = Response(_PAGE, mimetype="text/html")
    answer.headers["Content-Security-Policy"] = _POLICY
    return answer


@blueprint.get("/docs/<name>")
@described(answers={200: Stream("*/*", "A part of the page.")}, is_public=True)
def asset(name: str) -> Response:
    """What the page is made of."""
    if name == "start.js":
        return Response(_START, mimetype="text/javascript")
    if name not in _ASSETS:
        raise NotFound(f"There is no '{name[:64]}'")
    folder, mimetype = _ASSETS[name]
    content = resources.files("flask_openapi_swagger").joinpath("templates", "swagger", folder, name).read_bytes()
    return Response(content, mimetype=mimetype, headers={"Cache-Control": "max-age=3600"})


@functools.lru_cache(maxsize=8)
def _document_of(app: Flask) -> dict[str, Any]:
    return document(app)


def document(app: Flask) -> dict[str, Any]:
    """The OpenAPI 3.1 document of all routes that are described."""
    operations = list(_operations(app))
    schemas, components = _schemas([operation for _, _, operation in operations])
    paths: dict[str, dict[str, Any]] = {}
    for rule, method, operation in operations:
        shown = _shown(app, rule, method, operation, schemas)
        paths.setdefault(_path(rule), {})[method.lower()] = shown
    return {
        "openapi": "3.1.0",
        "info": {"title": "Everbatch", "version": version("everbatch"), "summary": "Asynchronous LLM generation"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operations(app: Flask) -> Iterator[tuple[Rule, str, Operation]]:
    for rule in app.url_map.iter_rules():
        operation = operation_of(app.view_functions[rule.endpoint])
        if operation is not None:
            for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"}):
                yield rule, method, operation


def _schemas(operations: list[Operation]) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """The schema of each type that the operations name, by the type's id; and all that they refer to, by name."""
    bodies: dict[int, Any] = {}
    answers: dict[int, Any] = {id(shapes.Problem): shapes.Problem}
    for operation in operations:
        taken = (operation.body, operation.form, *operation.query.values(), *operation.headers.values())
        bodies |= {id(each): each for each in taken if each is not None}
        answered = itertools.chain.from_iterable(map(operation.answered, operation.answers))
        answers |= {id(each): each for each in answered if not isinstance(each, Stream)}
    found, together = TypeAdapter.json_schemas(
        [
            *((key, "validation", TypeAdapter(each)) for key, each in bodies.items()),
            *((key, "serialization", TypeAdapter(each)) for key, each in answers.items()),
        ],
        ref_template=_REF,
    )
    components = {_name(name): _renamed(schema) for name, schema in together.get("$defs", {}).items()}
    return {key: _renamed(schema) for (key, _), schema in found.items()}, components


def _renamed(schema: Any) -> Any:
    """The schema, with what it refers to under the names that we show."""
    match schema:
        case {"$ref": str(ref), **rest}:
            return {"$ref": _REF.format(model=_name(ref.rpartition("/")[2])), **rest}
        case dict():
            return {key: _renamed(value) for key, value in schema.items()}
        case list():
            return [_renamed(value) for value in schema]
    return schema


def _name(model: str) -> str:
    """app__batches__Request → BatchesRequest, _PartForm → PartForm, Status-Input → StatusInput."""
    words = re.split("__|-", model.removeprefix("app__").lstrip("_"))
    return "".join(word[:1].upper() + word[1:] for word in words)


def _shown(
    app: Flask, rule: Rule, method: str, operation: Operation, schemas: Mapping[int, dict[str, Any]]
) -> dict[str, Any]:
    """An operation object."""
    summary, _, description = inspect.cleandoc(app.view_functions[rule.endpoint].__doc__ or "").partition("\n\n")
    blueprint_name, _, name = rule.endpoint.partition(".")
    shown: dict[str, Any] = {
        "operationId": f"{blueprint_name}_{name}",
        "tags": [blueprint_name],
        "summary": summary or name.replace("_", " "),
        "parameters": list(_parameters(rule, operation, schemas)),
        "responses": dict(_answers(operation, schemas)),
        "security": [] if operation.is_public else [{"key": []}],
    }
    if description:
        shown["description"] = description
    if operation.body is not None:
        shown["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[id(operation.body)]}},
        }
    if operation.form is not None:
        shown["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": schemas[id(operation.form)]}},
        }
    return shown


def _parameters(rule: Rule, operation: Operation, schemas: Mapping[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for name in sorted(rule.arguments):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for place, said in (("query", operation.query), ("header", operation.headers)):
        for name, its in said.items():
            yield {"name": name, "in": place, "required": False, "schema": schemas[id(its)]}


def _answers(operation: Operation, schemas: Mapping[int, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for status in operation.answers:
        content: dict[str, Any] = {}
        for each in operation.answered(status):
            if isinstance(each, Stream):
                content[each.content_type] = {"schema": {"description": each.description}}
            else:
                content["application/json"] = {"schema": schemas[id(each)]}
        answer = {"description": HTTPStatus(status).phrase}
        yield str(status), answer | ({"content": content} if content else {})
    problem = {CONTENT_TYPE: {"schema": schemas[id(shapes.Problem)]}}
    yield "default", {"description": "An error", "content": problem}


def _path(rule: Rule) -> str:
    return re.sub(r"<(?:[^:>]+:)?([^>]+)>", r"{\1}", rule.rule)
