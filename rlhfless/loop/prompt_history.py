"""Prompts whose samples had all the same reward, always right or always wrong, are drawn less often.

Of the prompts that a step would draw, one that was without signal k times in a row stays with a chance of
max(floor, factor^k); another takes the place of one that does not. So hard prompts come back once the policy can solve
them sometimes, and easy ones now and then. A prompt with a signal is drawn as before at once.

Invariant: the prompts of a step follow from the seed, the step, and what the steps up to step - 1 - max_staleness drew,
which have been learned from whenever it begins. A checkpoint keeps what steps after it need of that, so a step that is
done again has the same prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from rlhfless.loop.redraws import has_signal
from rlhfless.prepare.prompts import PromptOrder
from rlhfless.records import Experience, Prompt
from rlhfless.spec import DrawLessSpec


class PromptHistory:
    """What the steps drew, as far as later steps depend on it."""

    def __init__(self, spec: DrawLessSpec | None, seed: int, max_staleness: int) -> None:
        """Without a spec it keeps nothing, and the prompts are those of the order."""
        self._spec = spec
        self._seed = seed
        self._behind = 1 + max_staleness
        self._streaks: dict[str, int] = {}
        """By prompt, how many times in a row it was without signal, in the steps that are no longer in `_recent`."""
        self._recent: dict[int, dict[str, bool]] = {}
        """By step, the prompts that it drew, and whether each had a signal."""

    def prompts(self, order: PromptOrder, step: int, n: int) -> list[Prompt]:
        """The n prompts of a step, counted from 1; fewer than n of them are new ones only if the data has no more."""
        drawn = order.batch(step - 1, n)
        spec, streaks = self._spec, self._as_of(step - self._behind)
        if spec is None or not streaks:
            return drawn
        kept = [prompt for prompt in drawn if self._stays(spec, prompt, step, streaks)]
        used = {prompt.prompt_id for prompt in drawn}
        others = order.others(step - 1, len(order), used) if len(kept) < n else []
        others = [prompt for prompt in others if self._stays(spec, prompt, step, streaks)]
        places = iter(others)
        chosen = {prompt.prompt_id for prompt in kept}
        return [prompt if prompt.prompt_id in chosen else next(places, prompt) for prompt in drawn]

    def add(self, step: int, experience: Experience) -> None:
        """Take note of what a step drew. Idempotent."""
        if self._spec is not None:
            self._recent[step] = {group.prompt.prompt_id: has_signal(group) for group in experience.groups}

    def saved(self, step: int) -> dict[str, Any]:
        """What a checkpoint of `step` keeps; no earlier step is begun from then on."""
        folded = step + 1 - self._behind
        self._streaks = self._as_of(folded)
        self._recent = {number: drew for number, drew in self._recent.items() if number > folded}
        recent = {str(number): drew for number, drew in self._recent.items() if number <= step}
        return {"streaks": self._streaks, "recent": recent} if self._streaks or recent else {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint has kept; from the start if that is empty."""
        self._streaks = dict(saved.get("streaks", {}))
        self._recent = {int(number): dict(drew) for number, drew in saved.get("recent", {}).items()}

    def _as_of(self, step: int) -> dict[str, int]:
        """The streaks above 0 after a step."""
        streaks = dict(self._streaks)
        for number in sorted(number for number in self._recent if number <= step):
            for prompt_id, signal in self._recent[number].items():
                streaks[prompt_id] = 0 if signal else streaks.get(prompt_id, 0) + 1
        return {prompt_id: streak for prompt_id, streak in streaks.items() if streak}

    def _stays(self, spec: DrawLessSpec, prompt: Prompt, step: int, streaks: Mapping[str, int]) -> bool:
        chance = max(spec.floor, spec.factor ** streaks.get(prompt.prompt_id, 0))
        text = f"{self._seed}/{step}/{prompt.prompt_id}/draw_less".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") < chance * 2**64
