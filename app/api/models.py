"""/v1/models: the one model that is served."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, jsonify

from app.api import shapes
from app.api.auth import authenticate
from app.api.operations import described
from app.api.services import services
from app.errors import NotFound
from app.models import Model

blueprint = Blueprint("models", __name__, url_prefix="/v1/models")
blueprint.before_request(authenticate)


@blueprint.get("")
@described(answers={200: shapes.Models})
def list_models() -> Response:
    """The one model that is served."""
    return jsonify(object="list", data=[_model_object(services().model)])


@blueprint.get("/<name>")
@described(answers={200: shapes.Model})
def read(name: str) -> Response:
    """The model of that name."""
    model = services().model
    if name != model.name:
        raise NotFound(f"There is no model '{name[:64]}'", param="model")
    return jsonify(_model_object(model))


def _model_object(model: Model) -> dict[str, Any]:
    """OpenAI's model object; created is when its directory was made, in Unix seconds."""
    created = int((model.directory / "config.json").stat().st_mtime)
    return {"id": model.name, "object": "model", "created": created, "owned_by": "everbatch"}
