"""The check `rollouts`: a run's samples show whether its engines have the right weights.

Every sampled token has two logprobs: the engine's, at sampling, and the learner's, under the weights that the engine
should have. Their mean difference is rounding, and rounding changes slowly from step to step. If the difference in a
step is many times the difference in earlier steps, the step was drawn with other weights.

Weights that are older on purpose, because a schedule draws ahead of the learner, differ by the updates since then: so a
step is judged by earlier steps of the same lag. Against an update or two, one update more is little: what this check
sees with a lag is weights of another run, or many versions old.

The check needs no probe and sees every token of the run; it comes one step late. It cannot see wrong weights that
move logprobs by less than rounding does: `read_back` does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median
from types import MappingProxyType

from rlhfless.records import WeightVersion
from rlhfless.spec import DType
from rlhfless.spec.generation import Quantised, Quantization
from rlhfless.weights.errors import WeightCheckFailed

RISE = 4.0
"""A step is suspicious if its difference is above this multiple of the median of the steps before it. Over 200 good
steps of the demo in bfloat16 the largest ratio was 3.2, between differences far below ROUNDING (2e-5 to 4.5e-4); with
ROUNDING as the least median it was 0.43. In a trial with large updates, weights one step old gave a ratio of 20 (5e-4
to 1e-2)."""

REMEMBERED_STEPS = 20
"""Number of steps in the median: the difference follows the policy's entropy, over tens of steps."""

FIRST_STEPS = 3
"""Steps of a lag before the first step that is judged."""

ROUNDING: dict[DType, float] = {"float32": 1e-5, "float16": 2e-4, "bfloat16": 1e-3}
"""Mean differences, in nats, that are rounding whatever the steps before had: a policy that hardly hesitates has
differences near 0, and any number of times that means nothing."""

OF_CODES: Mapping[Quantised, float] = MappingProxyType({"int8": 4e-3, "fp8": 1.2e-2})
"""The same of engines in 8 bits, beside a learner that is not: as many times the one of bfloat16 as the probe's mean
difference was (4 and 12 times, with a model of 4 layers)."""

PATIENCE_STEPS = 2
"""This many suspicious steps in a row stop the run; fewer are a warning. Wrong weights do not become right again by
themselves."""


class RolloutMonitor:
    """Watches the mean |learner - engine| logprob of a run's steps."""

    def __init__(self, dtype: DType, limit_nats: float | None = None, quantization: Quantization = "off") -> None:
        """A step is suspicious above `limit_nats`; None derives the limit from earlier steps."""
        self._floor_nats = ROUNDING[dtype] if quantization == "off" else OF_CODES[quantization]
        self._given_nats = limit_nats
        self._recent_nats: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED_STEPS))
        """By lag."""
        self._suspicious = 0

    def limit_nats(self, lag: int = 0) -> float | None:
        """Above it the next step of a lag is suspicious; None until there are enough steps to judge by."""
        if self._given_nats is not None:
            return self._given_nats
        recent_nats = self._recent_nats[lag]
        if len(recent_nats) < FIRST_STEPS:
            return None
        return RISE * max(median(recent_nats), self._floor_nats)

    def observe(self, version: WeightVersion, difference_nats: float, lag: int = 0) -> str | None:
        """Take a step's mean difference; returns a warning if it is suspicious.

        Args:
            version: the oldest weights that the step was drawn with.
            difference_nats: mean |learner - engine| logprob of the step's sampled tokens.
            lag: the versions by which the learner was ahead of `version` when it computed its logprobs.

        Raises:
            WeightCheckFailed: `rollouts`, if it is the last of PATIENCE_STEPS suspicious steps in a row.
        """
        limit_nats = self.limit_nats(lag)
        if limit_nats is None or difference_nats <= limit_nats:
            self._recent_nats[lag].append(difference_nats)
            self._suspicious = 0
            return None
        self._suspicious += 1
        behind = f", drawn {lag} versions behind" if lag else ""
        message = (
            f"the learner's and the engines' logprobs of the step's tokens differ by {difference_nats:.3g} nats on "
            f"average{behind} (limit {limit_nats:.3g}): the engines draw with other weights than the learner's"
        )
        if self._suspicious >= PATIENCE_STEPS:
            raise WeightCheckFailed("rollouts", version, f"{message}, {self._suspicious} steps in a row")
        return message
