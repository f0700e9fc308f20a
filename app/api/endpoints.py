"""/v1/webhook_endpoints: receivers that a tenant keeps, in OpenAI's shapes; their log, tests and redeliveries."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flask import Blueprint, Response, jsonify, request

from app import endpoints, redeliveries, signatures
from app.api import shapes
from app.api.auth import authenticate, tenant
from app.api.bodies import read_object
from app.api.deliveries import log
from app.api.operations import described
from app.api.pages import asked_page, checked_id, listing, page_query
from app.api.services import services
from app.endpoints import Secret
from app.errors import QueueFull, ReceiverFailed, Unavailable
from app.notices import EVENT_TYPES
from app.tables import Delivery, Endpoint

blueprint = Blueprint("endpoints", __name__, url_prefix="/v1")
blueprint.before_request(authenticate)

_PAGE = 20
_MAX_PAGE = 100
_SENDER_S = 10.0
"""What a test may wait for a sender, beside what its receiver may take."""
_LOOK_S = 0.1
"""Between two looks whether a test has ended."""
_MAX_TESTS = 8
"""Tests that a process waits for at once: each holds a thread. Of one tenant it is one."""


@blueprint.post("/webhook_endpoints")
@described(body=endpoints.Creation, answers={200: shapes.EndpointWithSecret})
def create() -> Response:
    """Make an endpoint; its secret is shown this once."""
    own = services()
    with own.database.transaction() as session:
        made = endpoints.create(session, own.vault, own.settings, tenant().id, read_object())
    return _with_secret(made)


@blueprint.get("/webhook_endpoints")
@described(query=page_query("endpoint", max_limit=_MAX_PAGE), answers={200: shapes.Endpoints})
def list_endpoints() -> Response:
    """The tenant's endpoints, newest first."""
    page = asked_page("endpoint", limit=_PAGE, max_limit=_MAX_PAGE)
    with services().database.autocommit() as session:
        found = endpoints.page(session, tenant().id, after=page.after, limit=page.to_fetch)
    return listing(found, page, endpoint_object)


@blueprint.get("/webhook_endpoints/<endpoint_id>")
@described(answers={200: shapes.Endpoint})
def read(endpoint_id: str) -> Response:
    """The endpoint, without its secret."""
    with services().database.autocommit() as session:
        return jsonify(endpoint_object(endpoints.find(session, tenant().id, checked_id("endpoint", endpoint_id))))


@blueprint.post("/webhook_endpoints/<endpoint_id>")
@described(body=endpoints.Change, answers={200: shapes.Endpoint})
def change(endpoint_id: str) -> Response:
    """Change what the body names."""
    own = services()
    with own.database.transaction() as session:
        changed = endpoints.change(
            session, own.settings, tenant().id, checked_id("endpoint", endpoint_id), read_object()
        )
    return jsonify(endpoint_object(changed))


@blueprint.delete("/webhook_endpoints/<endpoint_id>")
@described(answers={200: shapes.DeletedEndpoint})
def delete(endpoint_id: str) -> Response:
    """Remove the endpoint."""
    with services().database.transaction() as session:
        endpoints.remove(session, tenant().id, checked_id("endpoint", endpoint_id))
    return jsonify(id=endpoint_id, object="webhook_endpoint.deleted", deleted=True)


@blueprint.post("/webhook_endpoints/<endpoint_id>/rotate_secret")
@described(body=endpoints.Rotation, answers={200: shapes.EndpointWithSecret})
def rotate_secret(endpoint_id: str) -> Response:
    """A new secret; the old one signs too for a day where that is asked for."""
    own = services()
    with own.database.transaction() as session:
        rotated = endpoints.rotate(
            session, own.vault, tenant().id, checked_id("endpoint", endpoint_id), _optional_object()
        )
    return _with_secret(rotated)


@blueprint.post("/webhook_secret/rotate")
@described(body=endpoints.Rotation, answers={200: shapes.WebhookSecret})
def rotate_own_secret() -> Response:
    """The secret that signs the webhooks that the tenant's jobs and batches name."""
    own = services()
    with own.database.transaction() as session:
        secret = endpoints.rotate_own(session, own.vault, tenant().id, _optional_object())
    return jsonify(object="webhook_secret", signing_secret=secret, signing_secret_hint=signatures.hint(secret))


