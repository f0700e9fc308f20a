"""The error tree. A refusal is an answer: it has a code, an HTTP status, a sentence, and where it fits a field.

    Refusal
    ├── InvalidRequest      422   a field is wrong
    │   └── PromptTooLong         with its parents' texts: the error of a job, for it was accepted
    ├── MalformedBody       400   the body is not the JSON we can read
    ├── Unauthenticated     401
    ├── Forbidden           403   a valid key, for something else
    ├── NotFound            404   also: somebody else's
    ├── Conflict            409   for ever: retrying does not help
    ├── PayloadTooLarge     413
    ├── ReceiverFailed      424   of a webhook that was to be tested
    ├── KeyReused           422   an Idempotency-Key with another body
    ├── QueueFull           429   retryable
    ├── RateLimited         429   retryable, in a minute
    ├── QuotaExceeded       429   retryable, tomorrow
    ├── Unavailable         503   retryable
    ├── StillRunning        504   the job goes on: it can be read, and need not be made again
    └── EndedBadly          500   the job that was waited for did not succeed; 409 when it was cancelled
    SetupError                    a process cannot start like this

A class's docstring is its default message.
"""

from __future__ import annotations

from typing import ClassVar


class Refusal(Exception):
    """The request was refused."""

    code: ClassVar[str] = "refused"
    status: ClassVar[int] = 400
    should_retry: bool | None = None
    """Said to stock clients, which try again by themselves after a 409 or a 5xx; None leaves it to them."""
    job_id: str | None = None
    """The job that it is about, where it is not the one that was asked for."""
    retry_after_s: int | None = None
    """Whole seconds a client should wait, where trying again can help; above 60 stock clients give up, rightly."""

    def __init__(
        self, message: str | None = None, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        self.message = message or (type(self).__doc__ or "").strip()
        self.param = param
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s
        super().__init__(self.message)


class InvalidRequest(Refusal):
    """A field of the request is wrong."""

    code = "invalid_request"
    status = 422


class PromptTooLong(InvalidRequest):
    """The prompt is too long with its parents' texts."""

    code = "prompt_too_long"


class MalformedBody(Refusal):
    """The body is not a JSON object in UTF-8."""

    code = "malformed_body"
    status = 400


class Unauthenticated(Refusal):
    """No valid API key was given: send 'Authorization: Bearer <key>'."""

    code = "invalid_api_key"
    status = 401


class Forbidden(Refusal):
    """This API key does not open this."""

    code = "forbidden"
    status = 403


class NotFound(Refusal):
    """There is no such object."""

    code = "not_found"
    status = 404


class Conflict(Refusal):
    """The object's state does not allow this, now or later."""

    code = "conflict"
    status = 409
    should_retry = False


class PayloadTooLarge(Refusal):
    """The body is larger than this server takes."""

    code = "payload_too_large"
    status = 413


class ReceiverFailed(Refusal):
    """The webhook's receiver was not reached."""

    code = "receiver_failed"
    status = 424


class KeyReused(Refusal):
    """This Idempotency-Key was used with another body."""

    code = "idempotency_key_reused"
    status = 422


class QueueFull(Refusal):
    """The queue is full: wait for some of your jobs to end."""

    code = "queue_full"
    status = 429
    retry_after_s = 5


class RateLimited(Refusal):
    """Too many requests in this minute."""

    code = "rate_limit_exceeded"
    status = 429
    retry_after_s = 1


class QuotaExceeded(Refusal):
    """The tokens of today are used or reserved."""

    code = "quota_exceeded"
    status = 429
    retry_after_s = 60


class Unavailable(Refusal):
    """The service cannot answer at the moment."""

    code = "unavailable"
    status = 503
    retry_after_s = 2


class StillRunning(Refusal):
    """The job has not ended in the time that a request may wait."""

    code = "still_running"
    status = 504
    should_retry = False

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Job '{job_id}' has not ended yet and goes on: see /v1/jobs/{job_id}")
        self.job_id = job_id


class EndedBadly(Refusal):
    """The job did not succeed."""

    should_retry = False

    def __init__(self, job_id: str, message: str, *, code: str, status: int) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.code = code  # type: ignore[misc]
        self.status = status  # type: ignore[misc]


class SetupError(Exception):
    """A process cannot start like this; the message says why and how to mend it, in one line."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
