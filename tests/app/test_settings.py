from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from app.settings import Settings, complaint, environment
from app.tiers import Tier


def test_child_reads_the_very_settings_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERBATCH_MODEL", "of-the-environment")
    monkeypatch.setenv("EVERBATCH_REDIS_URL", "redis://of-the-environment")
    settings = Settings(
        home=Path("/some/home"),
        model="echo",
        port=0,
        redis_url=None,
        secret_key=SecretStr("open sesame"),
        webhook_allow_private=True,
        echo_step_ms=0.25,
        tiers={"bulk": {"max_tenant_slots": 3}},
    )
    child = environment(settings)
    assert child["PATH"] == os.environ["PATH"]
    assert "EVERBATCH_REDIS_URL" not in child

    monkeypatch.delenv("EVERBATCH_REDIS_URL")
    for name, value in child.items():
        monkeypatch.setenv(name, value)
    assert Settings() == settings


def test_wrong_value_stops_the_start_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERBATCH_PORT", "65536")
    with pytest.raises(ValidationError, match=r"(?s)port.*65536"):
        Settings()


def test_a_step_that_cannot_hold_every_slot_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERBATCH_MAX_NUM_SEQS", "512")
    with pytest.raises(ValidationError) as refusal:
        Settings()
    assert complaint(refusal.value) == (
        "EVERBATCH_MAX_NUM_BATCHED_TOKENS is 256:"
        " Input should be at least EVERBATCH_MAX_NUM_SEQS = 512: a step holds a token for each slot"
    )


@pytest.mark.parametrize("variable", ["EVERBATCH_DATABASE_URL", "EVERBATCH_REDIS_URL"])
def test_an_address_that_is_none_stops_the_start_without_its_password(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "nonsense://user:secret@host")
    with pytest.raises(ValidationError) as refusal:
        Settings()
    assert variable in complaint(refusal.value) and "secret" not in complaint(refusal.value)


def test_a_lease_that_a_late_beat_would_end_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERBATCH_LEASE_S", "1")
    with pytest.raises(ValidationError) as refusal:
        Settings()
    assert complaint(refusal.value).startswith(
        "EVERBATCH_HEARTBEAT_S is 1.0: Input should be at most a third of EVERBATCH_LEASE_S = 1.0"
    )


def test_one_value_of_a_tier_is_set_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERBATCH_TIERS__BULK__FLOOR", "0.2")
    usual, tiers = Settings.model_fields["tiers"].default, Settings().tiers
    assert tiers[Tier.BULK] == usual[Tier.BULK].model_copy(update={"floor": 0.2})
    assert (tiers[Tier.PAID], tiers[Tier.FREE]) == (usual[Tier.PAID], usual[Tier.FREE])


@pytest.mark.parametrize(
    ("variable", "value", "complaint_of_it"),
    [
        ("TIERS__BULK__FLOOR", "0.6", "EVERBATCH_TIERS__BULK__FLOOR is '0.6': Input should be less than"),
        ("TIERS__PAID__FLOOR", "0.4", "EVERBATCH_TIERS: The floors add up to 0.55; they may be half of all tokens"),
        ("TIERS__FREE__FLUR", "0.1", "EVERBATCH_TIERS__FREE__FLUR is '0.1': Extra inputs are not permitted"),
        ("TIERS__GOLD__FLOOR", "0.1", "EVERBATCH_TIERS__GOLD: Extra inputs are not permitted"),
        ("TIERS__PAID__WEIGHT", "inf", "EVERBATCH_TIERS__PAID__WEIGHT is 'inf': Input should be a finite number"),
        ("TIERS__PAID__KEEP_DAYS", "1e7", "EVERBATCH_TIERS__PAID__KEEP_DAYS is '1e7': Input should be less than"),
        ("LEASE_S", "inf", "EVERBATCH_LEASE_S is 'inf': Input should be a finite number"),
        ("REDIS_URL", "unix:///run/redis.sock", "EVERBATCH_REDIS_URL is 'unix:///run/redis.sock': String should match"),
        ("TIERS", "{", "EVERBATCH_TIERS is '{': Input should be a valid dictionary"),
    ],
)
def test_a_value_that_cannot_be_used_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, complaint_of_it: str
) -> None:
    monkeypatch.setenv(f"EVERBATCH_{variable}", value)
    with pytest.raises(ValidationError) as refusal:
        Settings()
    assert complaint(refusal.value).startswith(complaint_of_it)


def test_a_home_is_one_place_however_it_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Settings(home=Path("~/x")).home == Settings(home=Path("x")).home == tmp_path / "x"
