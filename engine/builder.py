"""Makes an engine of its settings: runner, scheduler and loop. No torch here: the model has processes of its own."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from engine.config import EngineConfig
from engine.detokenizer import Detokenizer
from engine.echo import EchoRunner
from engine.errors import ModelError
from engine.grammars import GrammarError, Grammars
from engine.lanes import Lanes, num_cores
from engine.limits import Limits
from engine.loop import EngineLoop
from engine.models.spec import read_config
from engine.models.verdict import recall
from engine.policies import POLICIES, Policy, Tiered
from engine.request import Engine
from engine.scheduler import Scheduler
from engine.step import Runner

logger = logging.getLogger(__name__)


def build(config: EngineConfig) -> Engine:
    """The engine for the model in config.model_dir, loaded and not yet started.

    Raises ModelError, in one sentence for the operator, if the model cannot be served here.
    """
    runner = _runner(config)
    try:
        detokenizer = _detokenizer(config.model_dir)
        return EngineLoop(runner, detokenizer, scheduler_for(runner, config), _grammars(runner, config.model_dir))
    except BaseException:
        runner.close()
        raise


def scheduler_for(runner: Runner, config: EngineConfig) -> Scheduler:
    """The scheduler of a runner. Raises ValueError as Limits does, and for a policy that does not exist."""
    limits = Limits(
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        num_host_blocks=runner.num_host_blocks,
        context_length=runner.context_length,
        vocab_size=runner.vocab_size,
        eos_ids=runner.eos_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        step_budget_ms=config.step_budget_ms,
        prefill=config.prefill,
        preemption=config.preemption,
        max_tenant_seqs=config.max_tenant_seqs,
    )
    return Scheduler(limits, policy=_policy(config), secret=secrets.token_bytes(32))


def _policy(config: EngineConfig) -> Policy:
    if config.policy not in POLICIES:
        raise ValueError(f"policy is {config.policy!r}; there are {', '.join(POLICIES)}")
    made = POLICIES[config.policy]
    return Tiered(config.floors) if made is Tiered else made()


def _runner(config: EngineConfig) -> Runner:
    if read_config(config.model_dir)["model_type"] == "echo":
        return EchoRunner(step_ms=config.echo_step_ms)
    recall(config.model_dir)  # what was refused before is refused at once, not by a process of its own in seconds
    return Lanes(config, count=num_cores())


def _detokenizer(model_dir: Path) -> Detokenizer:
    try:
        return Detokenizer.load(model_dir)
    except Exception as error:  # tokenizers raises nothing narrower for a missing or broken file
        raise ModelError(f"{model_dir}: tokenizer.json cannot be used: {error}") from error


def _grammars(runner: Runner, model_dir: Path) -> Grammars | GrammarError:
    """A model whose tokenizer llguidance does not know is served all the same, without grammars."""
    try:
        return Grammars.load(model_dir, vocab_size=runner.vocab_size, eos_ids=runner.eos_ids)
    except GrammarError as error:
        logger.warning("%s: no grammars: %s", model_dir, error)
        return error
