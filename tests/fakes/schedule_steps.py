"""Fake steps of a schedule, without a run."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any


class Steps:
    """Records a schedule's actions in order. Rollouts and trainings last `turns` turns of the event loop, by name."""

    def __init__(self, turns: dict[str, int] | None = None, fails_at: int | None = None, learned: int = 0) -> None:
        self.turns = defaultdict(lambda: 1, turns or {})
        self.fails_at = fails_at
        self.done: list[str] = []
        """Started actions, in order."""
        self.learned = learned
        self.drawing: set[int] = set()
        self.most_at_once = 0
        self.behind: dict[int, int] = {}
        """By step: how many versions old its weights were when it was learned from."""
        self._began_with: dict[int, int] = {}

    async def rollout(self, step: int) -> Any:
        self.done.append(f"draw {step}")
        self._began_with[step] = self.learned
        self.drawing.add(step)
        self.most_at_once = max(self.most_at_once, len(self.drawing))
        try:
            await self._last(f"draw {step}")
        finally:
            self.drawing.discard(step)
        return step

    async def train(self, step: int, experience: Any) -> None:
        assert experience == step == self.learned + 1
        self.done.append(f"learn {step}")
        self.behind[step] = self.learned - self._began_with[step]
        await self._last(f"learn {step}")
        if step == self.fails_at:
            raise RuntimeError(f"step {step} failed")
        self.learned = step

    async def _last(self, what: str) -> None:
        for _ in range(self.turns[what]):
            await asyncio.sleep(0)
