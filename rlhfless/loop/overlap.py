"""Whether it pays to draw a step while the one before it is learned: both ways are tried, and timed.

A step of `sync` takes draw + learn seconds. With an overlap it takes at least max(draw, learn), and more where the two
share processors, memory bandwidth or a network: published runs have lost by it. So a run first takes a few steps of
`sync`. If the longer part leaves enough to be saved, it overlaps as many, and goes on with what was faster. Lengths
change as a policy learns, so it tries again after `again_after_steps`.

Pure: the caller gives the times.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from rlhfless.spec import AutoSpec

COUNTED = 3
"""Steps of each way in a trial: the median passes over one that an evaluation or a checkpoint made longer."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Seconds of a step."""

    draw_s: float
    learn_s: float
    """With what the spec wants after the step."""
    step_s: float
    """From the end of the step before it to its own end."""


@dataclass(frozen=True, slots=True)
class OverlapChoice:
    """The way that the steps after a trial are done, and why."""

    overlap: bool
    reason: str
    measured: dict[str, float]
    """Medians of the trial's steps."""


class OverlapTrial:
    """Tries both ways and chooses one, again and again."""

    def __init__(self, settings: AutoSpec) -> None:
        self._settings = settings
        self._waiting = 1  # steps until a trial begins: a run's first step warms everything up
        self._before: bool | None = None
        self._begin()

    def _begin(self) -> None:
        self._apart: list[TimedStep] = []
        self._overlapped: list[float] = []
        self.overlap = False
        """Whether the next step is to be drawn while this one is learned."""

    def observe(self, times: TimedStep) -> OverlapChoice | None:
        """Note a step that was done as `overlap` says; a choice if that ends a trial."""
        alike, self._before = self.overlap == self._before, self.overlap
        if self._waiting:
            self._waiting -= 1
            if not self._waiting:
                self._begin()
        elif alike and self.overlap:  # a step whose own draw was beside the step before it, too
            self._overlapped.append(times.step_s)
        elif alike:
            self._apart.append(times)
        if len(self._overlapped) == COUNTED:
            return self._compare()
        if len(self._apart) == COUNTED and not self.overlap:
            return self._try_overlap()
        return None

    def _apart_s(self) -> dict[str, float]:
        return {name: median(getattr(times, name) for times in self._apart) for name in ("draw_s", "learn_s", "step_s")}

    def _try_overlap(self) -> OverlapChoice | None:
        """Overlap the next steps, unless the longer part leaves too little to be saved."""
        apart = self._apart_s()
        possible = 1 - max(apart["draw_s"], apart["learn_s"]) / apart["step_s"]
        self.overlap = possible >= self._settings.least_saving
        if self.overlap:
            return None
        longer = "generation" if apart["draw_s"] > apart["learn_s"] else "learning"
        return self._settle(
            overlap=False, reason=f"{longer} takes {1 - possible:.0%} of a step, and an overlap no less"
        )

    def _compare(self) -> OverlapChoice:
        saved = 1 - median(self._overlapped) / self._apart_s()["step_s"]
        wanted = self._settings.least_saving
        enough = saved >= wanted
        reason = f"an overlap {'saves' if saved >= 0 else 'costs'} {abs(saved):.0%} of a step"
        return self._settle(overlap=enough, reason=reason if enough else f"{reason}; {wanted:.0%} is wanted")

    def _settle(self, *, overlap: bool, reason: str) -> OverlapChoice:
        measured = self._apart_s() | ({"overlapped_step_s": median(self._overlapped)} if self._overlapped else {})
        self._begin()
        self.overlap, self._waiting = overlap, self._settings.again_after_steps
        return OverlapChoice(overlap, reason, measured)
