"""Compare a recorded run under another policy or on other devices with its replay as recorded. Pure.

Both sides are simulated, because a measured run includes effects that no simulation has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhfless.sim.replay.measured import WALL
from rlhfless.sim.replay.replay import AS_RECORDED, Replay


@dataclass(frozen=True, slots=True)
class Beside:
    """Two replays of the same steps."""

    other: Replay
    base: Replay
    """The replay as recorded."""
    ran: str
    """The policy of the run."""
    ahead: int | None = None
    """Steps that the other generates ahead of the learner; None: as in the run."""

    @property
    def label(self) -> str:
        """The other's policy, devices and schedule."""
        policy = self.ran if self.other.policy == AS_RECORDED else self.other.policy
        where = f" on {self.other.extrapolated_to}" if self.other.extrapolated_to else ""
        ahead = "" if self.ahead is None else f", {self.ahead} step{'s' * (self.ahead != 1)} ahead"
        return f"{policy}{where}{ahead}"

    @property
    def times(self) -> float:
        """The simulated time of the other divided by that of the base."""
        return _wall_s(self.other) / _wall_s(self.base)

    @property
    def costs(self) -> float:
        """The predicted cost of the other divided by that of the base."""
        return self.other.predicted_usd / self.base.predicted_usd if self.base.predicted_usd else 1.0

    @property
    def same(self) -> tuple[int, int]:
        """The number of steps in which both plan the same, and the number of steps.

        The plans are compared, or, for a policy that records none, the division of response tokens over actors.
        """
        if self.other.plans:
            return sum(ran == again for _, ran, again in self.other.plans), len(self.other.plans)
        divided = dict(self.base.divided)
        return sum(divided.get(step) == shares for step, shares in self.other.divided), len(self.other.divided)

    @property
    def sentence(self) -> str:
        """The result of the comparison in words."""
        same, steps = self.same
        both = f"both plan the same in {'all' if same == steps else f'{same} of'} {steps} steps"
        what = f"{self.times:.2f}x the time at {self.costs:.2f}x the cost"
        return f"{self.label} would take {what} of {self.ran} as recorded, both simulated; {both}."


def _wall_s(replay: Replay) -> float:
    return math.fsum(step.predicted_s[WALL] for step in replay.steps)
