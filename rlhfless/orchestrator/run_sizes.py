"""The sizes of an elastic run as its process sees them: the present one, measured steps, changes and their cost."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from pathlib import Path
from statistics import fmean

from rlhfless.records import Decision
from rlhfless.util.clock import monotonic_s, unix_s
from rlhfless.util.folders import replace_text

SIZES_FILE = "sizes.json"
"""File in a run's folder, for its next driver: the size at which the run has worked last, and its seconds per step."""

CHANGE_S = 60.0
"""Seconds that a change is taken to cost until the run has started once: saving, stopping, and starting anew."""

RECENT_STEPS = 8
"""Steps of a size whose seconds are averaged."""


class RunSizes:
    """Sizes, steps and changes of one driver. All changes restart the run from its checkpoint, in the same driver."""

    def __init__(self, file: Path | None = None) -> None:
        """`file`: SIZES_FILE of the run; None keeps nothing."""
        self._file = file
        self._offered: tuple[int, ...] = ()
        self._refused: set[int] = set()
        """Sizes at which the run could not start."""
        self.size = 0
        """Devices that the run has, or starts with; 0 before it has any."""
        self._before = 0
        """Size before the change under way; 0 without one."""
        self.stopping = False
        """Whether the run stops to change its size."""
        self._worked = 0
        """Size of the last step, also of earlier drivers; 0 before the first."""
        self._seen_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_STEPS))
        self._steps_here = 0
        """Steps since the run started at its size."""
        self._changes_s: list[float] = []
        self._starts_s: float | None = None
        """When the run began to start at its size; None once it works."""
        self._began_s: dict[str, float] = {}
        """When each part of the change under way began, by name."""
        if file is not None and file.exists():
            kept = json.loads(file.read_text("utf-8"))
            self._worked = kept["worked"]
            for size, step_s in kept["seen_s"].items():
                self._seen_s[int(size)].append(step_s)

    @property
    def elastic(self) -> bool:
        return bool(self._offered)

    def offer(self, sizes: tuple[int, ...]) -> None:
        self._offered = sizes

    def among(self, granted: int) -> int:
        """Return the largest size within a grant; 0 if none is."""
        return max((size for size in self.allowed if size <= granted), default=0)

    @property
    def allowed(self) -> list[int]:
        """The sizes on offer at which the run has not failed to start."""
        return [size for size in self._offered if size not in self._refused] or list(self._offered)

    @property
    def change_s(self) -> float:
        """Seconds that a change costs: those of the last one."""
        return self._changes_s[-1] if self._changes_s else CHANGE_S

    @property
    def measured_s(self) -> dict[str, float]:
        """Mean seconds per step, by size."""
        return {str(size): fmean(seconds) for size, seconds in self._seen_s.items() if seconds}

    # -- changes

    def stops(self) -> None:
        """Note that the run saves its state and stops, to change its size."""
        self._before, self._began_s, self.stopping = self.size, {"save": monotonic_s()}, True

    def part(self, name: str) -> None:
        """Note that a part of the change begins: `stop` or `start`."""
        if self._before:
            self._began_s[name] = monotonic_s()

    def starts(self, size: int) -> None:
        """Note the size with which the run starts, or starts again."""
        self.size, self._steps_here, self._starts_s, self.stopping = size, 0, monotonic_s(), False

    def decision(self, step: int, reason: str) -> Decision | None:
        """Return the decision for the trace of a run that has started; None if it has the size of before."""
        if not self.elastic or self.size == self._before:
            return None
        inputs: dict[str, float | int | str | bool] = {"devices_before": self._before, "devices": self.size}
        return Decision(step, unix_s(), "size", f"{self._before} -> {self.size} devices", inputs | {"reason": reason})

    def works(self) -> dict[str, float] | None:
        """Note that a step or an evaluation begins; return the seconds of each part of the change that this ends, if
        one does."""
        start_s, self._starts_s = self._starts_s, None
        if not self._before:
            if start_s is not None and not self._changes_s:
                self._changes_s.append(monotonic_s() - start_s)
            return None
        names, times = [*self._began_s], [*self._began_s.values(), monotonic_s()]
        took_s = {f"{name}_s": after - at for name, at, after in zip(names, times, times[1:], strict=False)}
        self._changes_s.append(times[-1] - times[0])
        self._before, self._began_s = 0, {}
        return took_s

    def refuse(self) -> bool:
        """Refuse the present size if the run has worked at another, and has not done a step here since it started;
        return whether a size is left. It may have been another driver that has begun the change."""
        if self._steps_here or (self._worked or self._before) in (0, self.size):
            return False
        if len(self._refused) + 1 >= len(self._offered):
            return False
        self._refused.add(self.size)
        return True

    def step_done(self, step_s: float) -> None:
        """Note a step. The first at a size, which includes what starts late, counts only until there is another."""
        seen = self._seen_s[self.size]
        self._worked, self._steps_here = self.size, self._steps_here + 1
        if self._steps_here > 1 or not seen:
            if self._steps_here == 2 and len(seen) == 1:
                seen.clear()
            seen.append(step_s)
        if self._file is not None and self.elastic:
            replace_text(self._file, json.dumps({"worked": self._worked, "seen_s": self.measured_s}))
