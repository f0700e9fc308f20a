"""How long a step takes: a linear model of what is in it, fitted while the engine runs.

    ms = a + b·decodes + c·prefill_tokens + d·prefill_pairs + e·kv_read

Pure: no clock and no I/O. The scheduler sizes steps by it; the simulator takes it for the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.step import StepPlan

_DOUBT = 10.0
"""A coefficient may be so many times as large as the prior says, or more: so little the prior counts."""
_NOISE = 0.05
"""What a single step is trusted to tell: its time within 5 %."""
_DRIFT = 0.1
"""What a step weighs, in the long run, against all before it, in the directions that it tells of. Of others nothing is
forgotten: steps without prompts leave what prompts cost as it was."""
_OUTLIER = 4.0
"""A step that is off by more standard deviations than this, of what is known and of single steps, counts as if it were
off by so many: something else was busy."""
_CHANGED = 0.2
"""Predictions that are off by so much on average, all to the same side, tell of another machine: what was learned
counts no more than a prior from then on."""
_CAUTION = 5.0
"""Steps are planned for so many spreads less than their budget: errors that are normal leave next to none longer."""
_MOST_MARGIN = 0.25
"""But for a budget divided by no more than 1 + this: where steps differ more, a wider margin costs all more than long
steps do."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes."""

    num_decodes: int = 0
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
            num_decodes=n,
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
            self.num_decodes + other.num_decodes,
            self.prefill_tokens + other.prefill_tokens,
            self.prefill_pairs + other.prefill_pairs,
            self.kv_read + other.kv_read,
        )

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.num_decodes - other.num_decodes,
            self.prefill_tokens - other.prefill_tokens,
            self.prefill_pairs - other.prefill_pairs,
            self.kv_read - other.kv_read,
        )

    def features(self) -> tuple[float, ...]:
        return 1.0, self.num_decodes, self.prefill_tokens, self.prefill_pairs, self.kv_read


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
            + self.row * work.num_decodes
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
    """Recursive least squares of relative errors, from a prior on. An observation costs some 30 µs."""

    def __init__(self, prior: Coefficients = CPU_SMALL) -> None:
        self._prior = np.array([prior.step, prior.row, prior.prefill_token, prior.prefill_pair, prior.kv_position])
        self._fitted = np.ones(5)  # times the prior; those below 0 too, for the next step to correct
        self._covariance = np.eye(5) * _DOUBT**2
        self._coefficients = prior
        self._spread = _NOISE
        self._bias = 0.0  # running mean of how far predictions were off, as a share

    @property
    def coefficients(self) -> Coefficients:
        return self._coefficients

    @property
    def spread(self) -> float:
        """By how much a step's time differs from its prediction: root mean square of the last steps, as a share."""
        return self._spread

    def predict(self, work: Work) -> float:
        """Milliseconds that a step with this work is expected to take."""
        return self._coefficients.predict(work)

    def planned_ms(self, budget_ms: float) -> float:
        """What a step may be expected to take, for it hardly ever to take longer than its budget."""
        return budget_ms / (1.0 + min(_CAUTION * self._spread, _MOST_MARGIN))

    def observe(self, work: Work, elapsed_ms: float) -> None:
        """Learn from a step."""
        expected_ms = max(self.predict(work), 1e-6)
        shares = np.array(work.features()) * self._prior / expected_ms  # of the step's time, one for each coefficient
        self._covariance += (_DRIFT * _NOISE) ** 2 / float(shares @ shares) * np.outer(shares, shares)
        gained = self._covariance @ shares
        known = float(shares @ gained)  # variance of the prediction
        most = _OUTLIER * math.sqrt(known + max(_NOISE, self._spread) ** 2)
        share = elapsed_ms / expected_ms
        gain = gained / (known + _NOISE**2)
        self._covariance -= np.outer(gain, gained)
        self._fitted = self._fitted + gain * _within(share - float(shares @ self._fitted), most)
        self._coefficients = Coefficients(*(self._prior * self._without_negatives(self._fitted)).tolist())
        self._judge(_within(share - 1.0, most))

    def _without_negatives(self, fitted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The likeliest of what no coefficient below 0 leaves: the others take over what one of them gives up."""
        for _ in fitted:  # each turn sets one to 0
            lowest = int(np.argmin(fitted))
            if fitted[lowest] >= 0.0:
                return fitted
            fitted = fitted - self._covariance[:, lowest] * (fitted[lowest] / self._covariance[lowest, lowest])
            fitted[lowest] = 0.0
        return np.maximum(fitted, 0.0)

    def _judge(self, off: float) -> None:
        """Note by how much a prediction was off, as a share."""
        self._spread = math.sqrt(self._spread**2 + 0.05 * (min(off**2, 1.0) - self._spread**2))
        self._bias += 0.1 * (off - self._bias)
        if abs(self._bias) > _CHANGED:
            self._covariance, self._bias = np.eye(5) * _DOUBT**2, 0.0

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


def _within(value: float, most: float) -> float:
    return min(max(value, -most), most)
