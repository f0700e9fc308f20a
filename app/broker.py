"""Queue and task names, and the Celery client: the one place that knows the broker.

A message carries ids and numbers only. It is a hint: it may be lost, late or doubled, and Postgres decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import redis
from celery import Celery
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.tiers import Tier

GENERATE = "everbatch.generate"
"""The task that runs jobs; its keyword jobs is a list of [job id, dispatch number]."""
DELIVER = "everbatch.deliver"
"""The task that posts one webhook; its keywords are delivery_id and attempt."""
DELIVERIES = "deliveries"
"""The queue of webhooks."""


class BrokerError(Exception):
    """The broker took no message; the sweep finds what was meant to be sent."""


def answers(redis_url: str, timeout_s: float) -> bool:
    """Whether Redis answers on a fresh connection, within twice timeout_s."""
    client = redis.Redis.from_url(
        redis_url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
    )
    with client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


def queue_name(model: str, tier: Tier) -> str:
    """The queue of a model's tier, for instance paid.smollm2-135m-instruct."""
    return f"{tier.value}.{model}"


def tier_of(queue_name: str) -> Tier:
    """The tier of a queue. Raises ValueError for a queue that is no tier's."""
    return Tier(queue_name.partition(".")[0])


def queue(name: str) -> Queue:
    """A queue bound to its own name: one without an exchange would be bound to the default queue's."""
    return Queue(name, Exchange(""), routing_key=name)  # type: ignore[no-untyped-call]


def celery_app(name: str, redis_url: str, queues: Iterable[str], **transport: Any) -> Celery:
    """A Celery application with our rules: JSON only, no results, messages acknowledged once the claim stands.

    transport is added to the broker's transport options.
    """
    app = Celery(name, broker=redis_url, set_as_current=False)
    names = list(queues)
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_acks_late=False,
        task_queues=[queue(each) for each in names],
        task_default_queue=names[0] if names else DELIVERIES,
        task_create_missing_queues=False,
        worker_hijack_root_logger=False,
        broker_connection_max_retries=None,
        broker_connection_retry_on_startup=True,
        # Messages in the hands of a dead worker come back to the queue within seconds of this, not after the usual 100.
        # By then the sweep has sent the jobs anew, so the claim drops them; they only must not pile up.
        broker_transport_options={
            "visibility_timeout": 60,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 10,
            "priority_steps": [0],
            "socket_timeout": 5,  # of commands; a BRPOP is waited for by the event loop
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            # A BRPOP without a reply for so long, and the next look: its connection is dead, and a new one is made.
            "health_check_interval": 4,
            **transport,
        },
    )
    return app


class Broker:
    """Sends messages, and knows how many wait."""

    def __init__(self, redis_url: str) -> None:
        self._celery = celery_app("everbatch", redis_url, [DELIVERIES])
        self._redis = redis.Redis.from_url(redis_url, socket_timeout=5, socket_connect_timeout=5)

    def send_jobs(self, model: str, tier: Tier, jobs: Sequence[tuple[str, int]]) -> None:
        """One message that names jobs with their dispatch numbers. Raises BrokerError.

        Its id is fresh for each dispatch: a worker remembers revoked ids, and a job may come again.
        """
        job_id, number = jobs[0]
        self._send(GENERATE, queue_name(model, tier), f"{job_id}:{number}", {"jobs": [list(job) for job in jobs]})

    def send_delivery(self, delivery_id: str, attempt: int) -> None:
        """One message that names a webhook to be posted and the attempt that it is. Raises BrokerError."""
        self._send(DELIVER, DELIVERIES, f"{delivery_id}:{attempt}", {"delivery_id": delivery_id, "attempt": attempt})

    def waiting(self, model: str, tier: Tier) -> int:
        """Messages in the queue of a model's tier."""
        return int(self._redis.llen(queue_name(model, tier)))

    def close(self) -> None:
        self._celery.close()
        self._redis.close()

    def _send(self, task: str, queue_name: str, task_id: str, kwargs: dict[str, Any]) -> None:
        try:
            self._celery.send_task(task, kwargs=kwargs, queue=queue(queue_name), task_id=task_id, ignore_result=True)
        except OperationalError as error:
            raise BrokerError(f"no message was sent to {queue_name}: {error}") from error
