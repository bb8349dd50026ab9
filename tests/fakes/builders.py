"""Builders of values that many tests need: rollouts, trace rows, reward samples, texts, and fake steps."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rlhfless.functions.base import LeaseTerms
from rlhfless.records import FinishReason, Rollout, VersionSpan
from rlhfless.records.traces import TracedRollout
from rlhfless.rewards import RewardSample
from rlhfless.rewards.code import CodeReward
from rlhfless.rewards.protocol import Done, Outcome
from rlhfless.spec import CodeSpec


def rollout(prompt_id: str = "p", sample: int = 0, tokens: int = 3) -> Rollout:
    return Rollout(
        prompt_id,
        sample,
        2**62 + 5,
        np.arange(tokens, dtype=np.int64),
        np.linspace(-1, 0, tokens, dtype=np.float32),
        "täxt\n",
        FinishReason.STOP,
        (VersionSpan("run/1/0/ab", 0, 2), VersionSpan("run/1/0/cd", 2, tokens)),
        "actor-0",
        1.5,
        2.5,
        16,
    )


def drawn(
    prompt_id: str,
    index: int,
    tokens: Sequence[int] | np.ndarray,
    logprobs: Sequence[float] | np.ndarray | None = None,
    *,
    text: str = "",
    seed: int = 0,
    reason: FinishReason = FinishReason.STOP,
    spans: tuple[VersionSpan, ...] = (),
    actor: str = "a",
) -> Rollout:
    """Return a rollout with these tokens, generated within a second. Logprobs default to 0."""
    token_ids = np.array(tokens, dtype=np.int64)
    given = np.zeros(len(token_ids), np.float32) if logprobs is None else np.array(logprobs, np.float32)
    return Rollout(prompt_id, index, seed, token_ids, given, text, reason, spans, actor, 0.0, 1.0)


TOKENS = 50


def traced(
    step: int,
    prompt_id: str = "p",
    index: int = 0,
    *,
    prompt_tokens: int = 10,
    tokens: int = TOKENS,
    actor: str = "a",
    started_s: float = 0.0,
    finished_s: float = 1.0,
    reason: FinishReason = FinishReason.STOP,
) -> TracedRollout:
    ends = actor, started_s, finished_s, None, None
    return TracedRollout(step, prompt_id, index, 0, prompt_tokens, tokens, 0, 0.0, {}, {}, reason, (), *ends)


def timed(actor: str, step: int, index: int, token_s: float) -> TracedRollout:
    """Return a trace row of TOKENS tokens at `token_s` seconds per token."""
    return traced(step, index=index, prompt_tokens=4, actor=actor, finished_s=TOKENS * token_s)


def samples_of(*responses, prompt_id="p-1", **columns):
    """Return the samples of one prompt."""
    return [
        RewardSample("the prompt", text, len(text), FinishReason.LENGTH, columns, prompt_id, index)
        for index, text in enumerate(responses)
    ]


TEXTS = st.text(alphabet=st.characters(exclude_categories=()))
"""Arbitrary text, including lone surrogates and control characters."""


ANY_TEXT = TEXTS | st.binary().map(os.fsdecode)
"""Arbitrary text, including file names that are not UTF-8."""


# -- rewards that worker processes compute, here in the test's process


def value_of(reward: Any, response: str, columns: dict[str, Any]) -> Outcome:
    """Return the value that a verifier gives a response."""
    (outcome,) = [event.outcome for event in reward.run(samples_of(response, **columns)) if isinstance(event, Done)]
    return outcome


def code_value(response: str, columns: dict[str, Any], prompt: str = "the prompt", **options: Any) -> Outcome:
    """Return the `code` reward of a response, computed by real sandboxed processes."""
    reward = CodeReward(CodeSpec(type="code", timeout_s=20, **options))
    sample = RewardSample(prompt, response, len(response), FinishReason.STOP, columns, "p-1", 0)
    (outcome,) = [event.outcome for event in reward.run([sample]) if isinstance(event, Done)]
    return outcome


# -- fake steps of a schedule, without a run


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


# -- leases of functions in the test's own process


DAY_S = 86_400
LONG = LeaseTerms(DAY_S, DAY_S)
"""Longer than any test session: a function whose lease expires ends its process, which here is the test process."""
