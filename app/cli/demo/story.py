"""What the demo shows, in order. Each claim is checked before it is printed."""

from __future__ import annotations

import json
import os
import queue
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from app.children import wait_until
from app.cli.demo.follower import Follower
from app.cli.demo.narrator import Failed, Narrator
from app.cli.demo.readings import (
    Persisted,
    Reading,
    Recorder,
    live_worker_pids,
    persisted,
    read_worker,
    recorder,
    worker_metrics_url,
)
from app.cli.demo.receiver import Receiver
from app.cli.demo.service import Service
from app.client import ENDED_BATCH, Client, Event, Job
from app.tiers import Tier

SLOTS = 12
"""Few enough that the bulk rows fill them all, and paid jobs have to take theirs."""
_ROWS = 24
"""Of the batch file."""
_PATIENCE_S = 120.0
"""For any one thing to happen; each takes seconds."""
_HEALED_S = 60.0
"""Every single fault heals within so long."""
_BUSY_USE = 0.9
"""Slot use while more work waits than there are slots."""
_LONG, _KILLED_AT = 72, 24
"""Tokens of the jobs under which the worker is killed, and how many each has by then."""
_QUESTION = "Why is the sky blue?"
_SUBJECTS = ("sea", "moon", "bread", "river", "clock", "forest", "violin", "desert", "bridge", "storm")


@dataclass(frozen=True)
class _Survivor:
    """A job under which the worker is killed."""

    title: str
    follower: Follower
    shown: str
    """What its client had seen at that moment."""


