"""Selects samples of each step and evaluation for people to read, with the inputs and results of their rewards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless.prepare.shown_rows import gets_of
from rlhfless.records import Experience, Group, Prompt, Sample
from rlhfless.rewards.protocol import Unscorable
from rlhfless.spec import RewardSpec
from rlhfless.util.text import storable, storable_values

GROUPS = 4
"""Number of prompts per step or per set of an evaluation. Each contributes its best, its worst and one failed
sample."""

MOST_HELD_OUT = 24
"""Maximum number of prompts of an evaluation with many sets. Each set has at least one."""

FAILED = 2
"""Number of additional samples of a step whose reward failed."""

MOST_CHARACTERS = 20_000
"""Maximum characters of a prompt or response. The trace has the full text if `logging.record_tokens` is set."""

MOST_OF_COLUMN = 2_000
"""Maximum characters of a column."""


@dataclass(frozen=True, slots=True)
class SampleReader:
    rewards: Sequence[RewardSpec]
    special_tokens: Sequence[str]
    """The tokenizer's special tokens as text. The page highlights them."""

    def of_step(self, experience: Experience) -> list[dict[str, Any]]:
        """Return samples of a training step, chosen by a hash of the prompt id, so that a prompt that returns in a
        later epoch is likely to be shown again."""
        found = [sample for group in _chosen(experience.groups, GROUPS) for sample in _extremes(group)]
        known = {id(sample) for _, sample in found}
        rest = ((group, sample) for group in experience.groups for sample in group.samples if id(sample) not in known)
        found += [pair for pair in rest if pair[1].scored.failures][:FAILED]
        return [self._object(group.prompt, sample, "train") for group, sample in found]

    def of_evaluation(self, sampled: Experience, greedy: Experience) -> list[dict[str, Any]]:
        """Return samples of an evaluation, of the same prompts each time and including the greedy response."""
        best = {group.prompt.prompt_id: group.samples for group in greedy.groups}
        names = dict.fromkeys(group.prompt.source for group in sampled.groups)
        most = min(max(MOST_HELD_OUT // max(len(names), 1), 1), GROUPS)
        found = []
        for name in names:
            for group in _chosen([group for group in sampled.groups if group.prompt.source == name], most):
                found += [self._object(group.prompt, sample, "held_out") for _, sample in _extremes(group)]
                found += [
                    self._object(group.prompt, sample, "held_out", greedy=True)
                    for sample in best.get(group.prompt.prompt_id, ())
                ]
        return found

    def _object(self, prompt: Prompt, sample: Sample, split: str, *, greedy: bool = False) -> dict[str, Any]:
        rollout, episode = sample.rollouts[-1], sample.episode
        score = sample.scored
        texts = _cut(prompt.text), _cut(sample.text)
        return {
            "split": split,
            "data_set": prompt.source,
            "prompt_id": sample.key[0],
            "sample_index": sample.sample_index,
            "greedy": greedy,
            "prompt": texts[0],
            "columns": {storable(name): _short(value) for name, value in prompt.columns.items()},
            "expected": dict(self._expected(prompt)),
            "response": texts[1],
            "special_tokens": [token for token in self.special_tokens if any(token in text for text in texts)],
            "finish_reason": str(sample.finish_reason),
            "response_tokens": sample.model_tokens,
            "weights": rollout.version_spans[-1].version if rollout.version_spans else "",
            "rewards": {name: float(value) for name, value in score.parts.items()},
            "reward": float(score.total),
            "failures": {name: _cut(why) for name, why in score.failures.items()},
            "turns": [] if episode is None else _cut_texts(episode.shown()),
            "episode_status": "" if episode is None else str(episode.status),
        }

    def _expected(self, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """Yield the expected answer of each reward that compares with an answer, in the form used for comparison."""
        for reward in self.rewards:
            if not reward.scores(prompt.source):
                continue
            try:
                gets = gets_of(reward, prompt)
            except Unscorable:
                continue  # the failure of the sample says why
            if "expected" in gets:
                yield reward.label, _cut(str(gets["expected"]))


def _chosen(groups: Iterable[Group], most: int) -> list[Group]:
    """Choose groups by a hash of their prompt ids, so that the same prompts give the same choice."""
    return sorted(groups, key=lambda group: hashlib.blake2b(group.prompt.prompt_id.encode()).digest())[:most]


def _extremes(group: Group) -> list[tuple[Group, Sample]]:
    """Return the samples with the highest and the lowest reward, and a sample whose reward failed."""
    scored = [sample for sample in group.samples if not sample.scored.failures]
    failed = [sample for sample in group.samples if sample.scored.failures]
    ordered = sorted(scored, key=lambda sample: (sample.scored.total, sample.sample_index))
    shown = [*ordered[-1:], *ordered[:1], *failed[:1]]
    return [(group, sample) for sample in {id(each): each for each in shown}.values()]


def _cut_texts(value: Any) -> Any:
    """Cut all texts in JSON values."""
    if isinstance(value, str):
        return _cut(value)
    if isinstance(value, list):
        return [_cut_texts(each) for each in value]
    return {name: _cut_texts(each) for name, each in value.items()} if isinstance(value, dict) else value


def _short(value: Any) -> Any:
    """Return a column's value as JSON; a long value as truncated text."""
    text = json.dumps(storable_values(value), ensure_ascii=False, default=str, allow_nan=True)
    if len(text) <= MOST_OF_COLUMN:
        return json.loads(text, parse_constant=str)
    text = storable(value) if isinstance(value, str) else text
    return f"{text[:MOST_OF_COLUMN]}… ({len(text):,} characters)"


def _cut(text: str) -> str:
    text = storable(text)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}… ({len(text):,} characters)"
