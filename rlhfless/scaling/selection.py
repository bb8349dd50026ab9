"""The rules of `partial` (rlhfless.spec.schedule), whose steps do not learn from all groups that they generate, for the
live loop and for the simulator. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection

from rlhfless.spec import PartialSpec


def new_groups(schedule: PartialSpec, learns: int, left: int, unbegun: int, prompts: float) -> int:
    """How many groups a step begins that learns from `learns` groups, besides the `left` groups of earlier steps.

    This step and those after it are to begin `unbegun`: with those left, `learns` for each step that remains, so at the
    end of the run none is left. The data has `prompts` prompts (infinite: none comes again); one that is under way is
    not begun once more.
    """
    under_way = min(learns + math.ceil(schedule.ahead * learns), left + unbegun, prompts)
    return max(int(under_way) - left, 0)


def is_due(schedule: PartialSpec, begun: int, step: int) -> bool:
    """Whether a step waits for a group that the step `begun` has begun."""
    return step - begun >= schedule.max_staleness


class GroupGate:
    """Lets the groups of a step pass, as they become complete, until it has as many as it learns from."""

    def __init__(self, learns: int, must_include: Collection[str] = ()) -> None:
        """`must_include`: names of groups that pass in any case."""
        self.left = learns
        """Groups that are still to pass."""
        self.passed: list[str] = []
        self._must_include = set(must_include)

    def passes(self, name: str) -> bool:
        """Whether a group that is complete now is learned from. The places of those that are waited for stay free."""
        if name not in self._must_include and self.left <= len(self._must_include):
            return False
        self._must_include.discard(name)
        self.left -= 1
        self.passed.append(name)
        return True
