"""The stock client, as a user makes it. Neither this nor what stands beside it imports anything of ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from given import GIVEN, NewClient, WaitFor
from openai import BaseModel


class Driven:
    """An asynchronous client, or what one returned, with the face of the synchronous one: we run what it awaits."""

    def __init__(self, real: Any, runner: asyncio.Runner) -> None:
        self._real = real
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return self._shown(getattr(self._real, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._shown(self._real(*args, **kwargs))

    def __iter__(self) -> Iterator[Any]:
        rest = aiter(self._real)
        while True:
            try:
                yield self._awaited(anext(rest))
            except StopAsyncIteration:
                return

    def __enter__(self) -> Any:
        return self._shown(self._awaited(self._real.__aenter__()))

    def __exit__(self, *exception: Any) -> None:
        self._awaited(self._real.__aexit__(*exception))

    def _shown(self, value: Any) -> Any:
        if hasattr(value, "__await__"):
            value = self._awaited(value)
        is_object = type(value).__module__.startswith("openai.") and not isinstance(value, BaseModel)
        if is_object or callable(value) or hasattr(value, "__aiter__"):
            return Driven(value, self._runner)
        return value

    def _awaited(self, value: Any) -> Any:
        async def wait() -> Any:
            return await value

        return self._runner.run(wait())


@pytest.fixture(scope="session")
def new_client() -> Iterator[NewClient]:
    """Makes clients, which try once only unless they are told otherwise."""
    with asyncio.Runner() as runner:
        made: list[Any] = []

        def make(**options: Any) -> Any:
            usual: dict[str, Any] = {"api_key": GIVEN.key, "base_url": f"{GIVEN.url}/v1", "max_retries": 0}
            options = {**usual, "_strict_response_validation": GIVEN.is_strict, **options}
            made.append(Driven(openai.AsyncOpenAI(**options), runner) if GIVEN.is_async else openai.OpenAI(**options))
            return made[-1]

        yield make
        for client in made:
            client.close()


@pytest.fixture(scope="session")
def client(new_client: NewClient) -> Any:
    return new_client()


@pytest.fixture(scope="session")
def wait_for() -> WaitFor:
    """Reads until what was read is as wanted, and returns it."""

    def wait(read: Callable[[], Any], is_wanted: Callable[[Any], bool], *, timeout_s: float = 60.0) -> Any:
        give_up = time.monotonic() + timeout_s
        while not is_wanted(found := read()):
            assert time.monotonic() < give_up, found
            time.sleep(0.05)
        return found

    return wait
