"""How long a step takes: a linear model of what is in it, fitted while the engine runs.

    ms = a + b·rows + c·prefill_tokens + d·prefill_pairs + e·kv_read

Pure: no clock and no I/O. The scheduler sizes steps by it; the simulator takes it for the truth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.step import StepPlan

_SCALES = np.array([1.0, 64.0, 512.0, 512.0 * 512.0, 64.0 * 1024.0])
"""Typical values of the features, so that the fit is well conditioned."""
_FORGETTING = 0.999
"""What an observation weighs after the next one: half of it after 700 steps."""
_MAX_RESIDUALS = 4.0
"""A step that is off by more mean residuals than this counts as if it were off by so many: something else was busy."""
_LEAST_RESIDUAL = 0.05
"""Share of a step's predicted time that the mean residual counts for at least."""
_MAX_VARIANCE = 1e3
"""Sum of the variances, in those scales, up to which old steps are forgotten."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes."""

    rows: int = 0
    """Sequences that decode."""
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    """Pairs of a prefilled token and a position that it attends to."""
    kv_read: int = 0
    """Positions that the decodes attend to."""

    @classmethod
    def of(cls, plan: StepPlan) -> Work:
        n = plan.num_decodes
        starts, counts = plan.starts[n:].astype(np.int64), plan.counts[n:].astype(np.int64)
        return cls(
            rows=n,
            prefill_tokens=int(counts.sum()),
            prefill_pairs=int((counts * starts + counts * (counts + 1) // 2).sum()),
            kv_read=int(plan.starts[:n].sum()) + n,
        )

    @classmethod
    def piece(cls, start: int, count: int) -> Work:
        """A piece of a prompt behind `start` tokens that are in the cache."""
        return cls(prefill_tokens=count, prefill_pairs=count * start + count * (count + 1) // 2)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.rows + other.rows,
            self.prefill_tokens + other.prefill_tokens,
            self.prefill_pairs + other.prefill_pairs,
            self.kv_read + other.kv_read,
        )

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.rows - other.rows,
            self.prefill_tokens - other.prefill_tokens,
            self.prefill_pairs - other.prefill_pairs,
            self.kv_read - other.kv_read,
        )

    def features(self) -> tuple[float, ...]:
        return 1.0, self.rows, self.prefill_tokens, self.prefill_pairs, self.kv_read


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Milliseconds, none below 0."""

    step: float
    """Per step: reading the weights, launching the kernels."""
    row: float
    """Per sequence that decodes."""
    prefill_token: float
    prefill_pair: float
    kv_position: float
    """Per position that a decode attends to."""

    def predict(self, work: Work) -> float:
        """Milliseconds that a step with this work takes."""
        return (
            self.step
            + self.row * work.rows
            + self.prefill_token * work.prefill_tokens
            + self.prefill_pair * work.prefill_pairs
            + self.kv_position * work.kv_read
        )


CPU_SMALL = Coefficients(step=20.0, row=0.6, prefill_token=0.8, prefill_pair=2e-4, kv_position=1e-3)
"""A model of 135 M parameters in bf16 on 2 cores (AMD EPYC, AVX-512 bf16); a start for the fit, no measurement."""
H200_8B = Coefficients(step=4.7, row=0.002, prefill_token=0.0268, prefill_pair=8.7e-7, kv_position=3.4e-5)
"""8 billion parameters in bf16 on an H200, from its data sheet at 80 % of 4.8 TB/s and 600 TFLOP/s: the weights are
16.06 GB / 3.84 TB/s = 4.2 ms, and 0.5 ms of launches; a prefilled token 2 · 8.03e9 FLOP / 600 T = 0.0268 ms; a pair
4 · 32 layers · 4096 FLOP / 600 T = 8.7e-7 ms; a position read 131072 B / 3.84 TB/s = 3.4e-5 ms."""


class StepCost:
    """Recursive least squares with forgetting, from a prior on. An observation costs some 20 µs."""

    def __init__(self, prior: Coefficients = CPU_SMALL, *, weight: float = 1.0) -> None:
        """weight  steps that the prior counts for, above 0"""
        values = [prior.step, prior.row, prior.prefill_token, prior.prefill_pair, prior.kv_position]
        self._fitted = np.array(values) * _SCALES
        self._covariance = np.eye(5) / weight
        self._residual: float | None = None  # running mean of its size, ms
        self._coefficients = prior

    @property
    def coefficients(self) -> Coefficients:
        return self._coefficients

    def predict(self, work: Work) -> float:
        """Milliseconds that a step with this work is expected to take."""
        return self._coefficients.predict(work)

    def observe(self, work: Work, elapsed_ms: float) -> None:
        """Learn from a step."""
        features = np.array(work.features()) / _SCALES
        error = elapsed_ms - float(features @ self._fitted)
        if self._residual is None:
            self._residual = abs(error)
        # A fit that was exact so far must still be able to learn that it no longer is.
        most = _MAX_RESIDUALS * max(self._residual, _LEAST_RESIDUAL * self.predict(work))
        self._residual += 0.05 * (min(abs(error), most) - self._residual)
        error = min(max(error, -most), most)
        gained = self._covariance @ features
        gain = gained / (_FORGETTING + float(features @ gained))
        self._fitted = self._fitted + gain * error
        self._covariance = self._covariance - np.outer(gain, gained)
        # Without work of a kind nothing is learned of it, and forgetting alone would blow its variance up.
        if self._covariance.trace() < _MAX_VARIANCE:
            self._covariance /= _FORGETTING
        self._coefficients = Coefficients(*np.maximum(self._fitted / _SCALES, 0.0).tolist())

    def tokens_within(self, budget_ms: float, planned: Work, start: int, limit: int) -> int:
        """The most tokens, up to `limit`, of a piece from position `start` with which the step stays in the budget."""
        if self.predict(planned + Work.piece(start, limit)) <= budget_ms:
            return limit
        low, high = 0, limit  # low fits or is 0, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.predict(planned + Work.piece(start, middle)) <= budget_ms:
                low = middle
            else:
                high = middle
        return low