class Story:
    """Told once, on one running service."""

    def __init__(self, service: Service, webhooks: Receiver, narrator: Narrator) -> None:
        self._service = service
        self._webhooks = webhooks
        self._narrator = narrator
        self._paid = Client(service.access.url, service.access.paid_key)
        self._free = Client(service.access.url, service.access.free_key)
        self._owners: dict[str, Client] = {}
        """Every job that was submitted by itself, with the client that did."""
        self._batch_id = ""
        self._figures: dict[str, str] = {}

    def tell(self) -> dict[str, str]:
        """Show everything and return the figures of the summary. Raises Failed, or ClientError."""
        with self._paid, self._free:
            self._introduce()
            with recorder(self._read_worker) as recorded:
                self._fill_slots_with_bulk(recorded)
                self._mix_tiers(recorded)
                live = self._stream()
                self._expect_webhook(live)
                self._finish_batch()
            self._tell_speed(recorded)
            self._kill_worker()
            self._read_back()
        return self._figures

    def _introduce(self) -> None:
        model = self._service.model
        self._narrator.line(f"Address  {self._service.access.url}")
        self._narrator.line(f"Model    {model.name}, revision {model.revision}")
        self._narrator.line(f"Worker   process {self._service.worker_pid}, {SLOTS} slots in its running batch")
        self._narrator.line("The API, the io worker, Postgres and Valkey are processes of their own beside it.")
        self._figures["Model"] = model.name

    # ---- paid, free and bulk side by side

    def _fill_slots_with_bulk(self, recorded: Recorder) -> None:
        self._narrator.section("Paid, free and bulk jobs in one running batch")
        with tempfile.TemporaryDirectory(prefix="everbatch-demo-") as directory:
            file = Path(directory) / "subjects.jsonl"
            file.write_text("".join(f"{json.dumps(row)}\n" for row in _rows()))
            uploaded = self._paid.upload(file)
        self._batch_id = self._paid.create_batch(uploaded["id"], endpoint="/v1/completions")["id"]
        self._narrator.line(f"A file of {_ROWS} requests went to /v1/files and /v1/batches: {self._batch_id}.")
        full = _wait_for(recorded, lambda reading: reading.is_full, "bulk rows in every slot")
        self._narrator.claim(f"Its rows took all {SLOTS} slots.", full.running[Tier.BULK] == SLOTS)

    def _mix_tiers(self, recorded: Recorder) -> None:
        before = recorded.readings[-1]
        for client, subject in zip([self._free] * 3 + [self._paid] * 3, _SUBJECTS, strict=False):
            self._submit(client, prompt=f"A short tale of the {subject}:", max_tokens=32)
        self._narrator.line("Then 3 free and 3 paid jobs went to /v1/jobs.")
        mixed = _wait_for(recorded, lambda reading: reading.has_all_tiers, "all three tiers in one running batch")
        counts = ", ".join(f"{mixed.running[tier]} {tier.value}" for tier in Tier)
        self._narrator.claim(f"At one instant the running batch held {counts}.", mixed.has_all_tiers)
        self._narrator.claim(
            f"They did not wait for a row to end: {mixed.preemptions - before.preemptions} rows stood back at once.",
            mixed.preemptions > before.preemptions,
        )
        self._figures["One running batch"] = counts

    def _stream(self) -> Job:
        """Show a paid job's tokens as they come; returns the job once it has ended."""
        self._narrator.section("Tokens of a paid job as they come")
        started_at = time.monotonic()
        job = self._submit(
            self._paid,
            messages=[{"role": "user", "content": _QUESTION}],
            max_tokens=64,
            temperature=0,
            webhook={"url": self._webhooks.url},
        )
        self._narrator.live(f"   {_QUESTION}\n\n")
        arrivals: list[float] = []
        events: list[Event] = []
        for event in self._paid.events(job["id"]):
            events.append(event)
            if event.kind == "tokens":
                arrivals.append(time.monotonic() - started_at)
                self._narrator.live(event.data["text"])
        self._narrator.live("\n\n")
        ended = self._paid.get(job["id"])
        self._claim_stream(ended, events, arrivals)
        return ended

    def _claim_stream(self, ended: Job, events: Sequence[Event], arrivals: Sequence[float]) -> None:
        self._narrator.claim(
            f"{len(arrivals)} pieces came one by one, the first after {arrivals[0]:.2f} s,"
            f" the last after {arrivals[-1]:.2f} s.",
            len(arrivals) > 2 and arrivals[-1] > arrivals[0],
        )
        joined = "".join(event.data["text"] for event in events if event.kind == "tokens")
        self._narrator.claim("Joined they equal the result.", joined == _text(ended))
        middle = len(events) // 2
        rest = list(self._paid.events(ended["id"], after=middle))
        self._narrator.claim(
            f"Whoever comes back with Last-Event-ID {middle} gets events {middle + 1} to {len(events)}, no other.",
            rest == events[middle:],
        )
        self._figures["First token, all slots taken"] = f"{arrivals[0]:.2f} s"

    def _expect_webhook(self, job: Job) -> None:
        self._narrator.section("Its signed webhook")
        try:
            received = self._webhooks.inbox.get(timeout=_PATIENCE_S)
        except queue.Empty:
            raise Failed(f"No webhook came for {job['id']} within {_PATIENCE_S:.0f} s") from None
        secret = self._service.access.webhook_secret
        event = received.verified(secret)
        self._narrator.line(f"POST {self._webhooks.url}, webhook-id {received.headers.get('webhook-id')}")
        self._narrator.claim("The package standardwebhooks verifies its signature.", event is not None)
        assert event is not None
        self._narrator.claim(
            f"It says {event['type']} of {event['data']['id']}.",
            event["type"] == f"job.{job['status']}" and event["data"]["id"] == job["id"],
        )
        forged = received.body.replace(b"succeeded", b"cancelled")
        self._narrator.claim(
            "With another word in its body it is refused.",
            forged != received.body and received.with_body(forged).verified(secret) is None,
        )
        self._figures["Webhook"] = "received, signature verified"

    def _finish_batch(self) -> None:
        self._narrator.section("The batch's output file")
        batch = next(each for each in self._paid.batch_progress(self._batch_id) if each["status"] in ENDED_BATCH)
        counts = batch["request_counts"]
        self._narrator.claim(
            f"{self._batch_id} is {batch['status']}: {counts['completed']} of {counts['total']} rows succeeded.",
            batch["status"] == "completed" and counts == {"total": _ROWS, "completed": _ROWS, "failed": 0},
        )
        assert batch["output_file_id"] is not None
        with tempfile.TemporaryDirectory(prefix="everbatch-demo-") as directory:
            file = Path(directory) / "output.jsonl"
            self._paid.download(batch["output_file_id"], file)
            names = Counter(json.loads(line)["custom_id"] for line in file.read_text().split("\n") if line)
        self._narrator.claim(
            "Its output file has one line per row.", names == Counter(row["custom_id"] for row in _rows())
        )
        for job_id, client in self._owners.items():
            client.wait(job_id)

    def _tell_speed(self, recorded: Recorder) -> None:
        self._narrator.section("Speed")
        busy = recorded.busy_phase()
        if busy is None:
            raise Failed("The running batch was never seen full")
        first, last = busy
        seconds, steps = last.at - first.at, last.steps - first.steps
        use = (last.slot_steps - first.slot_steps) / (steps * SLOTS) if steps else 0.0
        speed = (last.generated_tokens - first.generated_tokens) / seconds
        self._narrator.line(f"From the first moment with every slot taken to the last: {seconds:.1f} s, {steps} steps.")
        self._narrator.claim(f"{speed:.0f} tokens/s", speed > 0)
        self._narrator.claim(f"{use:.1%} of the slots were in use over all steps.", use >= _BUSY_USE)
        self._figures["Speed"] = f"{speed:.0f} tokens/s"
        self._figures["Slot use while busy"] = f"{use:.1%}"

    # ---- a worker is killed

    def _kill_worker(self) -> None:
        self._narrator.section("A worker killed in the middle")
        titles = self._start_long_jobs()
        ids = [follower.job["id"] for follower in titles.values()]
        self._narrator.line(f"4 jobs of {_LONG} tokens run, and a client is connected to each.")
        if not wait_until(lambda: all(sum(row.tokens) >= _KILLED_AT for row in self._persisted(ids)), _PATIENCE_S):
            raise Failed(f"The long jobs did not reach {_KILLED_AT} tokens within {_PATIENCE_S:.0f} s")
        os.kill(self._service.worker_pid, signal.SIGKILL)
        killed_at = time.monotonic()
        self._narrator.line(f"kill -9 {self._service.worker_pid}")
        survivors = [_Survivor(title, follower, follower.text) for title, follower in titles.items()]
        ended = {each.follower.job["id"]: each.follower.finish(_PATIENCE_S) for each in survivors}
        rows = {row.job_id: row for row in self._persisted(ids)}
        for each in survivors:
            job_id = each.follower.job["id"]
            self._claim_survival(each, ended[job_id], rows[job_id])
        self._claim_same_text(survivors, ended)
        self._claim_no_token_twice(list(rows.values()))
        self._claim_recovery(survivors, killed_at)

    def _start_long_jobs(self) -> dict[str, Follower]:
        """By title; sampled ones name no seed."""
        jobs: list[tuple[str, Client, dict[str, Any]]] = [
            ("paid, greedy", self._paid, {"temperature": 0}),
            ("paid, temperature 1", self._paid, {"temperature": 1}),
            ("free, temperature 1", self._free, {"temperature": 1}),
            ("bulk, temperature 1", self._paid, {"temperature": 1, "service_tier": "flex"}),
        ]
        return {
            title: Follower(
                client,
                self._submit(
                    client,
                    prompt=f"The history of the {subject} begins",
                    max_tokens=_LONG,
                    ignore_eos=True,
                    **fields,
                ),
            )
            for (title, client, fields), subject in zip(jobs, _SUBJECTS, strict=False)
        }

    def _claim_survival(self, survivor: _Survivor, ended: Job, row: Persisted) -> None:
        before, after = row.tokens[0], sum(row.tokens[1:])
        self._narrator.claim(
            f"{survivor.title}: {before} tokens before the kill, {after} by attempt {row.attempt}, {_LONG} in all.",
            row.attempt == 2
            and before >= _KILLED_AT
            and before + after == _LONG == ended["usage"]["completion_tokens"],
        )

    def _claim_same_text(self, survivors: Sequence[_Survivor], ended: Mapping[str, Job]) -> None:
        self._narrator.claim(
            "What the connected clients had seen stayed, and their pieces joined are the results: nothing came twice.",
            all(
                _text(ended[each.follower.job["id"]]) == each.follower.text
                and each.follower.text.startswith(each.shown)
                for each in survivors
            ),
        )

    def _claim_no_token_twice(self, rows: Sequence[Persisted]) -> None:
        """The new process's own counters start at zero: they hold the second attempts and nothing else."""
        reading = self._read_worker()
        assert reading is not None
        missing = sum(sum(row.tokens[1:]) for row in rows)
        kept = sum(row.tokens[0] for row in rows)
        self._narrator.claim(
            f"The new worker decoded {reading.generated_tokens} tokens, the {missing} that were missing, no other.",
            reading.generated_tokens == missing,
        )
        self._narrator.claim(
            f"It prefilled {reading.recomputed_tokens} again: the prompts and the {kept} tokens that were kept.",
            reading.recomputed_tokens >= kept,
        )
        self._figures["Tokens kept over kill -9"] = f"{kept} of {kept + missing}, {missing} decoded after it"

    def _claim_recovery(self, survivors: Sequence[_Survivor], killed_at: float) -> None:
        pids = self._live_worker_pids()
        self._narrator.claim(
            f"Process {', '.join(map(str, pids))} took its place.", bool(pids) and self._service.worker_pid not in pids
        )
        resumed = [each.follower.text_of_attempt_came(2) for each in survivors]
        slowest = max(moment for moment in resumed if moment is not None) - killed_at
        self._narrator.claim(f"All four streams went on within {slowest:.1f} s.", slowest < _HEALED_S)
        self._figures["Recovery"] = f"{slowest:.1f} s"

    # ---- everything, from Postgres

    def _read_back(self) -> None:
        self._narrator.section("All results, read back from Postgres")
        rows = self._persisted(list(self._owners), [self._batch_id])
        submitted = len(self._owners) + _ROWS
        for status, count in sorted(Counter(row.status for row in rows).items()):
            tiers = Counter(row.tier for row in rows if row.status == status)
            self._narrator.line(f"{status}  {count}  ({', '.join(f'{tiers[tier]} {tier.value}' for tier in Tier)})")
        lost = submitted - sum(row.has_ended for row in rows)
        self._narrator.claim(f"{submitted} jobs were submitted, {lost} are lost.", lost == 0)
        self._narrator.claim("All succeeded.", all(row.status == "succeeded" for row in rows))
        self._narrator.claim(
            "Their event numbers run from 1 without gap or repeat, and one terminal event ends each.",
            all(row.numbers_are_whole for row in rows),
        )
        self._narrator.claim(
            "The text of each is its events joined, and what the API answers.",
            all(row.joined_text == row.output_text for row in rows)
            and all(self._answered(row) == row.output_text for row in rows if row.job_id in self._owners),
        )
        tokens = sum(row.completion_tokens for row in rows)
        self._figures["Jobs"] = f"{submitted} submitted, {submitted - lost} succeeded, {lost} lost"
        self._figures["Tokens"] = f"{tokens} generated"

    def _answered(self, row: Persisted) -> str:
        return _text(self._owners[row.job_id].get(row.job_id))

    # ---- hands

    def _submit(self, client: Client, **fields: Any) -> Job:
        job = client.submit(**fields)
        self._owners[job["id"]] = client
        return job

    def _read_worker(self) -> Reading | None:
        with self._service.database.transaction() as session:
            url = worker_metrics_url(session)
        try:
            return None if url is None else read_worker(url, time.monotonic())
        except httpx.HTTPError:
            return None  # it is starting, or was just killed

    def _persisted(self, job_ids: Sequence[str], batch_ids: Sequence[str] = ()) -> list[Persisted]:
        with self._service.database.transaction() as session:
            return persisted(session, job_ids=job_ids, batch_ids=batch_ids)

    def _live_worker_pids(self) -> list[int]:
        with self._service.database.transaction() as session:
            return live_worker_pids(session)


def _rows() -> Iterator[dict[str, Any]]:
    """Requests of mixed lengths, 16 to 63 tokens: a static batch would idle on them."""
    for number in range(_ROWS):
        yield {
            "custom_id": f"row-{number + 1}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": f"Ten facts about the {_SUBJECTS[number % len(_SUBJECTS)]}:",
                "max_tokens": 16 + 23 * number % 48,
                "temperature": 0,
            },
        }


def _wait_for(recorded: Recorder, wanted: Callable[[Reading], bool], what: str) -> Reading:
    if not wait_until(lambda: recorded.find(wanted) is not None, _PATIENCE_S):
        raise Failed(f"The engine worker did not show {what} within {_PATIENCE_S:.0f} s")
    found = recorded.find(wanted)
    assert found is not None
    return found


def _text(job: Job) -> str:
    return job["output"]["choices"][0]["text"]
