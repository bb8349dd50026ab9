"""Rules of the `partial` schedule (PartialSpec), whose steps do not learn from all groups that they
generate. Pure; shared by the live loop and the simulator."""

from __future__ import annotations

import math
from collections.abc import Collection

from rlhfless.spec import PartialSpec


def new_groups(schedule: PartialSpec, learns: int, left: int, unbegun: int, prompts: float) -> int:
    """Return the number of new groups to start in a step that learns from `learns` groups.

    `left` groups of earlier steps are unfinished. `unbegun` groups are to be started from this step on; together with
    `left`, they give `learns` groups for each remaining step, so none is left at the end of the run. The data has
    `prompts` prompts (infinite if none repeats); a prompt in progress is not started again.
    """
    under_way = min(learns + math.ceil(schedule.ahead * learns), left + unbegun, prompts)
    return max(int(under_way) - left, 0)


def is_due(schedule: PartialSpec, begun: int, step: int) -> bool:
    """Return whether a step must wait for a group started in the step `begun`."""
    return step - begun >= schedule.max_staleness


class GroupGate:
    """Admits a step's groups as they complete, until it has enough to learn from."""

    def __init__(self, learns: int, must_include: Collection[str] = ()) -> None:
        """Initialise the gate. Groups named in `must_include` are always admitted."""
        self.left = learns
        """Number of groups still to be admitted."""
        self.admitted: list[str] = []
        self._must_include = set(must_include)

    def admits(self, name: str) -> bool:
        """Return whether to learn from a newly completed group. Places for `must_include` groups stay reserved."""
        if name not in self._must_include and self.left <= len(self._must_include):
            return False
        self._must_include.discard(name)
        self.left -= 1
        self.admitted.append(name)
        return True
