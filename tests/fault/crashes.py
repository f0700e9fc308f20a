"""Where a process may die between a commit, a command to Redis and a write to the disk, and what must hold then.

Named points in the trip of a job, a batch, a file and a webhook. In each row the three points of a round, one for each
process: they are armed together.
"""

from __future__ import annotations

from itertools import zip_longest

from tests.fault.crashing import Spoiled

BEFORE, AFTER = "kill-before", "kill-after"

Points = dict[str, Spoiled]

API: Points = {
    # The job is durable, and the client's retry with its key gets this very job. Dispatch finds it without a nudge.
    "submitted, not nudged": Spoiled(BEFORE, "app.dispatch:Dispatcher.nudge", 3),
    # Nothing is durable: the retry makes the job.
    "submit not committed": Spoiled(AFTER, "app.jobs:submit", 3),
    # As the first.
    "submitted, those that shared the commit not told": Spoiled(AFTER, "app.reception:Reception._write", 3),
    # The cancel holds: the worker's writes are refused, the retry of the cancel gets the same answer.
    "cancelled, not announced": Spoiled(BEFORE, "app.api.services:Services.publish?cancelled"),
    # The job goes on until the retry.
    "cancel not committed": Spoiled(AFTER, "app.jobs:cancel"),
    # The numbers were drawn for a message that never was: the sweep forgets them, and the jobs are sent.
    "numbered, not sent": Spoiled(BEFORE, "app.broker:Broker.send_jobs", 2),
    "sent, the round not ended": Spoiled(AFTER, "app.broker:Broker.send_jobs", 2),
    # A stray on the shelf; the client uploads again.
    "upload stored, its row not written": Spoiled(AFTER, "app.shelf:Draft.keep"),
    "upload's row not committed": Spoiled(AFTER, "app.files:add"),
    # A file that its tenant can list and delete; the client uploads again.
    "upload committed, not answered": Spoiled(BEFORE, "app.api.files:file_object"),
    # A batch that its tenant can list and cancel; the client makes another one.
    "batch committed, not answered": Spoiled(BEFORE, "app.api.batches:batch_object"),
    # The row is gone, and so is the file for its tenant; the bytes are a stray.
    "file's row removed, its bytes not": Spoiled(BEFORE, "app.shelf:Shelf.erase"),
}

ENGINE: Points = {
    # The message is nowhere: its queue is empty, or a later one was claimed, and the jobs are sent again.
    "popped, not kept by the broker": Spoiled(BEFORE, "kombu.transport.redis:QoS.append"),
    # The message comes again from the broker's memory; the sweep may be quicker.
    "popped, not claimed": Spoiled(BEFORE, "app.claims:claim"),
    "claim not committed": Spoiled(AFTER, "app.claims:claim"),
    # Ours in Postgres, and we are dead: the lease brings it back. The message that comes again claims nothing.
    "claimed, not acknowledged": Spoiled(BEFORE, "worker.jobs:Claimer._begin"),
    "claimed, not announced": Spoiled(BEFORE, "app.events:announce?running"),
    "claimed, the engine has not got it": Spoiled(BEFORE, "worker.jobs:Claimer._submit"),
    # Nobody saw these tokens: the next attempt computes the same ones.
    "computed, not written": Spoiled(BEFORE, "app.events:append_tokens", 5),
    # Followers read the rows; the next attempt goes on behind them.
    "tokens committed, not announced": Spoiled(BEFORE, "app.events:announce?tokens", 5),
    "tokens announced, the buffers not emptied": Spoiled(BEFORE, "worker.progress:ProgressWriter._settle", 5),
    # The job still runs in Postgres; the next attempt ends it.
    "end not committed": Spoiled(AFTER, "app.claims:finish"),
    # It has ended, once and for ever; followers read the rows.
    "ended, not announced": Spoiled(BEFORE, "app.events:announce?succeeded"),
    "ended, Celery does not know": Spoiled(BEFORE, "worker.pool:EnginePool._on_done"),
    "numbered by a worker, not sent": Spoiled(BEFORE, "app.broker:Broker.send_jobs"),
}

IO: Points = {
    # The next leader finds running jobs of a dead worker. The engine worker of the same round is the dead one.
    "lost messages forgotten, not sent again": Spoiled(AFTER, "app.recovery:forget_lost_messages"),
    "worker declared dead, its jobs not back in line": Spoiled(AFTER, "worker.sweep:Sweeper._declare_dead"),
    "requeue not committed": Spoiled(AFTER, "app.recovery:requeue_orphans"),
    "requeued, not announced": Spoiled(BEFORE, "app.events:announce?queued"),
    # The settlements stay and are folded by the next one, once.
    "settlements not committed": Spoiled(AFTER, "app.settlements:fold"),
    # Due again once its lease is over; it costs no attempt.
    "delivery taken, not sent": Spoiled(BEFORE, "app.broker:Broker.send_delivery"),
    # An attempt without an end: it is posted again, with the same id.
    "delivery started, not posted": Spoiled(BEFORE, "worker.webhooks:post"),
    "delivery posted, not recorded": Spoiled(AFTER, "worker.webhooks:post"),
    "delivery's record not committed": Spoiled(AFTER, "app.deliveries:record"),
    # Rows and the place in the file are one transaction: the window is read again, and no row doubled.
    "batch rows written, the place in the file not": Spoiled(AFTER, "app.jobs:submit_rows"),
    "batch rows committed, not announced": Spoiled(AFTER, "worker.batches:Clerk._read_window"),
    # The files are written again, in place.
    "output file written, without its name": Spoiled(BEFORE, "app.shelf:Draft.keep"),
    "output file kept, not recorded": Spoiled(AFTER, "app.shelf:Draft.keep"),
    "end of the batch not committed": Spoiled(AFTER, "app.files:add"),
}


def rounds() -> list[dict[str, tuple[str, Spoiled]]]:
    """What is armed at once: by process, a point's name and what it does."""
    rows = zip_longest(API.items(), ENGINE.items(), IO.items())
    members = ("api", "engine1", "io")
    return [{m: point for m, point in zip(members, row, strict=True) if point is not None} for row in rows]