@blueprint.post("/webhook_endpoints/<endpoint_id>/test")
@described(body=redeliveries.Trial, answers={200: shapes.EndpointTest})
def test(endpoint_id: str) -> Response:
    """Have a sample event delivered, by the senders and in the way of all deliveries, and tell how it was answered."""
    own = services()
    patience_s = own.settings.webhook_timeout_s + _SENDER_S
    endpoint_id, body = checked_id("endpoint", endpoint_id), read_object()
    with _one_test(tenant().id):
        with own.database.transaction() as session:
            sent = redeliveries.add_test(session, tenant().id, endpoint_id, body, patience_s=patience_s)
        ended = _await(sent, patience_s)
    if ended.response_status is None:
        raise ReceiverFailed(f"The receiver was not reached: {ended.error}")
    return jsonify(
        object="webhook_endpoint.test",
        webhook_endpoint_id=endpoint_id,
        event_type=ended.event_type,
        status_code=ended.response_status,
        success=True,
    )


def _await(sent: Delivery, patience_s: float) -> Delivery:
    """The delivery once it has ended. Raises Unavailable when nobody took it up."""
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up:
        time.sleep(_LOOK_S)
        with services().database.autocommit() as session:
            found = redeliveries.find(session, sent.tenant_id, sent.id)
        if found.status in ("delivered", "dead"):
            return found
    raise Unavailable("No sender took the test up in time")


_testing: set[str] = set()
_testing_lock = threading.Lock()


@contextmanager
def _one_test(tenant_id: str) -> Iterator[None]:
    """A place among the tests under way. Raises QueueFull."""
    with _testing_lock:
        if tenant_id in _testing or len(_testing) >= _MAX_TESTS:
            raise QueueFull("Another test is under way: wait for its end")
        _testing.add(tenant_id)
    try:
        yield
    finally:
        with _testing_lock:
            _testing.discard(tenant_id)


@blueprint.get("/webhook_endpoints/<endpoint_id>/deliveries")
@described(query=page_query("evt", max_limit=_MAX_PAGE), answers={200: shapes.Deliveries})
def list_deliveries(endpoint_id: str) -> Response:
    """What was, and is to be, sent to an endpoint, newest first."""
    page = asked_page("evt", limit=_PAGE, max_limit=_MAX_PAGE)
    with services().database.autocommit() as session:
        endpoint = endpoints.find(session, tenant().id, checked_id("endpoint", endpoint_id))
        return log(session, redeliveries.of_endpoint(session, endpoint, after=page.after, limit=page.to_fetch), page)


@blueprint.post("/webhook_endpoints/<endpoint_id>/redeliver")
@described(body=redeliveries.Range, answers={200: shapes.Redelivery})
def redeliver(endpoint_id: str) -> Response:
    """Send what has ended of a time again, under the same ids."""
    with services().database.transaction() as session:
        number = redeliveries.redeliver_range(session, tenant().id, checked_id("endpoint", endpoint_id), read_object())
    return jsonify(object="webhook_endpoint.redelivery", webhook_endpoint_id=endpoint_id, deliveries=number)


@blueprint.get("/webhook_event_types")
@described(answers={200: shapes.EventTypes})
def list_event_types() -> Response:
    """All that is told."""
    return jsonify(object="list", data=EVENT_TYPES)


def endpoint_object(endpoint: Endpoint) -> dict[str, Any]:
    """An endpoint as clients see it: OpenAI's fields, then ours."""
    return {
        "id": endpoint.id,
        "object": "webhook_endpoint",
        "created_at": int(endpoint.created_at.timestamp()),
        "updated_at": int(endpoint.updated_at.timestamp()),
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": endpoint.event_types,
        "signing_secret_hint": endpoint.secret_hint,
        "enabled": endpoint.enabled,
        "disabled_reason": endpoint.disabled_reason,
    }


def _with_secret(shown: Secret) -> Response:
    return jsonify({**endpoint_object(shown.endpoint), "signing_secret": shown.secret})


def _optional_object() -> dict[str, Any]:
    """The body; nothing where none was sent."""
    return read_object() if request.content_length != 0 and request.get_data() else {}
