"""The served model, as the client lists it."""

from __future__ import annotations

from typing import Any

import openai
import pytest


def test_the_one_model_is_listed_and_read(client: Any) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("echo", "model", "everbatch")
    assert client.models.retrieve("echo") == model


def test_another_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-5")
    assert refused.value.param == "model"
