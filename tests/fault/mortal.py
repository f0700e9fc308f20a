"""An engine worker with a mortal engine: `python -m tests.fault.mortal -A worker.celery_app:engine worker …`.

It is killed as by the kernel, with no word to anybody, when the echo engine computes a token of a job whose seed is
POISON, beside whatever else is in that step.
"""

from __future__ import annotations

import os
import signal

from celery.bin.celery import main

from engine import builder
from engine.echo import EchoRunner
from engine.step import Sampled, StepPlan

POISON = 666
"""A seed."""


class MortalRunner(EchoRunner):
    def execute(self, plan: StepPlan) -> Sampled:
        if any(chunk.sampling is not None and chunk.sampling.seed == POISON for chunk in plan.chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(plan)


if __name__ == "__main__":
    builder.EchoRunner = MortalRunner  # type: ignore[misc]
    main()
