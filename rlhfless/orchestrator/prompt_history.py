"""What a run has drawn of each prompt: one record of lengths, signals and responses, whichever actors drew them.

- `lengths`: what forecasts of the prompt's next samples need. The scaling policy adds to it where it sees a step's
  samples, because it forecasts from the same view, and the simulator, which has no rollouts, runs the same code.
- Whether the prompt's samples differed in their rewards, by step, without those whose reward failed: `prompts` draws a
  prompt less often that was without signal. A step's own filter of such groups needs no record (`Redraws`).
- The newest responses: drafts for an engine, which gets those of a prompt with the first request of it and indexes them
  beside what it is drawing (functions/generation/vllm/drafter.py).
  They change no sample, so they may be lost: of each prompt the newest are
  kept, so that older weights fade, and of all prompts those that were drawn last, up to a number of tokens.

A resumed run reads all of it from the trace, which has the rollouts of each step once, and at a checkpoint those of all
steps before it; responses only with `logging.record_tokens`. The journal gives back the responses of steps since then.

Of the prompts that a step would draw, one that was without signal k times in a row stays with a chance of
max(floor, factor^k); another takes the place of one that does not. So hard prompts come back once the policy can solve
them sometimes, and easy ones now and then. A prompt with a signal is drawn as before at once.

Invariant: the prompts of a step follow from the seed, the step, and what the steps up to step - 1 - max_staleness drew,
which have been learned from whenever it begins. So a step that is done again has the same prompts.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from rlhfless.orchestrator.failures import usable
from rlhfless.orchestrator.redraws import differ
from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import IntArray, Prompt, Rollout
from rlhfless.records.traces import Trace, TracedRollout, newest_responses
from rlhfless.scaling.lengths import LengthPredictor
from rlhfless.scaling.lengths.recorded import samples_at, steps_of
from rlhfless.spec import DrawLessSpec, RunSpec

MOST_RESPONSES = 16
"""Of a prompt. More find hardly more, and travel with each request."""

MOST_TOKENS = 1 << 24
"""Of the responses to all prompts: 64 MiB."""


class PromptHistory:
    """What the samples of each prompt were, by its id. Prompts of several data sets may share an id: then drafts are
    wrong, and not samples."""

    def __init__(self, spec: RunSpec, most_tokens: int = MOST_TOKENS) -> None:
        """It keeps signals and responses if the spec has a use for them."""
        assert spec.prompts is not None, "a run that draws has prompts"
        self._spec, self._draw_less = spec, spec.prompts.draw_less
        self.lengths = LengthPredictor(spec.generation.max_tokens)
        self._signals: defaultdict[str, dict[int, bool]] = defaultdict(dict)
        """By prompt and step that drew it, whether its samples differed in their rewards."""
        self._responses: OrderedDict[str, deque[IntArray]] = OrderedDict()
        self._most_tokens, self._tokens = most_tokens, 0

    def read(self, trace: Trace, folder: Path) -> None:
        """Begin with the trace of earlier attempts, which is in `folder`. Raises TraceError."""
        for rollouts in steps_of(trace):
            self.lengths.learn(samples_at(rollouts))
        self.learned(trace.rollouts)
        if self._spec.generation.speculation.remembers:
            for prompt_id, token_ids in reversed(list(newest_responses(folder, self._most_tokens))):
                self._remember(prompt_id, token_ids)

    def learned(self, rollouts: Iterable[TracedRollout]) -> None:
        """Take note of the rewards of steps, each with all of its rollouts."""
        if self._draw_less is None:
            return
        rewards: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        for rollout in rollouts:
            if usable(rollout.reward_failures, self._spec.scoring):
                rewards[rollout.prompt_id, rollout.step][rollout.sample_index] = rollout.reward
        for (prompt_id, step), of_samples in rewards.items():
            if len(of_samples) > 1:  # fewer say nothing about the prompt
                self._signals[prompt_id][step] = differ([*of_samples.values()])

    def ended(self, rollouts: Iterable[Rollout]) -> None:
        """Take note of responses that have ended."""
        if self._spec.generation.speculation.remembers:
            for rollout in rollouts:
                self._remember(rollout.prompt_id, rollout.token_ids)

    def responses(self, prompt_ids: Iterable[str]) -> dict[str, tuple[IntArray, ...]]:
        """The responses to these prompts, the newest last; without prompts that have none."""
        return {name: tuple(self._responses[name]) for name in prompt_ids if name in self._responses}

    def prompts(self, order: PromptOrder, step: int, n: int) -> list[Prompt]:
        """The n prompts of a step, counted from 1; fewer than n of them are new ones only if the data has no more."""
        drawn = order.batch(step - 1, n)
        if (spec := self._draw_less) is None:
            return drawn
        kept = {prompt.prompt_id for prompt in drawn if self._stays(spec, prompt.prompt_id, step)}
        used = {prompt.prompt_id for prompt in drawn}
        others = order.others(step - 1, len(order), used) if len(kept) < n else []
        places = (prompt for prompt in others if self._stays(spec, prompt.prompt_id, step))
        return [prompt if prompt.prompt_id in kept else next(places, prompt) for prompt in drawn]

    def _stays(self, spec: DrawLessSpec, prompt_id: str, step: int) -> bool:
        known = step - 1 - self._spec.schedule.max_staleness
        signals = [signal for number, signal in sorted(self._signals.get(prompt_id, {}).items()) if number <= known]
        streak = [*reversed(signals), True].index(True)
        text = f"{self._spec.seed}/{step}/{prompt_id}/draw_less".encode()
        chance = max(spec.floor, spec.factor**streak)
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") < chance * 2**64

    def _remember(self, prompt_id: str, token_ids: IntArray) -> None:
        if not len(token_ids):
            return
        responses = self._responses.setdefault(prompt_id, deque())
        responses.append(token_ids.astype(np.int32))
        self._tokens += len(token_ids)
        if len(responses) > MOST_RESPONSES:
            self._tokens -= len(responses.popleft())
        self._responses.move_to_end(prompt_id)
        while self._tokens > self._most_tokens:
            _, oldest = self._responses.popitem(last=False)
            self._tokens -= sum(map(len, oldest))
