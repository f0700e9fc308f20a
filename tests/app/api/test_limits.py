"""What a client is told of its limits."""

from __future__ import annotations

from typing import Any


def test_requests_beyond_the_rate_are_a_429_that_says_when_to_come_back(call: Any, limit: Any) -> None:
    limit(requests_per_minute=2)
    answers = [call.submit(max_tokens=1) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"2"}
    refused = answers[-1]
    assert refused.get_json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers["x-ratelimit-reset-requests"] == f"{refused.headers['Retry-After']}s"
    assert call("GET", "/v1/jobs").status_code == 200, "reading is not counted"


def test_a_tenant_without_a_limit_is_told_none(call: Any) -> None:
    assert not [name for name, _ in call.submit(max_tokens=1).headers if name.lower().startswith("x-ratelimit")]


def test_a_job_beyond_the_quota_is_a_429_until_tomorrow(call: Any, limit: Any) -> None:
    limit(tokens_per_day=20)
    assert call.submit(max_tokens=10).status_code == 202  # and five of its prompt
    refused = call.submit(max_tokens=10)
    assert (refused.status_code, refused.get_json()["error"]["code"]) == (429, "quota_exceeded")
    assert 0 < int(refused.headers["Retry-After"]) <= 86_400
    assert call("GET", "/v1/jobs").get_json()["data"][1:] == [], "it left nothing"
    limit(tokens_per_day=0)
    assert call.submit(max_tokens=10).status_code == 202
